"""Reads the text out of an answer in OpenAI's shape, whole or streamed, while it passes.

Pure: bytes in, text out. Of an answer with several choices the first one counts. What the answer
is for, and who gets its bytes, is not known here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parrot_gateway.engines.usage import Usage, usage_of_body
from parrot_gateway.exceptions import AnswerError

#: A whole answer, or one event of a stream, longer than this is not read.
MAX_HELD_BYTES = 64 * 1024 * 1024
#: Characters of an error that are kept with the call.
_MAX_MESSAGE = 2000
_MAX_CODE = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    error: Any = None
    usage: Any = None


_decoder = msgspec.json.Decoder(_Answer)


class AnswerReader:
    """Follows one answer.

    `start` is told of its head, `feed` of its bytes, `end` that it is over.
    """

    __slots__ = ("_called_tools", "_finished", "_held", "_is_stream", "_said_something", "status",
                 "usage")  # fmt: skip

    def __init__(self) -> None:
        #: 0 until the head is there.
        self.status = 0
        #: Once the answer has told it.
        self.usage: Usage | None = None
        self._is_stream = False
        self._held = bytearray()
        self._finished = False
        self._called_tools = False
        self._said_something = False

    def start(self, status: int, content_type: bytes) -> None:
        """The head of the answer."""
        self.status = status
        self._is_stream = status < 400 and content_type.lower().startswith(b"text/event-stream")

    def feed(self, data: bytes) -> str:
        """Take bytes; returns the text that they complete.

        Raises:
            AnswerError: the stream told an error, or cannot be read.
        """
        if len(self._held) + len(data) > MAX_HELD_BYTES:
            raise AnswerError("the answer is too long to be read")
        self._held += data
        if not self._is_stream or (b"\n" not in data and b"\r" not in data):
            return ""
        # NOTE: between the halves of a CRLF an empty line is seen, which says nothing.
        *lines, rest = self._held.replace(b"\r", b"\n").split(b"\n")
        self._held = rest
        events = (bytes(line[5:]).strip() for line in lines if line.startswith(b"data:"))
        return "".join([self._event(event) for event in events])

    def end(self) -> str:
        """The answer is over; returns the rest of its text.

        Raises:
            AnswerError: it is an error, was not complete, or holds no text.
        """
        if self.status >= 400:
            raise self._refusal()
        text = ""
        if not self._is_stream:
            answer = self._decode(bytes(self._held))
            self.usage = usage_of_body(bytes(self._held))
            if answer.error:
                raise _error_of(answer.error, self.status)
            if not answer.choices:
                raise AnswerError("the answer has no choices")
            text = self._choice(answer.choices[0])
            self._finished = True
        if not self._finished:
            raise AnswerError("the answer ended before it was complete")
        if self._called_tools and not self._said_something:
            raise AnswerError("the model called tools instead of writing text", code="no_text")
        return text

    def _event(self, data: bytes) -> str:
        if data == b"[DONE]":
            self._finished = True
            return ""
        if not data:
            return ""
        answer = self._decode(data)
        if answer.error:
            raise _error_of(answer.error, 502)
        if isinstance(answer.usage, dict):
            self.usage = usage_of_body(data)
        return "".join(self._choice(c) for c in answer.choices or () if c.index == 0)

    def _choice(self, choice: _Choice) -> str:
        if choice.finish_reason is not None:
            self._finished = True
        part = choice.message or choice.delta
        text = choice.text if part is None else part.content
        if part is not None and (part.tool_calls or part.function_call):
            self._called_tools = True
        if text:
            self._said_something = True
        return text or ""

    def _decode(self, data: bytes) -> _Answer:
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise AnswerError("the answer is not in OpenAI's shape") from None

    def _refusal(self) -> AnswerError:
        try:
            error = _decoder.decode(bytes(self._held)).error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            error = None
        return _error_of(error, self.status)


def _error_of(error: Any, status: int) -> AnswerError:
    """The error that an answer told."""
    if isinstance(error, str) and error:
        return AnswerError(error[:_MAX_MESSAGE], answer_status=status)
    if not isinstance(error, dict):
        return AnswerError(
            f"the model's server answered with status {status}", answer_status=status
        )
    message, code = error.get("message"), error.get("code")
    return AnswerError(
        message[:_MAX_MESSAGE] if isinstance(message, str) and message else f"status {status}",
        code=code[:_MAX_CODE] if isinstance(code, str) else None,
        answer_status=status,
    )
