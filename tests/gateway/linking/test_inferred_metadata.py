"""Metadata that the scheduler gets for calls that declare nothing."""

from __future__ import annotations

import asyncio
from typing import Any
from zlib import crc32

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.task import LATENCY, THROUGHPUT

from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata
from parrot_gateway.http.exchange import Exchange, Message
from parrot_gateway.linking.inferred_metadata import InferredMetadata
from parrot_gateway.linking.process.wire import session_id_of
from parrot_gateway.linking.profiles.forecast import Forecast, TemplateForecast
from parrot_gateway.linking.profiles.templates import Template, prompt_of, step_of
from parrot_gateway.linking.service import LinkingService, call_id_of
from parrot_gateway.settings.model import LinkingSettings

USER = {"role": "user", "content": "Summarise this page: herons."}
ANSWER = {"role": "assistant", "content": "Herons wait."}


class FakeLinking(LinkingService):
    """A linking service whose process is taken to run, and to know one session."""

    def __init__(self, session: str = "", **more: Any) -> None:
        super().__init__(LinkingSettings.model_validate(more))
        self.is_running = True
        self.session = session
        self.waits: list[float] = []

    async def session_of(self, exchange: Exchange, wait_s: float) -> str:
        self.waits.append(wait_s)
        return self.session

    def foretell(self, settled: float = 16.0, **figures: Any) -> None:
        """Calls that begin as `USER` does do this."""
        text = prompt_of(body(USER))[:30]
        template = Template("t1", len(text), crc32(text), crc32(text[: step_of(len(text))]))
        figures = {"prefix_bytes": 80, **figures}
        forecast = Forecast("t1", 16.0, settled=settled, **figures)
        self.forecasts.update("default", [TemplateForecast(template, forecast)])


class Calls:
    """Metadata of calls, and the sessions that ended meanwhile; the clock stands still."""

    def __init__(self, linking: FakeLinking) -> None:
        self.ended: list[str] = []
        self.now = 0.0
        self.inferred = InferredMetadata(linking, self.ended.append, lambda: self.now)

    def of(self, *messages: dict[str, str], at: Exchange | None = None) -> CallMetadata:
        return asyncio.run(self.inferred.of(at or exchange(), body(*messages)))


def body(*messages: dict[str, str]) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": messages})


def exchange(*headers: tuple[bytes, bytes]) -> Exchange:
    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"method": "POST", "path": "/v1/chat/completions", "headers": list(headers)}
    return Exchange(scope, receive, send)


def test_a_call_of_which_nothing_is_known_is_an_ordinary_one() -> None:
    linking = FakeLinking()
    first = exchange()
    metadata = Calls(linking).of(USER, at=first)
    assert linking.waits == [], "a first call waits for nothing"
    assert metadata.application == session_id_of(call_id_of(first)), "it may begin a session"
    assert (metadata.objective, metadata.groups, metadata.template) == (LATENCY, (), "")
    linking.foretell(settled=1.0, feeds_fan_in=1.0, siblings=9.0)
    assert Calls(linking).of(USER).objective == LATENCY, "one call says nothing of its kind"
    linking.foretell(is_outer=True, feeds_fan_in=1.0, siblings=9.0)
    assert Calls(linking).of(USER).objective == LATENCY, "those were other kinds that begin so too"
    linking.foretell(prefix_bytes=40, feeds_fan_in=1.0, siblings=9.0)
    assert Calls(linking).of(USER).objective == LATENCY, "all chats begin so"


def test_calls_whose_answers_are_read_together_are_work_of_a_group() -> None:
    linking = FakeLinking()
    linking.foretell(feeds_fan_in=1.0, siblings=3.0)
    calls = Calls(linking)
    made = [calls.of(USER) for _ in range(4)]
    assert [each.objective for each in made] == [THROUGHPUT] * 4
    assert made[0].groups == made[2].groups != made[3].groups
    assert made[0].groups[0].size == 3
    assert made[0].template == "t1"
    assert made[0].application == ""


@pytest.mark.parametrize(
    ("use", "template", "objective"),
    [
        (["lengths"], "t1", LATENCY),
        (["groups"], "", THROUGHPUT),
        (["sessions"], "", LATENCY),
        (["prefixes"], "", LATENCY),
    ],
)
def test_each_use_has_its_switch(use: list[str], template: str, objective: object) -> None:
    linking = FakeLinking(use=use)
    linking.foretell(feeds_fan_in=1.0, siblings=3.0, returns=1.0)
    metadata = Calls(linking).of(USER)
    assert (metadata.template, metadata.objective) == (template, objective)
    assert bool(metadata.application) == bool(metadata.returns) == (use == ["sessions"])
    assert (metadata.common_share is not None) == (use == ["prefixes"])


