"""Requests of the Messages API as requests for a chat, which every model can answer.

Adjacent messages of one role are one turn. Tool results become messages of their own; earlier
thinking becomes the reasoning of its message. What a chat has no place for is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from parrot_gateway.api.anthropic.bodies import (
    Block,
    CountTokensBody,
    MessagesBody,
    ThinkingConfig,
    ToolChoice,
)
from parrot_gateway.api.anthropic.message import ThinkingDisplay
from parrot_gateway.calls.metadata import ServedModel
from parrot_gateway.calls.opaque_text import unpack_reasoning
from parrot_gateway.calls.requests.call import BodyDecoder, CallRequest, read_object
from parrot_gateway.calls.requests.field_checks import check_choice, refuse, tool_name
from parrot_gateway.calls.requests.types import REASONING_SWITCHES, ChatBody
from parrot_gateway.exceptions import (
    empty_array,
    invalid_value,
    missing_parameter,
    unsupported_value,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: How a client of Anthropic's marks a block that is no part of the prompt, and differs each time.
_BILLING = "x-anthropic-billing-header:"
#: Longest `user` that OpenAI takes; it means nothing to a model.
_MAX_USER = 64
_WHY = "is not supported by this gateway"
#: The variable by which some chat templates are told how long the reasoning may be.
_BUDGET = "thinking_budget"

_MESSAGES = BodyDecoder(MessagesBody, ("parrot", "conversation", "prompt_cache_key"))
_COUNT = BodyDecoder(CountTokensBody)


class MessagesAsChat(NamedTuple):
    """A request of the Messages API, as a chat."""

    chat: CallRequest
    #: How reasoning is shown in the answer.
    display: ThinkingDisplay
    #: Names of fields that have no effect.
    ignored: Sequence[str]


def messages_request(received: CallRequest, served: ServedModel | None) -> MessagesAsChat:
    """The call of `POST /v1/messages`. Call it in a thread for a large body.

    Args:
        received: the request as it came.
        served: the model of own engines; None for an upstream, whose model may see images.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    body = received.body
    request, unknown = _MESSAGES.decode(body)
    if request.max_tokens is None:
        raise missing_parameter("max_tokens")
    chat, only_own, display = _chat(request, for_upstream=served is None)
    chat["max_completion_tokens"] = request.max_tokens
    for name in ("temperature", "top_p", "top_k"):
        value = getattr(request, name)
        if value is not None:
            chat[name] = value
    stop = request.stop_sequences
    if stop:
        chat["stop"] = stop
    user = None if request.metadata is None else request.metadata.user_id
    if user is not None and len(user) <= _MAX_USER:
        chat["user"] = user
    if request.stream:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    if b'"parrot"' in body:
        _, fields = read_object(body)
        if "parrot" in fields:
            chat["parrot"] = fields["parrot"]
    ignored = [*unknown, *_without_effect(request, served)]
    return MessagesAsChat(_call(chat, only_own, received), display, ignored)


