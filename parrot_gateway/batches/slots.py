"""Limits the running lines for each server of their models."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TypeAlias

from parrot_gateway.backends.upstreams.slots import Slots
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.routing.model_directory import ModelDirectory, Target

#: The server of a line: a target, or the name of a model that no server has now.
Server: TypeAlias = Target | str


@dataclass(eq=False)
class LineSlots:
    """Slots for lines. Waiters for one server get them in turn.

    A server gets lines for half of its capacity, so that clients' calls always find room there.
    """

    models: ModelDirectory
    #: Maximum slots of one server.
    limit: int
    _slots: dict[Server, Slots] = field(default_factory=dict, init=False)

    async def acquire(self, model: str) -> Server:
        """Wait for a slot of the server of `model`; the caller releases it."""
        server = self._server_of(model)
        slots = self._slots.setdefault(server, Slots(1, max_waiting=sys.maxsize))
        slots.limit = self._limit_of(server)
        try:
            await slots.acquire(None)
        finally:
            self._forget_unused(server)
        return server

    def release(self, server: Server) -> None:
        """Return a slot."""
        slots = self._slots[server]
        slots.limit = self._limit_of(server)
        slots.release()
        self._forget_unused(server)

    def held(self) -> int:
        """Return the number of running lines."""
        return sum(slots.held for slots in self._slots.values())

    def _forget_unused(self, server: Server) -> None:
        if not self._slots[server].held and not self._slots[server].waiting:
            del self._slots[server]

    def _server_of(self, model: str) -> Server:
        try:
            target = self.models.resolve(model)
        except GatewayError:
            return model
        return target if target.upstream is None else target._replace(model="")

    def _limit_of(self, server: Server) -> int:
        if isinstance(server, str):
            return 1
        if server.upstream is None:
            engines = self.models.engines_for(server.model)
            most = sum(engine.info.max_batch_size for engine in engines)
        else:
            settings = self.models.upstreams[server.upstream].settings
            most = settings.max_concurrency * len(settings.servers)
        return max(1, min(self.limit, most // 2))
