"""Items of a request's `input`, or of a conversation's `items`: shapes and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

import msgspec

from parrot_gateway.calls.opaque_text import unpack_reasoning
from parrot_gateway.calls.requests.field_checks import check_choice
from parrot_gateway.calls.requests.types import ContentPart
from parrot_gateway.calls.responses.compaction import unpacked
from parrot_gateway.calls.responses.items import (
    CompactionItem,
    Item,
    MessageItem,
    Part,
    ReasoningItem,
    Role,
    ToolCallItem,
    ToolOutputItem,
    mint_item_id,
)
from parrot_gateway.exceptions import (
    NotFoundError,
    empty_array,
    invalid_value,
    missing_parameter,
    unsupported_value,
)

_ITEM_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")
_WHY = "is not supported with this model"


class InputItem(msgspec.Struct):
    """One item; which fields it has depends on its type."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: str | list[ContentPart] | None = None
    status: str | None = None
    # Of calls of tools, and of what these returned.
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    # Of reasoning, and of compactions.
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None


def items_of(
    input: str | list[InputItem] | None,
    param: str = "input",
    find: Callable[[str], Item | None] = lambda item_id: None,
) -> list[Item]:
    """The items that a request brings, each with an id of ours.

    Args:
        param: the field that they are in.
        find: gives the kept item of an id, for references.

    Raises:
        InvalidRequestError: naming the item and the field at fault.
        NotFoundError: a reference to an item that is not kept.
        UnsupportedError: a kind of item that is not offered, or content that is no text.
    """
    if input is None:
        return []
    if isinstance(input, str):
        return [MessageItem(mint_item_id(), "user", (Part(input),))]
    return [_item(item, f"{param}[{number}]", find) for number, item in enumerate(input)]


def check_outputs(history: Iterable[Item], items: Sequence[Item]) -> None:
    """Refuse what a tool returned where no call of it is known.

    Args:
        history: what precedes the items of the request.

    Raises:
        InvalidRequestError: naming the item.
    """
    if not any(isinstance(item, ToolOutputItem) for item in items):
        return
    called = {item.call_id for item in history if isinstance(item, ToolCallItem)}
    for number, item in enumerate(items):
        if isinstance(item, ToolCallItem):
            called.add(item.call_id)
        elif isinstance(item, ToolOutputItem) and item.call_id not in called:
            raise invalid_value(
                f"input[{number}].call_id",
                f"no tool call found for the output with call_id '{item.call_id[:80]}'. Put the "
                "call before it into 'input', or name its response in 'previous_response_id'.",
            )


def _item(item: InputItem, path: str, find: Callable[[str], Item | None]) -> Item:
    match item.type:
        case None | "message":
            return _message(item, path)
        case "function_call" | "custom_tool_call":
            field = "arguments" if item.type == "function_call" else "input"
            return ToolCallItem(
                mint_item_id("fc" if item.type == "function_call" else "ctc"),
                _given(item.call_id, f"{path}.call_id"),
                _given(item.name, f"{path}.name"),
                _given(getattr(item, field), f"{path}.{field}"),
                is_custom=item.type == "custom_tool_call",
                namespace=item.namespace,
            )
        case "function_call_output" | "custom_tool_call_output":
            is_custom = item.type == "custom_tool_call_output"
            return ToolOutputItem(
                mint_item_id("cto" if is_custom else "fco"),
                _given(item.call_id, f"{path}.call_id"),
                "\n".join(part.text for part in _parts(item.output, f"{path}.output")),
                is_custom,
            )
        case "reasoning":
            return _reasoning(item, path)
        case "compaction":
            field = f"{path}.encrypted_content"
            content = _given(item.encrypted_content, field)
            compaction = unpacked(content)
            if compaction is None:
                raise unsupported_value(
                    field,
                    f"'{field}' was not made by this gateway's /v1/responses/compact, and can be "
                    "read where it was made only.",
                )
            return CompactionItem(mint_item_id("cmp"), content, compaction)
        case "item_reference":
            item_id = _given(item.id, f"{path}.id")
            found = find(item_id)
            if found is None:
                raise NotFoundError(
                    f"Item with id '{item_id[:80]}' not found. Items are kept with stored "
                    "responses only; send the item itself.",
                    param=f"{path}.id",
                    code="item_not_found",
                )
            return found
    raise unsupported_value(
        f"{path}.type",
        f"an item of type '{item.type[:64]}' {_WHY}; messages, calls and outputs of functions and "
        "custom tools, reasoning and compactions are.",
    )


def _given(value: str | None, path: str) -> str:
    if value is None:
        raise missing_parameter(path)
    return value


def _message(item: InputItem, path: str) -> MessageItem:
    if item.role is None:
        raise missing_parameter(f"{path}.role")
    check_choice(f"{path}.role", item.role, _ITEM_ROLES)
    if item.content == []:
        raise empty_array(f"{path}.content")
    parts = _parts(item.content, f"{path}.content")
    return MessageItem(mint_item_id(), cast(Role, item.role), tuple(parts))


def _reasoning(item: InputItem, path: str) -> ReasoningItem:
    content = item.content
    if item.encrypted_content is not None and not content:
        content = unpack_reasoning(item.encrypted_content)
    if item.encrypted_content is not None and content is None:
        raise unsupported_value(
            f"{path}.encrypted_content",
            f"'{path}.encrypted_content' was encrypted by another server, and can be read there "
            "only. Leave this item out, or give its text in 'content'.",
        )
    return ReasoningItem(
        mint_item_id("rs"),
        _thoughts(item.summary, f"{path}.summary"),
        _thoughts(content, f"{path}.content"),
    )


def _thoughts(given: str | list[ContentPart] | None, path: str) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    return tuple(_given(part.text, f"{path}[{n}].text") for n, part in enumerate(given or ()))


def _parts(content: str | list[ContentPart] | None, path: str) -> list[Part]:
    if content is None:
        raise missing_parameter(path)
    if isinstance(content, str):
        return [Part(content)]
    return [_part(part, f"{path}[{number}]") for number, part in enumerate(content)]


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
