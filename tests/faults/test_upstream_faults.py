"""Faults of an upstream: what a client sees with that server alone, beside a second one, and with a
fallback."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from harness.gateway.relaying import started
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving
from harness.scripted_upstream import (
    Answer,
    ScriptedUpstream,
    chat_events,
    document,
    error,
    event_stream,
)
from harness.waiting import until

from parrot_gateway.settings.model import UpstreamSettings

EVENTS = chat_events(["One", " two"])
ROLE, FIRST, *_ = EVENTS
OK = event_stream(*EVENTS)
RESET = Answer(bare=True, cut=True)
#: Only for what is silent: others may be slow under load.
READ_TIMEOUT_S = 2.0


class Fault(NamedTuple):
    """A fault of the server, and the outcome that its client sees.

    `ok bad` is the whole answer of the server with the fault, `ok good` that of the other; then a
    status with its code, or `in band` with that of an error behind the first content.
    """

    act: Callable[[ScriptedUpstream], None]
    alone: str
    second: str
    fallback: str


def answers(*given: Answer) -> Callable[[ScriptedUpstream], None]:
    return lambda server: server.answer_all(*given)


def too_long() -> Answer:
    message = "This model's maximum context length is 8 tokens. However, you requested 9 tokens."
    fields = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return document({"error": fields}, 400)


FAULTS: dict[str, Fault] = {
    "cut after n bytes": Fault(
        answers(event_stream(ROLE, FIRST, FIRST[:30], cut=True)),
        "in band upstream_error", "in band upstream_error", "in band upstream_error",
    ),
    "cut before its first content": Fault(
        answers(event_stream(ROLE, FIRST[:30], cut=True)),
        "in band upstream_error", "ok good", "ok good",
    ),
    "stall": Fault(
        answers(Answer(parts=(ROLE, FIRST), content_type="text/event-stream", chunked=True,
                       stall=True)),
        "in band upstream_timeout", "in band upstream_timeout", "in band upstream_timeout",
    ),
    "stall before its first content": Fault(
        answers(Answer(parts=(ROLE,), content_type="text/event-stream", chunked=True, stall=True)),
        "in band upstream_timeout", "ok good", "ok good",
    ),
    "trickle": Fault(
        answers(Answer(parts=tuple(EVENTS), content_type="text/event-stream", chunked=True,
                       split=3)),
        "ok bad", "ok bad", "ok bad",
    ),
    "reset": Fault(answers(RESET), "502 upstream_error", "ok good", "ok good"),
    "malformed chunk": Fault(
        answers(Answer(bare=True, close=True, parts=(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\nzz\r\nno chunk\r\n",))),
        "502 upstream_error", "ok good", "ok good",
    ),
    "429 with retry-after": Fault(
        answers(error(429, retry_after="600")), "429 scripted_429", "ok good", "ok good"
    ),
    "429 without": Fault(answers(error(429)), "429 scripted_429", "ok good", "ok good"),
    "500 then 200": Fault(answers(error(500), OK), "ok bad", "ok good", "ok bad"),
    "refuse": Fault(
        lambda server: server.go_down(), "502 upstream_error", "ok good", "ok good"
    ),
    "flap": Fault(answers(RESET, OK, RESET, OK), "ok bad", "ok good", "ok bad"),
    "end without [DONE]": Fault(
        answers(event_stream(*EVENTS[:-1])), "ok bad", "ok bad", "ok bad"
    ),
    "end in the middle": Fault(
        answers(event_stream(ROLE, FIRST)),
        "in band upstream_error", "in band upstream_error", "in band upstream_error",
    ),
    "redirect": Fault(
        answers(Answer(307, (("location", "http://127.0.0.1:9/v1/elsewhere"),), (b"{}",))),
        "307 None", "ok good", "ok good",
    ),
    "401": Fault(answers(error(401)), "502 upstream_key_refused", "ok good", "ok good"),
    "404": Fault(answers(error(404)), "404 scripted_404", "404 scripted_404", "ok good"),
    "400 context length": Fault(answers(too_long()), "400 400", "400 400", "ok good"),
    "hang before head": Fault(
        answers(Answer(bare=True, stall=True)), "504 upstream_timeout", "ok good", "ok good"
    ),
    "5xx with HTML": Fault(
        answers(Answer(503, parts=(b"<html>Service Unavailable</html>",),
                       content_type="text/html")),
        "503 html", "ok good", "ok good",
    ),
}  # fmt: skip


def seen(status: int, headers: dict[bytes, bytes], body: bytes, engines: dict[bytes, str]) -> str:
    """Tell an answer in the words of `Fault`."""
    if status == 200:
        whole = b"".join(EVENTS)
        if body in (whole, whole.removesuffix(EVENTS[-1])):
            return f"ok {engines[headers[b'x-parrot-engine']]}"
        # No byte changes, none comes twice, and the end is an honest one.
        *_, failure, done = body.decode().strip().split("\n\n")
        assert body.startswith(ROLE)
        assert done == "data: [DONE]"
        return f"in band {json.loads(failure.removeprefix('data: '))['error']['code']}"
    if b"<html>" in body:
        return f"{status} html"
    return f"{status} {json.loads(body).get('error', {}).get('code')}"


@pytest.mark.parametrize("beside", ["alone", "second", "fallback"])
@pytest.mark.parametrize("name", FAULTS)
async def test_what_a_client_sees(name: str, beside: str) -> None:
    with ExitStack() as stack:
        bad, good = (stack.enter_context(ScriptedUpstream("m-1")) for _ in range(2))
        good.answer_all(OK)
        FAULTS[name].act(bad)
        common = {
            "models": ["m-1"], "max_retries": 1, "backoff_s": 0.001, "breaker_failures": 1000,
            "forward_authorization": False,
        }  # fmt: skip
        if name.startswith(("stall", "hang")):
            common["read_timeout_s"] = READ_TIMEOUT_S
        urls = [bad.base_url, good.base_url] if beside == "second" else [bad.base_url]
        fallback = "other" if beside == "fallback" else None
        entries = [
            UpstreamSettings.model_validate({**common, "name": "up", "urls": urls}
                                            | {"fallback": fallback}),
            UpstreamSettings.model_validate({**common, "name": "other", "url": good.base_url}),
        ]  # fmt: skip
        engines = {b"up": "bad", b"up-1": "bad", b"up-2": "good", b"other": "good"}
        async with (
            serving(ScriptedRemoteEngine(), upstreams=entries) as service,
            started(service.gateway.upstreams["up"]),
            started(service.gateway.upstreams["other"]),
        ):
            messages = [{"role": "user", "content": "Hello."}]
            request = {"model": "up", "messages": messages, "stream": True}
            answer = await service.post("/v1/chat/completions", request)
            assert seen(*answer, engines) == getattr(FAULTS[name], beside)
            # The server with the fault was asked first.
            assert bad.received or name == "refuse"
            records = service.gateway.call_records
            records.settle()
            assert not records.live()
            await until(
                lambda: all(each.ended != "running" for each in (*bad.received, *good.received))
            )
