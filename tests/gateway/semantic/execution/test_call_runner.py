"""Deferred calls to upstreams: what becomes of them where an upstream cannot answer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from harness.gateway.fleets import user
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving
from harness.scripted_upstream import ScriptedUpstream

from parrot_gateway.settings.model import UpstreamSettings


async def deferred(
    engine: ScriptedRemoteEngine, script: str, count: int, **settings: Any
) -> tuple[dict[str, Any], list[int]]:
    """The variable of a deferred call once it is final, and the calls that each server got."""
    servers = ExitStack()
    fakes = [servers.enter_context(ScriptedUpstream()) for _ in range(count)]
    entry = UpstreamSettings(
        name="vllm", urls=[fake.base_url for fake in fakes], models="*", backoff_s=0.001, **settings
    )
    try:
        async with serving(engine, upstreams=[entry]) as service:
            upstream = service.gateway.upstreams["vllm"]
            await upstream.start()
            body = {
                "model": f"vllm/fake:{script}",
                "messages": [user("Write.")],
                "parrot": {"session": "s", "output": "a", "defer": True},
            }
            status, headers, answer = await service.post("/v1/chat/completions", body)
            assert status == 200, answer
            async with service.client() as client:
                path = f"/variables/{headers[b'x-parrot-variable'].decode()}?timeout=10"
                found = await client.with_options(max_retries=0).get(path, cast_to=object)
            await upstream.close()
    except Exception as error:
        body = getattr(error, "response", None)
        if body is None:
            raise
        found = msgspec.json.decode(body.content)["variable"]
    finally:
        servers.close()
    assert isinstance(found, dict)
    return found, [sum(each.method == "POST" for each in fake.received) for fake in fakes]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("status", [429, 503])
async def test_the_fallback_answers_after_the_last_try(
    engine: ScriptedRemoteEngine, status: int, count: int
) -> None:
    variable, calls = await deferred(engine, f"status={status}", count, max_retries=1, fallback="m")
    assert (variable["state"], variable["value"]) == ("ready", "Hello world")
    assert sum(calls) == 2


@pytest.mark.parametrize("status", [400, 429])
async def test_a_refusal_without_a_fallback_fails_the_variable(
    engine: ScriptedRemoteEngine, status: int
) -> None:
    variable, calls = await deferred(engine, f"status={status}", 1, max_retries=1)
    assert variable["state"] == "failed"
    assert "scripted failure" in variable["failure"]["message"]
    assert sum(calls) == (1 if status == 400 else 2)


async def test_a_refusal_that_no_try_changes_takes_no_fallback(
    engine: ScriptedRemoteEngine,
) -> None:
    variable, calls = await deferred(engine, "status=400", 1, max_retries=1, fallback="m")
    assert (variable["state"], sum(calls)) == ("failed", 1)
