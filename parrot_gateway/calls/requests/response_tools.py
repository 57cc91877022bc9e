"""The tools of a response: functions and custom tools, written flat, and namespaces of them.

A custom tool takes a text. To a model it is a function with the one argument `input`. A model
knows no namespaces: the function `get` of `shop` is `shop__get` to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from parrot_gateway.calls.requests.field_checks import tool_name
from parrot_gateway.calls.requests.grammars import check_size
from parrot_gateway.calls.requests.tools import ToolFields, function_tool, optional_text, tool_use
from parrot_gateway.calls.tools.definitions import Tool, ToolUse, qualified_name
from parrot_gateway.exceptions import (
    InvalidRequestError,
    UnsupportedError,
    invalid_value,
    missing_parameter,
    unsupported_value,
    wrong_type,
)

#: Tools that the server is to run, by the beginning of their type.
_HOSTED = (
    "web_search", "file_search", "code_interpreter", "computer", "image_generation", "mcp",
    "local_shell", "shell", "apply_patch", "tool_search", "programmatic_tool_calling",
)  # fmt: skip


def response_tools(tools: Any, choice: Any, parallel: bool | None) -> ToolUse | None:
    """The tools of a response; None when it has none, or none may be called.

    Args:
        tools, choice, parallel: `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        InvalidRequestError: naming the field at fault.
        UnsupportedError: a tool that the server would have to run.
    """
    return tool_use(tools, choice, parallel, _FIELDS)


def shown_tools(tools: list[Any] | None) -> list[Any]:
    """Checked tools, as an answer repeats them."""
    return [
        {"parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
        for tool in tools or ()
    ]


class ToolName(NamedTuple):
    """A client's name for a tool."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def client_names(tools: list[Any] | None) -> dict[str, ToolName]:
    """Map the model's names of checked tools to the client's."""
    names: dict[str, ToolName] = {}
    for given in tools or ():
        is_namespace = given["type"] == "namespace"
        for tool in given["tools"] if is_namespace else [given]:
            namespace = given["name"] if is_namespace else None
            name = ToolName(tool["name"], namespace, tool["type"] == "custom")
            names[qualified_name(namespace, name.name)] = name
    return names


def _tools(value: Mapping[str, Any], path: str) -> Iterator[tuple[Tool, int]]:
    if value.get("type") != "namespace":
        yield _tool(value, path)
        return
    namespace = tool_name(value.get("name"), f"{path}.name")
    preface = optional_text(value.get("description"), f"{path}.description") or ""
    inner = value.get("tools")
    if not isinstance(inner, list):
        raise wrong_type(f"{path}.tools", "an array")
    for number, item in enumerate(inner):
        if not isinstance(item, dict):
            raise wrong_type(f"{path}.tools[{number}]", "an object")
        tool, size = _tool(item, f"{path}.tools[{number}]")
        # The description of the namespace is told once.
        yield tool.within(namespace, "" if number else preface), size


def _tool(value: Mapping[str, Any], path: str) -> tuple[Tool, int]:
    kind = value.get("type")
    if kind is None:
        raise missing_parameter(f"{path}.type")
    if not isinstance(kind, str):
        raise wrong_type(f"{path}.type", "a string")
    if kind.startswith(_HOSTED):
        raise UnsupportedError(
            f"Unsupported tool: '{kind[:64]}' ({path}) would have to be run by the server, which "
            "is not offered for this model. Give a tool of type 'function' or 'custom', and run it "
            "in your program.",
            param="tools",
        )
    if kind not in ("function", "custom"):
        raise unsupported_value(
            f"{path}.type",
            f"a tool of type '{kind[:64]}' is not supported with this model; 'function' and "
            "'custom' are, and a 'namespace' of them.",
        )
    nested = value.get(kind)
    if "name" not in value and isinstance(nested, dict):
        raise InvalidRequestError(
            f"Missing required parameter: '{path}.name'. The form with '{kind}' nested is that of "
            "/v1/chat/completions; here its fields stand beside 'type'.",
            param=f"{path}.name",
            code="missing_required_parameter",
        )
    if kind == "function":
        return function_tool(value, path)
    return _custom_tool(value, path)


def _custom_tool(value: Mapping[str, Any], path: str) -> tuple[Tool, int]:
    name = tool_name(value.get("name"), f"{path}.name")
    description = optional_text(value.get("description"), f"{path}.description") or ""
    format, schema = value.get("format"), {"type": "string"}
    if format is not None and not isinstance(format, dict):
        raise wrong_type(f"{path}.format", "an object")
    kind = "text" if format is None else format.get("type")
    if kind not in ("text", "grammar"):
        raise invalid_value(f"{path}.format.type", "expected 'text' or 'grammar'.")
    size, grammar = 0, None
    if format is not None and kind == "grammar":
        definition = format.get("definition")
        if not isinstance(definition, str) or not definition:
            raise invalid_value(f"{path}.format.definition", "expected a string, not empty.")
        check_size(definition, f"{path}.format.definition")
        size, syntax = len(definition), format.get("syntax")
        if syntax not in ("lark", "regex"):
            raise invalid_value(f"{path}.format.syntax", "expected 'lark' or 'regex'.")
        noun = "regular expression" if syntax == "regex" else "Lark grammar"
        description += f"\nIts input has to follow this {noun}:\n{definition}"
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
        else:
            grammar = definition
    parameters = {
        "type": "object",
        "properties": {"input": schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    tool = Tool(
        name,
        description.strip() or None,
        parameters,
        strict=kind == "grammar",
        input_grammar=grammar,
    )
    return tool, size


_FIELDS = ToolFields(_tools, "", ("function", "custom"))
