"""`POST /v1/embeddings` for models of own engines.

Fields and limits are OpenAI's; `prompt_name` is that of sentence-transformers and of
text-embeddings-inference, `truncate_prompt_tokens` that of vLLM. Token ids are the model's own, as
in vLLM, and are taken as they are.
"""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
from parrot_engine.protocol import PoolingInfo
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
from parrot_gateway.calls.requests.field_checks import check_choice, check_token_ids
from parrot_gateway.calls.requests.prepared import check_context, texts_of, token_lists_of
from parrot_gateway.calls.requests.types import AtLeast1, Prompts
from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    empty_array,
    invalid_value,
    long_array,
    missing_parameter,
    unsupported_value,
)
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.telemetry.call_record import CallObserver

#: OpenAI's limits of one request.
MAX_INPUTS = 2048
MAX_TOKENS = 300_000
#: Numbers that are written in place: about a millisecond.
_INLINE_VALUES = 8192

#: OpenAI's models, whose token ids are of a vocabulary that no model of our own engines has.
_OPENAI_MODELS = frozenset(
    {"text-embedding-3-large", "text-embedding-3-small", "text-embedding-ada-002"}
)
_TEXTS_INSTEAD = (
    "Send texts; LangChain's OpenAIEmbeddings does with check_embedding_ctx_length=False."
)


class EmbeddingBody(msgspec.Struct):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: Prompts | None = None
    encoding_format: str | None = None
    dimensions: AtLeast1 | None = None
    user: str | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: Truncation | None = None


_BODY = BodyDecoder(EmbeddingBody)


async def handle_embeddings(
    exchange: Exchange, placer: Placer, model: str, body: bytes, deadline: float
) -> None:
    """Answer with a list of vectors.

    Args:
        exchange: its body has been read, and is `body`.
        placer: the engines of the model.
        model: as the caller named it.
        body: the request's.
        deadline: see `pool`.

    Raises:
        InvalidRequestError: naming the field at fault.
        GatewayError: as `pool`.
    """
    pooling = pooling_of(placer.info, model, "embed")
    request, ignored = await in_thread_if_large(lambda: _BODY.decode(body), len(body))
    name_ignored(exchange, ignored)
    check_choice("encoding_format", request.encoding_format, ("float", "base64"))
    _check_dimensions(request.dimensions, pooling, model)
    sequences = await _sequences(request, placer, pooling)
    tokens = check_total(num_tokens(sequences), MAX_TOKENS, "input")
    size = pooling.dimensions if request.dimensions is None else request.dimensions
    dimensions = None if size == pooling.dimensions else size
    observer = CallObserver(exchange.record)
    values = await pool(
        placer, sequences, deadline=deadline, dimensions=dimensions, observer=observer
    )
    as_text = request.encoding_format == "base64"

    def answer() -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": _embedding(each, as_text)}
            for index, each in enumerate(values)
        ]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})

    short = len(values) * size <= _INLINE_VALUES
    await exchange.respond(200, answer() if short else await asyncio.to_thread(answer))


def _embedding(values: bytes, as_text: bool) -> Any:
    if as_text:
        return base64.b64encode(values).decode()
    numbers = array("f")
    numbers.frombytes(values)
    return numbers.tolist()


def _check_dimensions(dimensions: int | None, pooling: PoolingInfo, model: str) -> None:
    if dimensions is None or dimensions == pooling.dimensions:
        return
    if dimensions > pooling.dimensions:
        raise invalid_value(
            "dimensions",
            f"the vectors of '{model}' have {pooling.dimensions}, but got {dimensions} instead.",
        )
    if not pooling.is_matryoshka:
        raise unsupported_value(
            "dimensions",
            f"'{model}' was not trained for shorter vectors (Matryoshka), so that parts of its "
            f"{pooling.dimensions} dimensions say little. Where it was, its config.json says so: "
            '"is_matryoshka": true.',
        )
    sizes = pooling.matryoshka_dimensions
    if sizes and dimensions not in sizes:
        shown = ", ".join(map(str, sizes))
        raise unsupported_value("dimensions", f"'{model}' has vectors of {shown} dimensions.")


async def _sequences(
    request: EmbeddingBody, placer: Placer, pooling: PoolingInfo
) -> Sequence[PoolingTokens]:
    given = request.input
    if given is None:
        raise missing_parameter("input")
    if given == []:
        raise empty_array("input")
    if isinstance(given, list) and len(given) > MAX_TOKENS:
        # Too long in every form, so that the form needs no look at each item.
        raise long_array("input", MAX_INPUTS, len(given))
    if (texts := texts_of(given)) is not None:
        _check_count(len(texts))
        _check_no_empty(texts)
        prompt = _prompt(request.prompt_name, pooling)
        return await encode_texts(
            placer,
            [(prompt + text, None) for text in texts],
            name="input",
            truncation=request.truncate_prompt_tokens,
        )
    lists = token_lists_of(given, "input")
    _check_count(len(lists))
    _check_no_empty(lists)
    return _of_ids(request, lists, placer, pooling)


def _of_ids(
    request: EmbeddingBody, lists: Sequence[list[int]], placer: Placer, pooling: PoolingInfo
) -> list[PoolingTokens]:
    if request.prompt_name is not None:
        raise InvalidRequestError(
            "'prompt_name' goes with texts: token ids are taken as they are.", param="prompt_name"
        )
    if request.model in _OPENAI_MODELS:
        raise UnsupportedError(
            f"Token ids for '{request.model}' are of OpenAI's vocabulary; the model that stands "
            f"for it here has another. {_TEXTS_INSTEAD}",
            param="input",
            code="unsupported_value",
        )
    limit = pooling.max_tokens
    if (cut := request.truncate_prompt_tokens) is not None:
        lists = [ids[: limit if cut == -1 else min(cut, limit)] for ids in lists]
    # First what takes no look at each id: there may be millions.
    check_total(sum(map(len, lists)), MAX_TOKENS, "input")
    for ids in lists:
        check_context(limit, len(ids), 0, param="input", noun="input")
        try:
            check_token_ids("input", ids, placer.info.vocab_size)
        except InvalidRequestError as error:
            error.message += f" Were they made for another model? {_TEXTS_INSTEAD}"
            raise
    return [PoolingTokens(ids, None) for ids in lists]


def _check_count(count: int) -> None:
    if count > MAX_INPUTS:
        raise long_array("input", MAX_INPUTS, count)


def _check_no_empty(items: Sequence[str] | Sequence[list[int]]) -> None:
    for index, item in enumerate(items):
        if not item:
            what = "input cannot be an empty string" if item == "" else "input has no tokens"
            raise InvalidRequestError(
                f"Invalid 'input[{index}]': {what}.", param="input", code="invalid_value"
            )


def _prompt(name: str | None, pooling: PoolingInfo) -> str:
    chosen = pooling.default_prompt if name is None else name
    if chosen is None:
        return ""
    if chosen not in pooling.prompts:
        if not pooling.prompts:
            raise unsupported_value("prompt_name", "this model has no prompts.")
        check_choice("prompt_name", chosen, sorted(pooling.prompts))
    return pooling.prompts[chosen]
