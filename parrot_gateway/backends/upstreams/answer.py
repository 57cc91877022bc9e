"""Calls that an upstream answers: the body that it is sent, and its answer, reported to observers.

An upstream's answer in OpenAI's shape, whole or streamed, is parsed once, beside the bytes that
pass on to the client if there is one. Who the client is, is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal, TypeAlias

import msgspec
from parrot_scheduler.task import OBJECTIVE_KINDS

from parrot_gateway.backends.upstreams.client import UpstreamClient, UpstreamRequest
from parrot_gateway.backends.upstreams.continuation import Answering, Failover
from parrot_gateway.backends.upstreams.failure import FailedAttempt, Returned, ask
from parrot_gateway.backends.upstreams.reported_error import error_of, refusal_of
from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.observer import GenerationObserver, Observers, TextObserver
from parrot_gateway.calls.requests.call import PATHS, CallKind, CallRequest
from parrot_gateway.calls.tools.parsing import (
    ArgumentsPiece,
    ContentPiece,
    ToolCallBegin,
    ToolPiece,
)
from parrot_gateway.calls.usage import Usage, usage_of_body
from parrot_gateway.exceptions import (
    AnswerError,
    InvalidRequestError,
    MalformedAnswerError,
    UpstreamError,
)

#: How an upstream learns of priorities: vLLM (with `--scheduling-policy priority`) runs smaller
#: priorities earlier, and refuses any but 0 when it does not schedule by priority; SGLang (with
#: `--enable-priority-scheduling`) runs larger ones earlier, and calls without one last.
HintStyle: TypeAlias = Literal["none", "vllm", "sglang"]

#: A whole answer, or one event of a stream, longer than this is not read.
MAX_HELD_BYTES = 64 * 1024 * 1024
#: Finish reasons of answers that a server has not brought to their end, as it shuts down, say.
_GIVEN_UP = ("abort", "error")
#: The field of a body that is meant for the gateway.
_OURS = re.compile(rb'"parrot"')


class _Delta(msgspec.Struct):
    content: str | None = None
    #: Under two names, of which vLLM's newer one is `reasoning`.
    reasoning_content: Any = None
    reasoning: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    #: The stop string that matched, as vLLM and SGLang report it; ids of stop tokens otherwise.
    stop_reason: Any = None
    matched_stop: Any = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None
    usage: Any = None


_answer_decoder = msgspec.json.Decoder(_Answer)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UpstreamAnswerReader:
    """Parses the bytes of one answer, and notifies observers of what they hold.

    `start` takes its head, `feed` its bytes; `end` marks its end. Whoever runs the call
    reports the errors that it raises (`Observers.failed`).

    Args:
        observers: are notified of deltas, and of the end.
    """

    __slots__ = ("_finish_reason", "_held", "_observers", "is_finished", "is_stream", "status",
                 "usage")  # fmt: skip

    def __init__(self, observers: GenerationObserver) -> None:
        self._observers = observers
        #: 0 until the head is there.
        self.status = 0
        #: Once the answer has reported it.
        self.usage: Usage | None = None
        #: The answer has reported its end.
        self.is_finished = False
        self.is_stream = False
        self._held = bytearray()
        self._finish_reason: str | None = None

    def start(self, status: int, content_type: bytes) -> None:
        """The head of the answer."""
        self.status = status
        self.is_stream = status < 400 and content_type.lower().startswith(b"text/event-stream")

    def feed(self, data: bytes) -> None:
        """Take bytes.

        Raises:
            AnswerError: the stream reported an error, or cannot be read.
        """
        if len(self._held) + len(data) > MAX_HELD_BYTES:
            raise AnswerError("the answer is too long to be read")
        self._held += data
        if not self.is_stream or (b"\n" not in data and b"\r" not in data):
            return
        # NOTE: between the halves of a CRLF an empty line is seen, which means nothing.
        *lines, rest = self._held.replace(b"\r", b"\n").split(b"\n")
        self._held = rest
        for line in lines:
            if line.startswith(b"data:"):
                self._event(bytes(line[5:]).strip())

    def end(self) -> None:
        """The answer is over.

        Raises:
            AnswerError: it is an error, was not complete, or has no choices.
        """
        if self.status >= 400:
            raise refusal_of(bytes(self._held), self.status)
        if not self.is_stream:
            answer = self._decode(bytes(self._held))
            self.usage = usage_of_body(bytes(self._held))
            if answer.error:
                raise error_of(answer.error, self.status)
            if not answer.choices:
                raise AnswerError("the answer has no choices")
            for choice in answer.choices:
                self._choice(choice)
            self.is_finished = True
        if not self.is_finished:
            raise AnswerError("the answer ended before it was complete")
        self._observers.ended(self.usage, self._finish_reason)

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_finished = True
            return
        if not data:
            return
        answer = self._decode(data)
        if answer.error:
            raise error_of(answer.error, 502)
        if isinstance(answer.usage, dict):
            self.usage = usage_of_body(data)
        for choice in answer.choices or ():
            self._choice(choice)

    def _choice(self, choice: _Choice) -> None:
        if choice.finish_reason in _GIVEN_UP:
            raise AnswerError(
                f"the model's server gave the answer up (finish reason '{choice.finish_reason}')"
            )
        if choice.finish_reason is not None and choice.index == 0:
            self.is_finished, self._finish_reason = True, choice.finish_reason
        part = choice.message or choice.delta
        text = (choice.text if part is None else part.content) or ""
        pieces: list[ToolPiece] | None = None
        if part is not None and (part.tool_calls or part.function_call):
            pieces = [ContentPiece(text)] if text else []
            pieces += _calls_of(part)
        thought = None if part is None else part.reasoning_content or part.reasoning
        matched = choice.stop_reason or choice.matched_stop
        stop_string = matched if isinstance(matched, str) else None
        self._observers.delta(
            ChoiceDelta(
                0,
                choice.index,
                text,
                [],
                [],
                choice.finish_reason,  # type: ignore[arg-type]
                pieces,
                reasoning=thought if isinstance(thought, str) else "",
                stop_string=stop_string,
            )
        )

    def _decode(self, data: bytes) -> _Answer:
        try:
            return _answer_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise MalformedAnswerError("the answer is not in OpenAI's shape") from None


def _calls_of(part: _Delta) -> Iterable[ToolPiece]:
    calls = part.tool_calls if isinstance(part.tool_calls, list) else [part.function_call]
    for number, call in enumerate(calls):
        given = call if isinstance(call, dict) else {}
        function = given.get("function", given)
        function = function if isinstance(function, dict) else {}
        index = given.get("index", number)
        name, id_ = function.get("name"), given.get("id")
        if name or id_ or not function.get("arguments"):
            yield ToolCallBegin(index, str(name or ""), str(id_ or ""))
        if function.get("arguments"):
            yield ArgumentsPiece(index, str(function["arguments"]))


def rewrite(body: bytes, model: str | None) -> bytes:
    """`body` with another `model` (unless None) and without `parrot`; the very same object when
    there is nothing to change. The values of all other fields keep their bytes.

    Raises:
        InvalidRequestError: the body has to be changed and is no JSON object.
    """
    # NOTE: the expression takes half the time of `in`.
    if model is None and _OURS.search(body) is None:
        return body
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"The body is not a JSON object: {error}") from None
    if fields.pop("parrot", None) is None and model is None:
        return body
    if model is not None:
        fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def urgency_of(metadata: CallMetadata) -> int:
    """0 while a client waits; smaller is more urgent. The caller's priority comes first."""
    weaker = len(OBJECTIVE_KINDS) - 1 - OBJECTIVE_KINDS.index(metadata.objective.kind)
    return weaker - len(OBJECTIVE_KINDS) * metadata.priority


