"""Lets other servers go on with an answer of an upstream that broke off in mid-stream.

First other servers of the same upstream, then its `fallback` and theirs in turn, engines of our own
among them. Each gets the call with the text so far in it (`backends/upstreams/continuation.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from parrot_gateway.backends.own.generate import Generation
from parrot_gateway.backends.upstreams.answer import run_on_upstream, upstream_body
from parrot_gateway.backends.upstreams.client import Upstream, UpstreamClient
from parrot_gateway.backends.upstreams.continuation import (
    Answering,
    Continuation,
    ContinuationStyle,
    ContinuedAnswer,
    PartialAnswer,
    fault_of,
)
from parrot_gateway.backends.upstreams.continuation_styles import REFUSALS
from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallRequest, in_thread_if_large, prepare
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import AnswerError, GatewayError
from parrot_gateway.routing.fleet.call import FleetCall
from parrot_gateway.routing.model_directory import ModelDirectory, Target

logger = logging.getLogger(__name__)


class StreamFailover:
    """Goes on with one answer; see `backends.upstreams.continuation.Failover`.

    Args:
        models: who serves which.
        target: the upstream that answers.
        request: the call, which streams.
        metadata: of the call.
        deadline: `time.perf_counter()` at which the call ends.
    """

    def __init__(
        self,
        models: ModelDirectory,
        target: Target,
        request: CallRequest,
        metadata: Callable[[], CallMetadata],
        deadline: float,
    ) -> None:
        self.partial = PartialAnswer(request)
        self._models = models
        self._target = target
        self._request = request
        self._metadata = metadata
        self._deadline = deadline
        #: Servers of the upstream that have failed.
        self._failed = set[str]()
        #: The one that has said something last, until its loss was reported.
        self._server: str | None = None

    async def go_on(
        self, error: GatewayError, server: str, usage: Usage | None, answering: Answering
    ) -> bool:
        """See `Failover`."""
        settings = self._models.upstreams[self._target.upstream or ""].settings.stream_failure
        fault, partial = fault_of(error), self.partial
        if fault not in settings.on:
            return False
        partial.broke_off(usage)
        self._failed.add(server)
        self._server, broke_at = server, time.perf_counter()
        targets, tries = self._targets(), settings.max_fallbacks
        while True:
            obstacle = await in_thread_if_large(partial.obstacle, self._request.size)
            if self._has_ended(answering.observers):
                return True
            target = next(targets, None) if tries and obstacle is None else None
            if target is None:
                reason = obstacle or "no server is left to go on with it"
                logger.warning("a stream of %s broke off (%s) and ends: %s", server, fault, reason)
                return False
            name = target.upstream or target.model
            if self._server is not None:
                answering.observers.lost(self._server, fault_of(error))
                self._server = None
            try:
                if not await self._continue(target, answering, broke_at):
                    continue
            except GatewayError as failure:
                logger.info("%s did not go on with a stream: %s", name, failure.message)
                partial.broke_off(None)
                tries -= 1
                error, broke_at = failure, time.perf_counter()
                continue
            logger.info("a stream of %s broke off (%s) and went on at %s", server, fault, name)
            return True

    def _has_ended(self, observers: GenerationObserver) -> bool:
        """Report the end of an answer of which no text is missing."""
        partial = self.partial
        if not partial.is_complete:
            if not partial.is_at_limit:
                return False
            observers.delta(ChoiceDelta(0, 0, "", [], [], "length"))
        observers.ended(partial.usage)
        return True

    def _targets(self) -> Iterator[Target]:
        """Yield the backends to ask, in order."""
        models, target = self._models, self._target
        # Once for each other server. Of a fallback's servers the scheduler chooses one.
        servers = models.upstreams[target.upstream or ""].settings.servers
        yield from [target] * (len(servers) - 1)
        seen = set[Target]()
        while target.upstream is not None:
            fallback = models.upstreams[target.upstream].settings.fallback
            if fallback is None:
                return
            try:
                target = models.resolve(fallback)
            except GatewayError:
                return
            if target in seen:
                return
            seen.add(target)
            yield target

    async def _continue(self, target: Target, answering: Answering, broke_at: float) -> bool:
        """Let a backend go on; False where it cannot, and was not asked.

        Raises:
            GatewayError: it has failed, maybe after more of the answer.
        """

        def started(server: str) -> None:
            self._server = server
            # NOTE: an upstream does not say how much of the prompt it has computed again.
            answering.observers.resumed(server, time.perf_counter() - broke_at, 0)

        if target.upstream is None:
            await self._on_engine(target.model, answering, started)
            return True
        styles = self._models.upstreams[target.upstream].continuation
        style = styles.style_for(target.model)
        if style != "continue_final_message" and self.partial.has_reasoning:
            style = None
        if style is None and self.partial.has_begun and self._request.kind == "chat":
            return False
        client = self._client(target.upstream, is_other=target != self._target)
        if client is None:
            return False
        rest = await self._rest(style or "prefill")
        metadata = self._metadata()
        body = await in_thread_if_large(
            lambda: upstream_body(rest.request, client, target.model, metadata), rest.request.size
        )
        failure = await run_on_upstream(
            client,
            rest.request.kind,
            answering.headers,
            body,
            ContinuedAnswer(self.partial, rest.seam, answering.observers, started),
            GenerationObserver(),
            returned="all",
            note_failed=answering.note_failed,
            between_reads=answering.between_reads,
        )
        if failure is None:
            return True
        status = failure.error.upstream_status if isinstance(failure.error, AnswerError) else None
        if rest.has_message and failure.reason == "refused" and status in REFUSALS:
            styles.refused(target.model)
        raise failure.error

    def _client(self, name: str, *, is_other: bool) -> UpstreamClient | None:
        """An upstream, or another server of the one that has failed; None: all of them have."""
        upstream = self._models.upstreams[name]
        if is_other or isinstance(upstream, Upstream):
            return self._models.upstream(name, self._metadata)
        servers = upstream.untried(self._failed)
        if not servers:
            return None
        server = servers[0].upstream.name
        self._failed.add(server)
        return FleetCall(upstream, self._metadata(), server)

    async def _on_engine(
        self, model: str, answering: Answering, on_start: Callable[[str], None]
    ) -> None:
        models, metadata = self._models, self._metadata()
        await models.loaded(model)
        placer = models.placer(model, metadata)
        rest = await self._rest("continue_final_message")
        await in_thread_if_large(lambda: rest.request.typed, rest.request.size)
        call = prepare(rest.request, placer)
        generation_request = await call.generation_request(metadata.salt)
        observer = ContinuedAnswer(self.partial, rest.seam, answering.observers, on_start)
        with Generation(placer, generation_request, self._deadline, [observer]) as generation:
            while not generation.state.done:
                await generation.next()
                if answering.between_reads is not None:
                    await answering.between_reads()

    async def _rest(self, style: ContinuationStyle) -> Continuation:
        return await in_thread_if_large(
            lambda: self.partial.continuation(style), self._request.size
        )
