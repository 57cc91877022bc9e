"""What can be said against a semantic call before anything is sent to a model."""

from __future__ import annotations

import msgspec

from parrot_gateway.api.semantic.fields import SemanticFields
from parrot_gateway.engines.catalog import EngineTarget
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.generation.requests.validation import decode, missing_parameter
from parrot_gateway.semantic.templates.reference import has_reference
from parrot_gateway.server.gateway import Gateway

#: A model's name is kept with its calls, which upstreams that take any name do not bound.
MAX_MODEL_CHARACTERS = 1024


class _Body(msgspec.Struct):
    model: str | None = None
    n: int | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_Body)
_list_decoder = msgspec.json.Decoder(list[msgspec.Raw])


async def check_deferrable(
    gateway: Gateway, path: str, body: bytes, fields: SemanticFields
) -> None:
    """Check a call before it becomes part of a session.

    Raises:
        InvalidRequestError: it would fill a variable with several texts, or has a field that an
            engine of our own refuses.
        ContextLengthError: it is deferred, and its prompt is too long as it stands.
        ModelNotFoundError: nobody serves its model.
    """
    call = decode(body, _decoder)
    if not call.model:
        raise missing_parameter("model")
    if len(call.model) > MAX_MODEL_CHARACTERS:
        raise InvalidRequestError(
            f"Invalid 'model': longer than {MAX_MODEL_CHARACTERS} characters.",
            param="model",
            code="string_above_max_length",
        )
    if fields.transform is not None and fields.output is None and not fields.defer:
        raise InvalidRequestError(
            "A transform is applied to what fills a variable: name an output, or defer the call.",
            param="transform",
            code="invalid_value",
        )
    target = gateway.resolve(call.model)
    if (
        fields.transform is not None
        and fields.transform.needs_tokens
        and not isinstance(target, EngineTarget)
    ):
        raise UnsupportedError(
            f"The model '{call.model}' belongs to the upstream '{target.upstream}', whose "
            "tokenizer this gateway does not have: count characters instead of tokens.",
            param="transform",
            code="unsupported_value",
        )
    if fields.defer or fields.output is not None:
        _check_one_text(call)
    if fields.defer and isinstance(target, EngineTarget):
        is_final = not fields.inputs and not has_reference(body)
        await _check_with_engine(path, body, gateway.engine_of(target.model), is_final=is_final)


async def _check_with_engine(
    path: str, body: bytes, engine: RemoteEngine, *, is_final: bool
) -> None:
    # Imported here because they load the tokenizer's library, which a gateway that only passes
    # calls on does not need.
    if path == "/v1/chat/completions":
        from parrot_gateway.api.openai.chat import check_chat, check_chat_fits

        check_chat(body, engine)
        if is_final:
            await check_chat_fits(body, engine)
    else:
        from parrot_gateway.api.openai.completions import check_completions, check_completions_fit

        check_completions(body, engine)
        if is_final:
            await check_completions_fit(body, engine)


def _check_one_text(call: _Body) -> None:
    if call.n is not None and call.n != 1:
        raise InvalidRequestError(
            "Invalid 'n': a call that fills a variable has one answer, so 'n' must be 1.",
            param="n",
            code="invalid_value",
        )
    prompt = bytes(call.prompt)
    if prompt.startswith(b"["):
        items = _list_decoder.decode(prompt)
        if len(items) > 1 and not all(bytes(item)[:1] in b"-0123456789" for item in items):
            raise InvalidRequestError(
                "Invalid 'prompt': a call that fills a variable has one prompt.",
                param="prompt",
                code="invalid_value",
            )
