"""The answer of a deferred call: at once, in the ordinary shape, with a reference as its text."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from parrot_gateway.api.openai.sse import DONE


def deferred_answer(path: str, call_id: str, model: str, text: str) -> dict[str, Any]:
    """The whole answer."""
    if path == "/v1/chat/completions":
        kind = "chat.completion"
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
        }
    else:
        kind, choice = "text_completion", {"index": 0, "text": text}
    choice |= {"logprobs": None, "finish_reason": "stop"}
    return {**_envelope(path, kind, call_id, model), "choices": [choice], "usage": _usage()}


def deferred_stream(
    path: str, call_id: str, model: str, text: str, *, include_usage: bool
) -> bytes:
    """The same as a short stream."""
    if path == "/v1/chat/completions":
        envelope = _envelope(path, "chat.completion.chunk", call_id, model)
        choices: list[dict[str, Any]] = [
            {"delta": {"role": "assistant", "content": "", "refusal": None}},
            {"delta": {"content": text}},
            {"delta": {}, "finish_reason": "stop"},
        ]
    else:
        envelope = _envelope(path, "text_completion", call_id, model)
        choices = [{"text": text, "finish_reason": "stop"}]
    usage = {"usage": None} if include_usage else {}
    chunks: list[dict[str, Any]] = [
        {
            **envelope,
            "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **choice}],
            **usage,
        }
        for choice in choices
    ]
    if include_usage:
        chunks.append({**envelope, "choices": [], "usage": _usage()})
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + DONE


def _envelope(path: str, kind: str, call_id: str, model: str) -> dict[str, Any]:
    prefix = "chatcmpl" if path == "/v1/chat/completions" else "cmpl"
    return {
        "id": f"{prefix}-{call_id.removeprefix('call_')}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def _usage() -> dict[str, int]:
    return {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
