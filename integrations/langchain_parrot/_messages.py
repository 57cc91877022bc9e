"""Converts LangChain messages to OpenAI's wire form, and answers to messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

#: Blocks of an assistant's content that chat completions cannot carry: reasoning, and calls, which
#: are in `tool_calls`.
_NOT_CONTENT = frozenset(
    {
        "reasoning",
        "thinking",
        "redacted_thinking",
        "tool_call",
        "tool_call_chunk",
        "invalid_tool_call",
        "function_call",
    }
)


def to_wire(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return the `messages` of a request body.

    Texts, images, audio and files in any of LangChain's forms are sent in OpenAI's form.
    """
    wire: list[dict[str, Any]] = []
    for message in messages:
        converted = convert_to_openai_messages([_prepared(message)])
        for one in converted:
            if one["role"] == "tool":
                # OpenAI's tool messages have no name, and strict servers refuse one.
                one.pop("name", None)
        if isinstance(message, AIMessage) and message.invalid_tool_calls:
            # The model must see the call it wrote, so that the answer to it has a counterpart.
            calls = [_invalid_on_wire(call) for call in message.invalid_tool_calls]
            converted[0].setdefault("tool_calls", []).extend(calls)
        wire.extend(converted)
    return wire


def _prepared(message: BaseMessage) -> BaseMessage:
    """Remove blocks that are no content, so that langchain_core can convert the message."""
    if isinstance(message.content, str) or not isinstance(message, AIMessage):
        return message
    content = [
        block
        for block in message.content
        if isinstance(block, str) or block.get("type") not in _NOT_CONTENT
    ]
    return message.model_copy(update={"content": content})


def _invalid_on_wire(call: InvalidToolCall) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["args"]}
    return {"type": "function", "id": call["id"], "function": function}


def _additional(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a message or delta that LangChain keeps beside the content."""
    additional: dict[str, Any] = {}
    # `reasoning` is vLLM's newer name; DeepSeek and SGLang use the other.
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        additional["reasoning_content"] = reasoning
    for name in ("refusal", "audio"):
        if message.get(name):
            additional[name] = message[name]
    return additional


def to_message(answered: Mapping[str, Any], usage: UsageMetadata | None) -> AIMessage:
    """Convert one choice of an answer to a message.

    A tool call whose arguments are no JSON object goes to `invalid_tool_calls`.
    """
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for raw in answered.get("tool_calls") or ():
        try:
            call = parse_tool_call(raw, return_id=True)
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(raw, str(error)))
            continue
        if call is None:
            # A custom tool's call, which this package does not offer.
            continue
        if isinstance(call["args"], dict):
            calls.append(ToolCall(name=call["name"], args=call["args"], id=call["id"]))
        else:
            invalid.append(make_invalid_tool_call(raw, "The arguments are no JSON object."))
    return AIMessage(
        content=answered.get("content") or "",
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs=_additional(answered),
        usage_metadata=usage,
    )


def to_chunk(delta: Mapping[str, Any]) -> AIMessageChunk:
    """Convert one event of a stream to a message chunk."""
    return AIMessageChunk(
        content=delta.get("content") or "",
        tool_call_chunks=[_call_chunk(raw) for raw in delta.get("tool_calls") or ()],
        additional_kwargs=_additional(delta),
    )


def _call_chunk(raw: Mapping[str, Any]) -> ToolCallChunk:
    function = raw.get("function") or {}
    return tool_call_chunk(
        name=function.get("name"),
        args=function.get("arguments"),
        id=raw.get("id"),
        index=raw.get("index"),
    )


def to_usage(usage: Mapping[str, Any] | None) -> UsageMetadata | None:
    """Return token counts in LangChain's form; prefix cache hits are `cache_read`."""
    if not usage:
        return None
    prompt_tokens = usage.get("prompt_tokens") or 0
    completion_tokens = usage.get("completion_tokens") or 0
    metadata = UsageMetadata(
        input_tokens=prompt_tokens,
        output_tokens=completion_tokens,
        total_tokens=usage.get("total_tokens") or prompt_tokens + completion_tokens,
    )
    of_prompt = usage.get("prompt_tokens_details") or {}
    inputs = {
        "cache_read": of_prompt.get("cached_tokens"),
        "cache_creation": of_prompt.get("cache_write_tokens"),
        "audio": of_prompt.get("audio_tokens"),
    }
    if any(count is not None for count in inputs.values()):
        known = {name: count for name, count in inputs.items() if count is not None}
        metadata["input_token_details"] = InputTokenDetails(**known)  # type: ignore[typeddict-item]
    of_answer = usage.get("completion_tokens_details") or {}
    outputs = {
        "reasoning": of_answer.get("reasoning_tokens"),
        "audio": of_answer.get("audio_tokens"),
    }
    if any(count is not None for count in outputs.values()):
        known = {name: count for name, count in outputs.items() if count is not None}
        metadata["output_token_details"] = OutputTokenDetails(**known)  # type: ignore[typeddict-item]
    return metadata
