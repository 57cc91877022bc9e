"""Calls to an upstream of several servers: which of them each goes to, and what it takes there.

A call is a task of the scheduler: which prompt it has (`upstream_prompt`), how long it ran, what
was found in the server's cache. Requests for what a server keeps go to that server
(`stored_objects`). A server that fails before the first content of its answer is left for another
at once.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import partial

from parrot_scheduler.actions import Place
from parrot_scheduler.task import Task

from parrot_gateway.backends.upstreams.client import UpstreamRequest
from parrot_gateway.backends.upstreams.failure import (
    FailedAttempt,
    error_to_tell,
    reason_of_error,
    reason_of_status,
    refusal_error,
)
from parrot_gateway.backends.upstreams.response import UpstreamResponse
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.requests.call import in_thread_if_large
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import (
    GatewayError,
    OverloadedError,
    UpstreamError,
    UpstreamTimeoutError,
)
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.routing.fleet.prompt import BYTES_PER_TOKEN, UpstreamPrompt, read_prompt
from parrot_gateway.routing.fleet.server import BegunStream, FleetServer
from parrot_gateway.routing.placer import SubmittedTask, template_of

#: Routes that any server can answer; all others may be about what one of them keeps.
_PLACED = re.compile(
    r"/v1/(?:chat/completions|completions|responses|responses/input_tokens|messages"
    r"|messages/count_tokens|embeddings|moderations|rerank|score|classify|pooling"
    r"|audio/.+|images/.+)|/tokenize"
)
#: Events of a stream that hold no token: role or finish reason, and `[DONE]`.
_OTHER_EVENTS = 2


class FleetCall:
    """See `parrot_gateway.backends.upstreams.client.UpstreamClient`.

    Args:
        fleet: the servers.
        metadata: of the call.
        server: the only one that shall answer; None: the scheduler chooses.
    """

    def __init__(
        self, fleet: UpstreamFleet, metadata: CallMetadata, server: str | None = None
    ) -> None:
        self.settings = fleet.settings
        self.name = fleet.name
        self.forwards_authorization = fleet.forwards_authorization
        self.notes_failures = True
        self._fleet = fleet
        self._metadata = metadata
        self._server = server

    async def request(
        self, request: UpstreamRequest, *, first_byte_timeout_s: float | None = None
    ) -> UpstreamResponse:
        """Send a request to the server that the scheduler chooses, or that keeps what it names.

        A request that names what no server is known to keep is sent to one after the other while
        they answer 404.

        Raises:
            OverloadedError: no server takes calls, or none had room in time.
            GatewayError: all servers have failed: the first answer of one, as a `RefusedError`,
                else the first error.
        """
        path, body = request.path, request.body
        route = path.decode("latin-1") if isinstance(path, bytes) else path
        fleet, objects = self._fleet, self._fleet.objects
        keeper = self._server or objects.server_for(route, body)
        if request.method != "POST" or _PLACED.fullmatch(route) is None:
            servers = fleet.in_order(keeper)
            response = await self._ask(servers, request, first_byte_timeout_s, keeper=keeper)
            if response.status < 300:
                is_answer = route.startswith(("/v1/responses", "/v1/chat"))
                objects.read_answer(response.first, response.server, is_answer=is_answer)
            return response
        prompt = await in_thread_if_large(
            partial(read_prompt, route, body, self._metadata.salt), len(body)
        )
        if fleet.has_left or (keeper is not None and not fleet.server(keeper).takes_calls):
            response = await fleet.server(keeper or "").upstream.request(
                request, first_byte_timeout_s=first_byte_timeout_s
            )
        elif keeper is not None:
            placed = ServerPlacement(fleet, self._metadata, prompt)
            response = await placed.request(keeper, request, first_byte_timeout_s)
        else:
            response = await self._ask_placed(prompt, request, first_byte_timeout_s)
        if response.status == 404 and prompt.continues and keeper is None:
            others = [s for s in fleet.in_order(None) if s.upstream.name != response.server]
            response = await self._ask(iter(others), request, first_byte_timeout_s, response)
        is_stored = prompt.store if route != "/v1/responses" else prompt.store is not False
        if is_stored and response.status < 300:
            objects.read_answer(response.first, response.server, is_answer=True)
        return response

    async def _ask_placed(
        self, prompt: UpstreamPrompt, request: UpstreamRequest, first_byte_timeout_s: float | None
    ) -> UpstreamResponse:
        """Send a request to one server after the other, until one answers."""
        loop, fleet = asyncio.get_running_loop(), self._fleet
        began, left_s = loop.time(), first_byte_timeout_s
        tried: set[str] = set()
        failures: list[FailedAttempt] = []
        if len(fleet.untried(tried)) > 1:
            request = request._replace(holds_first=True)
        while True:
            others = fleet.untried(tried)
            bound = others[0].upstream.name if tried and others else None
            placed = ServerPlacement(fleet, self._metadata, prompt, tried)
            try:
                response = await placed.request(bound, request, left_s)
            except (UpstreamError, OverloadedError) as error:
                if placed.server is None and not failures:
                    raise
                failure = FailedAttempt(error, reason_of_error(error))
            else:
                reason = reason_of_status(response.status)
                if reason is None:
                    return response
                is_retried = bool(tried or fleet.untried({response.server}))
                response.exhausted |= is_retried and fleet.settings.max_retries > 0
                failure = FailedAttempt(await refusal_error(response), reason)
            failures.append(failure)
            if first_byte_timeout_s is not None:
                left_s = first_byte_timeout_s - (loop.time() - began)
            if placed.server is not None:
                tried.add(placed.server)
                if request.note_failed is not None:
                    request.note_failed(placed.server, failure.reason)
            is_late = left_s is not None and left_s <= 0
            if placed.server is None or is_late or not fleet.untried(tried):
                raise error_to_tell(failures)

    async def _ask(
        self,
        servers: Iterator[FleetServer],
        request: UpstreamRequest,
        first_byte_timeout_s: float | None,
        answer: UpstreamResponse | None = None,
        keeper: str | None = None,
    ) -> UpstreamResponse:
        """The first answer that is no 404, or else the first one.

        Args:
            answer: one that is there already.
            keeper: the only server that can answer anything but 404.
        """
        failure: GatewayError | None = None
        for server in servers:
            try:
                response = await server.upstream.request(
                    request, first_byte_timeout_s=first_byte_timeout_s
                )
            except (UpstreamError, OverloadedError) as error:
                # NOTE: after a time-out the first server may still be making what is asked for.
                is_at_work = isinstance(error, UpstreamTimeoutError) and request.method != "GET"
                if answer is None and (keeper is not None or is_at_work):
                    raise
                failure = failure or error
                if answer is None and request.note_failed is not None:
                    request.note_failed(server.upstream.name, reason_of_error(error))
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
        if answer is None and failure is not None:
            raise failure
        if answer is None:
            self._fleet.check_available()
            raise UpstreamError(f"No server of the upstream '{self.name}' takes calls.")
        return answer


class ServerPlacement(SubmittedTask):
    """One call to a server that the scheduler chooses; a `RequestTracker`.

    Args:
        fleet: the servers.
        metadata: of the call.
        prompt: what is known of it.
        tried: servers that have failed it.
    """

    def __init__(
        self,
        fleet: UpstreamFleet,
        metadata: CallMetadata,
        prompt: UpstreamPrompt,
        tried: Collection[str] = (),
    ) -> None:
        super().__init__(fleet.runner, fleet.updater, metadata)
        #: Name of the server, once it has one.
        self.server: str | None = None
        self._fleet = fleet
        self._prompt = prompt
        self._tried = tried
        self._server: FleetServer | None = None
        self._cached = 0
        #: Prompt tokens to be computed before the answer begins, those of others included, and
        #: when it was placed.
        self._ahead_tokens = 0
        self._contexts = 0
        self._is_filling = False
        self._filling: asyncio.Handle | None = None
        self._placed_at = 0.0
        self._first_at = 0.0
        self._is_stream = False
        self._num_events = 0
        self._num_bytes = 0

    async def request(
        self, keeper: str | None, request: UpstreamRequest, first_byte_timeout_s: float | None
    ) -> UpstreamResponse:
        """Wait for a place, send the request there, and follow its answer.

        Args:
            keeper: the only server that can answer; None: any can.
            request: sent to that server.
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
            try:
                response = await server.upstream.request(
                    request, first_byte_timeout_s=left_s, tracker=self,
                    max_retries=self._max_retries(server.upstream.name, keeper),
                )  # fmt: skip
            finally:
                self._fleet.end_probe(server)
        except BaseException:
            self.close()
            raise
        self._answered(response)
        return response

    def _max_retries(self, server: str, keeper: str | None) -> int:
        """Tries on the same server: none as long as there are others."""
        most = self._fleet.settings.max_retries
        if keeper is not None and not self._tried:
            return most
        if self._fleet.untried({*self._tried, server}):
            return 0
        return max(0, most - len(self._tried))

    def _explained(self, place: Place) -> Place:
        if not self._tried:
            return place
        return replace(place, reasons=replace(place.reasons, decided_by="failover"))

    async def _find_server(self, keeper: str | None, limit_s: float) -> FleetServer:
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

    def _begin(self, place: Place) -> FleetServer:
        server = self._fleet.server(place.engine_id)
        self.server = server.upstream.name
        self._fleet.begin_probe(server)
        loop, prompt = asyncio.get_running_loop(), self._prompt
        self._server = server
        self._placed_at = loop.time()
        self._cached = place.reasons.expected_cached_tokens
        server.running += 1
        server.pending_tokens += prompt.tokens - self._cached
        server.computed_tokens += prompt.tokens - self._cached
        server.context_tokens += prompt.tokens
        self._ahead_tokens, self._contexts = server.pending_tokens, server.context_tokens
        self._is_filling = True
        if prompt.is_stream:
            server.unanswered[self] = BegunStream(self._placed_at, self._ahead_tokens)
        else:
            # Nothing tells when such an answer begins.
            model = server.step_model
            fill_s = self._ahead_tokens * model.prefill_token_s + model.weights_s
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
        """See `RequestTracker`."""
        self._num_bytes += len(data)
        if self._is_stream:
            self._num_events += data.count(b"data:")

    def succeeded(self, usage: Usage | None) -> None:
        """See `RequestTracker`."""
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
            server.note_times(
                1, self._ahead_tokens, self._contexts, self._first_at - self._placed_at
            )
            server.note_times(max(0, generated - 1), 0, self._contexts, now - self._first_at)
        else:
            steps = max(1, generated // prompt.sequences)
            server.note_times(steps, self._ahead_tokens, self._contexts, now - self._placed_at)

    def _generated(self, usage: Usage | None) -> int:
        """Tokens of the answer; where it does not say, those of its events, or of its bytes."""
        if usage is not None:
            return usage.completion_tokens
        if self._is_stream:
            return max(1, self._num_events - _OTHER_EVENTS)
        return max(1, self._num_bytes // BYTES_PER_TOKEN)

    def close(self) -> None:
        """See `RequestTracker`."""
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
