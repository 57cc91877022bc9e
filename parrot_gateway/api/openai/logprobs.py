"""Log-probabilities in the answers of completions and chats."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from parrot_engine.protocol import TokenLogprobs
from parrot_engine.text import IncrementalDetokenizer, Tokenizer

from parrot_gateway.calls.generation_request import TextToken

#: OpenAI's sentinel for "very unlikely": JSON has no minus infinity.
VERY_UNLIKELY = -9999.0


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) else VERY_UNLIKELY


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TextToken], start: int = 0, *, as_ids: bool = False
) -> dict[str, list[Any]]:
    """`logprobs` of a completions choice.

    `text_offset` counts characters of the choice's `text`. `top_logprobs` has the chosen token
    besides the likeliest ones, as OpenAI's does. The end-of-text token that ended the choice is
    listed too: scoring harnesses count on one entry a token.

    Args:
        tokenizer: the model's.
        tokens: of the completion.
        start: characters of the echoed prompt.
        as_ids: tokens are named by their ids.
    """
    shape = _empty_completion_logprobs()
    for token in tokens:
        _append(shape, tokenizer, token.logprobs, start + token.offset, as_ids)
    return shape


def echoed_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs | None],
    *,
    as_ids: bool = False,
    skip_special_tokens: bool = True,
) -> dict[str, list[Any]]:
    """The same for the tokens of an echoed prompt, of which the first has no log-probability.

    Args:
        skip_special_tokens: the echo is without them.
    """
    shape = _empty_completion_logprobs()
    offset = 0
    text = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    pieces = text.push_each(token_ids)
    for token_id, piece, entry in zip(token_ids, pieces, logprobs, strict=True):
        if entry is None:
            shape["tokens"].append(_named(tokenizer, token_id, as_ids))
            shape["token_logprobs"].append(None)
            shape["top_logprobs"].append(None)
            shape["text_offset"].append(offset)
        else:
            _append(shape, tokenizer, entry, offset, as_ids)
        offset += len(piece)
    return shape


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {key: first[key] + second[key] for key in first}


def _empty_completion_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _named(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def _append(
    shape: dict[str, list[Any]],
    tokenizer: Tokenizer,
    entry: TokenLogprobs,
    offset: int,
    as_ids: bool,
) -> None:
    text, logprob = _named(tokenizer, entry.token_id, as_ids), finite(entry.logprob)
    shape["tokens"].append(text)
    shape["token_logprobs"].append(logprob)
    top: dict[str, float] = {}
    for token_id, value in entry.top:
        # NOTE: two ids may have one text; the likelier comes first and stays.
        top.setdefault(_named(tokenizer, token_id, as_ids), finite(value))
    top.setdefault(text, logprob)
    shape["top_logprobs"].append(top)
    shape["text_offset"].append(offset)


def chat_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[TextToken], *, as_ids: bool = False
) -> dict[str, Any]:
    """`logprobs` of a chat choice: the tokens of its text, without the one that ended it."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return _chat_entry(tokenizer, token_id, logprob, as_ids)

    return {
        "content": [
            {
                **entry(token.logprobs.token_id, token.logprobs.logprob),
                "top_logprobs": [entry(*top) for top in token.logprobs.top],
            }
            for token in tokens
            if not token.is_end
        ],
        "refusal": None,
    }


def _chat_entry(
    tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool
) -> dict[str, Any]:
    raw = _named(tokenizer, token_id, True).encode() if as_ids else tokenizer.token_bytes(token_id)
    return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}
