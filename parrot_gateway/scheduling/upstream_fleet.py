"""An upstream of several servers of the same models, which the scheduler places calls on.

Each server is an engine for the scheduler. What it is told of one comes from the calls that went
there: how many run, which prompts it has seen (`upstream_prompt`), and how long they took. Requests
for what a server keeps go to that server (`stored_objects`). A server whose circuit breaker opens
leaves, and comes back once it answers again.

NOTE: this is the place for what servers say of themselves (health, metrics, KV events), and for
another try on another server.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from parrot_scheduler.actions import Place
from parrot_scheduler.events import EngineDraining, EngineJoined, EngineReport, EngineResumed
from parrot_scheduler.task import DEFAULT_STEP_MODEL, EngineDescription, StepModel, Task

from parrot_gateway.engines.breaker import BreakerState
from parrot_gateway.engines.upstream import Upstream
from parrot_gateway.engines.upstream_response import UpstreamResponse
from parrot_gateway.engines.usage import Usage
from parrot_gateway.exceptions import DrainedError, OverloadedError, UpstreamError
from parrot_gateway.generation.placement import CallMetadata
from parrot_gateway.generation.requests.call import in_thread_if_large
from parrot_gateway.scheduling.placer import SchedulerRunner, SubmittedCall, template_of
from parrot_gateway.scheduling.step_times import Scale, StepTimes
from parrot_gateway.scheduling.stored_objects import StoredObjects
from parrot_gateway.scheduling.task_updates import TaskUpdater
from parrot_gateway.scheduling.upstream_prompt import (
    BLOCK_TOKENS,
    BYTES_PER_TOKEN,
    UpstreamPrompt,
    read_prompt,
)
from parrot_gateway.settings.model import UpstreamSettings

logger = logging.getLogger(__name__)

#: `Upstream.request` of a request, but for the server, its time-out and tracker.
_Send: TypeAlias = Callable[..., Awaitable[UpstreamResponse]]

#: How much KV a server holds is not known: no call waits for memory.
_UNBOUNDED_TOKENS = 2**40
_MAX_BATCH_TOKENS = 8192
#: Seconds between two looks at what a server's calls took.
_TIMES_S = 1.0
#: A stream that takes so many times as long to begin as was expected is late.
_OVERDUE = 2.0
#: Least pause between two probes of a server that has been failing.
_PROBE_PAUSE_S = 0.05
#: Routes that any server can answer; all others may be about what one of them keeps.
_PLACED = re.compile(
    r"/v1/(?:chat/completions|completions|responses|responses/input_tokens|messages"
    r"|messages/count_tokens|embeddings|moderations|rerank|score|classify|pooling"
    r"|audio/.+|images/.+)|/tokenize"
)
#: Events of a stream that hold no token: role or finish reason, and `[DONE]`.
_OTHER_EVENTS = 2


class _Server:
    """One server, and what the gateway has sent there.

    Args:
        upstream: the server.
        scale: of the times of all servers.
    """

    def __init__(self, upstream: Upstream, scale: Scale) -> None:
        self.upstream = upstream
        #: The scheduler knows it, and places calls on it unless the operator has drained it.
        self.is_joined = False
        self.drained = False
        #: Its breaker is closed, or is not.
        self.recovered, self.failed = asyncio.Event(), asyncio.Event()
        self.recovered.set()
        #: Calls placed there, the tokens of their contexts, and of these to be computed.
        self.running = 0
        self.context_tokens = 0
        self.pending_tokens = 0
        #: Prompt tokens that were not expected in its cache, so far.
        self.computed_tokens = 0
        #: Streams that have not begun yet, oldest first.
        self.unanswered: dict[PlacedCall, None] = {}
        self.step_model: StepModel = DEFAULT_STEP_MODEL
        self._fit = StepTimes(DEFAULT_STEP_MODEL, scale=scale)
        self._steps = 0
        self._filled = self._used = self._busy_s = 0.0

    @property
    def takes_calls(self) -> bool:
        """Whether new calls may be placed on it."""
        return self.is_joined and not self.drained

    def note_times(self, steps: int, filled: float, used: float, busy_s: float) -> None:
        """A call's own view: steps, tokens filled before the first one, tokens in contexts."""
        self._steps += steps
        self._filled += filled
        self._used += used * steps
        self._busy_s += busy_s

    def fit(self, now: float) -> bool:
        """Whether there is a new step model.

        A stream that should have begun long ago counts as beginning now, so that a server that
        answers nothing any more does not pass for a fast one.
        """
        oldest = next(iter(self.unanswered), None)
        if oldest is not None:
            waited_s, known = now - oldest.placed_at, self.step_model
            due_s = known.weights_s + oldest.ahead_tokens * known.prefill_token_s
            if waited_s > max(_TIMES_S, _OVERDUE * due_s):
                self.note_times(1, oldest.ahead_tokens, self.context_tokens, waited_s)
        if self._steps == 0:
            return False
        mean_used = self._used / self._steps
        model = self._fit.add(self._steps, self._filled, mean_used, self._busy_s)
        self._steps = 0
        self._filled = self._used = self._busy_s = 0.0
        if model is not None:
            self.step_model = model
        return model is not None


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
        #: Calls that wait for a place.
        self.waiting = 0
        self._fitted_at = 0.0
        scale = Scale()
        self._servers = {
            name: _Server(
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
        """Whether all servers that have listed their models serve this one."""
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
        """Whether the models of a server are known."""
        return any(server.upstream.ready for server in self._servers.values())

    @property
    def drained(self) -> bool:
        """Whether the operator has drained all servers."""
        return all(server.drained for server in self._servers.values())

    def upstreams(self) -> list[Upstream]:
        """Its servers, each as an upstream of its own."""
        return [server.upstream for server in self._servers.values()]

    async def start(self) -> None:
        """As `Upstream.start`, for each server."""
        await self.open()
        self.join()

    async def open(self) -> None:
        """As `Upstream.open`, for each server; the scheduler does not know them yet."""
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
        """As `Upstream.succeed`. The scheduler forgets the other's servers."""
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

    def call(self, metadata: CallMetadata) -> FleetCall:
        """The upstream as one call sees it."""
        return FleetCall(self, metadata)

    # Servers

    def has_present_key(self) -> bool:
        """See `Upstream.has_present_key`; all servers have the same."""
        return all(server.upstream.has_present_key() for server in self._servers.values())

    def set_drained(self, name: str, *, drained: bool) -> list[str]:
        """As `Upstream.set_drained`, for one server, or for all by the upstream's name.

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

    def server(self, name: str) -> _Server:
        """The server of a name; any, where there is none of it any more."""
        if name in self._servers:
            return self._servers[name]
        return min(self._servers.values(), key=lambda each: each.running)

    def in_order(self, first: str | None) -> Iterator[_Server]:
        """The servers that take calls, in their order; one named comes first in any case."""
        if first is not None:
            yield self._servers[first]
        for name, server in self._servers.items():
            if name != first and (server.takes_calls or self.has_left):
                yield server

    def least_used(self) -> str | None:
        """The server that has computed the fewest prompt tokens: of equally good ones it gets what
        begins, so that conversations which never run at once are spread over all caches, too."""
        joined = (each for each in self._servers.values() if each.takes_calls)
        server = min(joined, key=lambda each: each.computed_tokens, default=None)
        return None if server is None else server.upstream.name

    def fit(self, now: float) -> None:
        """Tell the scheduler what was learned of the servers' times, at most every `_TIMES_S`."""
        if now - self._fitted_at < _TIMES_S or self.has_left:
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
            wait_s = min(server.upstream.retry_after_s for server in self._servers.values())
            any_drained = any(server.drained for server in self._servers.values())
            drained = " or are drained" if any_drained else ""
            raise OverloadedError(
                f"None of the {len(self._servers)} servers of the upstream '{self.name}' takes "
                f"calls: all have been failing{drained}. Try again in {wait_s:.0f} s.",
                code="upstream_unavailable",
                retry_after_s=round(wait_s, 1),
            )

    def _let_join(self, server: _Server) -> None:
        """Let a server take calls whose models are known, unless it does or is failing."""
        if server.is_joined or not (self._may_join and server.recovered.is_set()):
            return
        name = server.upstream.name
        others = [each.computed_tokens for each in self._servers.values() if each.is_joined]
        server.computed_tokens = max(server.computed_tokens, min(others, default=0))
        server.is_joined = True
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
            server.failed.clear()
            server.recovered.set()
        elif state == "open":
            server.recovered.clear()
            server.failed.set()
            if server.is_joined:
                server.is_joined = False
                self.runner.engine_left(name)
                logger.warning("%s has been failing and gets no calls for now", name)

    async def _keep(self, server: _Server) -> None:
        """Let a server take calls once its models are known, and whenever it has recovered."""
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
            while not server.recovered.is_set():
                await asyncio.sleep(_PROBE_PAUSE_S)
                await server.upstream.probe()
            logger.info("%s answers again", server.upstream.name)


class FleetCall:
    """See `parrot_gateway.engines.upstream.UpstreamClient`.

    Args:
        fleet: the servers.
        metadata: of the call.
    """

    def __init__(self, fleet: UpstreamFleet, metadata: CallMetadata) -> None:
        self.settings = fleet.settings
        self.name = fleet.name
        self._fleet = fleet
        self._metadata = metadata

    async def request(
        self,
        method: str,
        path: str | bytes,
        query: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        *,
        first_byte_timeout_s: float | None = None,
        readable: bool = True,
    ) -> UpstreamResponse:
        """Send a request to the server that the scheduler chooses, or that keeps what it names.

        A request that names what no server is known to keep is sent to one after the other while
        they answer 404.
        """
        route = path.decode("latin-1") if isinstance(path, bytes) else path
        fleet, objects = self._fleet, self._fleet.objects
        keeper = objects.server_for(route, body)
        send = partial(
            Upstream.request,
            method=method, path=path, query=query, headers=headers, body=body, readable=readable,
        )  # fmt: skip
        if method != "POST" or _PLACED.fullmatch(route) is None:
            response = await self._ask(fleet.in_order(keeper), send, first_byte_timeout_s)
            if response.status < 300:
                is_answer = route.startswith(("/v1/responses", "/v1/chat"))
                objects.read_answer(response.first, response.server, is_answer=is_answer)
            return response
        prompt = await in_thread_if_large(
            partial(read_prompt, route, body, self._metadata.salt), len(body)
        )
        if fleet.has_left or (keeper is not None and not fleet.server(keeper).takes_calls):
            response = await send(
                fleet.server(keeper or "").upstream, first_byte_timeout_s=first_byte_timeout_s
            )
        else:
            placed = PlacedCall(fleet, self._metadata, prompt)
            response = await placed.request(keeper, send, first_byte_timeout_s)
        if response.status == 404 and prompt.continues and keeper is None:
            others = [s for s in fleet.in_order(None) if s.upstream.name != response.server]
            response = await self._ask(iter(others), send, first_byte_timeout_s, response)
        is_stored = prompt.store if route != "/v1/responses" else prompt.store is not False
        if is_stored and response.status < 300:
            objects.read_answer(response.first, response.server, is_answer=True)
        return response

    async def _ask(
        self,
        servers: Iterator[_Server],
        send: _Send,
        first_byte_timeout_s: float | None,
        answer: UpstreamResponse | None = None,
    ) -> UpstreamResponse:
        """The first answer that is no 404, or else the first one.

        Args:
            answer: one that is there already.
        """
        for server in servers:
            try:
                response = await send(server.upstream, first_byte_timeout_s=first_byte_timeout_s)
            except (UpstreamError, OverloadedError):
                if answer is None:
                    raise
                continue
            except BaseException:
                if answer is not None:
                    answer.close()
                raise
            if answer is None:
                answer = response
            elif response.status == 404:
                response.close()
            else:
                answer.close()
                answer = response
            if answer.status != 404:
                break
        if answer is None:
            self._fleet.check_available()
            raise UpstreamError(f"No server of the upstream '{self.name}' takes calls.")
        return answer


class PlacedCall(SubmittedCall):
    """One call to a server that the scheduler chooses; a `CallTracker`.

    Args:
        fleet: the servers.
        metadata: of the call.
        prompt: what is known of it.
    """

    def __init__(
        self, fleet: UpstreamFleet, metadata: CallMetadata, prompt: UpstreamPrompt
    ) -> None:
        super().__init__(fleet.runner, fleet.updater, metadata)
        self._fleet = fleet
        self._prompt = prompt
        self._server: _Server | None = None
        self._cached = 0
        #: Prompt tokens to be computed before the answer begins, those of others included, and
        #: when it was placed.
        self.ahead_tokens = 0
        self._contexts = 0
        self._is_filling = False
        self._filling: asyncio.Handle | None = None
        self.placed_at = 0.0
        self._first_at = 0.0
        self._is_stream = False
        self._num_events = 0
        self._num_bytes = 0

    async def request(
        self, keeper: str | None, send: _Send, first_byte_timeout_s: float | None
    ) -> UpstreamResponse:
        """Wait for a place, send the request there, and follow its answer.

        Args:
            keeper: the only server that can answer; None: any can.
            send: sends the request to a server.
            first_byte_timeout_s: see there.

        Raises:
            OverloadedError: no server takes calls, or none had room in time.
            GatewayError: see `Upstream.request`.
        """
        limit_s = self._fleet.settings.read_timeout_s
        if first_byte_timeout_s is not None:
            limit_s = min(limit_s, first_byte_timeout_s)
        try:
            server = await self._find_server(keeper, limit_s)
            left_s = max(0.001, limit_s - self.queued_s)
            response = await send(server.upstream, first_byte_timeout_s=left_s, tracker=self)
        except BaseException:
            self.close()
            raise
        self._answered(response)
        return response

    async def _find_server(self, keeper: str | None, limit_s: float) -> _Server:
        fleet = self._fleet
        fleet.check_available()
        fleet.fit(asyncio.get_running_loop().time())
        task = self.submit(partial(self._task_of, keeper))
        if self._place is None and fleet.waiting >= fleet.settings.max_waiting:
            raise OverloadedError(
                f"{fleet.waiting} calls wait for the upstream '{fleet.name}' already. "
                "Try again later."
            )
        fleet.waiting += 1
        try:
            if self._place is not None:
                place = await self.placed(task)
            else:
                async with asyncio.timeout(limit_s):
                    place = await self.placed(task)
        except TimeoutError:
            raise OverloadedError(
                f"The upstream '{fleet.name}' had no room within {limit_s:g} s. Try again later."
            ) from None
        finally:
            fleet.waiting -= 1
        self.log_placement(task, place, place.engine_id)
        return self._begin(place)

    def _task_of(self, keeper: str | None, task_id: int, metadata: CallMetadata) -> Task:
        fleet, prompt = self._fleet, self._prompt
        prefix = prompt.prefix if fleet.settings.cached_tokens else ()
        prefers = metadata.prefers if metadata.prefers in fleet.settings.servers else None
        if prefers is None and not metadata.groups and not prompt.is_answered:
            prefers = fleet.least_used()
        return Task(
            id=task_id,
            model=fleet.name,
            tenant=metadata.tenant,
            application=metadata.application or f"call-{task_id}",
            prompt_tokens=prompt.tokens,
            max_tokens=prompt.max_tokens,
            prefix=prefix,
            template=metadata.template or template_of(prefix),
            objective=metadata.objective,
            groups=metadata.groups,
            priority=-metadata.priority,
            successors=metadata.successors,
            returns=metadata.returns,
            num_sequences=prompt.sequences,
            bound_to=keeper,
            prefers=prefers,
            common_tokens=metadata.common_tokens_of(prompt.tokens),
        )

    def _begin(self, place: Place) -> _Server:
        server = self._fleet.server(place.engine_id)
        loop, prompt = asyncio.get_running_loop(), self._prompt
        self._server = server
        self.placed_at = loop.time()
        self._cached = place.reasons.expected_cached_tokens
        server.running += 1
        server.pending_tokens += prompt.tokens - self._cached
        server.computed_tokens += prompt.tokens - self._cached
        server.context_tokens += prompt.tokens
        self.ahead_tokens, self._contexts = server.pending_tokens, server.context_tokens
        self._is_filling = True
        if prompt.is_stream:
            server.unanswered[self] = None
        else:
            # Nothing tells when such an answer begins.
            model = server.step_model
            fill_s = self.ahead_tokens * model.prefill_token_s + model.weights_s
            self._filling = loop.call_later(fill_s, self._filled)
        return server

    def _filled(self) -> None:
        if self._is_filling and self._server is not None:
            self._is_filling = False
            self._server.pending_tokens -= self._prompt.tokens - self._cached
            self.progress(filled=self._prompt.tokens, cached=self._cached, generated=0)

    def _answered(self, response: UpstreamResponse) -> None:
        self._first_at = asyncio.get_running_loop().time()
        if self._server is not None:
            self._server.unanswered.pop(self, None)
        self._is_stream = response.content_type == "text/event-stream"
        if response.status < 400 and self._is_stream:
            # NOTE: in the next turn, behind what sends the first bytes on.
            self._filling = asyncio.get_running_loop().call_soon(self._filled)
        self.read(response.first)

    def read(self, data: bytes) -> None:
        """See `CallTracker`."""
        self._num_bytes += len(data)
        if self._is_stream:
            self._num_events += data.count(b"data:")

    def succeeded(self, usage: Usage | None) -> None:
        """See `CallTracker`."""
        server, prompt = self._server, self._prompt
        assert server is not None
        generated = 1 if prompt.max_tokens == 1 else self._generated(usage)
        cached = self._cached
        if usage is not None and usage.cached_tokens and usage.prompt_tokens:
            cached = prompt.tokens * usage.cached_tokens // usage.prompt_tokens
        self._progress = (prompt.tokens, min(cached, prompt.tokens), generated)
        self.succeed()
        now = asyncio.get_running_loop().time()
        if self._is_stream:
            server.note_times(1, self.ahead_tokens, self._contexts, self._first_at - self.placed_at)
            server.note_times(max(0, generated - 1), 0, self._contexts, now - self._first_at)
        else:
            steps = max(1, generated // prompt.sequences)
            server.note_times(steps, self.ahead_tokens, self._contexts, now - self.placed_at)

    def _generated(self, usage: Usage | None) -> int:
        """Tokens of the answer; where it does not say, those of its events, or of its bytes."""
        if usage is not None:
            return usage.completion_tokens
        if self._is_stream:
            return max(1, self._num_events - _OTHER_EVENTS)
        return max(1, self._num_bytes // BYTES_PER_TOKEN)

    def close(self) -> None:
        """See `CallTracker`."""
        server, self._server = self._server, None
        if server is not None:
            server.unanswered.pop(self, None)
            server.running -= 1
            server.context_tokens -= self._prompt.tokens
            if self._is_filling:
                server.pending_tokens -= self._prompt.tokens - self._cached
            if self._filling is not None:
                self._filling.cancel()
        super().close()
