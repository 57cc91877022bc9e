"""Request bodies of the Responses API, for models of our own engines: shapes and checks.

Text only, structured if asked for, and calls of tools. What such a model cannot do (hosted tools,
images, files) is refused by name, worded as OpenAI's errors. Items are read in `input_items`; what
a body becomes is decided in `create`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from parrot_gateway.api.responses.input_items import InputItem
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.requests.field_checks import check_choice, refuse
from parrot_gateway.calls.requests.grammars import (
    check_supported,
    grammar_of_text_format,
    requested_grammar,
)
from parrot_gateway.calls.requests.output import OutputOptions, output_options
from parrot_gateway.calls.requests.response_tools import response_tools
from parrot_gateway.calls.requests.types import (
    AtLeast0,
    AtLeast1,
    Metadata,
    SamplingFields,
    TopLogprobs,
)
from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    mutually_exclusive,
    unsupported_value,
    wrong_type,
)

#: Items of one request; a conversation's requests may hold fewer.
MAX_ITEMS = 10_000
MAX_CONVERSATION_ITEMS = 20

LOGPROBS = "message.output_text.logprobs"
PACKED_REASONING = "reasoning.encrypted_content"
#: Values of `include`; only these two are ever there.
_INCLUDES = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    PACKED_REASONING,
    LOGPROBS,
)
_SUMMARIES = ("auto", "concise", "detailed")
#: The fields of `reasoning` and their values, and those values that are refused.
_REASONING: dict[str, tuple[str, ...]] = {
    "effort": ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "summary": _SUMMARIES,
    "generate_summary": _SUMMARIES,
    "context": ("auto", "current_turn", "all_turns"),
    "mode": ("standard", "pro"),
}
_REFUSED_REASONING = ("concise", "detailed", "all_turns", "pro")
_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")
_WHY = "is not supported with this model"
#: Fields of other routes, and what they are called here.
_RENAMED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "functions": "tools",
}


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
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    # Refused unless harmless.
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
    text: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Any = None
    tools: Any = None
    # Accepted whatever they say, and repeated in the answer.
    max_tool_calls: AtLeast0 | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    background: bool | None = None
    # Refused unless harmless.
    access_programs: Any = None
    context_management: Any = None
    moderation: Any = None
    personality: Any = None
    prompt: Any = None
    # Of chats, named or written differently here.
    functions: Any = None
    max_completion_tokens: Any = None
    messages: Any = None
    response_format: Any = None


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
    for name, successor in _RENAMED.items():
        if getattr(body, name) is not None:
            raise _of_chats(name, f"is called '{successor}' here")
    if body.n not in (None, 1):
        raise _of_chats("n", "above 1 has no place in a response")
    if body.return_token_ids:
        raise _of_chats("return_token_ids", "is not taken here")
    if body.background and body.store is False:
        raise invalid_value(
            "store", "a response with 'background' has to be stored, to be read later."
        )
    refuse(body, ("access_programs", "context_management", "moderation"), _WHY)
    check_input_fields(body)


def _of_chats(name: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"Unsupported parameter: '{name}' {what}; it is taken by /v1/chat/completions.", param=name
    )


def check_input_fields(body: ResponseBody | InputFields) -> None:
    """Check what responses and the counting of their input tokens have in common.

    Raises:
        InvalidRequestError: naming the first field at fault.
    """
    refuse(body, ("prompt", "personality"), _WHY)
    _check_text(body.text)
    check_choice("truncation", body.truncation, ("auto", "disabled"))
    _check_reasoning(body.reasoning or {})
    if body.previous_response_id is not None and body.conversation is not None:
        raise mutually_exclusive("conversation", "previous_response_id")


def _check_reasoning(reasoning: dict[str, Any]) -> None:
    for name, value in reasoning.items():
        param = f"reasoning.{name}"
        if name not in _REASONING:
            raise InvalidRequestError(
                f"Unknown parameter: '{param[:80]}'.", param=param[:80], code="unknown_parameter"
            )
        if value is not None and not isinstance(value, str):
            raise wrong_type(param, "a string")
        check_choice(param, value, _REASONING[name])
        if value in _REFUSED_REASONING:
            raise unsupported_value(
                param,
                f"'{param}' does not support '{value}' with this model; "
                f"'{_REASONING[name][0]}' is supported.",
            )


def _check_text(text: dict[str, Any] | None) -> None:
    if text is None:
        return
    grammar_of_text_format(text.get("format"), "text.format")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported_value("text.verbosity", f"'text.verbosity' other than 'medium' {_WHY}.")


def response_output(body: ResponseBody, served: ServedModel) -> OutputOptions:
    """Read the constraints on the output: a grammar, and tools that may be called.

    Raises:
        InvalidRequestError: a field is malformed, or two set a grammar.
        UnsupportedError: a tool that is not offered, or this model's engine follows no grammar.
    """
    info = served.info
    grammar, param = requested_grammar(body, info)
    wanted = grammar_of_text_format((body.text or {}).get("format"), "text.format")
    if wanted is not None:
        if grammar is not None:
            raise mutually_exclusive("text.format", param)
        check_supported(info, "text.format")
        grammar, param = wanted, "text.format"
    tools = response_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return output_options(grammar, param or None, tools, served)