def test_what_any_applications_share_of_a_prompt_is_its_template() -> None:
    linking = FakeLinking()
    calls = Calls(linking)
    assert calls.of(USER).common_share is None, "no template is known"
    assert calls.of(USER, ANSWER, USER).common_share == 0.0, "what is cached of it is its own"
    linking.foretell(prefix_bytes=80)
    size = len(body(USER, ANSWER, USER))
    assert calls.of(USER, ANSWER, USER).common_share == pytest.approx(80 / size, rel=0.15)
    tools = b',"tools":[' + b" " * 800 + b"]}"
    with_tools = body(USER, ANSWER, USER)[:-1] + tools
    metadata = asyncio.run(calls.inferred.of(exchange(), with_tools))
    assert metadata.common_share == pytest.approx((80 + 812) / (size + 812), rel=0.15)
    assert metadata.common_tokens_of(1000) == round(metadata.common_share * 1000)
    linking.foretell(prefix_bytes=16_384)
    assert calls.of(USER).common_share is None, "where the template ends is not known"


def test_a_first_call_that_others_usually_follow_begins_its_session() -> None:
    linking = FakeLinking()
    linking.foretell(returns=0.9)
    first = exchange()
    metadata = Calls(linking).of(USER, at=first)
    assert metadata.application == session_id_of(call_id_of(first))
    assert metadata.returns == 0.9
    assert metadata.objective == LATENCY
    linking.foretell(returns=0.1)
    assert Calls(linking).of(USER).application == "", "most end with their answer"


def test_a_call_that_goes_on_waits_for_its_session_as_long_as_is_set() -> None:
    linking = FakeLinking("sess_1", session_wait_s=0.5)
    assert Calls(linking).of(USER, ANSWER, USER).application == "sess_1"
    assert linking.waits == [0.5]


@pytest.mark.parametrize(("needed", "session"), [(0.49, ""), (0.5, "sess_1"), (1.7, "sess_1")])
def test_a_call_waits_for_its_session_while_memory_is_scarce(needed: float, session: str) -> None:
    linking = FakeLinking("sess_1")
    inferred = InferredMetadata(linking, lambda _: None, memory_needed=lambda: needed)
    metadata = asyncio.run(inferred.of(exchange(), body(USER, ANSWER, USER)))
    assert metadata.application == session
    assert len(linking.waits) == bool(session)


def test_calls_that_are_kept_out_are_ordinary() -> None:
    linking = FakeLinking("sess_1")
    linking.foretell(feeds_fan_in=1.0, siblings=3.0)
    calls = Calls(linking)
    off = exchange((b"x-parrot-link", b"off"))
    assert calls.of(USER, ANSWER, USER, at=off) is ORDINARY_CALL
    excluded = Calls(FakeLinking("sess_1", exclude_tenants=["default"]))
    assert excluded.of(USER, ANSWER, USER) is ORDINARY_CALL
    linking.is_running = False
    assert calls.of(USER, ANSWER, USER) is ORDINARY_CALL


@given(
    calls=st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 1.0, 400.0])), max_size=30)
)
@settings(max_examples=30, deadline=None)
def test_a_session_ends_once_when_it_is_quiet_for_long(calls: list[tuple[int, float]]) -> None:
    linking = FakeLinking()
    made = Calls(linking)
    used: dict[str, float] = {}
    for number, pause in calls:
        made.now += pause
        linking.session = f"sess_{number}"
        seen = len(made.ended)
        made.of(USER, ANSWER, USER)
        used[linking.session] = made.now
        late = {name for name, last in used.items() if made.now - last > 600.0}
        assert set(made.ended[seen:]) == late
        for name in late:
            del used[name]


def test_a_process_that_is_behind_is_waited_for_once() -> None:
    class Silent(LinkingService):
        """One whose process takes questions and answers none."""

        def _send(self, message: object, *, is_bounded: bool = True) -> bool:
            return True

    async def ask() -> None:
        linking = Silent(LinkingSettings())
        linking.is_running = True
        assert await linking.session_of(exchange(), 0.01) == ""
        # Not for an hour, while that answer is overdue.
        assert await linking.session_of(exchange(), 3600.0) == ""
        (overdue,) = linking._waiting.values()
        overdue.set_result(b'"sess_1"')
        await asyncio.sleep(0)
        assert await linking.session_of(exchange(), 0.01) == ""

    asyncio.run(ask())
