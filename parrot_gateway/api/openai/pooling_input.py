"""Steps of embeddings, rerank and score: a model that can, and texts as tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta
from parrot_engine.protocol import EngineInfo, PoolingInfo
from parrot_engine.text import ChatTemplateError
from parrot_engine.text.pairs import encode_written_pairs
from parrot_engine.text.tokenizer import PoolingTokens

from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.calls.requests.prepared import INLINE_CHARACTERS, check_context, refuse_hopeless
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError, unsupported_value

#: Tokens that a text is cut to, as in vLLM; -1: to the model's limit.
Truncation: TypeAlias = Annotated[int, Meta(ge=-1)]

#: Of a request: what is tokenized in some ten seconds.
MAX_CHARACTERS = 8 * 1024 * 1024

#: What it takes to have a template write a pair, in characters of texts.
_TEMPLATE_CHARACTERS = 1024

_WANTED = {"embed": "vectors", "score": "scores of pairs"}
_ROUTES = {"embed": "/v1/embeddings", "score": "/v1/rerank and /v1/score"}
_WHAT_WOULD = {
    "embed": "Load an embedder (a BERT, XLM-R or decoder checkpoint with modules.json)",
    "score": "Load a cross-encoder (…ForSequenceClassification with one label, or a decoder with a "
    "LogitScore in modules.json)",
}


def pooling_of(info: EngineInfo, model: str, task: Literal["embed", "score"]) -> PoolingInfo:
    """Return the pooling of a model, which has to be for `task`.

    Raises:
        UnsupportedError: something else than `task`, or nothing.
    """
    pooling = info.pooling
    if pooling is not None and pooling.task == task:
        return pooling
    offered = [_ROUTES[pooling.task]] if pooling is not None else []
    if info.generates:
        offered.insert(0, "/v1/chat/completions")
    raise UnsupportedError(
        f"The model '{model}' ({info.architecture}) makes no {_WANTED[task]}; it is there for "
        f"{' and '.join(offered)}. {_WHAT_WOULD[task]}, or name such a model of an upstream.",
        param="model",
        code="unsupported_route",
    )


async def encode_texts(
    placer: Placer,
    texts: Sequence[tuple[str, str | None]],
    *,
    name: str,
    truncation: Truncation | None,
    instruction: str | None = None,
) -> list[PoolingTokens]:
    """Tokenize texts, or pairs of them, as the model reads them.

    Args:
        placer: of the model.
        texts: first and second text of each.
        name: the field that holds them.
        truncation: tokens that each is cut to.
        instruction: for a model whose template writes pairs; None: its default.

    Raises:
        ContextLengthError: one of them has too many tokens.
        InvalidRequestError: all of them together have too many characters, or the model's template
            refuses one.
        UnsupportedError: the model takes no instruction.
    """
    pooling, tokenizer = placer.info.pooling, placer.tokenizer
    assert pooling is not None
    template = pooling.pair_template
    if instruction is not None and template is None:
        raise unsupported_value("instruction", "this model takes none.")
    if instruction is None and template is not None and pooling.default_prompt is not None:
        instruction = pooling.prompts[pooling.default_prompt]
    if pooling.lowercase:
        texts = [(a.lower(), None if b is None else b.lower()) for a, b in texts]
    limit = pooling.max_tokens
    cut = None if truncation is None else limit if truncation == -1 else min(truncation, limit)

    def encode() -> list[PoolingTokens]:
        if template is None:
            return tokenizer.encode_for_pooling(texts, max_tokens=cut)
        pairs = [(a, b or "") for a, b in texts]
        try:
            return encode_written_pairs(tokenizer, pairs, instruction, template, max_tokens=cut)
        except ChatTemplateError as error:
            raise InvalidRequestError(str(error)[:1000], param=name) from None

    characters = sum(len(a) + len(b or "") for a, b in texts)
    if template is not None:
        characters += len(texts) * (len(instruction or "") + _TEMPLATE_CHARACTERS)
    if characters > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"Invalid '{name}': {characters} characters, of pairs counted for each, are more than "
            f"the {MAX_CHARACTERS} of one request.",
            param=name,
            code="string_above_max_length",
        )
    if characters <= INLINE_CHARACTERS:
        sequences = encode()
    else:
        if cut is None:
            parts = [part for pair in texts for part in pair if part is not None]
            await refuse_hopeless(tokenizer, placer.info, parts, param=name, noun=name)
        sequences = await asyncio.to_thread(encode)
    for item in sequences:
        check_context(limit, len(item.token_ids), 0, param=name, noun=name)
        if not item.token_ids:
            raise InvalidRequestError(
                f"Invalid '{name}': a text without tokens has no vector.", param=name
            )
    return sequences


def num_tokens(sequences: Sequence[PoolingTokens]) -> int:
    """Count the tokens of all sequences."""
    return sum(len(item.token_ids) for item in sequences)


def check_total(tokens: int, limit: int, name: str) -> int:
    """The tokens of a request, held by the field `name`.

    Raises:
        InvalidRequestError: there are more than `limit`.
    """
    if tokens > limit:
        raise InvalidRequestError(
            f"Requested {tokens} tokens, max {limit} tokens per request.",
            param=name,
            code="max_tokens_per_request",
        )
    return tokens
