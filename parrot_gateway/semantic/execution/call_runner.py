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
from parrot_gateway.backends.upstreams.client import UpstreamClient
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import TextObserver
from parrot_gateway.calls.requests.call import CallRequest, in_thread_if_large, prepare
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.routing.model_directory import EngineTarget, ModelDirectory
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
        model, tried = job.call.model, set[str]()
        while True:
            target = self.models.resolve(model)
            job.record.served_model = target.model
            if isinstance(target, EngineTarget):
                await self._on_engine(job, request, metadata, target.model, observer)
                break
            upstream = self.models.upstream(target.upstream, lambda: metadata)
            other = None if target.upstream in tried else upstream.settings.fallback
            body = await in_thread_if_large(
                partial(_streamed_body, request, upstream, target.model, metadata), request.size
            )
            headers = [each for each in job.spec.headers if each[0] not in _CONNECTION_HEADERS]
            answered = await run_on_upstream(
                upstream,
                request.kind,
                job.record.outgoing_headers(headers),
                body,
                observer,
                CallObserver(job.record),
                may_fall_back=other is not None,
            )
            if answered or other is None:
                break
            tried.add(target.upstream)
            model = other
        observer.finish()

    async def _on_engine(
        self,
        job: Job,
        request: CallRequest,
        metadata: CallMetadata,
        model: str,
        observer: JobObserver,
    ) -> None:
        await self.models.loaded(model)
        placer = self.models.placer(model, metadata)
        call = prepare(request, placer, job.spec.checked)
        if call.uses_tools:
            raise UnsupportedError(
                "Unsupported parameter: 'tools' has no place in a call whose text fills a "
                "variable; with 'tool_choice' 'none' it passes.",
                param="tools",
            )
        generation_request = await call.generation_request(metadata.salt)
        deadline = time.perf_counter() + self.call_timeout_s
        observers = [observer, CallObserver(job.record)]
        with Generation(placer, generation_request, deadline, observers) as generation:
            if generation_request.best_of > 1:
                await collect(generation, 1, generation_request.best_of)
            while not generation.state.done:
                observer.check()
                await generation.next()
            observer.check()


def _streamed_body(
    request: CallRequest, upstream: UpstreamClient, model: str, metadata: CallMetadata
) -> bytes:
    return upstream_body(_as_stream(request), upstream, model, metadata)


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
