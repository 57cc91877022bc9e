"""Converts LlamaIndex messages to OpenAI's wire form, and answers back, for chat and
completions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import (
    AudioBlock,
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

_ROLES = {MessageRole.CHATBOT: "assistant", MessageRole.MODEL: "assistant"}


def to_wire(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages for `/v1/chat/completions`.

    Raises:
        ValueError: a message has content that OpenAI's interface cannot express.
    """
    return [_message_to_wire(message) for message in messages]


def _message_to_wire(message: ChatMessage) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, ToolCallBlock):
            calls.append(_call_to_wire(block))
        elif not isinstance(block, ThinkingBlock):
            # Reasoning is not part of the answer.
            parts.append(_part_to_wire(block))
    wire: dict[str, Any] = {"role": _ROLES.get(message.role, message.role.value)}
    if all(part["type"] == "text" for part in parts):
        text = "".join(part["text"] for part in parts)
        wire["content"] = None if calls and not text else text
    else:
        wire["content"] = parts
    known = message.additional_kwargs
    if not calls and known.get("tool_calls"):
        # From memories filled by models older than ToolCallBlock.
        calls = [_plain(call) for call in known["tool_calls"]]
        wire["content"] = wire["content"] or None
    if calls:
        wire["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if known.get(name) is not None:
            wire[name] = known[name]
    return wire


def _call_to_wire(block: ToolCallBlock) -> dict[str, Any]:
    arguments = block.tool_kwargs
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    return {
        "id": block.tool_call_id,
        "type": "function",
        "function": {"name": block.tool_name, "arguments": arguments},
    }


def _plain(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value


def _part_to_wire(block: ContentBlock) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    if isinstance(block, ImageBlock):
        url = str(block.url) if block.url else None
        if url is None:
            encoded = block.resolve_image(as_base64=True).read().decode()
            url = f"data:{block.image_mimetype};base64,{encoded}"
        image = {"url": url, **({"detail": block.detail} if block.detail else {})}
        return {"type": "image_url", "image_url": image}
    if isinstance(block, AudioBlock):
        encoded = block.resolve_audio(as_base64=True).read().decode()
        return {"type": "input_audio", "input_audio": {"data": encoded, "format": block.format}}
    if isinstance(block, DocumentBlock):
        encoded = block.resolve_document().read()
        data = block._get_b64_string(encoded)
        kind = block.document_mimetype or "application/pdf"
        file = {"filename": block.title, "file_data": f"data:{kind};base64,{data}"}
        return {"type": "file", "file": file}
    raise ValueError(f"OpenAI's interface has no form for a message's {type(block).__name__}.")


def _details(answer: Any, parrot: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's `additional_kwargs`: token counts in the form of LlamaIndex's
    counters.
    """
    details: dict[str, Any] = {"parrot": dict(parrot)} if parrot else {}
    usage = getattr(answer, "usage", None)
    if usage is not None:
        details["prompt_tokens"] = usage.prompt_tokens
        details["completion_tokens"] = usage.completion_tokens
        details["total_tokens"] = usage.total_tokens
        cached = getattr(usage.prompt_tokens_details, "cached_tokens", None)
        if cached is not None:
            details["cached_tokens"] = cached
    return details


def _chat_response(
    reasoning: str,
    text: str,
    calls: Sequence[tuple[str | None, str, str]],
    raw: Any,
    parrot: Mapping[str, Any],
    finish_reason: str | None,
    delta: str | None = None,
) -> ChatResponse:
    """Build a response; `calls` has id, name and arguments of each tool call."""
    blocks: list[ContentBlock] = [ThinkingBlock(content=reasoning)] if reasoning else []
    if text or not calls:
        blocks.append(TextBlock(text=text))
    blocks += [
        ToolCallBlock(tool_call_id=id_, tool_name=name, tool_kwargs=arguments or "{}")
        for id_, name, arguments in calls
    ]
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks),
        delta=delta,
        raw=raw,
        additional_kwargs={**_details(raw, parrot), "finish_reason": finish_reason},
    )


def chat_response(answer: Any, parrot: Mapping[str, Any]) -> ChatResponse:
    """Convert a whole chat completion."""
    choice = answer.choices[0]
    calls = [
        (call.id, call.function.name, call.function.arguments)
        for call in choice.message.tool_calls or ()
        if call.type == "function"
    ]
    text = choice.message.content or ""
    reasoning = _reasoning(choice.message)
    return _chat_response(reasoning, text, calls, answer, parrot, choice.finish_reason)


def completion_response(answer: Any, parrot: Mapping[str, Any]) -> CompletionResponse:
    """Convert a whole completion."""
    choice = answer.choices[0]
    return CompletionResponse(
        text=choice.text or "",
        raw=answer,
        additional_kwargs={**_details(answer, parrot), "finish_reason": choice.finish_reason},
    )


def _reasoning(message: Any) -> str:
    """Return the model's reasoning, which servers name differently."""
    for name in ("reasoning_content", "reasoning"):
        text = getattr(message, name, None)
        if isinstance(text, str):
            return text
    return ""


class ChatAssembly:
    """Assembles the chunks of a chat stream; each result has everything so far."""

    def __init__(self) -> None:
        self._text = ""
        self._reasoning = ""
        #: Id, name and arguments, by index.
        self._calls: dict[int, tuple[str | None, str, str]] = {}
        self._finish_reason: str | None = None

    def add(self, chunk: Any, parrot: Mapping[str, Any]) -> ChatResponse:
        """Return the response so far; `delta` is the new part."""
        delta = ""
        if chunk.choices:
            choice = chunk.choices[0]
            self._finish_reason = choice.finish_reason or self._finish_reason
            delta = choice.delta.content or ""
            self._text += delta
            self._reasoning += _reasoning(choice.delta)
            for call in choice.delta.tool_calls or ():
                self._add_call(call)
        calls = [call for _, call in sorted(self._calls.items())]
        return _chat_response(
            self._reasoning, self._text, calls, chunk, parrot, self._finish_reason, delta
        )

    def _add_call(self, delta: Any) -> None:
        # Servers number the calls; an unnumbered one is assumed to continue the last call.
        index = delta.index if delta.index is not None else max(len(self._calls) - 1, 0)
        id_, name, arguments = self._calls.get(index, (None, "", ""))
        function = delta.function
        self._calls[index] = (
            id_ or delta.id or None,
            name + ((function and function.name) or ""),
            arguments + ((function and function.arguments) or ""),
        )


class CompletionAssembly:
    """Assembles the chunks of a completion stream."""

    def __init__(self) -> None:
        self._text = ""
        self._finish_reason: str | None = None

    def add(self, chunk: Any, parrot: Mapping[str, Any]) -> CompletionResponse:
        """Return the response so far; `delta` is the new part."""
        delta = ""
        if chunk.choices:
            delta = chunk.choices[0].text or ""
            self._finish_reason = chunk.choices[0].finish_reason or self._finish_reason
        self._text += delta
        return CompletionResponse(
            text=self._text,
            delta=delta,
            raw=chunk,
            additional_kwargs={**_details(chunk, parrot), "finish_reason": self._finish_reason},
        )


class Endpoint(NamedTuple):
    """One of the two ways to ask a model.

    Attributes:
        resource: the `openai` client's resource with `create`.
        prompt_fields: builds the body field of the prompt or the messages.
        response: builds LlamaIndex's response from a whole answer and the gateway's headers.
        assembly: makes the object that assembles a stream.
    """

    resource: str
    prompt_fields: Callable[[Any], dict[str, Any]]
    response: Callable[[Any, Mapping[str, Any]], Any]
    assembly: Callable[[], ChatAssembly | CompletionAssembly]


CHAT = Endpoint(
    "chat.completions",
    lambda messages: {"messages": to_wire(messages)},
    chat_response,
    ChatAssembly,
)
COMPLETION = Endpoint(
    "completions", lambda prompt: {"prompt": prompt}, completion_response, CompletionAssembly
)
