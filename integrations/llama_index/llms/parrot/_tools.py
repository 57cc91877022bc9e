"""Tools: how a call offers them, and which of them an answer calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatResponse, ToolCallBlock
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.llms.parrot._structured import closed

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


def tool_fields(
    tools: Sequence[BaseTool],
    *,
    strict: bool,
    required: bool,
    choice: str | dict[str, Any] | None,
    parallel: bool,
) -> dict[str, Any]:
    """The fields of a body that offer tools.

    Args:
        tools: at least one.
        strict: whether arguments have to follow their schemas.
        required: whether one has to be called, where `choice` says nothing.
        choice: OpenAI's `tool_choice`, or the name of a tool.
        parallel: whether several may be called.
    """
    if choice is None:
        choice = "required" if required else "auto"
    elif isinstance(choice, str) and choice not in ("none", "auto", "required"):
        choice = {"type": "function", "function": {"name": choice}}
    return {
        "tools": [_described(tool, strict) for tool in tools],
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
    }


def keep_one_call(response: ChatResponse) -> None:
    """Drop all calls but the first."""
    superfluous = _calls_of(response)[1:]
    blocks = response.message.blocks
    response.message.blocks = [block for block in blocks if block not in superfluous]


def selections(response: ChatResponse, *, must_call: bool) -> list[ToolSelection]:
    """The calls of a response; arguments of a stream may still be incomplete.

    Raises:
        ValueError: there are none, and `must_call`.
    """
    calls = _calls_of(response)
    if not calls and must_call:
        raise ValueError(
            "The model called no tool. tool_required=True makes it; it said: "
            f"{(response.message.content or '')[:200]!r}"
        )
    return [
        ToolSelection(
            tool_id=call.tool_call_id or "",
            tool_name=call.tool_name,
            tool_kwargs=_arguments_of(call),
        )
        for call in calls
    ]


def _calls_of(response: ChatResponse) -> list[ToolCallBlock]:
    return [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]


def _described(tool: BaseTool, strict: bool) -> dict[str, Any]:
    described: dict[str, Any] = tool.metadata.to_openai_tool(skip_length_check=True)
    if strict:
        function = described["function"]
        function["strict"] = True
        function["parameters"] = closed(function["parameters"])
    return described


def _arguments_of(call: ToolCallBlock) -> dict[str, Any]:
    if not isinstance(call.tool_kwargs, str):
        return call.tool_kwargs
    try:
        arguments = parse_partial_json(call.tool_kwargs)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
