"""`POST /tokenize` and `POST /detokenize`, with the field names of vLLM.

A prompt is tokenized as `/v1/completions` would, a chat as `/v1/chat/completions` would. No engine
is involved: the tokenizer lives in the gateway.
"""

from __future__ import annotations

import asyncio

import msgspec

from parrot_gateway.api.openai.answers import encode
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.call import decode
from parrot_gateway.calls.requests.chat import render_chat
from parrot_gateway.calls.requests.field_checks import check_token_ids
from parrot_gateway.calls.requests.prepared import tokenize
from parrot_gateway.calls.requests.tools import requested_tools
from parrot_gateway.calls.requests.types import ChatBody, DetokenizeBody, TokenizeBody
from parrot_gateway.exceptions import InvalidRequestError, missing_parameter
from parrot_gateway.http.exchange import Exchange

#: Characters that `/tokenize` takes: a tokenizer needs some 80 bytes for each while it works.
MAX_CHARACTERS = 4 * 1024 * 1024
#: Ids that `/detokenize` decodes in place: about a millisecond.
INLINE_TOKENS = 8192

_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


async def handle_tokenize(exchange: Exchange, served: ServedModel, body: bytes) -> None:
    """Answer `{count, max_model_len, tokens, token_strs}`.

    Args:
        exchange: its body has been read, and is `body`.
        served: the model.
        body: `prompt` or `messages`.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    request = decode(body, _TOKENIZE)
    if request.prompt is not None and request.messages is not None:
        raise InvalidRequestError(
            "Give either 'prompt' or 'messages', not both.", param="messages", code="invalid_value"
        )
    if request.prompt is not None:
        text, special = request.prompt, request.add_special_tokens is not False
    elif request.messages is not None:
        use = requested_tools(ChatBody(tools=request.tools))
        tools = () if use is None else use.tools
        text = await render_chat(served.tokenizer, request, len(body), tools)
        special = bool(request.add_special_tokens)
    else:
        raise missing_parameter("prompt")
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequestError(
            f"The text has {len(text)} characters, at most {MAX_CHARACTERS} are tokenized at once.",
            param="prompt" if request.prompt is not None else "messages",
            code="string_above_max_length",
        )
    ids = (await tokenize(served.tokenizer, [text], add_special_tokens=special))[0]

    def answer() -> bytes:
        strings = None
        if request.return_token_strs:
            strings = [served.tokenizer.vocabulary_text(token_id) for token_id in ids]
        limit = served.info.max_context_tokens
        return encode(
            {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings}
        )

    short = len(ids) <= INLINE_TOKENS
    await exchange.respond(200, answer() if short else await asyncio.to_thread(answer))


async def handle_detokenize(exchange: Exchange, served: ServedModel, body: bytes) -> None:
    """Answer `{prompt}`: the text of `tokens`, special ones included by default.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    request = decode(body, _DETOKENIZE)
    if request.tokens is None:
        raise missing_parameter("tokens")
    check_token_ids("tokens", request.tokens, served.info.vocab_size)
    skip = bool(request.skip_special_tokens)
    if len(request.tokens) <= INLINE_TOKENS:
        text = served.tokenizer.decode(request.tokens, skip_special_tokens=skip)
    else:
        text = await asyncio.to_thread(
            served.tokenizer.decode, request.tokens, skip_special_tokens=skip
        )
    await exchange.respond(200, encode({"prompt": text}))
