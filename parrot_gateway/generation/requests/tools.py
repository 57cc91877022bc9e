"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat, checked and read."""

from __future__ import annotations

from typing import Any

from parrot_gateway.exceptions import (
    InvalidRequestError,
    invalid_value,
    long_array,
    missing_parameter,
    unsupported_value,
    wrong_type,
)
from parrot_gateway.generation.requests.grammars import NAME, schema_grammar
from parrot_gateway.generation.requests.types import ChatBody
from parrot_gateway.generation.requests.validation import refuse
from parrot_gateway.generation.tools.definitions import Tool, ToolMode, ToolUse

MAX_TOOLS = 128
#: Parameters of all tools: they are read, checked and written into grammars in one go.
MAX_SCHEMA_BYTES = 1024 * 1024
_WHY = "is not supported with this model"


def requested_tools(body: ChatBody) -> ToolUse | None:
    """The tools of a call; None when it has none, or none may be called.

    Raises:
        InvalidRequestError: naming the field at fault.
        UnsupportedError: another kind of tool than functions, or the older `functions`.
    """
    if body.function_call != "none":
        refuse(body, ("functions", "function_call"), f"{_WHY}; 'tools' is its successor")
    choice = body.tool_choice
    tools = _tools(body.tools)
    if not tools:
        if choice not in (None, "auto", "none"):
            raise InvalidRequestError(
                "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are "
                "specified.",
                param="tool_choice",
                code="invalid_value",
            )
        return None
    if choice == "none":
        return None
    mode, names = _choice(choice)
    callable_ = tools if names is None else [_named(tools, name) for name in names]
    return ToolUse(
        tools,
        callable_,
        mode,
        # One function that was named is called once.
        parallel=body.parallel_tool_calls is not False and not _is_named(choice),
    )


def _tools(value: Any) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", "an array")
    if len(value) > MAX_TOOLS:
        raise long_array("tools", MAX_TOOLS, len(value))
    tools: list[Tool] = []
    left = MAX_SCHEMA_BYTES
    for number, item in enumerate(value):
        tool, size = _tool(item, f"tools[{number}]")
        left -= size
        if left < 0:
            raise InvalidRequestError(
                f"Invalid 'tools': their parameters come to more than {MAX_SCHEMA_BYTES} bytes.",
                param="tools",
                code="string_above_max_length",
            )
        tools.append(tool)
    seen: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.name in seen:
            raise InvalidRequestError(
                f"Invalid 'tools': two functions are called '{tool.name}'.",
                param=f"tools[{number}].function.name",
                code="invalid_value",
            )
        seen.add(tool.name)
    return tools


def _tool(value: Any, path: str) -> tuple[Tool, int]:
    """A tool, and the bytes of its parameters."""
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    kind = value.get("type")
    if kind is None:
        raise missing_parameter(f"{path}.type")
    if kind != "function":
        raise unsupported_value(f"{path}.type", f"'{path}.type' other than 'function' {_WHY}.")
    function = value.get("function")
    if function is None:
        raise missing_parameter(f"{path}.function")
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", "an object")
    name = _name(function.get("name"), f"{path}.function.name")
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise wrong_type(f"{path}.function.description", "a string")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.function.strict", "a boolean")
    parameters, size = function.get("parameters"), 0
    if parameters is not None:
        param = f"{path}.function.parameters"
        size = len(schema_grammar(parameters, param).text)
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"Invalid '{param}': its 'type' has to be 'object'.",
                param=param,
                code="invalid_function_parameters",
            )
    return Tool(name, description, parameters or None, bool(strict)), size


def _name(value: Any, path: str) -> str:
    if value is None:
        raise missing_parameter(path)
    if not isinstance(value, str):
        raise wrong_type(path, "a string")
    if not NAME.fullmatch(value):
        raise invalid_value(path, "expected up to 64 letters, digits, '_' or '-'.")
    return value


def _is_named(choice: Any) -> bool:
    return isinstance(choice, dict) and choice.get("type") == "function"


def _choice(choice: Any) -> tuple[ToolMode, list[str] | None]:
    """The mode, and the names of the tools that may be called; None: all."""
    if choice in (None, "auto"):
        return "auto", None
    if choice == "required":
        return "required", None
    if isinstance(choice, str):
        raise InvalidRequestError(
            f"Invalid value for 'tool_choice': '{choice[:64]}'. Supported values are: 'none', "
            "'auto' and 'required'.",
            param="tool_choice",
            code="invalid_value",
        )
    if not isinstance(choice, dict):
        raise wrong_type("tool_choice", "a string or an object")
    kind = choice.get("type")
    if kind == "function":
        return "required", [_chosen(choice, "tool_choice")]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        path = "tool_choice.allowed_tools"
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise missing_parameter(f"{path}.tools")
        mode = allowed.get("mode")
        if mode not in ("auto", "required") or not allowed["tools"]:
            raise invalid_value(path, "expected a 'mode' of 'auto' or 'required', and 'tools'.")
        names = [_chosen(item, f"{path}.tools[{n}]") for n, item in enumerate(allowed["tools"])]
        return ("auto" if mode == "auto" else "required"), names
    raise unsupported_value("tool_choice", f"'tool_choice' of this type {_WHY}.")


def _chosen(value: Any, path: str) -> str:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    function = value.get("function")
    if not isinstance(function, dict):
        raise missing_parameter(f"{path}.function")
    return _name(function.get("name"), f"{path}.function.name")


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequestError(
        f"Invalid value for 'tool_choice': there is no function '{name}' in 'tools'.",
        param="tool_choice",
        code="invalid_value",
    )
