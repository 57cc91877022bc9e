"""An upstream of several scripted servers, behind a whole gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from harness.gateway.relaying import started
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import Received, ScriptedUpstream
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.settings.model import SchedulerSettings, UpstreamSettings

MODEL = "fake"


class Fleet:
    """A gateway before several scripted servers."""

    def __init__(self, service: Service, fakes: Sequence[ScriptedUpstream]) -> None:
        self.service = service
        self.fakes = fakes
        upstream = service.gateway.upstreams["vllm"]
        assert isinstance(upstream, UpstreamFleet)
        self.upstream = upstream

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> tuple[str, bytes]:
        """The server that answered, and its answer."""
        body = {"model": MODEL, "messages": messages, **more}
        status, headers, answer = await self.service.post("/v1/chat/completions", body)
        assert status == 200, answer
        return headers[b"x-parrot-engine"].decode(), answer

    def counts(self) -> list[int]:
        """Calls that each server got."""
        return [len(fake.received) for fake in self.fakes]

    def received(self) -> list[Received]:
        """Return the requests that the servers got."""
        return [each for fake in self.fakes for each in fake.received]

    def servers(self) -> list[dict[str, Any]]:
        """Return the servers as `/health` describes them."""
        described: list[dict[str, Any]] = self.upstream.describe()["servers"]
        return described

    def placed_on(self, name: str) -> int:
        """Calls in flight at one server."""
        return next(each["placed"] for each in self.servers() if each["name"] == name)

    def placed(self) -> list[int]:
        """Calls in flight at each server, as the gateway counts them."""
        return [each["placed"] for each in self.servers()]

    def pending_tokens(self) -> list[int]:
        """Prompt tokens that each server is believed to have to compute."""
        return [self.upstream.server(each["name"]).pending_tokens for each in self.servers()]


@asynccontextmanager
async def fleet(
    engine: ScriptedRemoteEngine,
    count: int = 2,
    scheduler: SchedulerSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fakes = [stack.enter_context(ScriptedUpstream(MODEL, "fake-2")) for _ in range(count)]
        urls = [fake.base_url for fake in fakes]
        given = {"models": [MODEL], "backoff_s": 0.001, **settings}
        entry = UpstreamSettings(name="vllm", urls=urls, **given)
        service = await stack.enter_async_context(
            serving(engine, upstreams=[entry], scheduler=scheduler)
        )
        await stack.enter_async_context(started(service.gateway.upstreams["vllm"]))
        yield Fleet(service, fakes)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
