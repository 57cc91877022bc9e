"""Records of calls: route and model, engine and why that one, times, tokens and end.

Metrics, the log line of a call, traces and the live page read the same record, so that they agree.
Whoever runs a call writes a few attributes of its record; nothing is done for each token.
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

#: Unended records that are kept; calls beyond are not recorded. More than settings let in.
MAX_LIVE = 100_000
#: Status of a call whose client left before there was an answer, as nginx writes it.
CLIENT_LEFT = 499
_NO_HEADERS: Mapping[bytes, bytes] = {}
#: Ended calls that batch sinks have not got yet, at most.
_MAX_UNSETTLED = 64
#: Characters of an error's message that are kept.
MAX_MESSAGE = 2000


# NOTE: a struct, which is made in a third of a dataclass's time, and untracked by the garbage
# collector: there may be thousands a second, and the live page keeps the latest.
class CallRecord(msgspec.Struct, eq=False, gc=False):
    """One call. What is unknown is None; times without a note are `time.perf_counter()`.

    A deferred call has one record, that of the request which submitted it: it ends with the call,
    not with the answer that holds the reference. So does a response made in the background. Of a
    request of Parrot's own API each output is a call with a record of its own, and so is each line
    of a batch.
    """

    request_id: str
    #: Id under which `/v1/calls/{id}` knows it.
    call_id: str
    #: Arrival of the request.
    started: float
    #: The route, without what is variable in it; empty for requests that are no calls.
    path: str = ""
    tenant: str = DEFAULT_TENANT
    #: Id of the session that it belongs to, declared or named by headers; not an inferred one.
    session: str | None = None
    #: Id of the batch that it is a line of.
    batch: str | None = None
    #: Id of the response that it makes, which may be stored.
    response_id: str | None = None
    #: As the request names it, and as its engines or upstream know it.
    model: str | None = None
    served_model: str | None = None
    #: Name of the engine or of the upstream's server that took it last.
    engine: str | None = None
    #: Why that one: the word of what decided, and the same in a few words.
    reason: str | None = None
    explanation: str | None = None
    #: Unix time of `started`.
    started_at: float = 0.0
    #: The inputs of a call with semantic variables are there.
    ready: float | None = None
    #: It was read and checked, and waits for a place on an engine.
    submitted: float | None = None
    #: It has one.
    placed: float | None = None
    #: The first token of an own engine; the first bytes of an upstream.
    first_token: float | None = None
    ended: float | None = None
    #: Seconds between `submitted` and `placed`, as whoever places calls counts them.
    queued_s: float | None = None
    prompt_tokens: int | None = None
    #: Part of `prompt_tokens` that was found in a prefix cache.
    cached_tokens: int | None = None
    output_tokens: int | None = None
    #: HTTP status: of the answer; of a call that answers later, what it would have been; 499 where
    #: the client left before an answer began. 0 until then.
    status: int = 0
    #: As the client got them, also within a stream that had begun; of an error without a code its
    #: type.
    error_code: str | None = None
    error_message: str | None = None
    #: Of the last candidate; of own engines, and of upstreams whose answer is parsed anyway.
    finish_reason: str | None = None
    streamed: bool = False
    #: Its client was answered with a reference, or with a response that is still to be made.
    deferred: bool = False
    client_left: bool = False
    #: Its client's, or the one chosen for it; None before that.
    trace: CallTrace | None = None
    #: What it says, until it has ended; None where nobody may want that.
    content: CallContent | None = None
    _records: CallRecords | None = None

    def outgoing_headers(self, headers: Headers) -> Headers:
        """Headers of the call's request to an upstream, which name its trace."""
        trace = self._choose_trace()
        return headers if trace is None else trace.headers(headers)

    def _choose_trace(self) -> CallTrace | None:
        """The trace, chosen now if it was not before; None where none are exported."""
        if self.trace is None and self._records is not None:
            ratio = self._records.trace_ratio
            if ratio is not None:
                self.trace = CallTrace.choose(self.tenant, self.session, ratio)
        return self.trace

    def wanted_content(self) -> CallContent | None:
        """The holder of prompt and answer; None if nobody wants them of this call.

        Ask for it once there is something to hold: tenant, session and trace are known then.
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
        """Bytes of the answer to the request; see `Exchange.copy_answer`."""
        if not self.deferred and (content := self.wanted_content()) is not None:
            content.answered(data)

    def fail(self, error: GatewayError) -> None:
        """The client gets this error."""
        self.note_failure(error.code or error.type, error.message)

    def note_failure(self, code: str, message: str) -> None:
        """Note that the call failed; `code` is never empty.

        The record holds the message without what looks like a key: upstreams repeat keys.
        """
        self.error_code, self.error_message = code, hide_keys(message[:MAX_MESSAGE])

    def leave(self) -> None:
        """The client left before the answer was complete."""
        self.client_left = True
        self.status = self.status or CLIENT_LEFT

    def end(self) -> None:
        """Hand the record to the sinks: the call has ended. Safe to call twice."""
        records = self._records
        if records is not None:
            records._end(self)


class CallObserver(GenerationObserver):
    """Writes the record of a call from what its runner reports.

    Args:
        record: of the call, which somebody else ends.
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
        # Of an earlier try.
        record.error_code = record.error_message = record.first_token = None

    def first_token(self) -> None:
        self._record.first_token = time.perf_counter()

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self._record.finish_reason = finish_reason
        self._count(usage)

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        # What the client gets to read is noted where it is written.
        self._count(usage)

    def _count(self, usage: Usage | None) -> None:
        if usage is not None:
            record = self._record
            record.prompt_tokens = usage.prompt_tokens
            record.cached_tokens = usage.cached_tokens
            record.output_tokens = usage.completion_tokens


class WantedContents(NamedTuple):
    """Names the calls whose prompts and answers are taken, besides those of exported traces."""

    #: Those of all calls.
    are_kept: bool
    #: Never of these.
    exclude_tenants: Collection[str]


#: Takes the record of a call that has ended, in the event loop's thread. Must not block; one that
#: raises is logged and dropped. What the call said is in it only then.
Sink: TypeAlias = Callable[[CallRecord], None]
#: The same of some dozens.
BatchSink: TypeAlias = Callable[[Sequence[CallRecord]], None]


class CallRecords:
    """Holds the records of calls that have not ended, and hands those that have to sinks.

    Attributes:
        sinks: get each record once, when its call has ended; appended to while the gateway is put
            together.
        batch_sinks: get each record once, some dozens at a time: between the other work of a call
            the same lines take four times as long. Readers of what they keep call `settle` first.

    Args:
        trace_ratio: share of the traces that are exported; None where none are.
        contents: which prompts and answers are wanted; None: none are taken.
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
        """A call begins.

        Args:
            record: ended by whoever runs the call, with `CallRecord.end`.
            path: see `CallRecord.path`.
            headers: of the request, names in lower case.
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
        """The records of calls that have not ended, oldest first."""
        return list(self._live)

    def wants_content(self, record: CallRecord) -> bool:
        """True if anybody wants the prompt and the answer of a call."""
        contents = self._contents
        if contents is None or record.tenant in contents.exclude_tenants:
            return False
        if contents.are_kept:
            return True
        trace = record._choose_trace()
        return trace is not None and trace.sampled

    def settle(self) -> None:
        """Let the batch sinks have all calls that have ended."""
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
        # Records outlive their calls.
        record.content = None
        self._unsettled.append(record)
        if len(self._unsettled) >= _MAX_UNSETTLED:
            self.settle()
