"""Questions that the linking process does not answer in time."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import serving

from parrot_gateway.linking import service as linking_service


def test_what_nobody_can_say_in_time_is_not_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linking_service, "_QUERY_TIMEOUT_S", 0.01)

    async def ask() -> None:
        async with (
            serving(ScriptedRemoteEngine()) as service,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{service.port}/v1") as client,
        ):
            # A process that takes questions and answers none.
            service.gateway.linking.is_running = True
            for path in ("/calls/call_1", "/sessions/sess_1", "/sessions/sess_1/graph"):
                late = await client.get(path)
                error = late.json()["error"]
                assert (late.status_code, error["code"]) == (503, "linking_behind"), path
                assert error["type"] == "server_error"
                assert int(late.headers["retry-after"]) > 0
            service.gateway.linking.is_running = False
            assert (await client.get("/calls/call_1")).status_code == 404

    asyncio.run(ask())
