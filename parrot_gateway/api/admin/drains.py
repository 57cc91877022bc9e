"""`/admin/v1/engines` and `/admin/v1/drain`: engines and the gateway taken out of service and back.

A drained engine finishes what it has and gets no new calls; so does a server of an upstream. The
drained gateway is not ready for load balancers, and refuses calls some time later.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from parrot_gateway.api.admin.bodies import DrainBody, read
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.calls.requests.call import BodyDecoder
from parrot_gateway.exceptions import NotFoundError
from parrot_gateway.http.dispatch import CallGate
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import route
from parrot_gateway.routing.fleet.fleet import UpstreamFleet

logger = logging.getLogger(__name__)

_decoder = BodyDecoder(DrainBody)
#: Begins the ids of upstreams' servers on the live page.
_UPSTREAM = "upstream:"


class DrainRoutes:
    """The routes.

    Args:
        registry: the engines that joined.
        upstreams: by name.
        gate: of the gateway's calls.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        upstreams: Mapping[str, Upstream | UpstreamFleet],
        gate: CallGate,
    ) -> None:
        self.registry = registry
        self.upstreams = upstreams
        self.gate = gate

    @route("GET", "/admin/v1/engines")
    async def list_engines(self, exchange: Exchange) -> None:
        """List engines that joined and servers of upstreams, with their states."""
        await exchange.respond_json({"object": "list", "data": self._describe()})

    @route("POST", "/admin/v1/engines/{engine}/drain")
    async def drain_engine(self, exchange: Exchange, engine: str) -> None:
        """Give an engine or a server of an upstream no new calls; what it runs goes on."""
        await self._set_drained(exchange, engine, drained=True)

    @route("POST", "/admin/v1/engines/{engine}/undrain")
    async def undrain_engine(self, exchange: Exchange, engine: str) -> None:
        """Give an engine or a server of an upstream calls again."""
        await self._set_drained(exchange, engine, drained=False)

    @route("GET", "/admin/v1/drain")
    async def describe(self, exchange: Exchange) -> None:
        """Tell whether the gateway is drained, and how many calls still run."""
        await exchange.respond_json(self.gate.describe_drain())

    @route("POST", "/admin/v1/drain")
    async def drain(self, exchange: Exchange) -> None:
        """Drain the gateway: no longer ready at once, calls are refused some time later."""
        given: DrainBody = await read(exchange, _decoder)
        self.gate.set_drained(True, given.refuse_after_s)
        logger.warning("the gateway is drained by its operator, with %d calls", self.gate.running)
        await exchange.respond_json(self.gate.describe_drain())

    @route("POST", "/admin/v1/undrain")
    async def undrain(self, exchange: Exchange) -> None:
        """Let the gateway be ready and take calls again."""
        self.gate.set_drained(False)
        logger.warning("the gateway takes calls again")
        await exchange.respond_json(self.gate.describe_drain())

    async def _set_drained(self, exchange: Exchange, name: str, *, drained: bool) -> None:
        found = [engine.id for engine in self.registry.set_drained(name, drained=drained)]
        server = name.removeprefix(_UPSTREAM)
        for upstream in self.upstreams.values():
            found += upstream.set_drained(server, drained=drained)
        if not found:
            raise NotFoundError(
                f"No engine and no server of an upstream is called '{name[:200]}'.",
                param="engine",
                code="engine_not_found",
            )
        logger.warning("%s is %s", name, "drained" if drained else "given calls again")
        entries = [entry for entry in self._describe() if entry["id"] in found]
        await exchange.respond_json({"object": "list", "data": entries})

    def _describe(self) -> list[dict[str, Any]]:
        found = [_engine(engine) for engine in self.registry.joined.values()]
        for upstream in self.upstreams.values():
            described = upstream.describe()
            found += [
                _server(each, upstream.name) for each in described.get("servers", [described])
            ]
        return found


def _engine(engine: RemoteEngine) -> dict[str, Any]:
    return {
        "id": engine.id,
        "object": "engine",
        "name": engine.name,
        "model": engine.info.model,
        "kind": engine.info.kind,
        "state": "serving" if engine.takes_calls else "draining",
        "drained": engine.drained,
        "running": engine.running,
    }


def _server(described: dict[str, Any], upstream: str) -> dict[str, Any]:
    state = "serving"
    if described["drained"]:
        state = "draining"
    elif not described["ready"]:
        state = "loading"
    elif described["breaker"] != "closed":
        state = "failing"
    return {
        "id": described["name"],
        "object": "engine",
        "name": described["name"],
        "model": upstream,
        "kind": "upstream",
        "state": state,
        "drained": described["drained"],
        "running": described["running"],
    }
