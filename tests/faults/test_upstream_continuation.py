"""Streams of upstreams that break off: another server goes on, and the client gets one answer.

Whole gateways, real sockets, and servers that write the same text, each from where it is told to.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import openai
import pytest
from harness.continuing_server import PIECES, PROMPT, TEXT, ContinuingServer, Fault, Takes, rest_of
from harness.gateway.fleets import started
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import Http
from harness.gateway.serving import Service, serving, until
from harness.message_events import events_of, message_of
from harness.processes import DEMO_MODEL, GatewayProcess, upstream_settings
from harness.scripted_upstream import ScriptedUpstream, chat_events, event_stream
from parrot_engine.protocol import SamplingParams

from parrot_gateway.settings.model import UpstreamSettings
from parrot_gateway.telemetry.call_record import CallRecord

CHAT: dict[str, Any] = {"model": "first/m", "messages": [{"role": "user", "content": "Say it."}]}
COMPLETION: dict[str, Any] = {"model": "first/m", "prompt": PROMPT, "max_tokens": 99}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FAULTS: tuple[Fault, ...] = ("cut", "end", "malformed", "in_band_error", "abort")


@dataclass
class Scene:
    """A gateway before a server that breaks off and those that may go on."""

    service: Service
    broken: ContinuingServer
    others: Sequence[ContinuingServer]
    is_fleet: bool

    def cuts(self, body: dict[str, Any]) -> list[int]:
        """The ends of its events up to the last that says something.

        Behind the first event of a chat nothing has been said but the role.
        """
        events = self.broken.events({**body, "model": "m"})
        ends = list(itertools.accumulate(map(len, events)))
        return ends[:-2]

    def arm(self, cut: int, fault: Fault) -> None:
        """Let the next stream break off after these bytes; of a fleet at any of its servers."""
        self.broken.faults_left.append(None)
        for server in (self.broken, *(self.others if self.is_fleet else ())):
            server.cut, server.fault = cut, fault


def own_engine() -> ScriptedRemoteEngine:
    """An engine of our own that writes the text, or the rest of it."""
    engine = ScriptedRemoteEngine()

    def script(prompt: list[int], _: SamplingParams) -> list[int]:
        text = engine.tokenizer.decode(prompt, skip_special_tokens=False)
        given = text.rpartition("<|im_start|>assistant\n")[2].removeprefix(PROMPT)
        return engine.text("".join(rest_of(given)))

    engine.script = script
    return engine


@asynccontextmanager
async def scene(
    *others: ContinuingServer,
    is_fleet: bool = False,
    backup: ContinuingServer | None = None,
    has_own: bool = False,
    stream_failure: dict[str, Any] | None = None,
    continuation: str = "auto",
    call_timeout_s: float = 30.0,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """The first server is one of a fleet with the others, or they are fallbacks in turn.

    `backup` is the fallback of a fleet.
    """
    broken, engine = ContinuingServer(), own_engine()
    failure = {"mode": "continue", **(stream_failure or {})}
    # No breaker opens: each test lets one server fail again and again.
    common: dict[str, Any] = {
        "models": ["m"], "backoff_s": 0.001, "max_retries": 0, "breaker_failures": 10_000,
        "continuation": continuation,
    }  # fmt: skip
    async with AsyncExitStack() as stack:
        for server in (broken, *others):
            await stack.enter_async_context(server.running())
        first = {**common, "name": "first", "stream_failure": failure, **settings}
        if has_own:
            first["fallback"] = "own"
        entries = []
        if is_fleet:
            urls = [server.url for server in (broken, *others)]
            for server in others:
                server.faults_left = broken.faults_left
            if backup is not None:
                first["fallback"] = "backup/m"
                entries.append(UpstreamSettings(name="backup", url=backup.url, **common))
            entries.append(UpstreamSettings(urls=urls, **first))
        else:
            names = [f"other-{number}" for number in range(len(others))]
            if names:
                first["fallback"] = f"{names[0]}/m"
            entries.append(UpstreamSettings(url=broken.url, **first))
            for number, server in enumerate(others):
                then = f"{names[number + 1]}/m" if number + 1 < len(names) else None
                entries.append(
                    UpstreamSettings(name=names[number], url=server.url, fallback=then, **common)
                )
        service = await stack.enter_async_context(
            serving(engine, upstreams=entries, call_timeout_s=call_timeout_s)
        )
        for upstream in service.gateway.upstreams.values():
            await stack.enter_async_context(started(upstream))
        yield Scene(service, broken, others, is_fleet)


class Streamed(NamedTuple):
    """A streamed answer, as a client puts it together."""

    text: str
    chunks: list[Any]
    error: openai.APIError | None


async def stream(service: Service, body: dict[str, Any]) -> Streamed:
    """One streamed call by the real client, put together as its users do."""
    text, chunks, error = "", [], None
    async with service.client() as client:
        make: Any = client.chat.completions if "messages" in body else client.completions
        try:
            async for chunk in await make.create(**{**body, "stream": True}):
                chunks.append(chunk)
                for choice in chunk.choices:
                    delta = choice.delta.content if "messages" in body else choice.text
                    text += delta or ""
        except openai.APIError as failure:
            error = failure
    return Streamed(text, chunks, error)


def check_one_answer(answer: Streamed, context: object = None) -> None:
    """The client cannot tell it from the answer of one server."""
    assert answer.error is None, context
    assert answer.text == TEXT, context
    for name in ("id", "created", "model", "object"):
        assert len({getattr(chunk, name) for chunk in answer.chunks}) == 1, (name, context)
    choices = [choice for chunk in answer.chunks for choice in chunk.choices]
    reasons = [each.finish_reason for each in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["stop"], context
    roles = [each.delta.role for each in choices if hasattr(each, "delta")]
    assert [role for role in roles if role] == ["assistant"][: len(roles)], context


class Way(NamedTuple):
    """A way for an answer to go on."""

    takes: Takes = "continue_final_message"
    trims: bool = False
    is_fleet: bool = False
    is_own: bool = False


WAYS = {
    "second server": Way(is_fleet=True),
    "fallback": Way(),
    "fallback that trims": Way(trims=True),
    "prefill": Way("prefill"),
    "prefill that trims": Way("prefill", trims=True),
    "prefix, repeated": Way("prefix"),
    "own engine": Way(is_own=True),
}
FALLBACK = WAYS["fallback"]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@asynccontextmanager
async def scene_of(way: Way, **settings: Any) -> AsyncIterator[Scene]:
    others = [] if way.is_own else [ContinuingServer(way.takes, way.trims)]
    continuation = "auto" if way.takes == "continue_final_message" else way.takes
    settings = {"is_fleet": way.is_fleet, "has_own": way.is_own, **settings}
    async with scene(*others, continuation=continuation, **settings) as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
@every_way
async def test_a_stream_goes_on_behind_any_event(way: Way, fault: Fault) -> None:
    async with scene_of(way) as made:
        for body in (CHAT, COMPLETION):
            for cut in made.cuts(body):
                made.arm(cut, fault)
                check_one_answer(await stream(made.service, body), (fault, cut))
                assert made.broken.faults_left == [], "the stream was not broken"


@every_way
async def test_a_stream_that_stalls_goes_on(way: Way) -> None:
    # That of the second server of a fleet as well.
    async with scene_of(way, read_timeout_s=3.0 if way.is_fleet else 0.5) as made:
        made.arm(made.cuts(CHAT)[3], "stall")
        check_one_answer(await stream(made.service, CHAT))


async def test_a_stream_of_which_only_the_end_is_missing_is_ended() -> None:
    async with scene_of(FALLBACK) as made:
        for body in (CHAT, COMPLETION):
            events = made.broken.events({**body, "model": "m"})
            finished = len(b"".join(events[:-1]))
            for fault in ("cut", "malformed", "in_band_error"):
                made.arm(finished, fault)  # type: ignore[arg-type]
                check_one_answer(await stream(made.service, body), fault)
        assert made.others[0].requests == []


async def test_an_answer_that_has_its_tokens_is_ended() -> None:
    async with scene_of(FALLBACK) as made:
        made.arm(made.cuts(CHAT)[3], "cut")
        answer = await stream(made.service, {**CHAT, "max_tokens": 3})
        assert (answer.text, answer.error) == ("".join(PIECES[:3]), None)
        assert answer.chunks[-1].choices[0].finish_reason == "length"
        assert made.others[0].requests == []
        made.arm(made.cuts(CHAT)[3], "cut")
        check_one_answer(await stream(made.service, {**CHAT, "max_completion_tokens": 50}))
        assert made.others[0].requests[0]["max_completion_tokens"] == 47


async def test_usage_and_servers_are_those_of_one_answer() -> None:
    async with scene_of(FALLBACK) as made:
        ended: list[CallRecord] = []
        made.service.gateway.call_records.sinks.append(ended.append)
        made.arm(made.cuts(CHAT)[2], "cut")
        options = {"stream_options": {"include_usage": True}}
        answer = await stream(made.service, {**CHAT, **options})
        check_one_answer(answer)
        usage = answer.chunks[-1].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (10, len(PIECES))
        assert [chunk.usage for chunk in answer.chunks[:-1]] == [None] * (len(answer.chunks) - 1)
        engines = [(chunk.model_extra or {}).get("parrot") for chunk in answer.chunks]
        assert [each for each in engines if each] == [{"engines": ["first", "other-0"]}]
        (record,) = ended
        assert (record.lost_engines, record.engine) == (("first",), "other-0")
        assert (record.loss_kinds, len(record.pauses_s)) == (("transport_error",), 1)
        assert (record.prompt_tokens, record.output_tokens) == (10, len(PIECES))
        assert (record.error_code, record.status) == (None, 200)
        async with Http(made.service) as http:
            metrics = (await http.get("/metrics")).text
        labels = 'model_name="m",reason="transport_error"'
        assert f"\nparrot_call_engine_losses_total{{{labels}}} 1" in metrics


async def test_a_server_that_refuses_is_remembered_and_the_next_one_goes_on() -> None:
    refusing = ContinuingServer("refuse")
    async with scene(refusing, ContinuingServer()) as made:
        for _ in range(2):
            made.arm(made.cuts(CHAT)[3], "cut")
            check_one_answer(await stream(made.service, CHAT))
        assert len(refusing.requests) == 1
        assert len(made.others[1].requests) == 2
        # What has not begun is asked for as any call is.
        made.arm(made.cuts(CHAT)[0], "cut")
        check_one_answer(await stream(made.service, CHAT))
        assert len(refusing.requests) == 2


async def test_a_server_that_goes_on_may_break_off_itself() -> None:
    second = ContinuingServer(faults_left=[None])
    async with scene(second, ContinuingServer()) as made:
        made.arm(made.cuts(CHAT)[2], "cut")
        second.cut = made.cuts(CHAT)[2]
        check_one_answer(await stream(made.service, CHAT))
        assert len(made.others[1].requests) == 1
        given = made.others[1].requests[0]["messages"][-1]
        assert given == {"role": "assistant", "content": "".join(PIECES[:4])}


@pytest.mark.parametrize("fault", FAULTS)
async def test_without_a_server_left_a_stream_ends_as_it_does_without_the_setting(
    fault: Fault,
) -> None:
    answers = []
    failing = ContinuingServer(status=500)
    for stream_failure in ({"mode": "terminate"}, {}):
        async with scene(failing, stream_failure=stream_failure) as made:
            made.broken.identity = 7
            made.arm(made.cuts(CHAT)[3], fault)
            body = {**CHAT, "stream": True}
            answers.append((await made.service.post("/v1/chat/completions", body))[2])
            assert len(failing.requests) == (0 if stream_failure else 1)
    assert answers[0] == answers[1]
    assert answers[0].count(b'"error"') == (fault != "abort")


@pytest.mark.parametrize(
    ("stream_failure", "fault"),
    [
        ({"on": ["read_timeout"]}, "cut"),
        ({"on": ["transport_error"]}, "in_band_error"),
        ({"max_fallbacks": 0}, "cut"),
    ],
)
async def test_settings_say_when_a_stream_goes_on(
    stream_failure: dict[str, Any], fault: Fault
) -> None:
    async with scene_of(FALLBACK, stream_failure=stream_failure) as made:
        made.arm(made.cuts(CHAT)[3], fault)
        answer = await stream(made.service, CHAT)
        assert answer.text == "".join(PIECES[:3])
        assert answer.error is not None
        assert made.others[0].requests == []


async def test_tries_are_bounded() -> None:
    failing = [ContinuingServer(status=500) for _ in range(3)]
    async with scene(*failing, stream_failure={"max_fallbacks": 2}) as made:
        made.arm(made.cuts(CHAT)[3], "cut")
        assert (await stream(made.service, CHAT)).error is not None
        assert [len(each.requests) for each in failing] == [1, 1, 0]


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"tools": [TOOL], "tool_choice": "required"},
        {"extra_body": {"guided_regex": ".*"}},
    ],
)
async def test_what_is_no_plain_text_ends_in_band(more: dict[str, Any]) -> None:
    async with scene_of(FALLBACK) as made:
        made.arm(made.cuts(CHAT)[3], "cut")
        answer = await stream(made.service, {**CHAT, **more})
        assert answer.text == "".join(PIECES[:3])
        assert "broke off" in str(answer.error)
        assert made.others[0].requests == []


async def test_a_tool_call_in_flight_ends_in_band_and_one_that_follows_is_passed_on() -> None:
    async with scene_of(FALLBACK) as made:
        body = {**CHAT, "tools": [TOOL]}
        made.broken.calls_tool = made.others[0].calls_tool = True
        *_, text, called = made.cuts(body)
        made.arm(called, "cut")
        answer = await stream(made.service, body)
        assert "broke off" in str(answer.error)
        made.arm(text, "cut")
        answer = await stream(made.service, body)
        assert (answer.text, answer.error) == (TEXT, None)
        calls = [c for chunk in answer.chunks for c in chunk.choices[0].delta.tool_calls or ()]
        assert [call.function.name for call in calls if call.function.name] == ["look"]
        assert "".join(call.function.arguments or "" for call in calls) == "{}"
        assert answer.chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_variables_get_one_answer() -> None:
    async with scene_of(FALLBACK) as made, Http(made.service) as http:
        cut = made.cuts(CHAT)[3]
        for defer in (True, False):
            made.arm(cut, "cut")
            parrot = {"session": "s", "output": f"text-{defer}", "defer": defer}
            body = {**CHAT, "stream": not defer, "parrot": parrot}
            response = await http.post("/v1/chat/completions", json=body)
            value = await http.value(response.headers["x-parrot-variable"])
            assert value.json()["value"] == TEXT, value.text
        assert len(made.others[0].requests) == 2


async def test_messages_of_anthropics_api_go_on() -> None:
    async with scene_of(FALLBACK) as made:
        made.arm(made.cuts(CHAT)[3], "cut")
        body = {**CHAT, "max_tokens": 99, "stream": True}
        status, _, answer = await made.service.post("/v1/messages", body)
        assert status == 200
        message = message_of(events_of(answer))
        assert message["content"] == [{"type": "text", "text": TEXT}]
        assert len(made.others[0].requests) == 1


async def test_the_time_of_a_call_is_that_of_all_its_servers() -> None:
    async with scene_of(FALLBACK, call_timeout_s=1.0) as made:
        other = made.others[0]
        other.fault, other.faults_left = "stall", [None]
        made.arm(made.cuts(CHAT)[3], "cut")
        answer = await stream(made.service, CHAT)
        assert "".join(PIECES[:3]).startswith(answer.text)
        assert isinstance(answer.error, openai.APIError)
        assert answer.error.code == "timeout"


async def test_a_client_that_leaves_ends_the_work_of_the_server_that_goes_on() -> None:
    async with scene_of(FALLBACK) as made:
        other = made.others[0]
        other.fault, other.faults_left = "stall", [None]
        made.arm(made.cuts(CHAT)[3], "cut")
        raw = json.dumps({**CHAT, "stream": True}).encode()
        _, writer = await made.service.send("/v1/chat/completions", raw)
        await until(lambda: other.requests)
        writer.close()
        await until(lambda: other.hung_up)
        await until(lambda: made.service.gate.running == 0)


async def test_an_upstream_may_be_its_own_fallback() -> None:
    async with scene(fallback="first/m") as made:
        made.arm(made.cuts(CHAT)[2], "cut")
        check_one_answer(await stream(made.service, CHAT))
        assert len(made.broken.requests) == 2
        # Once only.
        made.arm(made.cuts(CHAT)[2], "cut")
        made.arm(made.cuts(CHAT)[2], "cut")
        assert (await stream(made.service, CHAT)).error is not None
        assert len(made.broken.requests) == 4


async def test_servers_of_an_upstream_are_asked_once_each_before_its_fallback() -> None:
    others = [ContinuingServer(), ContinuingServer()]
    fallback = ContinuingServer()
    async with (
        fallback.running(),
        scene(*others, is_fleet=True, stream_failure={"max_fallbacks": 3}, backup=fallback) as made,
    ):
        made.arm(made.cuts(CHAT)[2], "cut")
        made.arm(made.cuts(CHAT)[2], "cut")
        made.arm(made.cuts(CHAT)[2], "cut")
        check_one_answer(await stream(made.service, CHAT))
        asked = [len(each.requests) for each in (made.broken, *others)]
        assert (asked, len(fallback.requests)) == ([1, 1, 1], 1)


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_another_server_has_added_is_not_followed_by_the_first(fault: Fault) -> None:
    async with scene(ContinuingServer(faults_left=[None])) as made:
        (other,) = made.others
        ends = made.cuts(CHAT)
        other.cut = ends[2]
        made.arm(ends[2], fault)
        made.broken.follows = True
        answer = await stream(made.service, CHAT)
        assert answer.text == "".join(PIECES[:4])
        assert answer.error is not None
        assert len(other.requests) == 1


async def test_a_fleet_counts_nothing_of_a_server_that_broke_off() -> None:
    async with scene_of(WAYS["second server"]) as made:
        for cut in made.cuts(CHAT):
            made.arm(cut, "cut")
            check_one_answer(await stream(made.service, CHAT))
        described = made.service.gateway.upstreams["first"].describe()
        assert [each["placed"] for each in described["servers"]] == [0, 0]
        calls = sum(each["usage"]["calls"] for each in described["servers"])
        assert calls == len(made.cuts(CHAT))


def test_the_demo_model_goes_on_in_a_real_gateway(upstream: ScriptedUpstream) -> None:
    words = ("Once ", "upon", " a time\n")
    broken = upstream.script(event_stream(*chat_events(words)[:4]))
    settings = upstream_settings(
        "broken", upstream.base_url, fallback=DEMO_MODEL, stream_failure={"mode": "continue"}
    )
    body: dict[str, Any] = {"messages": CHAT["messages"], "temperature": 0, "max_tokens": 12}
    config = {"models": [{"model": DEMO_MODEL}], "upstreams": [settings]}
    with (
        GatewayProcess(config=config) as gateway,
        openai.OpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            model=f"broken/{broken}", stream=True, stream_options={"include_usage": True}, **body
        )
        chunks = list(stream)
        given = {"role": "assistant", "content": "Once upon a time"}
        rest = client.chat.completions.create(
            model=DEMO_MODEL,
            extra_body={"continue_final_message": True, "add_generation_prompt": False},
            **{**body, "messages": [*body["messages"], given], "max_tokens": 9},
        )
    text = "".join(choice.delta.content or "" for each in chunks for choice in each.choices)
    written = rest.choices[0].message.content
    assert written is not None
    # The blank that the client has is cut where the model writes it once more.
    assert text == "".join(words) + written.removeprefix("\n")
    assert {chunk.id for chunk in chunks} == {"chatcmpl-scripted"}
    usage = chunks[-1].usage
    assert usage is not None
    assert rest.usage is not None
    assert usage.completion_tokens == 3 + rest.usage.completion_tokens
    assert usage.total_tokens == rest.usage.total_tokens
