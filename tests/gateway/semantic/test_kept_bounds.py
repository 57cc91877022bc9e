"""Bounds on the sum of what clients leave behind, and on the length of names they give."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, PATHS, body_of, http_of

from parrot_gateway.backends.upstreams.answer import UpstreamAnswerReader
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.exceptions import AnswerError, OverloadedError, SessionNotFoundError
from parrot_gateway.semantic.call_spec import CallSpec
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.service import SemanticService
from parrot_gateway.settings.model import SessionSettings


class Stuck:
    """Answers no call."""

    async def run(self, job: Job, request: CallRequest, metadata: CallMetadata) -> None:
        """See `CallRunner.run`."""
        await asyncio.Event().wait()


@pytest_asyncio.fixture
async def service() -> AsyncIterator[SemanticService]:
    limits = SessionSettings(max_total_variables=12, max_running_calls=1)
    service = SemanticService(limits, Stuck(), call_timeout_s=60.0)
    yield service
    await service.close()
    assert service.sessions.statistics().variables == 0


def call(text: str = "x") -> CallRequest:
    return CallRequest("completions", json.dumps({"model": "m", "prompt": text}).encode())


async def test_variables_of_all_sessions(service: SemanticService) -> None:
    for name, count in (("few", 2), ("most", 6), ("some", 4)):
        session = service.session("tenant", name)
        for _ in range(count):
            session.anonymous_variable()
    newest = service.session("tenant", "new")
    newest.anonymous_variable()
    # The largest idle one has made room.
    with pytest.raises(SessionNotFoundError):
        service.sessions.find("tenant", "most")
    assert service.sessions.statistics().variables == 7
    for _ in range(5):
        newest.anonymous_variable()
    for name in ("few", "some"):
        service.sessions.find("tenant", name).pin()
    with pytest.raises(OverloadedError, match="max_total_variables"):
        newest.anonymous_variable()
    newest.delete(next(iter(newest)).id)
    newest.anonymous_variable()
    service.close_session(service.sessions.find("tenant", "few"))
    for _ in range(2):
        newest.anonymous_variable()


async def test_cancelled_calls_leave_the_line_before_a_place(service: SemanticService) -> None:
    session = service.session("tenant", "s")
    service.submit(session, CallSpec(request=call()))
    await asyncio.sleep(0)
    jobs = []
    for number in range(1000):
        job = service.submit(session, CallSpec(request=call(f"{number}")))
        await asyncio.sleep(0)
        service.executor.cancel(job)
        jobs.append(weakref.ref(job))
        del job
    gc.collect()
    assert sum(job() is not None for job in jobs) < 10
    assert len(service.executor._queue) < 200
    # Those that are wanted still have their turn, in their order.
    kept = [
        service.submit(session, CallSpec(request=call(f"kept {n}"), priority=n)) for n in range(3)
    ]
    await asyncio.sleep(0)
    for job in reversed(kept):
        running = [each for each in service.executor.unfinished if each.node.state == "running"]
        service.executor.cancel(running[0])
        for _ in range(5):
            await asyncio.sleep(0)
        assert job.node.state == "running"


@pytest.mark.parametrize("path", PATHS)
async def test_names_of_calls(engine: ScriptedRemoteEngine, path: str) -> None:
    async with http_of(engine) as http:
        for name in ("n" * 257, "tab\tin it"):
            answer = await http.post(
                path, content=json.dumps(body_of(path, "x", parrot={"session": "s", "name": name}))
            )
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "parrot.name"
        headers = {"x-parrot-session": "s", "x-parrot-name": "n" * 257}
        answer = await http.post(path, json=body_of(path, "x"), headers=headers)
        assert answer.json()["error"]["param"] == "X-Parrot-Name"
        answer = await http.call(path, "x", parrot={"session": "s", "name": "n" * 256})
        assert answer.status_code == 200


async def test_models_of_calls(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        asked = body_of(CHAT, "x", parrot={"session": "s"}) | {"model": "m" * 1025}
        answer = await http.post(CHAT, json=asked)
        assert answer.json()["error"]["code"] == "string_above_max_length"
        assert answer.json()["error"]["param"] == "model"


async def test_headers_of_waiting_calls_count(engine: ScriptedRemoteEngine) -> None:
    async with http_of(engine) as http:
        parrot = {"session": "s", "defer": True, "inputs": {"late": "late"}}
        asked = body_of(COMPLETIONS, "{{late}}", parrot=parrot)
        await http.post(COMPLETIONS, json=asked, headers={"x-other": "y" * 50_000})
        assert (await http.gauges())["held_bytes"] > 50_000
        await http.delete("/v1/sessions/s")


def test_errors_of_upstreams_are_cut() -> None:
    reader = UpstreamAnswerReader(GenerationObserver())
    reader.start(500, b"application/json")
    reader.feed(json.dumps({"error": {"message": "m" * 10_000, "code": "c" * 10_000}}).encode())
    with pytest.raises(AnswerError) as caught:
        reader.end()
    assert len(caught.value.message) < 3000
    assert len(caught.value.code or "") <= 200
