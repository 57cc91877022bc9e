"""Chat messages: from the request's body to what a template reads, and to the prompt's text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
from parrot_engine.text import ChatTemplateError, Tokenizer

from parrot_gateway.exceptions import InvalidRequestError, UnsupportedError
from parrot_gateway.generation.requests.types import ChatBody, Message, TokenizeBody
from parrot_gateway.generation.requests.validation import (
    check_choice,
    check_length,
    missing_parameter,
    nested_too_deeply,
)
from parrot_gateway.generation.tools.definitions import Tool, described_in_text, knows_tools

#: Bodies that are rendered in place: about a millisecond.
INLINE_BYTES = 32 * 1024

#: Messages of one chat. Templates take some 0.1 ms for each, and nothing ends them.
MAX_MESSAGES = 16_384

ROLES = ("developer", "system", "user", "assistant", "tool", "function")

#: Templates know neither of these: `developer` is OpenAI's newer word for `system`, `function`
#: its older one for `tool`.
_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}

_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA_PARTS = ("image_url", "input_image", "input_audio", "audio", "video_url", "file",
                "input_file")  # fmt: skip

#: Variables that the gateway itself gives to a template.
_RESERVED = frozenset(
    {"messages", "tools", "documents", "template", "chat_template", "add_generation_prompt",
     "continue_final_message", "self"}
)  # fmt: skip


async def render_chat_aside(
    tokenizer: Tokenizer,
    body: ChatBody | TokenizeBody,
    num_bytes: int,
    tools: Sequence[Tool] = (),
) -> str:
    """`render_chat`, in a thread when the body it came in is large, so that nobody else waits.

    A cancelled wait leaves the thread to finish; nothing reads the result.
    """
    if num_bytes <= INLINE_BYTES:
        return render_chat(tokenizer, body, tools)
    return await asyncio.to_thread(render_chat, tokenizer, body, tools)


def render_chat(
    tokenizer: Tokenizer, body: ChatBody | TokenizeBody, tools: Sequence[Tool] = ()
) -> str:
    """The prompt text of a chat, as the model's template writes it.

    `add_generation_prompt` is true unless the last message is to be continued. The model is told of
    `tools`, by its template or, where that knows none, in words.

    Raises:
        InvalidRequestError: a message is not valid, the template refuses the chat, or the model
            has none.
        UnsupportedError: a message holds more than text.
    """
    messages = template_messages(body.messages)
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            raise InvalidRequestError(
                f"Invalid 'chat_template_kwargs': '{name[:64]}' cannot be set.",
                param="chat_template_kwargs",
                code="invalid_value",
            )
    effort = getattr(body, "reasoning_effort", None)
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and opens:
        raise InvalidRequestError(
            "'continue_final_message' and 'add_generation_prompt' exclude each other.",
            param="continue_final_message",
            code="invalid_value",
        )
    tool_dicts = None
    try:
        if tools and knows_tools(tokenizer):
            tool_dicts = [tool.to_dict() for tool in tools]
        elif tools:
            messages = described_in_text(messages, tools)
        return tokenizer.render_chat(
            messages,
            tools=tool_dicts,
            add_generation_prompt=opens,
            continue_final_message=continues,
            **variables,
        )
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error)[:1000], param="messages") from None
    except RecursionError:
        # NOTE: whatever works on a document in Python stops at fewer levels than its decoder.
        raise nested_too_deeply() from None


def template_messages(messages: list[Message] | None) -> list[dict[str, Any]]:
    """Messages as templates read them: content as one string, arguments of tool calls as objects.

    Text parts are joined by line breaks.

    Raises:
        InvalidRequestError: naming the message and field at fault.
        UnsupportedError: a part that is no text.
    """
    if messages is None:
        raise missing_parameter("messages")
    if not messages:
        raise InvalidRequestError(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got "
            "an empty array instead.",
            param="messages",
            code="empty_array",
        )
    check_length("messages", messages, MAX_MESSAGES)
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    role = message.role
    check_choice(f"{path}.role", role, ROLES)
    if message.audio is not None:
        raise UnsupportedError(
            "Unsupported parameter: 'audio' in messages is not supported with this model.",
            param=f"{path}.audio",
        )
    if role == "tool" and message.tool_call_id is None:
        raise missing_parameter(f"{path}.tool_call_id")
    content = _content(message, path)
    if content is None and not (
        role == "assistant" and (message.tool_calls or message.function_call)
    ):
        raise InvalidRequestError(
            "Invalid value for 'content': expected a string, got null.",
            param=f"{path}.content",
            code="invalid_type",
        )
    shown: dict[str, Any] = {"role": _TEMPLATE_ROLES.get(role, role), "content": content or ""}
    if message.name is not None:
        shown["name"] = message.name
    if message.tool_call_id is not None:
        shown["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        shown["reasoning_content"] = message.reasoning_content
    calls = message.tool_calls or []
    if message.function_call is not None:
        calls = [{"type": "function", "function": message.function_call}]
    if calls:
        shown["tool_calls"] = [_tool_call(call) for call in calls]
    return shown


def _content(message: Message, path: str) -> str | None:
    if message.content is None:
        return message.refusal
    if isinstance(message.content, str):
        return message.content
    texts: list[str] = []
    for number, part in enumerate(message.content):
        if part.type in _TEXT_PARTS:
            text = part.text
        elif part.type == "refusal":
            text = part.refusal
        elif part.type in _MEDIA_PARTS:
            raise UnsupportedError(
                f"Unsupported value: content of type '{part.type}' is not supported with this "
                "model; only text is.",
                param=f"{path}.content[{number}].type",
                code="unsupported_value",
            )
        else:
            check_choice(f"{path}.content[{number}].type", part.type, ("text", "refusal"))
            text = None
        if text is None:
            field = "refusal" if part.type == "refusal" else "text"
            raise missing_parameter(f"{path}.content[{number}].{field}")
        texts.append(text)
    if not texts:
        raise InvalidRequestError(
            f"Invalid '{path}.content': empty array. Expected an array with minimum length 1, but "
            "got an empty array instead.",
            param=f"{path}.content",
            code="empty_array",
        )
    return "\n".join(texts)


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments, JSON in a string, are opened for the template."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
