"""What the answers of completions and chat have in common: ids, usage, log-probabilities."""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from parrot_engine.protocol import EngineInfo, TokenLogprobs
from parrot_engine.text import IncrementalDetokenizer, Tokenizer

from parrot_gateway import __version__
from parrot_gateway.engines.usage import Usage
from parrot_gateway.generation.request import TextToken

#: OpenAI's sentinel for "very unlikely": JSON has no minus infinity.
VERY_UNLIKELY = -9999.0

encode = msgspec.json.Encoder().encode


class Envelope:
    """The part of an answer that all its chunks share.

    Args:
        prefix: of the id: `cmpl` or `chatcmpl`.
        info: the engine that answers.
        model: as the caller named it.
    """

    def __init__(self, prefix: str, info: EngineInfo, model: str) -> None:
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint(info),
        }

    def chunk_head(self, kind: str, extra: dict[str, Any] | None = None) -> bytes:
        """A chunk up to and with the bracket that opens `choices`."""
        whole = encode({"object": kind, **self.fields, **(extra or {}), "choices": []})
        return b"data: " + whole[: -len(b"]}")]


class ChunkWriter:
    """Frames the choices of a stream as events; only the delta itself is encoded each time.

    Args:
        head: see `Envelope.chunk_head`.
        include_usage: the caller wants a last chunk with the usage; the others then carry
            `usage: null`.
    """

    __slots__ = ("_head", "_tail", "include_usage")

    def __init__(self, head: bytes, *, include_usage: bool) -> None:
        self._head = head
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self.include_usage = include_usage

    def event(self, choice: bytes) -> bytes:
        """One event with one encoded choice."""
        return self._head + choice + self._tail

    def usage(self, usage: Usage) -> bytes:
        """The event after all others, if the caller wants one."""
        if not self.include_usage:
            return b""
        return self._head + b'],"usage":' + encode(usage_dict(usage)) + b"}\n\n"


def system_fingerprint(info: EngineInfo) -> str:
    """Changes whenever the same seed may give other tokens: with model, engine and version."""
    parts = (info.model, info.kind, info.architecture, info.device, info.dtype, __version__)
    return "fp_" + hashlib.blake2b("\0".join(parts).encode(), digest_size=5).hexdigest()


def usage_dict(usage: Usage) -> dict[str, Any]:
    """`usage`; see `Usage` for how tokens are counted."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else VERY_UNLIKELY


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TextToken], start: int = 0
) -> dict[str, list[Any]]:
    """`logprobs` of a completions choice.

    `text_offset` counts characters of the choice's `text`. `top_logprobs` has the chosen token
    besides the likeliest ones, as OpenAI's does. The end-of-text token that ended the choice is
    listed too: scoring harnesses count on one entry a token.

    Args:
        tokenizer: the model's.
        tokens: of the completion.
        start: characters of the echoed prompt.
    """
    shape = _empty_completion_logprobs()
    for token in tokens:
        _append(shape, tokenizer, token.logprobs, start + token.offset)
    return shape


def echoed_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
) -> dict[str, list[Any]]:
    """The same for the tokens of an echoed prompt, of which the first has no log-probability."""
    shape = _empty_completion_logprobs()
    offset = 0
    pieces = IncrementalDetokenizer(tokenizer).push_each(token_ids)
    for token_id, piece, entry in zip(token_ids, pieces, logprobs, strict=True):
        if entry is None:
            shape["tokens"].append(tokenizer.token_text(token_id))
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            shape["text_offset"].append(offset)
        else:
            _append(shape, tokenizer, entry, offset)
        offset += len(piece)
    return shape


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """One after the other."""
    return {key: first[key] + second[key] for key in first}


def _empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _append(
    shape: dict[str, list[Any]], tokenizer: Tokenizer, entry: TokenLogprobs, offset: int
) -> None:
    text, logprob = tokenizer.token_text(entry.token_id), finite(entry.logprob)
    shape["tokens"].append(text)
    shape["token_logprobs"].append(logprob)
    top: dict[str, float] = {}
    for token_id, value in entry.top:
        # NOTE: two ids may have one text; the likelier comes first and stays.
        top.setdefault(tokenizer.token_text(token_id), finite(value))
    top.setdefault(text, logprob)
    shape["top_logprobs"].append(top)
    shape["text_offset"].append(offset)


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[TextToken]) -> dict[str, Any]:
    """`logprobs` of a chat choice: the tokens of its text, without the one that ended it."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, token.logprobs.token_id, token.logprobs.logprob),
                "top_logprobs": [_chat_entry(tokenizer, *top) for top in token.logprobs.top],
            }
            for token in tokens
            if not token.is_end
        ],
        "refusal": None,
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(raw),
    }
