"""Writes the rest of an upstream's stream, when another server goes on with it.

The beginning has passed unchanged. The rest is written from deltas, in the envelope of the
beginning: to the client it is one answer.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from parrot_gateway.api.event_stream import DONE, data_event
from parrot_gateway.api.openai.answers import delta_of, usage_dict
from parrot_gateway.api.upstream.event_guard import RestWriter
from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.calls.tools.parsing import ContentPiece, ToolPiece
from parrot_gateway.calls.usage import Usage

#: Fields of a chunk that are those of the whole answer.
_ENVELOPE = ("id", "object", "created", "model", "system_fingerprint", "service_tier")
_chunk_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RestOfStream(RestWriter):
    """See `RestWriter`.

    Args:
        request: the call.
        sample: an event of the beginning that has a choice; None if there was none.
        call_id: names the answer where nothing else does.
        engines: servers that have answered so far, in order.
    """

    def __init__(
        self, request: CallRequest, sample: bytes | None, call_id: str, engines: list[str]
    ) -> None:
        self._is_chat = request.kind == "chat"
        self._engines = engines
        options = request.semantic_head.stream_options
        self._includes_usage = options is not None and bool(options.include_usage)
        self._events = b""
        self._has_written = False
        if sample is not None:
            lines = sample.replace(b"\r", b"\n").split(b"\n")
            data = next(line for line in lines if line.startswith(b"data:"))
            chunk = _chunk_decoder.decode(data[5:])
            self._envelope: dict[str, Any] = {
                name: chunk[name] for name in _ENVELOPE if name in chunk
            }
            return
        self._envelope = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{call_id.removeprefix('call_')}",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": int(time.time()),
            "model": request.model,
        }
        if self._is_chat:
            self._write({"delta": {"role": "assistant", "content": ""}})

    def take(self) -> bytes:
        events, self._events = self._events, b""
        return events

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        self._engines.append(engine)

    def delta(self, delta: ChoiceDelta) -> None:
        if self._is_chat:
            if delta.reasoning:
                thought = {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
                self._write({"delta": thought})
            pieces: list[ToolPiece] = [ContentPiece(delta.text)] if delta.text else []
            for piece in pieces if delta.pieces is None else delta.pieces:
                self._write({"delta": delta_of(piece)})
        elif delta.text:
            self._write({"text": delta.text})
        if delta.finish_reason is not None:
            self._finish(delta.finish_reason)

    def _finish(self, reason: str) -> None:
        empty: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        self._write({**empty, "finish_reason": reason}, parrot={"engines": self._engines})

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        # Where nothing follows the beginning, usage that is known has passed with it.
        if self._includes_usage and self._has_written and usage is not None:
            chunk = {**self._envelope, "choices": [], "usage": usage_dict(usage)}
            self._events += data_event(chunk)
        self._events += DONE

    def _write(self, choice: dict[str, Any], **more: Any) -> None:
        self._has_written = True
        choice = {"index": 0, "logprobs": None, "finish_reason": None, **choice}
        usage = {"usage": None} if self._includes_usage else {}
        self._events += data_event({**self._envelope, "choices": [choice], **usage, **more})
