"""Records of calls: route and model, engine and the reason for it, times, tokens and end.

Metrics, the call's log line, traces and the live page read the same record, so they agree. The
runner of a call sets a few attributes of its record; nothing is done per token.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from parrot_gateway.calls.metadata import DEFAULT_TENANT
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.telemetry.content.content import TEXT_ROUTES, CallContent
from parrot_gateway.telemetry.key_hiding import hide_keys
from parrot_gateway.telemetry.trace_context import TRACEPARENT, CallTrace, Headers

logger = logging.getLogger(__name__)

#: Maximum unended records; further calls are not recorded. Settings admit fewer calls.
MAX_LIVE = 100_000
#: Status of a call whose client left before an answer, as in nginx.
CLIENT_LEFT = 499
_NO_HEADERS: Mapping[bytes, bytes] = {}
#: Maximum ended calls not yet given to batch sinks.
_MAX_UNSETTLED = 64
#: Maximum servers named of those that could not answer.
MAX_TRIED = 32
#: Characters kept of an error's message.
MAX_MESSAGE = 2000


# NOTE: a struct is made in a third of a dataclass's time and is not tracked by the garbage
# collector. There may be thousands a second, and the live page keeps the latest.
class CallRecord(msgspec.Struct, eq=False, gc=False):
    """One call. Unknown values are None; times without a note are `time.perf_counter()`.

    A deferred call has one record, that of the submitting request: it ends with the call, not with
    the answer that has the reference. A background response works the same way. In Parrot's own API
    each output is a call with its own record, and so is each line of a batch.
    """

    request_id: str
    #: Its id in `/v1/calls/{id}`.
    call_id: str
    #: Arrival of the request.
    started: float
    #: The route without its variable parts; empty for requests that are not calls.
    path: str = ""
    tenant: str = DEFAULT_TENANT
    #: Id of its session, declared or named by headers; never an inferred one.
    session: str | None = None
    #: Id of the batch that contains it as a line.
    batch: str | None = None
    #: Id of the response that it makes, which may be stored.
    response_id: str | None = None
    #: The model's name in the request, and its name for the engines or the upstream.
    model: str | None = None
    served_model: str | None = None
    #: Name of the last engine or upstream server that took it.
    engine: str | None = None
    #: Reason for that engine: the deciding rule's name, and an explanation in a few words.
    reason: str | None = None
    explanation: str | None = None
    #: Unix time of `started`.
    started_at: float = 0.0
    #: Time at which all inputs of a call with semantic variables were there.
    ready: float | None = None
    #: Time at which it was checked and began to wait for an engine.
    submitted: float | None = None
    #: Time of its placement.
    placed: float | None = None
    #: The first token of an own engine, or the first bytes of an upstream.
    first_token: float | None = None
    ended: float | None = None
    #: Seconds between `submitted` and `placed`, as counted by the placing code.
    queued_s: float | None = None
    prompt_tokens: int | None = None
    #: The part of `prompt_tokens` found in a prefix cache.
    cached_tokens: int | None = None
    output_tokens: int | None = None
    #: HTTP status of the answer; for a call that answers later, the status it would have had; 499
    #: if the client left before an answer began. 0 until then.
    status: int = 0
    #: The error that the client got, even within a stream that had begun; without a code, its type.
    error_code: str | None = None
    error_message: str | None = None
    #: Finish reason of the last candidate: of own engines, and of upstream answers that are parsed
    #: anyway.
    finish_reason: str | None = None
    streamed: bool = False
    #: True if the client got a reference, or a response that is still to be made.
    deferred: bool = False
    client_left: bool = False
    #: The client's trace, or the one chosen for the call; None before that.
    trace: CallTrace | None = None
    #: Its prompt and answer until it has ended; None if nothing can want them.
    content: CallContent | None = None
    #: Servers that could not answer before `engine` did, each with the reason: `vllm-1=timeout`.
    tried: tuple[str, ...] = ()
    #: Names of engines and upstream servers that were lost while they ran it, with the kind or the
    #: fault; seconds until the next one had gone on, and tokens that own engines computed again.
    lost_engines: tuple[str, ...] = ()
    loss_kinds: tuple[str, ...] = ()
    pauses_s: tuple[float, ...] = ()
    refilled_tokens: int = 0
    _records: CallRecords | None = None

    def outgoing_headers(self, headers: Headers) -> Headers:
        """Return headers for the upstream request that name the call's trace."""
        trace = self._choose_trace()
        return headers if trace is None else trace.headers(headers)

    def _choose_trace(self) -> CallTrace | None:
        """Return the trace, chosen now if needed; None if none are exported."""
        if self.trace is None and self._records is not None:
            ratio = self._records.trace_ratio
            if ratio is not None:
                self.trace = CallTrace.choose(self.tenant, self.session, ratio)
        return self.trace

    def wanted_content(self) -> CallContent | None:
        """Return the holder of prompt and answer; None if nothing wants them for this call.

        Ask once there is content to hold, when tenant, session and trace are known.
        """
        content = self.content
        if content is None or content.is_wanted:
            return content
        if content.is_wanted is None and self._records is not None:
            content.is_wanted = self._records.wants_content(self)
        if not content.is_wanted:
            self.content = None
        return self.content

    def take_answer(self, data: bytes, is_last: bool) -> None:
        """Take bytes of the answer; see `Exchange.copy_answer`."""
        if not self.deferred and (content := self.wanted_content()) is not None:
            content.answered(data)

    def note_failed(self, server: str, reason: str) -> None:
        """Note a server that could not answer, before the client got any content."""
        if len(self.tried) < MAX_TRIED:
            self.tried += (f"{server}={reason}",)

    def fail(self, error: GatewayError) -> None:
        """Note the error that the client gets."""
        self.note_failure(error.code or error.type, error.message)

    def note_failure(self, code: str, message: str) -> None:
        """Note that the call failed; `code` is never empty.

        Anything that looks like a key is removed from the message, because upstreams repeat keys.
        """
        self.error_code, self.error_message = code, hide_keys(message[:MAX_MESSAGE])

    def leave(self) -> None:
        """Note that the client left before the answer was complete."""
        self.client_left = True
        self.status = self.status or CLIENT_LEFT

    def end(self) -> None:
        """Give the record of an ended call to the sinks. Safe to call twice."""
        records = self._records
        if records is not None:
            records._end(self)


