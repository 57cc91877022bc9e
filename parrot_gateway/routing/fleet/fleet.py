"""An upstream of several servers of the same models, which the scheduler places calls on.

Each server is an engine for the scheduler, that joins once its models are known. One whose circuit
breaker opens leaves. Once the breaker is half open it is back, for a single call at a time, until
enough of these have succeeded: its answers to other requests say nothing about calls. How a call
finds its server is in `fleet_call`.

NOTE: this is the place for what servers say of themselves (health, metrics, KV events).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from parrot_scheduler.events import EngineDraining, EngineJoined, EngineReport, EngineResumed
from parrot_scheduler.task import EngineDescription

from parrot_gateway.backends.upstreams.breaker import BreakerState
from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.backends.upstreams.continuation_styles import ContinuationStyles
from parrot_gateway.exceptions import DrainedError, OverloadedError, UpstreamError
from parrot_gateway.routing.fleet.prompt import BLOCK_TOKENS
from parrot_gateway.routing.fleet.server import TIMES_S, FleetServer
from parrot_gateway.routing.fleet.stored_objects import StoredObjects
from parrot_gateway.routing.placer import SchedulerRunner
from parrot_gateway.routing.step_times import Scale
from parrot_gateway.routing.task_updates import TaskUpdater
from parrot_gateway.settings.model import UpstreamSettings

logger = logging.getLogger(__name__)

#: How much KV a server holds is not known: no call waits for memory.
_UNBOUNDED_TOKENS = 2**40
_MAX_BATCH_TOKENS = 8192
#: Least pause between two looks at a breaker that is open.
_SHORT_S = 0.005
#: Without any server that takes calls, each is tried again after so long, however long its breaker
#: would stay open.
LAST_RESORT_S = 1.0


class UpstreamFleet:
    """The servers of one upstream. Used in the event loop's thread only.

    Args:
        settings: as checked.
        runner: the scheduler.
        updater: passes on what becomes known of calls later.
        gateway_has_key: as of `Upstream`.
    """

    def __init__(
        self,
        settings: UpstreamSettings,
        runner: SchedulerRunner,
        updater: TaskUpdater,
        *,
        gateway_has_key: bool = True,
    ) -> None:
        self.settings = settings
        self.name = settings.name
        self.runner = runner
        self.updater = updater
        self.objects = StoredObjects()
        #: How its servers are told to go on with answers that broke off elsewhere.
        self.continuation = ContinuationStyles(settings)
        #: Calls that wait for a place.
        self.waiting = 0
        self._fitted_at = 0.0
        scale = Scale()
        self._servers = {
            name: FleetServer(
                Upstream(
                    settings,
                    gateway_has_key=gateway_has_key,
                    server=(name, url),
                    on_breaker=partial(self._breaker_changed, name),
                ),
                scale,
            )
            for name, url in settings.servers.items()
        }
        self._keepers: list[asyncio.Task[None]] = []
        #: The scheduler may know the servers: between `join` and `leave`.
        self._may_join = False
        #: Another has taken its place; what has begun here goes on.
        self.has_left = False

    def serves(self, model: str) -> bool:
        """Return true if all servers that have listed their models serve this one."""
        ready = [server.upstream for server in self._servers.values() if server.upstream.ready]
        return bool(ready) and all(each.serves(model) for each in ready)

    def serves_any(self) -> bool:
        return self.settings.models == "*"

    def models(self) -> tuple[str, ...]:
        """The models that they all list, as far as they have."""
        listed = [each.upstream.models() for each in self._servers.values() if each.upstream.ready]
        return tuple(name for name in (listed or [()])[0] if all(name in each for each in listed))

    @property
    def ready(self) -> bool:
        """True if the models of any server are known."""
        return any(server.upstream.ready for server in self._servers.values())

    @property
    def refusal(self) -> UpstreamError | None:
        """See `Upstream.refusal`."""
        refusals = (server.upstream.refusal for server in self._servers.values())
        return next((each for each in refusals if each is not None), None)

    @property
    def drained(self) -> bool:
        """True if the operator has drained all servers."""
        return all(server.drained for server in self._servers.values())

    @property
    def forwards_authorization(self) -> bool:
        """See `UpstreamClient`; all servers have the same key."""
        return all(each.upstream.forwards_authorization for each in self._servers.values())

    def upstreams(self) -> list[Upstream]:
        """Its servers, each as an upstream of its own."""
        return [server.upstream for server in self._servers.values()]

    async def start(self) -> None:
        """Do what `Upstream.start` does, for each server."""
        await self.open()
        self.join()

    async def open(self) -> None:
        """Do what `Upstream.open` does, for each server; the scheduler does not know them yet."""
        for server in self._servers.values():
            await server.upstream.open()

    def join(self) -> None:
        """Let the scheduler place calls on the servers whose models are known, and on the others
        once they are."""
        self._may_join = True
        for server in self._servers.values():
            if server.upstream.ready:
                self._let_join(server)
        self._keepers = [
            asyncio.create_task(self._keep(server), name=f"keep-{server.upstream.name}")
            for server in self._servers.values()
        ]

    async def wait_ready(self) -> None:
        """Return once the models of all servers are known."""
        for server in self._servers.values():
            await server.upstream.wait_ready()
            self._let_join(server)

    def succeed(self, other: object) -> None:
        """Do what `Upstream.succeed` does. The scheduler forgets the other's servers."""
        if not isinstance(other, UpstreamFleet):
            return
        other.leave()
        for name, server in self._servers.items():
            before = other._servers.get(name)
            if before is not None:
                server.drained = before.drained
                server.upstream.succeed(before.upstream)

    def leave(self) -> None:
        """The scheduler places no calls on the servers any more; those that have begun go on."""
        self._may_join, self.has_left = False, True
        for keeper in self._keepers:
            keeper.cancel()
        for name, server in self._servers.items():
            if server.is_joined:
                server.is_joined = False
                self.runner.engine_left(name)

    async def close(self) -> None:
        """Abort what is in flight and close all connections."""
        self.leave()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for server in self._servers.values():
            await server.upstream.close()

    def describe(self) -> dict[str, Any]:
        """State and counters as plain types, for `/health`."""
        servers = [
            {
                **each.upstream.describe(),
                "drained": each.drained,
                "takes_calls": each.takes_calls,
                "placed": each.running,
            }
            for each in self._servers.values()
        ]
        return {
            "name": self.name,
            "ready": self.ready,
            "models": len(self.models()),
            "waiting": self.waiting,
            "stored_objects": len(self.objects),
            "servers": servers,
        }

    # Servers

    def has_present_key(self) -> bool:
        """See `Upstream.has_present_key`; all servers have the same."""
        return all(server.upstream.has_present_key() for server in self._servers.values())

    def set_drained(self, name: str, *, drained: bool) -> list[str]:
        """Do what `Upstream.set_drained` does, for one server, or for all by the upstream's name.

        Requests for what only a drained server keeps still go there.
        """
        names = list(self._servers) if name == self.name else [name]
        found = [each for each in names if each in self._servers]
        for each in found:
            server = self._servers[each]
            if server.drained != drained:
                server.drained = drained
                if server.is_joined:
                    self.runner.notify(EngineDraining(each) if drained else EngineResumed(each))
        return found

    def server(self, name: str) -> FleetServer:
        """The server of a name; any, where there is none of it any more."""
        if name in self._servers:
            return self._servers[name]
        return min(self._servers.values(), key=lambda each: each.running)

    def in_order(self, first: str | None) -> Iterator[FleetServer]:
        """The servers that take calls, in their order; one named comes first in any case."""
        if first is not None:
            yield self._servers[first]
        for name, server in self._servers.items():
            if name != first and (server.takes_calls or self.has_left):
                yield server

    def untried(self, tried: Collection[str]) -> list[FleetServer]:
        """The other servers that take calls, the least busy first."""
        names = (name for name in self._servers if name not in tried)
        servers = [self._servers[name] for name in names if self._servers[name].takes_calls]
        return sorted(servers, key=lambda each: (each.running, each.computed_tokens))

    def begin_probe(self, server: FleetServer) -> None:
        """Give a server no other call while one finds out if it has recovered."""
        if not server.probing and server.upstream.breaker_state() == "half_open":
            server.probing = True
            self.runner.notify(EngineDraining(server.upstream.name))

    def end_probe(self, server: FleetServer) -> None:
        """Give it calls again after a probe, unless that has failed."""
        if server.probing:
            server.probing = False
            if server.takes_calls:
                self.runner.notify(EngineResumed(server.upstream.name))

    def least_used(self) -> str | None:
        """The server that has computed the fewest prompt tokens: of equally good ones it gets what
        begins, so that conversations which never run at once are spread over all caches, too."""
        joined = (each for each in self._servers.values() if each.takes_calls)
        server = min(joined, key=lambda each: each.computed_tokens, default=None)
        return None if server is None else server.upstream.name

    def fit(self, now: float) -> None:
        """Tell the scheduler what was learned of the servers' times, at most every `TIMES_S`."""
        if now - self._fitted_at < TIMES_S or self.has_left:
            return
        self._fitted_at = now
        for name, server in self._servers.items():
            if server.fit(now):
                used = server.context_tokens
                report = EngineReport(name, server.running, 0, used, server.step_model)
                self.runner.notify(report)

    def check_available(self) -> None:
        """
        Raises:
            DrainedError: the operator has drained all servers.
            OverloadedError: no server takes calls.
        """
        if not any(server.takes_calls for server in self._servers.values()):
            if self.drained:
                raise DrainedError(f"All servers of the upstream '{self.name}' are drained")
            waits_s = [server.upstream.retry_after_s for server in self._servers.values()]
            wait_s = min(LAST_RESORT_S, *waits_s)
            reasons = ["have been failing"]
            if any(server.drained for server in self._servers.values()):
                reasons.append("are drained")
            if not all(server.upstream.ready for server in self._servers.values()):
                reasons.append("have not listed their models yet")
            raise OverloadedError(
                f"None of the {len(self._servers)} servers of the upstream '{self.name}' takes "
                f"calls: all {' or '.join(reasons)}. Try again in {wait_s:.0f} s.",
                code="upstream_unavailable",
                retry_after_s=round(wait_s, 1),
            )

    def _let_join(self, server: FleetServer) -> None:
        """Let a server take calls whose models are known, unless it does or is failing."""
        is_failing = server.upstream.breaker_state() == "open"
        if server.is_joined or is_failing or not self._may_join:
            return
        name = server.upstream.name
        others = [each.computed_tokens for each in self._servers.values() if each.is_joined]
        server.computed_tokens = max(server.computed_tokens, min(others, default=0))
        server.is_joined, server.probing = True, False
        self.runner.notify(
            EngineJoined(
                EngineDescription(
                    id=name,
                    model=self.name,
                    capacity_tokens=_UNBOUNDED_TOKENS,
                    max_batch=self.settings.max_concurrency,
                    max_batch_tokens=_MAX_BATCH_TOKENS,
                    block_tokens=BLOCK_TOKENS,
                    assumed_tokens=self.settings.cached_tokens,
                    step_model=server.step_model,
                )
            )
        )
        if server.drained:
            self.runner.notify(EngineDraining(name))

    def _breaker_changed(self, name: str, state: BreakerState) -> None:
        server = self._servers[name]
        if state == "closed":
            logger.info("%s answers again", name)
        elif state == "open":
            server.failed.set()
            if server.is_joined:
                server.is_joined = False
                self.runner.engine_left(name)
                logger.warning("%s has been failing and gets no calls for now", name)

    async def _keep(self, server: FleetServer) -> None:
        """Let a server take calls once its models are known, and after its breaker was open."""
        await server.upstream.wait_ready()
        listed = set(server.upstream.models())
        if listed != set(self.models()):
            logger.warning(
                "%s lists other models than the other servers of upstream %s: only those that all "
                "list are served", server.upstream.name, self.name,
            )  # fmt: skip
        while True:
            self._let_join(server)
            await server.failed.wait()
            server.failed.clear()
            was_away = False
            while server.upstream.breaker_state() == "open":
                open_s = min(server.upstream.open_s, LAST_RESORT_S)
                await asyncio.sleep(max(_SHORT_S, open_s))
                if not any(each.takes_calls for each in self._servers.values()):
                    # A look at a server that hangs would take seconds.
                    server.upstream.try_again()
                    continue
                listens = await server.upstream.listens()
                if was_away and listens:
                    # A process that was away and is back is not the one that failed.
                    server.upstream.try_again()
                was_away = not listens
