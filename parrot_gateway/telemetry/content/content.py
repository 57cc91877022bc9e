"""Prompt and answer of one call: bytes while it runs, parsed once it has ended."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from parrot_gateway.telemetry.content.answers import answer_of, text_answer
from parrot_gateway.telemetry.content.parts import Message, Part, Room
from parrot_gateway.telemetry.content.requests import Prompt, prompt_of, without_secrets
from parrot_gateway.telemetry.key_hiding import hide_keys

#: Bytes held of an answer; only the beginning of a longer one is read.
_MAX_ANSWER_BYTES = 8 * 1024 * 1024
#: Largest size read in the event loop: takes less than a millisecond.
_MAX_INLINE_BYTES = 64 * 1024
#: Routes whose calls have prompts and answers in text.
TEXT_ROUTES = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/messages"),
        *("/v1/responses", "/v1/responses/compact", "/v1/semantic_call"),
    }
)


class ReadContent(msgspec.Struct, gc=False):
    """Prompt and answer of a call, in the shape of OpenTelemetry's GenAI conventions.

    Attributes:
        path, request: the route, and the body in JSON without keys; empty if it is longer
            than the limit.
        cut_characters: number of characters left out of the messages.
    """

    path: str
    request: str
    system_instructions: list[Part]
    input_messages: list[Message]
    output_messages: list[Message]
    cut_characters: int = 0


class CallContent:
    """Prompt and answer of a call as bytes: nothing is decoded while it runs.

    Attributes:
        is_wanted: true if anything wants it; None until that is known.
        size_bytes: bytes of all that is held.
    """

    __slots__ = ("_answer", "_answer_bytes", "_is_bound", "_path", "_request", "_text", "is_wanted")

    def __init__(self) -> None:
        self.is_wanted: bool | None = None
        self._path = ""
        self._request = b""
        #: True: the request has values in place of its variables.
        self._is_bound = False
        self._answer: list[bytes] = []
        self._answer_bytes = 0
        #: Text and finish reason.
        self._text: tuple[str, str] | None = None

    @property
    def size_bytes(self) -> int:
        text = self._text[0] if self._text is not None else ""
        return len(self._request) + self._answer_bytes + len(text)

    def asked(self, path: str, body: bytes, *, is_bound: bool = False) -> None:
        """Note the request, or the request with its variables' values."""
        self._path, self._request, self._is_bound = path, body, is_bound

    def answered(self, data: bytes) -> None:
        """Note further bytes of the answer as they are sent."""
        if self._answer_bytes < _MAX_ANSWER_BYTES:
            self._answer.append(data)
            self._answer_bytes += len(data)

    def wrote(self, text: str, finish_reason: str) -> None:
        """Note the whole text of a call whose answer is sent to nobody."""
        self._text = text, finish_reason

    async def read(self, max_characters: int) -> ReadContent:
        """Parse all of it as messages; in a thread if it is large.

        Args:
            max_characters: limit of all texts together.
        """
        if self.size_bytes <= _MAX_INLINE_BYTES:
            return self.read_now(max_characters)
        return await asyncio.to_thread(self.read_now, max_characters)

    def read_now(self, max_characters: int) -> ReadContent:
        """Parse it in this thread; see `read`."""
        try:
            request: Any = msgspec.json.decode(self._request)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            request = None
        request = request if isinstance(request, dict) else {}
        # The answer comes first and gets half of the room; the prompt gets the rest.
        for_answer = Room(max_characters // 2)
        if self._text is not None:
            output = text_answer(*self._text, for_answer)
        else:
            output = answer_of(b"".join(self._answer), for_answer)
        room = Room(max_characters - max_characters // 2 + for_answer.left)
        try:
            prompt = prompt_of(request, room)
        except (ValueError, TypeError, AttributeError):
            prompt = Prompt([], [])
        shown = ""
        if len(self._request) <= max_characters and request:
            if self._is_bound:
                request.pop("parrot", None)
            encoded = msgspec.json.encode(without_secrets(request))
            shown = hide_keys(encoded.decode("utf-8", "replace"))
        cut = for_answer.cut + room.cut
        return ReadContent(self._path, shown, *prompt, output, cut)
