"""Tools that a model may call, and how a chat shows them.

A chat template that knows tools gets them, and earlier calls, as they are. For any other the chat
is rewritten: the system message lists the tools and how to call them (in the words of the Hermes
models), earlier calls and their results become text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from parrot_engine.text import TextAssets, Tokenizer

from parrot_gateway.calls.tools.parsing import ToolFormat

ToolMode: TypeAlias = Literal["auto", "required"]

_KNOWS_TOOLS = re.compile(r"\btools\b")

_PREAMBLE = (
    "You can call functions to help with the user's request. Their signatures are within "
    "<tools></tools>:\n<tools>\n{tools}\n</tools>\n\nFor each call, write a JSON object with the "
    "function's name and its arguments within <tool_call></tool_call>:\n<tool_call>\n"
    '{{"name": <name>, "arguments": <object of arguments>}}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str | None = None
    #: A JSON schema of its arguments; None takes none, or any.
    parameters: Mapping[str, Any] | None = None
    #: Its arguments have to be valid whenever it is called.
    strict: bool = False
    #: In Lark's notation: what its only argument, `input`, has to follow. It is written raw then.
    input_grammar: str | None = None

    def within(self, namespace: str, preface: str) -> Tool:
        """The tool as a model sees it that is one of a namespace.

        Args:
            preface: precedes its description.
        """
        description = "\n\n".join(text for text in (preface, self.description) if text)
        name = qualified_name(namespace, self.name)
        return replace(self, name=name, description=description or None)

    def to_dict(self) -> dict[str, Any]:
        """Write the tool as the API does, for templates."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters or {"type": "object", "properties": {}})
        return {"type": "function", "function": function}


def qualified_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool, which may belong to a namespace."""
    return name if namespace is None else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one call, and how they may be used."""

    #: Those shown to the model.
    tools: Sequence[Tool]
    #: Those that it may call.
    callable: Sequence[Tool]
    mode: ToolMode
    parallel: bool


def tool_format(tokenizer: Tokenizer) -> ToolFormat:
    """How a model writes calls, by its chat template."""
    source = template_source(tokenizer.assets)
    if "[TOOL_CALLS]" in source:
        return "mistral"
    if "<tool_call>" in source or not knows_tools(tokenizer):
        return "hermes"
    if "<|python_tag|>" in source or '"parameters"' in source:
        return "llama"
    return "hermes"


def knows_tools(tokenizer: Tokenizer) -> bool:
    """Return whether the chat template reads `tools`."""
    return _KNOWS_TOOLS.search(template_source(tokenizer.assets)) is not None


def template_source(assets: TextAssets) -> str:
    """The chat template of a model, the one for tools where there are several; empty without."""
    source = assets.chat_template
    if isinstance(source, dict):
        return source.get("tool_use") or source.get("default") or ""
    return source or ""


def described_in_text(
    messages: Sequence[dict[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """A chat for a template that knows nothing of tools.

    Args:
        messages: as templates read them.
        tools: those shown to the model.
    """
    lines = "\n".join(json.dumps(tool.to_dict(), ensure_ascii=False) for tool in tools)
    preamble = _PREAMBLE.format(tools=lines)
    chat = [_in_words(message) for message in messages]
    if chat and chat[0]["role"] == "system":
        own = chat[0]["content"]
        chat[0] = {**chat[0], "content": f"{own}\n\n{preamble}" if own else preamble}
        return chat
    return [{"role": "system", "content": preamble}, *chat]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [message["content"]] if message.get("content") else []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict):
            said = {"name": function.get("name"), "arguments": function.get("arguments")}
            texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
    rest = {key: item for key, item in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}
