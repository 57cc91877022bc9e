"""Token usage as upstreams report it: found in bytes on their way through, never re-serialised.

Reads chat, completions, embeddings and Responses bodies alike. Prices nothing, keeps no history.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import msgspec

#: Bodies up to this size are decoded; of longer ones only the tail is searched.
DECODE_LIMIT = 64 * 1024
#: How much of the end of a stream or a long body is looked at.
TAIL_BYTES = 16 * 1024

_USAGE_KEY = re.compile(rb'"usage"\s*:\s*(?=\{)')
_decoder = json.JSONDecoder()


class Usage(NamedTuple):
    """Tokens of a call.

    Of own engines counted from real token ids: a prompt counts once, however many candidates it
    has. Every generated id of every candidate counts, including the end-of-text id that ended it
    and the ids of a stop string up to the one that completed it. Of an upstream as it reports them.
    """

    prompt_tokens: int
    completion_tokens: int
    #: Part of `prompt_tokens` that was found in a prefix cache.
    cached_tokens: int
    #: Part of `completion_tokens` that is reasoning.
    reasoning_tokens: int = 0


@dataclass(slots=True)
class UsageTotals:
    """Counts since the start, of one upstream."""

    #: Calls answered with a success.
    calls: int = 0
    #: Those of them whose answer held no usage (a stream without `include_usage`, say).
    unmetered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def add(self, usage: Usage | None) -> None:
        self.calls += 1
        if usage is None:
            self.unmetered += 1
            return
        self.prompt_tokens += usage.prompt_tokens
        self.completion_tokens += usage.completion_tokens
        self.cached_tokens += usage.cached_tokens

    def to_dict(self) -> dict[str, int]:
        return dict(sorted(asdict(self).items()))


class _Body(msgspec.Struct):
    usage: Any = None


_body_decoder = msgspec.json.Decoder(_Body)


def usage_of_body(body: bytes) -> Usage | None:
    """The usage in a whole JSON answer, or None."""
    if len(body) > DECODE_LIMIT:
        return usage_of_tail(body[-TAIL_BYTES:])
    try:
        return _usage(_body_decoder.decode(body).usage)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def usage_of_tail(tail: bytes) -> Usage | None:
    """The last usage object that begins in `tail` (the end of a stream or of a body), or None.

    Only a key at its place in JSON is found: the same letters inside a text have their quotes
    escaped.
    """
    for match in reversed(list(_USAGE_KEY.finditer(tail))):
        text = tail[match.end() :].decode("utf-8", "replace")
        try:
            value, _ = _decoder.raw_decode(text)
        except (ValueError, RecursionError):
            continue
        usage = _usage(value)
        if usage is not None:
            return usage
    return None


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    prompt = _count(value, "prompt_tokens", "input_tokens")
    completion = _count(value, "completion_tokens", "output_tokens")
    if prompt is None and completion is None:
        return None
    details = value.get("prompt_tokens_details") or value.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    details = value.get("completion_tokens_details") or value.get("output_tokens_details")
    reasoning = _count(details, "reasoning_tokens") if isinstance(details, dict) else None
    return Usage(prompt or 0, completion or 0, cached or 0, reasoning or 0)


def _count(value: dict[str, Any], *names: str) -> int | None:
    for name in names:
        number = value.get(name)
        if isinstance(number, int) and number >= 0:
            return number
    return None
