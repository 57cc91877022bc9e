"""How many lines are in work at once, by whoever serves their models."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TypeAlias

from parrot_gateway.exceptions import GatewayError
from parrot_gateway.scheduling.model_directory import EngineTarget, ModelDirectory, Target

#: Who serves a line: a target, or the name of a model that nobody serves now.
Server: TypeAlias = Target | str


class LineSlots:
    """Slots of lines; those who wait for one server get them in turn.

    A server gets lines for half of what it takes at once, so that a call that somebody waits for
    always finds room there.

    Args:
        models: who serves which.
        limit: slots of one server at most.
    """

    def __init__(self, models: ModelDirectory, limit: int) -> None:
        self._models = models
        self._limit = limit
        self._held: Counter[Server] = Counter()
        self._lines: dict[Server, deque[asyncio.Future[None]]] = {}

    async def acquire(self, model: str) -> Server:
        """Wait for a slot of whoever serves `model`; to be released."""
        server = self._server_of(model)
        line = self._lines.setdefault(server, deque())
        if line or self._held[server] >= self._limit_of(server):
            turn = asyncio.get_running_loop().create_future()
            line.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._held[server] -= 1
                    self._grant(server)
                else:
                    line.remove(turn)
                raise
        else:
            self._held[server] += 1
        return server

    def release(self, server: Server) -> None:
        """Give a slot back."""
        self._held[server] -= 1
        self._grant(server)

    def held(self) -> int:
        """Lines in work."""
        return self._held.total()

    def _grant(self, server: Server) -> None:
        line = self._lines[server]
        limit = self._limit_of(server)
        while line and self._held[server] < limit:
            turn = line.popleft()
            if not turn.done():
                self._held[server] += 1
                turn.set_result(None)
        if not line and not self._held[server]:
            del self._lines[server], self._held[server]

    def _server_of(self, model: str) -> Server:
        try:
            target = self._models.resolve(model)
        except GatewayError:
            return model
        return target if isinstance(target, EngineTarget) else target._replace(model="")

    def _limit_of(self, server: Server) -> int:
        if isinstance(server, str):
            return 1
        if isinstance(server, EngineTarget):
            engines = self._models.engines_for(server.model)
            most = sum(engine.info.max_batch_size for engine in engines)
        else:
            most = self._models.upstreams[server.upstream].settings.max_concurrency
        return max(1, min(self._limit, most // 2))
