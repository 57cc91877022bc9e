"""Request bodies of the Responses API, for models of our own engines: shapes, checks, items.

Text only, structured if asked for. What such a model cannot do (tools, images, files, background)
is refused by name, worded as OpenAI's errors. What a body becomes is decided in `create`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import Meta
from parrot_engine.protocol import EngineInfo, Grammar

from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    empty_array,
    missing_parameter,
    mutually_exclusive,
    unsupported_value,
    wrong_type,
)
from parrot_gateway.generation.requests.grammars import (
    check_supported,
    grammar_of_text_format,
    requested_grammar,
)
from parrot_gateway.generation.requests.types import (
    MAX_METADATA,
    AtLeast0,
    AtLeast1,
    ContentPart,
    SamplingFields,
    TopLogprobs,
)
from parrot_gateway.generation.requests.validation import check_choice, refuse
from parrot_gateway.generation.responses.items import Item, Part, Role, mint_item_id

#: Items of one request; a conversation's requests may hold fewer.
MAX_ITEMS = 10_000
MAX_CONVERSATION_ITEMS = 20

LOGPROBS = "message.output_text.logprobs"
#: Values of `include`; only log-probabilities are ever there.
_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    LOGPROBS,
)
_ITEM_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
_WHY = "is not supported with this model"


#: As much as OpenAI takes.
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=MAX_METADATA),
]


class InputItem(msgspec.Struct):
    """One item of `input`; of all kinds only messages are read."""

    type: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    status: str | None = None


#: Of one request.
Items: TypeAlias = Annotated[list[InputItem], Meta(max_length=MAX_ITEMS)]


class ConversationRef(msgspec.Struct):
    """`conversation`, given as an object."""

    id: str


class InputFields(msgspec.Struct):
    """The fields that the prompt of a response is made from."""

    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused unless harmless.
    tools: Any = None
    tool_choice: Any = None
    text: dict[str, Any] | None = None
    prompt: Any = None
    personality: Any = None


class ResponseBody(SamplingFields):
    """`POST /v1/responses`."""

    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationRef | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: AtLeast1 | None = None
    top_logprobs: TopLogprobs | None = None
    include: list[str] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    # Accepted whatever they say, and repeated in the answer.
    max_tool_calls: AtLeast0 | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # Refused unless harmless.
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    moderation: Any = None
    personality: Any = None
    prompt: Any = None
    text: dict[str, Any] | None = None
    tool_choice: Any = None
    tools: Any = None


class ConversationBody(msgspec.Struct):
    """`POST /v1/conversations`, and `POST /v1/conversations/{id}`."""

    model: str | None = None
    items: Annotated[list[InputItem], Meta(max_length=MAX_CONVERSATION_ITEMS)] | None = None
    metadata: Metadata | None = None


def check_response(body: ResponseBody) -> None:
    """Check the fields that need no look-up, but for the sampling.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    for number, name in enumerate(body.include or ()):
        check_choice(f"include[{number}]", name, _INCLUDES)
    check_choice("service_tier", body.service_tier, _SERVICE_TIERS)
    if body.max_tokens is not None:
        raise UnsupportedError(
            "Unsupported parameter: 'max_tokens' is called 'max_output_tokens' here.",
            param="max_tokens",
        )
    if body.n not in (None, 1):
        raise UnsupportedError(
            "Unsupported parameter: 'n' above 1 has no place in a response.", param="n"
        )
    if body.return_token_ids:
        raise UnsupportedError(
            f"Unsupported parameter: 'return_token_ids' {_WHY}.", param="return_token_ids"
        )
    refuse(body, ("background", "access_programs", "context_management", "moderation"), _WHY)
    check_input_fields(body)


def check_input_fields(body: ResponseBody | InputFields) -> None:
    """Check what responses and the counting of their input tokens have in common.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    refuse(body, ("prompt", "personality"), _WHY)
    _check_tools(body)
    _check_text(body.text)
    check_choice("truncation", body.truncation, ("auto", "disabled"))
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise wrong_type("reasoning.effort", "a string")
        check_choice("reasoning.effort", effort, _EFFORTS)
    if body.previous_response_id is not None and body.conversation is not None:
        raise InvalidRequestError(
            "Mutually exclusive parameters: 'previous_response_id' and 'conversation' cannot be "
            "used together.",
            param="previous_response_id",
            code="mutually_exclusive_parameters",
        )


def _check_tools(body: ResponseBody | InputFields) -> None:
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported_value("tool_choice", f"'tool_choice' other than 'none' {_WHY}.")
    if body.tools is not None and not isinstance(body.tools, list):
        raise wrong_type("tools", "an array")
    if body.tool_choice != "none":
        refuse(body, ("tools",), _WHY)


def _check_text(text: dict[str, Any] | None) -> None:
    if text is None:
        return
    grammar_of_text_format(text.get("format"), "text.format")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported_value("text.verbosity", f"'text.verbosity' other than 'medium' {_WHY}.")


def response_grammar(body: ResponseBody, info: EngineInfo) -> tuple[Grammar | None, str | None]:
    """The grammar that the output has to follow, and the field that sets it.

    Raises:
        InvalidRequestError: a field is malformed, or two ask for something.
        UnsupportedError: this model's engine follows no grammar.
    """
    other, name = requested_grammar(body, info)
    grammar = grammar_of_text_format((body.text or {}).get("format"), "text.format")
    if grammar is None:
        return other, name or None
    if other is not None:
        raise mutually_exclusive("text.format", name)
    check_supported(info, "text.format")
    return grammar, "text.format"


def items_of(input: str | list[InputItem] | None, param: str = "input") -> list[Item]:
    """The items that a request brings, each with an id of ours.

    Raises:
        InvalidRequestError: naming the item and the field at fault.
        UnsupportedError: an item that is no message, or content that is no text.
    """
    if input is None:
        return []
    if isinstance(input, str):
        return [Item(mint_item_id(), "user", (Part(input),))]
    return [_item(item, f"{param}[{number}]") for number, item in enumerate(input)]


def _item(item: InputItem, path: str) -> Item:
    if item.type not in (None, "message"):
        raise unsupported_value(
            f"{path}.type", f"an item of type '{item.type[:64]}' {_WHY}; only messages are."
        )
    if item.role is None:
        raise missing_parameter(f"{path}.role")
    check_choice(f"{path}.role", item.role, _ITEM_ROLES)
    return Item(mint_item_id(), cast(Role, item.role), tuple(_parts(item, path)))


def _parts(item: InputItem, path: str) -> list[Part]:
    if item.content is None:
        raise missing_parameter(f"{path}.content")
    if isinstance(item.content, str):
        return [Part(item.content)]
    if not item.content:
        raise empty_array(f"{path}.content")
    return [_part(part, f"{path}.content[{n}]") for n, part in enumerate(item.content)]


def _part(part: ContentPart, path: str) -> Part:
    kind: Literal["text", "refusal"] = "refusal" if part.type == "refusal" else "text"
    if part.type not in _TEXT_PARTS and kind != "refusal":
        raise unsupported_value(
            f"{path}.type", f"content of type '{part.type[:64]}' {_WHY}; only text is."
        )
    text = part.refusal if kind == "refusal" else part.text
    if text is None:
        raise missing_parameter(f"{path}.{kind}")
    return Part(text, is_refusal=kind == "refusal")