def count_tokens_request(received: CallRequest, *, for_upstream: bool) -> MessagesAsChat:
    """The same chat for `POST /v1/messages/count_tokens`.

    Args:
        for_upstream: the model belongs to an upstream.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    request, unknown = _COUNT.decode(received.body)
    chat, only_own, display = _chat(request, for_upstream=for_upstream)
    return MessagesAsChat(_call(chat, only_own, received), display, unknown)


def _without_effect(request: MessagesBody, served: ServedModel | None) -> Sequence[str]:
    budget = None if request.thinking is None else request.thinking.budget_tokens
    if budget is None or (
        served is not None and _BUDGET in str(served.tokenizer.assets.chat_template)
    ):
        return ()
    return ("thinking.budget_tokens",)


def _call(chat: dict[str, Any], only_own: dict[str, Any], received: CallRequest) -> CallRequest:
    def typed() -> ChatBody:
        limited = ("stop", "max_completion_tokens", "parrot")
        fields = {name: value for name, value in chat.items() if name not in limited}
        typed = msgspec.convert(fields | only_own, ChatBody)
        # More stop strings and fewer tokens than the chat route takes.
        typed.stop = chat.get("stop")
        typed.max_completion_tokens = chat.get("max_completion_tokens")
        return typed

    return CallRequest(
        "chat",
        lambda: msgspec.json.encode(chat),
        typed=typed,
        head=received.semantic_head,
        size=received.size,
    )


def _chat(
    request: CountTokensBody, *, for_upstream: bool
) -> tuple[dict[str, Any], dict[str, Any], ThinkingDisplay]:
    """The fields that both routes share, those for own engines alone, and how thinking is shown."""
    refuse(request, ("container", "mcp_servers"), _WHY)
    if request.messages is None:
        raise missing_parameter("messages")
    if not request.messages:
        raise empty_array("messages")
    messages: list[dict[str, Any]] = []
    if request.system:
        text = _text_of(request.system, "system")
        if text:
            messages.append({"role": "system", "content": text})
    turns = _Turns(messages, for_upstream=for_upstream)
    paths = ((f"messages[{n}]", message) for n, message in enumerate(request.messages))
    for role, group in groupby(paths, key=lambda pair: pair[1].role):
        blocks: list[tuple[str, Block]] = []
        for path, message in group:
            blocks += _blocks(message.content, f"{path}.content")
        turns.add(role, blocks)
    chat: dict[str, Any] = {"model": request.model, "messages": messages}
    if request.tools:
        chat["tools"] = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        chat |= _tool_choice(request.tool_choice)
    output = None if request.output_config is None else request.output_config.format
    place = "output_format" if output is None else "output_config.format"
    output = output or request.output_format
    if output is not None:
        chat["response_format"] = _response_format(output, f"{place}.type")
    display, only_own = _thinking(request.thinking)
    effort = None if request.output_config is None else request.output_config.effort
    if effort is not None:
        only_own.setdefault("reasoning_effort", effort)
    last = messages[-1] if messages else {"role": "user"}
    if last["role"] == "assistant" and not last.get("tool_calls"):
        # What follows continues it.
        only_own |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat, only_own, display


def _thinking(config: ThinkingConfig | None) -> tuple[ThinkingDisplay, dict[str, Any]]:
    """How thinking is shown, and what turns it on or off on own engines."""
    if config is None or config.type == "disabled":
        return "hidden", {"reasoning_effort": "none"}
    check_choice("thinking.type", config.type, ("enabled", "adaptive", "disabled"))
    check_choice("thinking.display", config.display, ("summarized", "omitted"))
    if config.type == "enabled" and config.budget_tokens is None:
        raise missing_parameter("thinking.budget_tokens")
    variables: dict[str, Any] = dict.fromkeys(REASONING_SWITCHES, True)
    if config.budget_tokens is not None:
        variables[_BUDGET] = config.budget_tokens
    display: ThinkingDisplay = "omitted" if config.display == "omitted" else "shown"
    return display, {"chat_template_kwargs": variables}


def _blocks(content: str | list[Block], path: str) -> list[tuple[str, Block]]:
    if isinstance(content, str):
        return [(path, Block("text", content))]
    return [(f"{path}[{n}]", block) for n, block in enumerate(content)]


class _Turns:
    """Writes turns as messages of a chat.

    Args:
        messages: extended.
        for_upstream: the chat goes to an upstream, whose model may see images.
    """

    def __init__(self, messages: list[dict[str, Any]], *, for_upstream: bool) -> None:
        self._messages = messages
        self._for_upstream = for_upstream

    def add(self, role: str, blocks: Sequence[tuple[str, Block]]) -> None:
        if role == "assistant":
            self._assistant(blocks)
            return
        parts: list[dict[str, Any]] = []
        for path, block in blocks:
            if block.type == "tool_result" and role == "user":
                self._end(role, parts)
                parts = []
                self._tool_result(block, path)
            else:
                parts.append(self._part(block, path))
        self._end(role, parts)

    def _end(self, role: str, parts: list[dict[str, Any]]) -> None:
        """Write what was collected of a turn."""
        if not parts:
            return
        content: Any = parts
        if all(part["type"] == "text" for part in parts):
            content = "\n".join(part["text"] for part in parts)
        self._messages.append({"role": role, "content": content})

    def _part(self, block: Block, path: str) -> dict[str, Any]:
        if block.type == "image" and self._for_upstream:
            return {"type": "image_url", "image_url": {"url": _image_url(block, path)}}
        return {"type": "text", "text": _block_text(block, path)}

    def _tool_result(self, block: Block, path: str) -> None:
        if block.tool_use_id is None:
            raise missing_parameter(f"{path}.tool_use_id")
        text = _text_of(block.content or "", f"{path}.content")
        self._messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})

    def _assistant(self, blocks: Sequence[tuple[str, Block]]) -> None:
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for path, block in blocks:
            if block.type == "tool_use":
                calls.append(_tool_call(block, path))
            elif block.type == "thinking":
                thoughts.append(self._thought(block))
            elif block.type != "redacted_thinking":
                texts.append(_block_text(block, path))
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        thought = "\n".join(filter(None, thoughts))
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        self._messages.append(message)

    def _thought(self, block: Block) -> str:
        """The reasoning of a block. An upstream gets its own only: others may refuse the field."""
        packed = unpack_reasoning(block.signature or "")
        if packed is None and self._for_upstream:
            return ""
        return block.thinking or packed or ""


def _text_of(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    texts: Iterable[str] = (_block_text(block, where) for where, block in _blocks(content, path))
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _block_text(block: Block, path: str) -> str:
    if block.type == "document" and (block.source or {}).get("type") == "text":
        text = (block.source or {}).get("data")
        if not isinstance(text, str):
            raise missing_parameter(f"{path}.source.data")
        return text
    if block.type != "text":
        raise unsupported_value(
            f"{path}.type",
            f"content of type '{block.type[:64]}' is not supported here with this model; text is.",
        )
    if block.text is None:
        raise missing_parameter(f"{path}.text")
    return block.text


def _image_url(block: Block, path: str) -> str:
    source = block.source or {}
    kind = source.get("type")
    if kind == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if kind == "url":
        return str(source.get("url"))
    raise unsupported_value(
        f"{path}.source.type", "an image comes as 'base64' or 'url'; files are not kept here."
    )


def _tool_call(block: Block, path: str) -> dict[str, Any]:
    if block.id is None:
        raise missing_parameter(f"{path}.id")
    if block.name is None:
        raise missing_parameter(f"{path}.name")
    arguments = msgspec.json.encode(block.input or {}).decode()
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise unsupported_value(
            f"{path}.type",
            f"a tool of type '{str(kind)[:64]}' {_WHY}; only tools with a name and an input_schema "
            "are, which the client runs.",
        )
    if "input_schema" not in tool:
        raise missing_parameter(f"{path}.input_schema")
    name = tool_name(tool.get("name"), f"{path}.name")
    function = {"name": name, "parameters": tool["input_schema"]}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    if choice.type == "tool":
        if choice.name is None:
            raise missing_parameter("tool_choice.name")
        chosen: Any = {"type": "function", "function": {"name": choice.name}}
    else:
        check_choice("tool_choice.type", choice.type, (*_CHOICES, "tool"))
        chosen = _CHOICES[choice.type]
    return fields | {"tool_choice": chosen}


def _response_format(output: dict[str, Any], param: str) -> dict[str, Any]:
    if output.get("type") != "json_schema":
        raise invalid_value(param, "expected 'json_schema'.")
    schema = {"name": "output", "schema": output.get("schema"), "strict": True}
    return {"type": "json_schema", "json_schema": schema}
