"""`POST /v1/rerank` and `POST /v1/score` for cross-encoders of own engines, shaped as vLLM's.

`/v1/rerank` takes what Jina and Cohere take: a query and documents; `/v1/score` pairs texts one to
one, or one to all.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from parrot_engine.text.tokenizer import PoolingTokens

from parrot_gateway.api.ignored_fields import name_ignored
from parrot_gateway.api.openai.pooling_input import (
    Truncation,
    check_total,
    encode_texts,
    num_tokens,
    pooling_of,
)
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.backends.own.pooling import pool
from parrot_gateway.calls.requests.call import BodyDecoder, in_thread_if_large
from parrot_gateway.calls.requests.types import AtLeast0
from parrot_gateway.exceptions import (
    InvalidRequestError,
    empty_array,
    long_array,
    missing_parameter,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.telemetry.call_record import CallObserver

#: Of one request.
MAX_DOCUMENTS = 2048
MAX_TOKENS = 1_000_000

Instruction: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class Document(msgspec.Struct):
    """A document to rerank; what else it holds is not read."""

    text: str


class RerankBody(msgspec.Struct):
    """`POST /v1/rerank`."""

    model: str | None = None
    query: str | None = None
    documents: list[str | Document] | None = None
    top_n: AtLeast0 | None = None
    return_documents: bool | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    #: What documents are wanted for, of models whose template has a place for it.
    instruction: Instruction | None = None


class ScoreBody(msgspec.Struct):
    """`POST /v1/score`."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    #: What documents are wanted for, of models whose template has a place for it.
    instruction: Instruction | None = None


_RERANK = BodyDecoder(RerankBody)
_SCORE = BodyDecoder(ScoreBody)


async def handle_rerank(
    exchange: Exchange, placer: Placer, model: str, body: bytes, deadline: float
) -> None:
    """Answer with the documents, most relevant first; arguments as of `handle_embeddings`.

    Raises:
        InvalidRequestError: naming the field at fault.
        GatewayError: as `pool`.
    """
    pooling_of(placer.info, model, "score")
    request, ignored = await in_thread_if_large(lambda: _RERANK.decode(body), len(body))
    name_ignored(exchange, ignored)
    if request.query is None:
        raise missing_parameter("query")
    if request.documents is None:
        raise missing_parameter("documents")
    documents = [item if isinstance(item, str) else item.text for item in request.documents]
    _check_count("documents", len(documents))
    pairs = [(request.query, document) for document in documents]
    sequences = await encode_texts(
        placer,
        pairs,
        name="documents",
        truncation=request.truncate_prompt_tokens,
        instruction=request.instruction,
    )
    tokens = check_total(num_tokens(sequences), MAX_TOKENS, "documents")
    scores = await _scores(exchange, placer, sequences, deadline)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results: list[dict[str, Any]] = []
    for index in ranked[: request.top_n or len(ranked)]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    await exchange.respond_json(
        {
            "id": f"rerank-{exchange.request_id.removeprefix('req_')}",
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
        }
    )


async def handle_score(
    exchange: Exchange, placer: Placer, model: str, body: bytes, deadline: float
) -> None:
    """Answer with the score of each pair, in order; arguments as of `handle_embeddings`.

    Raises:
        InvalidRequestError: naming the field at fault.
        GatewayError: as `pool`.
    """
    pooling_of(placer.info, model, "score")
    request, ignored = await in_thread_if_large(lambda: _SCORE.decode(body), len(body))
    name_ignored(exchange, ignored)
    first, second = _texts("text_1", request.text_1), _texts("text_2", request.text_2)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"Invalid 'text_2': {len(second)} texts cannot be paired with {len(first)} of "
            "'text_1'. Give one 'text_1' for all, or as many of both.",
            param="text_2",
            code="invalid_value",
        )
    sequences = await encode_texts(
        placer,
        list(zip(first, second, strict=True)),
        name="text_2",
        truncation=request.truncate_prompt_tokens,
        instruction=request.instruction,
    )
    tokens = check_total(num_tokens(sequences), MAX_TOKENS, "text_2")
    scores = await _scores(exchange, placer, sequences, deadline)
    await exchange.respond_json(
        {
            "id": f"score-{exchange.request_id.removeprefix('req_')}",
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _texts(name: str, value: str | list[str] | None) -> list[str]:
    if value is None:
        raise missing_parameter(name)
    texts = [value] if isinstance(value, str) else value
    _check_count(name, len(texts))
    return texts


def _check_count(name: str, count: int) -> None:
    if not count:
        raise empty_array(name)
    if count > MAX_DOCUMENTS:
        raise long_array(name, MAX_DOCUMENTS, count)


async def _scores(
    exchange: Exchange, placer: Placer, sequences: Sequence[PoolingTokens], deadline: float
) -> list[float]:
    observer, values = CallObserver(exchange.record), array("f")
    values.frombytes(b"".join(await pool(placer, sequences, deadline=deadline, observer=observer)))
    return values.tolist()
