"""Session, run, parent, name and group of a call, as LlamaIndex's spans give them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from harness.processes import GatewayProcess
from harness.scripted_upstream import ScriptedUpstream, chat_document, chat_events, document
from harness.scripted_upstream import event_stream as stream_answer
from llama_index.core.async_utils import run_jobs
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.tools import FunctionTool
from llama_index.llms.parrot import Parrot, linking

dispatcher = get_dispatcher(__name__)


class Recorder:
    """A model whose server remembers the field `parrot` of every call."""

    def __init__(self, upstream: ScriptedUpstream, **settings: Any) -> None:
        self._upstream = upstream
        self.name = upstream.script(document(chat_document("Yes.")))
        self.llm = Parrot(model=self.name, base_url=upstream.base_url, **settings)

    def fields(self) -> list[dict[str, str]]:
        """`parrot` of each call, in order of arrival."""
        return [call.json.get("parrot", {}) for call in self._upstream.calls(self.name)]


@dispatcher.span
async def asked(llm: Parrot) -> str:
    return (await llm.acomplete("Well?")).text


@dispatcher.span
async def asked_at_once(llm: Parrot, count: int) -> None:
    await asyncio.gather(*(llm.acomplete("Well?") for _ in range(count)))


@dispatcher.span
async def asked_in_turn(llm: Parrot, count: int) -> None:
    for _ in range(count):
        await asyncio.wait_for(asyncio.ensure_future(asked(llm)), 60)


def test_a_chain_is_one_session(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)

    @dispatcher.span
    def program() -> None:
        recorder.llm.complete("One?")
        recorder.llm.complete("Two?")

    program()
    first, second = recorder.fields()
    assert first["session"] == second["session"] == first["parent"] == second["parent"]
    assert "<locals>.program-" in first["session"]
    assert (first["name"], second["name"]) == ("program", "program")
    assert first["run"] != second["run"]
    assert first["run"].startswith("Parrot.complete-")
    assert "group" not in first | second


def test_runs_of_a_program_are_sessions_of_their_own(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)
    for _ in range(2):
        asyncio.run(asked(recorder.llm))
    first, second = recorder.fields()
    assert first["session"] != second["session"]


async def test_branches_of_a_gather_are_a_group(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)
    await asked_at_once(recorder.llm, 3)
    fields = recorder.fields()
    assert len(fields) == 3
    assert {made["group"] for made in fields} == {fields[0]["session"]}
    assert len({made["run"] for made in fields}) == 3


async def test_one_branch_is_no_group(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)
    await asked_at_once(recorder.llm, 1)
    assert "group" not in recorder.fields()[0]


async def test_tasks_that_wait_for_each_other_are_no_group(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)
    await asked_in_turn(recorder.llm, 3)
    fields = recorder.fields()
    assert [set(made) for made in fields] == [{"session", "run", "parent", "name"}] * 3
    assert {made["name"] for made in fields} == {"asked"}


async def test_steps_deep_in_branches_belong_to_the_nearest_fan_out(
    upstream: ScriptedUpstream,
) -> None:
    recorder = Recorder(upstream)

    @dispatcher.span
    async def outer() -> None:
        await asyncio.gather(asked_at_once(recorder.llm, 2), asked_at_once(recorder.llm, 2))

    await outer()
    fields = recorder.fields()
    groups = [made["group"] for made in fields]
    assert sorted(map(groups.count, groups)) == [2, 2, 2, 2]
    assert all(made["group"] == made["parent"] for made in fields)
    assert len({made["session"] for made in fields}) == 1


async def test_jobs_of_llamaindex_are_a_group(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)

    @dispatcher.span
    async def program() -> None:
        await run_jobs([asked(recorder.llm) for _ in range(3)], workers=3)

    await program()
    fields = recorder.fields()
    assert all(made["group"].startswith("run_jobs-") for made in fields)
    assert {made["name"] for made in fields} == {"asked"}


async def test_a_stream_belongs_to_the_step_that_asked(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream)
    upstream._scripts[recorder.name] = [stream_answer(*chat_events(["Yes."]))]

    @dispatcher.span
    async def program() -> Any:
        return await recorder.llm.astream_complete("Well?")

    async for _ in await program():
        pass
    assert recorder.fields()[0]["name"] == "program"


async def test_what_the_user_says_wins(upstream: ScriptedUpstream) -> None:
    recorder = Recorder(upstream, session="mine", objective="throughput")

    @dispatcher.span
    async def program() -> None:
        await recorder.llm.acomplete("One?", name="first", group="ours")
        await recorder.llm.acomplete("Two?", output="second", defer=False, priority=2)

    await program()
    first, second = recorder.fields()
    assert first["session"] == second["session"] == "mine"
    assert (first["name"], first["group"], first["objective"]) == ("first", "ours", "throughput")
    assert (second["output"], second["priority"]) == ("second", 2)
    assert "name" not in second
    assert "defer" not in second


@pytest.mark.parametrize("linked", [True, False])
async def test_lone_calls_and_linking_off_say_nothing(
    upstream: ScriptedUpstream, linked: bool
) -> None:
    recorder = Recorder(upstream, linking=linked)
    await recorder.llm.acomplete("Well?")
    recorder.llm.complete("Well?")
    if not linked:
        await asked_at_once(recorder.llm, 2)
    assert recorder.fields() == [{}] * len(recorder.fields())


async def test_the_gateway_takes_what_is_said(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    name = upstream.script(document(chat_document("Yes.")))
    llm = Parrot(model=name, base_url=relay.base_url)
    long: Callable[..., Awaitable[Any]] = asked_at_once.__wrapped__
    long.__qualname__ = "x" * 300
    await dispatcher.span(_renamed(long))(llm, 2)
    sessions = relay.get("/v1/sessions")["data"]
    session = next(each for each in sessions if each["name"].startswith("xxx"))
    calls = relay.get(f"/v1/sessions/{session['id']}/graph?format=json")["calls"]
    assert len(session["name"]) == 256
    assert {call["group"] for call in calls} == {session["name"]}
    assert [call["state"] for call in calls] == ["done", "done"]


def _renamed(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def fresh(*args: Any) -> Any:
        return await function(*args)

    fresh.__qualname__ = function.__qualname__
    return fresh


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "MAX_SPANS", 10)
    handler = linking.LinkingSpanHandler()
    signature: Any = None
    handler.span_enter("root-0", signature)
    for number in range(100):
        handler.span_enter(f"step-{number}", signature, parent_id="root-0")
        handler.span_exit(f"step-{number}", signature)
    assert len(handler._spans) == 10
    # A root that is in use is not forgotten, and steps begun by others still know theirs.
    previous = "root-0"
    for number in range(100):
        handler.span_enter(f"chain-{number}", signature, parent_id=previous)
        previous = f"chain-{number}"
    assert len(handler._spans) == 10
    assert handler._spans[previous].root_id == "root-0"
    depth, span = 0, handler._spans[previous]
    while span.parent is not None:
        depth, span = depth + 1, span.parent
    assert depth < 12


def test_a_span_from_before_the_handler_is_the_root() -> None:
    handler = linking.LinkingSpanHandler()
    signature: Any = None
    handler.span_enter("Step.run-1", signature, instance=object(), parent_id="Earlier.run-0")
    assert handler.fields_of("Step.run-1")["session"] == "Earlier.run-0"
    assert handler.fields_of("nowhere") == {}


def test_calls_outside_of_synthesizers_are_not_deferred(upstream: ScriptedUpstream) -> None:
    def add(one: int, other: int) -> int:
        """The sum."""
        return one + other

    recorder = Recorder(upstream, defer=True, context_window=1000)
    tool = FunctionTool.from_defaults(add)
    recorder.llm.chat_with_tools([tool], "1 and 2?")
    recorder.llm.chat_with_tools([tool], "1 and 2?", defer=True)
    recorder.llm.complete("1 and 2?")
    assert [fields.get("defer") for fields in recorder.fields()] == [None, None, None]