class CallObserver(GenerationObserver):
    """Writes a call's record from its runner's reports.

    Args:
        record: the call's record; its owner ends it.
    """

    __slots__ = ("_record",)

    reads_text = False

    def __init__(self, record: CallRecord) -> None:
        self._record = record

    def submitted(self) -> None:
        self._record.submitted = time.perf_counter()

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        record = self._record
        record.engine, record.queued_s = engine, queued_s
        record.reason = reason.partition(" ")[0].rstrip(",") or "upstream"
        record.explanation = reason
        record.placed = (record.submitted or record.started) + queued_s
        # Reset what an earlier try noted.
        record.error_code = record.error_message = record.first_token = None

    def lost(self, engine: str, kind: str) -> None:
        self._record.lost_engines += (engine,)
        self._record.loss_kinds += (kind,)

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        record = self._record
        record.engine = engine
        record.pauses_s += (pause_s,)
        record.refilled_tokens += refilled_tokens

    def first_token(self) -> None:
        self._record.first_token = time.perf_counter()

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self._record.finish_reason = finish_reason
        self._count(usage)

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        # The final text for the client is noted where it is written.
        self._count(usage)

    def _count(self, usage: Usage | None) -> None:
        if usage is not None:
            record = self._record
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.output_tokens = usage.completion_tokens


class WantedContents(NamedTuple):
    """Selects the calls whose content is taken, besides those of exported traces."""

    #: True: content of all calls is taken.
    are_kept: bool
    #: Content of these is never taken.
    exclude_tenants: Collection[str]


#: Takes the record of an ended call, in the event loop's thread. It must not block; if it raises,
#: the error is logged and dropped. The call's content is available only then.
Sink: TypeAlias = Callable[[CallRecord], None]
#: Takes some dozens of records at a time.
BatchSink: TypeAlias = Callable[[Sequence[CallRecord]], None]


class CallRecords:
    """Holds the records of unended calls, and gives ended ones to the sinks.

    Attributes:
        sinks: get each record once, when its call has ended; appended to while the gateway is
            built.
        batch_sinks: get each record once, some dozens at a time, because the same code takes four
            times as long between other work of a call. Readers of their state call `settle` first.

    Args:
        trace_ratio: share of the traces that are exported; None if none are.
        contents: selects the wanted prompts and answers; None: none are taken.
    """

    def __init__(
        self, trace_ratio: float | None = None, contents: WantedContents | None = None
    ) -> None:
        self.trace_ratio = trace_ratio
        self._contents = contents
        self.sinks: list[Sink] = []
        self.batch_sinks: list[BatchSink] = []
        self._unsettled: list[CallRecord] = []
        self._live: dict[CallRecord, None] = {}

    def begin(
        self, record: CallRecord, path: str, headers: Mapping[bytes, bytes] = _NO_HEADERS
    ) -> None:
        """Begin the record of a call.

        Args:
            record: the call's runner ends it with `CallRecord.end`.
            path: see `CallRecord.path`.
            headers: the request's headers, names in lower case.
        """
        record.path = path
        record.started_at = time.time()
        if self.trace_ratio is not None and (client := headers.get(TRACEPARENT)) is not None:
            record.trace = CallTrace.of_client(client)
        if len(self._live) < MAX_LIVE:
            record._records = self
            self._live[record] = None
            if self._contents is not None and path in TEXT_ROUTES:
                record.content = CallContent()

    def live(self) -> list[CallRecord]:
        """Return the records of unended calls, oldest first."""
        return list(self._live)

    def wants_content(self, record: CallRecord) -> bool:
        """Return true if anything wants a call's prompt and answer."""
        contents = self._contents
        if contents is None or record.tenant in contents.exclude_tenants:
            return False
        if contents.are_kept:
            return True
        trace = record._choose_trace()
        return trace is not None and trace.sampled

    def settle(self) -> None:
        """Give all ended calls to the batch sinks."""
        if not self._unsettled:
            return
        ended, self._unsettled = self._unsettled, []
        for sink in self.batch_sinks:
            try:
                sink(ended)
            except Exception:
                logger.exception("a sink of call records failed and is dropped")
                self.batch_sinks = [each for each in self.batch_sinks if each is not sink]

    def _end(self, record: CallRecord) -> None:
        if record.content is not None:
            record.wanted_content()
        record._records = None
        del self._live[record]
        record.ended = time.perf_counter()
        for sink in self.sinks:
            try:
                sink(record)
            except Exception:
                logger.exception("a sink of call records failed and is dropped")
                self.sinks = [each for each in self.sinks if each is not sink]
        # Records outlive their calls' content.
        record.content = None
        self._unsettled.append(record)
        if len(self._unsettled) >= _MAX_UNSETTLED:
            self.settle()
