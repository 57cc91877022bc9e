"""A server that fails is left for another, before anything of its answer is passed on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from harness.gateway.fleets import MODEL, Fleet, fleet, user
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.scripted_upstream import (
    Answer,
    chat_document,
    chat_events,
    document,
    error,
    event_stream,
)
from harness.waiting import until

from parrot_gateway.routing.fleet import fleet as fleet_module

ROLE, WORD, *_ = chat_events(["One"])
OK = document(chat_document("fine"))
OK_STREAM = event_stream(*chat_events(["fine"]))
PATH = "/v1/chat/completions"


async def ask(
    served: Fleet, number: int = 0, path: str = PATH, **more: Any
) -> tuple[int, dict[bytes, bytes], bytes]:
    body = {"model": MODEL, "messages": [user(f"{number} " * 50)], **more}
    return await served.service.post(path, body)


FAILURES: dict[str, tuple[Answer, bytes]] = {
    "refused": (Answer(bare=True, close=True), b"connection"),
    "500": (error(500), b"server_error"),
    "429": (error(429, retry_after="600"), b"rate_limited"),
    "an error with 200": (document({"error": {"message": "no"}}), b"answer_error"),
    "401": (error(401), b"key_refused"),
}
STREAM_FAILURES: dict[str, tuple[Answer, bytes]] = {
    "role, then cut": (event_stream(ROLE, cut=True), b"connection"),
    "role, then an error": (
        event_stream(ROLE, b'data: {"error": {"message": "no"}}\n\n'),
        b"answer_error",
    ),
    "role, then the end": (event_stream(ROLE), b"connection"),
}


@pytest.mark.parametrize("name", [*FAILURES, *STREAM_FAILURES])
async def test_another_server_answers(engine: ScriptedRemoteEngine, name: str) -> None:
    stream = name in STREAM_FAILURES
    answer, reason = (STREAM_FAILURES if stream else FAILURES)[name]
    settings = {"max_retries": 0, "forward_authorization": False, "breaker_failures": 1000}
    async with fleet(engine, **settings) as served:
        bad, good = served.fakes
        bad.answer_all(answer)
        good.script(OK)
        good.answer_all(OK_STREAM if stream else OK)
        for number in range(4):
            status, headers, body = await ask(served, number, stream=stream)
            assert (status, headers[b"x-parrot-engine"]) == (200, b"vllm-2"), body
            assert headers.get(b"x-parrot-tried", b"vllm-1=" + reason) == b"vllm-1=" + reason
        assert served.counts()[0] >= 1
        assert (served.placed(), served.pending_tokens()) == ([0, 0], [0, 0])


async def test_a_refusal_is_not_repeated_elsewhere(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine) as served:
        for fake in served.fakes:
            fake.answer_all(error(400))
        status, headers, _ = await ask(served)
        assert (status, sum(served.counts())) == (400, 1)
        assert b"x-parrot-tried" not in headers


async def test_all_servers_fail(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, count=3, max_retries=0) as served:
        answers = [Answer(bare=True, close=True), error(503, retry_after="9"), error(500)]
        for fake, answer in zip(served.fakes, answers, strict=True):
            fake.answer_all(answer)
        status, headers, body = await ask(served)
        # The first answer that a server gave, as it came.
        assert status in (500, 503)
        assert msgspec.json.decode(body)["error"]["code"] == f"scripted_{status}"
        assert headers[b"retry-after"] == b"9"
        assert headers[b"x-parrot-tried"].count(b"=") == 3
        assert served.counts() == [1, 1, 1]


@pytest.mark.parametrize(("max_retries", "calls"), [(0, 2), (1, 2), (3, 4)])
async def test_retries_count_for_all_servers_together(
    engine: ScriptedRemoteEngine, max_retries: int, calls: int
) -> None:
    async with fleet(engine, max_retries=max_retries) as served:
        for fake in served.fakes:
            fake.answer_all(error(503))
        status, headers, _ = await ask(served)
        assert (status, sum(served.counts())) == (503, calls)
        assert headers.get(b"x-should-retry") == (b"false" if max_retries else None)


async def test_a_server_that_hangs(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, read_timeout_s=2.0, max_retries=0) as served:
        served.fakes[0].answer_all(Answer(bare=True, stall=True))
        status, headers, _ = await ask(served)
        assert (status, headers[b"x-parrot-engine"]) == (200, b"vllm-2")
        assert headers[b"x-parrot-tried"] == b"vllm-1=timeout"
        assert (served.placed(), served.pending_tokens()) == ([0, 0], [0, 0])


async def test_calls_at_once_when_a_server_goes_down(engine: ScriptedRemoteEngine) -> None:
    settings = {"breaker_failures": 2, "breaker_open_s": 60, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        gates = [fake.gate() for fake in served.fakes]
        for fake, gate in zip(served.fakes, gates, strict=True):
            fake.answer_all(document(chat_document("fine"), before=gate))
        calls = [asyncio.create_task(ask(served, number)) for number in range(12)]
        await until(lambda: served.counts() == [6, 6])
        served.fakes[0].go_down()
        await until(lambda: served.placed() == [0, 12])
        gates[1].open()
        answers = await asyncio.gather(*calls)
        assert [status for status, _, _ in answers] == [200] * 12
        tried = [headers.get(b"x-parrot-tried") for _, headers, _ in answers]
        assert tried.count(b"vllm-1=connection") == 6
        assert (served.placed(), served.pending_tokens()) == ([0, 0], [0, 0])


async def test_a_server_that_only_lists_its_models_costs_no_call(
    engine: ScriptedRemoteEngine,
) -> None:
    settings = {"breaker_failures": 2, "breaker_open_s": 0.02, "max_retries": 0, "models": None}
    async with fleet(engine, **settings) as served:
        await asyncio.wait_for(served.upstream.wait_ready(), 20)
        await until(lambda: all(each["takes_calls"] for each in served.servers()))
        bad = served.fakes[0]
        bad._scripts[MODEL] = [error(500)]

        def openings() -> int:
            return int(served.servers()[0]["breaker_openings"])

        for number in range(1000):
            status, _, body = await ask(served, number)
            assert status == 200, body
            if openings() >= 4:
                break
            # Half open, it is back for one call.
            await until(lambda: served.servers()[0]["takes_calls"])
        assert openings() >= 4
        assert served.servers()[0]["breaker"] != "closed"
        # Each cycle after the first cost it a single call, and nobody else one.
        assert served.counts()[0] <= 2 + openings()


async def test_without_any_other_a_failing_server_is_tried_early(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server comes back and the other goes: nobody waits for the breaker of the first."""
    monkeypatch.setattr(fleet_module, "LAST_RESORT_S", 0.05)
    settings = {"breaker_failures": 1, "breaker_open_s": 600, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        first, second = served.fakes
        first.answer_all(error(500))
        while not first.received:
            await ask(served)
        await until(lambda: not served.servers()[0]["takes_calls"])
        # As long as the other one answers, its breaker stays open.
        assert (await ask(served))[0] == 200
        assert served.servers()[0]["breaker"] == "open"
        first.answer_all(OK)
        second.answer_all(error(500))
        assert (await ask(served))[0] == 500
        await until(lambda: served.servers()[0]["takes_calls"])
        assert (await ask(served))[0] == 200
        assert served.servers()[1]["breaker"] == "open"


async def test_half_open_a_server_gets_a_single_call(engine: ScriptedRemoteEngine) -> None:
    settings = {"breaker_failures": 1, "breaker_open_s": 0.05, "max_retries": 0}
    async with fleet(engine, **settings) as served:
        bad, good = served.fakes
        bad._scripts[MODEL] = [error(500)]
        number = 0
        while not bad.received:
            await ask(served, number)
            number += 1
        gate = bad.gate()
        bad._scripts[MODEL] = [document(chat_document("fine"), before=gate)]
        await until(lambda: served.servers()[0]["takes_calls"])
        before = len(bad.received)
        calls = [asyncio.create_task(ask(served, number)) for number in range(100, 108)]
        await until(lambda: len(bad.received) == before + 1 and len(good.received) >= 8)
        assert not served.servers()[0]["takes_calls"]
        gate.open()
        answers = await asyncio.gather(*calls)
        assert [status for status, _, _ in answers] == [200] * 8
        assert all(b"x-parrot-tried" not in headers for _, headers, _ in answers)
        await until(lambda: served.servers()[0]["takes_calls"])


async def test_why_it_was_that_server(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_retries=0) as served:
        served.fakes[0].answer_all(error(500))
        for number in range(9):
            _, headers, _ = await ask(served, number)
            if b"x-parrot-tried" in headers:
                break
        async with served.service.client() as client:
            id_ = headers[b"x-request-id"].decode()
            found: Any = await client.get(f"/calls/{id_}", cast_to=object)
        explanation = found["explanation"]
        assert (explanation["engine"], explanation["decided_by"]) == ("vllm-2", "failover")
        assert "another server had failed before" in explanation["text"]


async def test_lists_come_from_a_server_that_is_there(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_retries=0) as served:
        served.fakes[0].go_down()
        async with served.service.client() as client:
            answer = await client.files.with_raw_response.list()
            assert answer.headers["x-parrot-engine"] == "vllm-2"


async def test_all_servers_are_left_for_the_fallback(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_retries=0, fallback="m") as served:
        for fake in served.fakes:
            fake.answer_all(error(500))
        status, headers, body = await ask(served)
        assert status == 200, body
        assert headers[b"x-parrot-tried"].count(b"server_error") == 2
