"""An answer that broke off in mid-stream, and the request by which another server goes on with it.

Pure: deltas in, requests and deltas out. Whoever runs the call decides who goes on, and sends.

Only plain text can be continued: the text is put into the request, and the server writes what
follows. A tool call, a grammar or several candidates would begin anew. An answer that has said
nothing yet is asked for once more, whatever it is to be.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import msgspec

from parrot_gateway.backends.upstreams.seam import Seam
from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.calls.requests.completions import DEFAULT_MAX_TOKENS
from parrot_gateway.calls.tools.parsing import ContentPiece
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import (
    AnswerError,
    GatewayError,
    MalformedAnswerError,
    UpstreamTimeoutError,
)

#: How a server is told to continue a chat's answer; see the setting `upstreams.continuation`.
ContinuationStyle: TypeAlias = Literal["continue_final_message", "prefix", "prefill"]
#: What ended a stream; see the setting `upstreams.stream_failure.on`.
StreamFault: TypeAlias = Literal["transport_error", "read_timeout", "malformed", "in_band_error"]

#: Fields that restrict the text to a grammar, whatever they hold.
_GRAMMARS = ("structured_outputs", "guided_choice", "guided_grammar", "guided_json",
             "guided_regex", "regex", "ebnf", "json_schema")  # fmt: skip


def fault_of(error: GatewayError) -> StreamFault:
    """The word for what ended a stream."""
    if isinstance(error, UpstreamTimeoutError):
        return "read_timeout"
    if isinstance(error, MalformedAnswerError):
        return "malformed"
    return "in_band_error" if isinstance(error, AnswerError) else "transport_error"


class _Fields(msgspec.Struct):
    """The fields of a request that say whether its answer can be continued, of any type."""

    n: Any = None
    best_of: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    return_token_ids: Any = None
    echo: Any = None
    suffix: Any = None
    audio: Any = None
    modalities: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    continue_final_message: Any = None
    prompt: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    min_tokens: Any = None


class _Message(msgspec.Struct):
    role: Any = None
    content: Any = None


_fields_decoder = msgspec.json.Decoder(_Fields)
_message_decoder = msgspec.json.Decoder(_Message)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_object_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Continuation(NamedTuple):
    """How one server goes on."""

    request: CallRequest
    #: Joins its text to what was said.
    seam: Seam
    #: The text so far is in the request, as a message that the server may refuse.
    has_message: bool = False


class Answering(NamedTuple):
    """How the rest of an answer reaches those who wait for it."""

    #: Of the whole answer.
    observers: GenerationObserver
    #: The client's, for requests to upstreams.
    headers: Iterable[tuple[bytes, bytes]]
    #: Told of each server that could not go on, and why; as of `UpstreamRequest`.
    note_failed: Callable[[str, str], None]
    #: Awaited before more of the answer is read.
    between_reads: Callable[[], Awaitable[None]] | None = None


class Failover(Protocol):
    """Lets other servers go on with one answer."""

    @property
    def partial(self) -> PartialAnswer:
        """The answer so far; to be notified of each delta that reaches the client."""
        ...

    async def go_on(
        self, error: GatewayError, server: str, usage: Usage | None, answering: Answering
    ) -> bool:
        """Let another server go on with an answer that broke off, until one ends it.

        Args:
            error: what ended it.
            server: name of the one that did not.
            usage: tokens so far, if the stream has said that.

        Returns:
            False when none does; observers may have got more of the answer, not its end.
        """
        ...


class PartialAnswer(GenerationObserver):
    """Keeps what an answer has said so far; is notified of each delta that the client gets.

    Args:
        request: the call, which streams.
    """

    __slots__ = ("_events", "_fields", "_finish_reason", "_first_prompt_tokens", "_generated",
                 "_has_others", "_has_tool_calls", "_request", "_texts", "_thoughts",
                 "num_deltas")  # fmt: skip

    def __init__(self, request: CallRequest) -> None:
        self._request = request
        #: Read once they are needed.
        self._fields: _Fields | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._has_tool_calls = False
        #: Candidates beside the first.
        self._has_others = False
        self._finish_reason: str | None = None
        #: Deltas so far.
        self.num_deltas = 0
        #: Deltas with text of the server that answers now; tokens of those before it.
        self._events = 0
        self._generated = 0
        self._first_prompt_tokens: int | None = None

    def delta(self, delta: ChoiceDelta) -> None:
        self.num_deltas += 1
        if delta.choice:
            self._has_others = True
            return
        content = delta.content
        if content:
            self._texts.append(content)
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)
        if content or delta.reasoning:
            self._events += 1
        if delta.pieces is not None and not self._has_tool_calls:
            self._has_tool_calls = any(not isinstance(p, ContentPiece) for p in delta.pieces)
        self._finish_reason = delta.finish_reason or self._finish_reason

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_complete(self) -> bool:
        """Return whether the text has come to its end, if not the stream."""
        return self._finish_reason is not None

    @property
    def has_begun(self) -> bool:
        """Return whether it has said anything that another answer would repeat."""
        return bool(self._has_tool_calls or self._has_others or self._thoughts or self.text.strip())

    def broke_off(self, usage: Usage | None) -> None:
        """The server that answers is gone.

        Args:
            usage: tokens so far, if the stream has said that. Otherwise each event with text counts
                as one token, which is at most the number that there were.
        """
        if usage is not None and self._first_prompt_tokens is None and not self._generated:
            self._first_prompt_tokens = usage.prompt_tokens
        self._generated += self._events if usage is None else usage.completion_tokens
        self._events = 0

    @property
    def usage(self) -> Usage | None:
        """Tokens so far, where the first server has said how many the prompt has."""
        prompt = self._first_prompt_tokens
        return None if prompt is None else Usage(prompt, self._generated, 0)

    def usage_of(self, last: Usage | None) -> Usage | None:
        """The usage of the whole answer.

        The prompt counts once, as the first server counted it, or else as the last one did less
        the text that it continued.

        Args:
            last: of the server that has ended the answer.
        """
        if last is None or not self._generated:
            return last
        prompt = self._first_prompt_tokens
        if prompt is None:
            prompt = max(0, last.prompt_tokens - self._generated)
        return last._replace(
            prompt_tokens=prompt,
            completion_tokens=self._generated + last.completion_tokens,
            cached_tokens=min(last.cached_tokens, prompt),
        )

    def obstacle(self) -> str | None:
        """Why no server can go on with it, in a few words; None: one can.

        Call it in a thread for a large request.
        """
        if self._has_others:
            return "several candidates"
        if self._has_tool_calls:
            return "a tool call"
        fields = self._read_fields()
        if fields is None:
            return "a request that cannot be read"
        if _count(fields.n) > 1 or _count(fields.best_of) > 1:
            return "several candidates"
        if (
            not (fields.logprobs is None or fields.logprobs is False)
            or fields.prompt_logprobs is not None
        ):
            return "log-probabilities"
        if fields.return_token_ids:
            return "token ids"
        if fields.audio is not None or fields.modalities not in (None, ["text"]):
            return "audio"
        if fields.echo or (isinstance(fields.prompt, list) and len(fields.prompt) != 1):
            return "an echoed prompt or several"
        if not self.has_begun:
            return None
        if not self.text.strip():
            return "reasoning"
        return self._obstacle_within_text(fields)

    def _obstacle_within_text(self, fields: _Fields) -> str | None:
        format_ = fields.response_format
        is_text = format_ is None or (isinstance(format_, dict) and format_.get("type") == "text")
        if not is_text or any(getattr(fields, name) is not None for name in _GRAMMARS):
            return "a grammar"
        if (fields.tools and fields.tool_choice not in (None, "auto", "none")) or (
            fields.functions and fields.function_call not in (None, "auto", "none")
        ):
            return "a grammar"
        if self._request.kind == "completions":
            if fields.suffix is not None:
                return "a suffix"
            prompt = fields.prompt[0] if isinstance(fields.prompt, list) else fields.prompt
            return None if isinstance(prompt, str) else "a prompt of token ids"
        if fields.continue_final_message and not isinstance(self._last_message().content, str):
            return "a message of several parts"
        return None

    @property
    def is_at_limit(self) -> bool:
        """Return whether the answer already has as many tokens as the request allows. Ask for an
        `obstacle` first, which reads the request."""
        fields = self._read_fields() if self.has_begun else None
        limits = () if fields is None else (fields.max_tokens, fields.max_completion_tokens)
        return any(isinstance(limit, int) and limit <= self._generated for limit in limits)

    def continuation(self, style: ContinuationStyle) -> Continuation:
        """The request for the rest of the answer.

        Only for an answer without an `obstacle`. Call it in a thread for a large request.

        Args:
            style: how a chat is continued.
        """
        text = self.text
        if not self.has_begun:
            self._generated = 0
            return Continuation(self._request, Seam("", text))
        body = _object_decoder.decode(self._request.body)
        fields = self._read_fields()
        assert fields is not None
        self._lower_limits(body, fields)
        if self._request.kind == "completions":
            prompt = fields.prompt[0] if isinstance(fields.prompt, list) else fields.prompt
            body["prompt"] = _raw(prompt + text)
            return Continuation(self._with_body(body), Seam(text, ""))
        given = text.rstrip()
        messages = _list_decoder.decode(body["messages"])
        message: dict[str, Any] = {"role": "assistant", "content": given}
        if fields.continue_final_message:
            message["content"] = self._last_message().content + given
            messages.pop()
        if style == "prefix":
            message["prefix"] = True
        elif style == "continue_final_message":
            body["continue_final_message"] = _raw(True)
            body["add_generation_prompt"] = _raw(False)
            if self._thoughts:
                message["reasoning_content"] = "".join(self._thoughts)
        messages.append(_raw(message))
        body["messages"] = _raw(messages)
        may_echo = style != "continue_final_message"
        seam = Seam(
            message["content"],
            text[len(given) :],
            may_echo=may_echo,
            is_known_to_echo=style == "prefix",
        )
        return Continuation(self._with_body(body), seam, has_message=True)

    @property
    def has_reasoning(self) -> bool:
        """Return whether reasoning precedes the text, which only some servers take back."""
        return bool(self._thoughts)

    def _lower_limits(self, body: dict[str, msgspec.Raw], fields: _Fields) -> None:
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            limit = getattr(fields, name)
            if isinstance(limit, int):
                body[name] = _raw(max(0 if name == "min_tokens" else 1, limit - self._generated))
        left = DEFAULT_MAX_TOKENS - self._generated
        if self._request.kind == "completions" and fields.max_tokens is None and left > 0:
            # Servers that have another default end early rather than late.
            body["max_tokens"] = _raw(left)

    def _with_body(self, body: dict[str, msgspec.Raw]) -> CallRequest:
        return CallRequest(self._request.kind, msgspec.json.encode(body), head=self._request.head)

    def _last_message(self) -> _Message:
        messages = _list_decoder.decode(_object_decoder.decode(self._request.body)["messages"])
        return _message_decoder.decode(messages[-1])

    def _read_fields(self) -> _Fields | None:
        if self._fields is None:
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                self._fields = _fields_decoder.decode(self._request.body)
        return self._fields


class ContinuedAnswer(GenerationObserver):
    """Reports the answer of a server that goes on as the rest of the answer that broke off.

    Args:
        partial: what was said before; is notified of what follows.
        seam: of the request.
        observers: of the whole answer.
        on_start: called with the name of the server that goes on.
    """

    def __init__(
        self,
        partial: PartialAnswer,
        seam: Seam,
        observers: GenerationObserver,
        on_start: Callable[[str], None],
    ) -> None:
        self._partial = partial
        self._seam = seam
        self._observers = observers
        self._on_start = on_start

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self._on_start(engine)

    def lost(self, engine: str, kind: str) -> None:
        self._observers.lost(engine, kind)

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        self._observers.resumed(engine, pause_s, refilled_tokens)

    def delta(self, delta: ChoiceDelta) -> None:
        text = self._seam.feed(delta.content)
        if delta.finish_reason is not None:
            text += self._seam.end()
        pieces = delta.pieces
        if pieces is not None:
            pieces = [piece for piece in pieces if not isinstance(piece, ContentPiece)]
            if text:
                pieces.insert(0, ContentPiece(text))
        # The reasoning was over before the text began.
        reasoning = "" if self._partial.text.strip() else delta.reasoning
        if text or reasoning or pieces or delta.finish_reason is not None:
            self._tell(delta._replace(text=text, pieces=pieces, reasoning=reasoning))

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        if text := self._seam.end():
            self._tell(ChoiceDelta(0, 0, text, [], [], None))
        self._observers.ended(self._partial.usage_of(usage), finish_reason)

    def _tell(self, delta: ChoiceDelta) -> None:
        self._partial.delta(delta)
        self._observers.delta(delta)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _count(value: Any) -> int:
    return value if isinstance(value, int) else 1
