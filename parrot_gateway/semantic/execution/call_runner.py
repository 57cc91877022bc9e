"""Runs deferred calls on an own engine or an upstream.

`JobObserver` fills a call's variable from any answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from parrot_gateway.backends.own.generate import Generation, collect
from parrot_gateway.backends.upstreams.answer import run_on_upstream, upstream_body
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import TextObserver
from parrot_gateway.calls.requests.call import CallRequest, in_thread_if_large, prepare
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.routing.fallback import answer_with_fallbacks
from parrot_gateway.routing.model_directory import ModelDirectory, Target
from parrot_gateway.routing.stream_failover import StreamFailover
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.telemetry.call_record import CallObserver

#: Headers about the client's connection and time-outs rather than the call.
_CONNECTION_HEADERS = frozenset(
    {
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"accept",
        b"accept-encoding",
        b"x-stainless-read-timeout",
        b"x-stainless-timeout",
        b"x-stainless-retry-count",
    }
)


class JobObserver(TextObserver):
    """Appends the text of an answer to its job."""

    def __init__(self, job: Job, clock: Callable[[], float]) -> None:
        super().__init__(lambda text: job.append(text, clock()))
        #: Text without a reader is not parsed.
        self.reads_text = job.output is not None or job.context is not None
        self._job = job

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self._job.call.engine = engine
        self._job.call.placement = reason

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        self._job.call.engine = engine

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        super().ended(usage, finish_reason)
        if usage is not None:
            self._job.call.tokens = usage.completion_tokens

    def finish(self) -> None:
        if self.reads_text:
            super().finish()
        else:
            self.check()


@dataclass(frozen=True)
class CallRunner:
    """Runs deferred calls on the models of a gateway."""

    models: ModelDirectory
    call_timeout_s: float
    clock: Callable[[], float]

    async def run(self, job: Job, request: CallRequest, metadata: CallMetadata) -> None:
        """Run a call and append its text to `job` as it comes.

        A cancellation ends the work on the engine.

        Args:
            request: with values bound.

        Raises:
            GatewayError: the call failed.
        """
        observer = JobObserver(job, self.clock)
        target = self.models.resolve(job.call.model)
        attempts = _JobAttempts(self, job, request, metadata, observer)
        await answer_with_fallbacks(self.models, target, attempts)
        observer.finish()


@dataclass(frozen=True, slots=True)
class _JobAttempts:
    """Answers one deferred call; see `Attempts`."""

    runner: CallRunner
    job: Job
    request: CallRequest
    metadata: CallMetadata
    observer: JobObserver

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """See `Attempts`."""
        job, request, metadata = self.job, self.request, self.metadata
        job.record.served_model = model
        models = self.runner.models
        client = models.upstream(upstream, lambda: metadata)
        streamed = await in_thread_if_large(partial(_as_stream, request), request.size)
        body = await in_thread_if_large(
            partial(upstream_body, streamed, client, model, metadata), request.size
        )
        failover = None
        if client.settings.stream_failure.mode == "continue":
            deadline = time.perf_counter() + self.runner.call_timeout_s
            target = Target(model, upstream)
            failover = StreamFailover(models, target, streamed, lambda: metadata, deadline)
        headers = [each for each in job.spec.headers if each[0] not in _CONNECTION_HEADERS]
        return await run_on_upstream(
            client,
            request.kind,
            job.record.outgoing_headers(headers),
            body,
            self.observer,
            CallObserver(job.record),
            returned=returned,
            note_failed=job.record.note_failed,
            failover=failover,
        )

    async def on_engine(self, model: str) -> None:
        """See `Attempts`."""
        models, job, observer = self.runner.models, self.job, self.observer
        job.record.served_model = model
        await models.loaded(model)
        placer = models.placer(model, self.metadata)
        call = prepare(self.request, placer, job.spec.checked)
        if call.uses_tools:
            raise UnsupportedError(
                "Unsupported parameter: 'tools' has no place in a call whose text fills a "
                "variable; with 'tool_choice' 'none' it passes.",
                param="tools",
            )
        generation_request = await call.generation_request(self.metadata.salt)
        deadline = time.perf_counter() + self.runner.call_timeout_s
        observers = [observer, CallObserver(job.record)]
        with Generation(placer, generation_request, deadline, observers) as generation:
            if generation_request.best_of > 1:
                await collect(generation, 1, generation_request.best_of)
            while not generation.state.done:
                observer.check()
                await generation.next()
            observer.check()


def _as_stream(request: CallRequest) -> CallRequest:
    """Turn a call into a streaming one, unless it has several candidates (`best_of`)."""
    best_of = request.semantic_head.best_of
    if not isinstance(best_of, int | None):
        raise InvalidRequestError(
            "Invalid type for 'best_of': expected an integer.", param="best_of", code="invalid_type"
        )
    if best_of is not None and best_of > 1:
        # The best candidate is known only at the end.
        return request
    fields = dict(request.fields)
    fields["stream"] = msgspec.Raw(b"true")
    # Not every upstream knows these options.
    fields.pop("stream_options", None)
    return CallRequest(request.kind, msgspec.json.encode(fields), head=request.head)