def with_hints(body: bytes, style: HintStyle, metadata: CallMetadata) -> bytes:
    """`body` with a priority; the very same object when there is nothing to say.

    That is so when the caller gives one himself, and when the body is no JSON object.
    """
    urgency = urgency_of(metadata)
    if style == "none" or (style == "vllm" and urgency == 0):
        return body
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    if "priority" in fields:
        return body
    value = urgency if style == "vllm" else -urgency
    fields["priority"] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)


def upstream_body(
    request: CallRequest, upstream: UpstreamClient, model: str, metadata: CallMetadata
) -> bytes:
    """The body of a chat or a completion as its upstream gets it. Call it in a thread for a large
    request.

    Args:
        request: as received.
        upstream: where it goes.
        model: the name that the upstream knows.
        metadata: of the call, for upstreams that take a priority.

    Raises:
        InvalidRequestError: as `rewrite`.
    """
    body = rewrite(request.body, None if model == request.model else model)
    style = upstream.settings.hints
    return body if style == "none" else with_hints(body, style, metadata)


async def run_on_upstream(
    upstream: UpstreamClient,
    kind: CallKind,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    observer: GenerationObserver,
    record: GenerationObserver,
    *,
    returned: Returned,
    note_failed: Callable[[str, str], None],
    between_reads: Callable[[], Awaitable[None]] | None = None,
    failover: Failover | None = None,
) -> FailedAttempt | None:
    """Let an upstream answer a call for observers alone.

    Args:
        kind: of the call.
        headers: the client's, names in lower case.
        body: see `upstream_body`; with `stream` set where observers read the text as it is written.
        observer: is notified of the answer.
        record: is too, without its text.
        returned: the failures to return, so that another backend can answer.
        note_failed: as of `UpstreamRequest`.
        between_reads: awaited before more of the answer is read, so that a client to whom the
            observer writes can hold it back.
        failover: lets other servers go on with a stream that breaks off.

    Returns:
        a failure when nothing was reported because another backend shall answer.

    Raises:
        GatewayError: the upstream could not be reached, refused the call, or broke off.
    """
    observers = Observers([observer, record])
    observers.submitted()
    request = UpstreamRequest("POST", PATHS[kind], headers, body, note_failed=note_failed)
    response = await ask(upstream, request, returned)
    if isinstance(response, FailedAttempt):
        return response
    try:
        observers.started(response.server, response.queued_s, response.reason)
        if response.status < 400:
            observers.first_token()
        reader = UpstreamAnswerReader(
            observers if failover is None else Observers([failover.partial, observers])
        )
        reader.start(response.status, response.content_type.encode())
        data = response.first
        while True:
            reader.feed(data)
            if isinstance(observer, TextObserver):
                observer.check()
            if response.at_eof:
                break
            if between_reads is not None:
                await between_reads()
            data = await response.read()
        if response.status < 400 and not reader.is_finished and reader.is_stream:
            raise incomplete(response.server)
        reader.end()
        response.succeeded(reader.usage)
    except UpstreamError as error:
        if failover is None or not reader.is_stream:
            raise
        answering = Answering(observers, headers, note_failed, between_reads)
        if not await failover.go_on(error, response.server, reader.usage, answering):
            raise
    finally:
        response.close()
    return None


def incomplete(server: str) -> UpstreamError:
    """The error for a stream of this upstream that ended too early."""
    return UpstreamError(
        f"The upstream '{server}' ended its stream before the answer was complete."
    )
