"""The scheduler learns of a server through the whole gateway."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from harness.gateway.fleets import fleet, user
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.waiting import until
from parrot_scheduler.task import DEFAULT_STEP_MODEL

from parrot_gateway.routing.fleet import fleet as fleet_module
from parrot_gateway.routing.fleet import server


async def test_a_server_that_answers_nothing_passes_for_a_slow_one(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (server, fleet_module):
        monkeypatch.setattr(module, "TIMES_S", 0.01)
    async with fleet(engine) as served:
        stuck = msgspec.json.encode(
            {"model": "vllm/fake:fault=stall,after=0", "messages": [user("x")], "stream": True}
        )
        _, writer = await served.service.send("/v1/chat/completions", stuck)
        await until(lambda: sum(served.placed()) == 1)
        hung, other = sorted(("vllm-1", "vllm-2"), key=lambda name: -served.placed_on(name))

        async def is_known() -> bool:
            await served.chat([user("word " * 100)], stream=True)
            models = [served.upstream.server(name).step_model for name in (hung, other)]
            return models[0].weights_s > 5 * DEFAULT_STEP_MODEL.weights_s > models[1].weights_s

        async with asyncio.timeout(60):
            while not await is_known():
                pass
        writer.close()
        await until(lambda: served.placed() == [0, 0])
        assert not served.upstream.server(hung).unanswered
