"""`tools`, `tool_choice` and `parallel_tool_calls`, checked and read: those of a chat, and what all
APIs have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from parrot_gateway.calls.requests.field_checks import refuse, tool_name
from parrot_gateway.calls.requests.grammars import schema_grammar
from parrot_gateway.calls.requests.types import ChatBody
from parrot_gateway.calls.tools.definitions import Tool, ToolMode, ToolUse
from parrot_gateway.exceptions import (
    InvalidRequestError,
    invalid_value,
    long_array,
    missing_parameter,
    unsupported_value,
    wrong_type,
)

MAX_TOOLS = 128
#: Parameters of all tools: they are read, checked and written into grammars in one go.
MAX_SCHEMA_BYTES = 1024 * 1024
_WHY = "is not supported with this model"


#: Reads one element of `tools`: its tools, each with the bytes of its parameters.
ReadTools: TypeAlias = Callable[[Any, str], Iterable[tuple[Tool, int]]]


class ToolFields(NamedTuple):
    """How an API writes its tools."""

    read: ReadTools
    #: Of a tool in `tools` and `tool_choice`: the object that holds its name; empty: itself.
    holder: str
    #: Values of `type` that name one tool in `tool_choice`.
    kinds: tuple[str, ...] = ("function",)


def requested_tools(body: ChatBody) -> ToolUse | None:
    """The tools of a chat; None when it has none, or none may be called.

    Raises:
        InvalidRequestError: naming the field at fault.
        UnsupportedError: another kind of tool than functions, or the older `functions`.
    """
    if body.function_call != "none":
        refuse(body, ("functions", "function_call"), f"{_WHY}; 'tools' is its successor")
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls, _CHAT)


def tool_use(given: Any, choice: Any, parallel: bool | None, fields: ToolFields) -> ToolUse | None:
    """The tools of a call, checked; None when it has none, or none may be called.

    Args:
        given, choice, parallel: `tools`, `tool_choice` and `parallel_tool_calls`.
        fields: how the API writes them.

    Raises:
        InvalidRequestError: naming the field at fault.
        UnsupportedError: a kind of tool that is not offered.
    """
    tools = _tools(given, fields)
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
    mode, names = _choice(choice, fields)
    callable_ = tools if names is None else [_named(tools, name) for name in names]
    is_named = isinstance(choice, dict) and choice.get("type") in fields.kinds
    # One tool that was named is called once.
    return ToolUse(tools, callable_, mode, parallel=parallel is not False and not is_named)


def _tools(value: Any, fields: ToolFields) -> list[Tool]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type("tools", "an array")
    if len(value) > MAX_TOOLS:
        raise long_array("tools", MAX_TOOLS, len(value))
    tools: dict[str, Tool] = {}
    left = MAX_SCHEMA_BYTES
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise wrong_type(f"tools[{number}]", "an object")
        for tool, size in fields.read(item, f"tools[{number}]"):
            left -= size
            if left < 0:
                raise InvalidRequestError(
                    f"Invalid 'tools': their parameters come to more than {MAX_SCHEMA_BYTES} "
                    "bytes.",
                    param="tools",
                    code="string_above_max_length",
                )
            if tool.name in tools:
                holder = f".{fields.holder}" if fields.holder else ""
                raise InvalidRequestError(
                    f"Invalid 'tools': two functions are called '{tool.name}'.",
                    param=f"tools[{number}]{holder}.name",
                    code="invalid_value",
                )
            tools[tool.name] = tool
    if len(tools) > MAX_TOOLS:
        raise long_array("tools", MAX_TOOLS, len(tools))
    return list(tools.values())


def _chat_tool(value: Any, path: str) -> Iterator[tuple[Tool, int]]:
    kind = value.get("type")
    if kind is None:
        raise missing_parameter(f"{path}.type")
    if kind == "custom":
        raise unsupported_value(
            f"{path}.type", f"a tool of type 'custom' {_WHY} here; /v1/responses takes it."
        )
    if kind != "function":
        raise unsupported_value(f"{path}.type", f"'{path}.type' other than 'function' {_WHY}.")
    function = value.get("function")
    if function is None:
        hint = ""
        if "name" in value:
            hint = " The flat form, with 'name' beside 'type', is that of /v1/responses."
        error = missing_parameter(f"{path}.function")
        raise InvalidRequestError(error.message + hint, param=error.param, code=error.code)
    if not isinstance(function, dict):
        raise wrong_type(f"{path}.function", "an object")
    yield function_tool(function, f"{path}.function")


def function_tool(
    function: Mapping[str, Any], path: str, schema: str = "parameters"
) -> tuple[Tool, int]:
    """A function by its name, description, parameters and strictness.

    Args:
        path: of the object in the request.
        schema: the field that holds the JSON schema of its arguments.

    Returns:
        the tool, and the bytes of its parameters.

    Raises:
        InvalidRequestError: naming the field at fault.
    """
    name = tool_name(function.get("name"), f"{path}.name")
    description = optional_text(function.get("description"), f"{path}.description")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise wrong_type(f"{path}.strict", "a boolean")
    parameters, size = function.get(schema), 0
    if parameters is not None:
        param = f"{path}.{schema}"
        size = len(schema_grammar(parameters, param, closes=False).text)
        if parameters.get("type", "object") != "object":
            raise InvalidRequestError(
                f"Invalid '{param}': its 'type' has to be 'object'.",
                param=param,
                code="invalid_function_parameters",
            )
    return Tool(name, description, parameters or None, bool(strict)), size


def optional_text(value: Any, path: str) -> str | None:
    """A string that may be left out.

    Raises:
        InvalidRequestError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise wrong_type(path, "a string")
    return value


_CHAT = ToolFields(_chat_tool, "function")


def _choice(choice: Any, fields: ToolFields) -> tuple[ToolMode, list[str] | None]:
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
    if kind in fields.kinds:
        return "required", [_chosen(choice, "tool_choice", fields)]
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        path = "tool_choice.allowed_tools"
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list):
            raise missing_parameter(f"{path}.tools")
        mode = allowed.get("mode")
        if mode not in ("auto", "required") or not allowed["tools"]:
            raise invalid_value(path, "expected a 'mode' of 'auto' or 'required', and 'tools'.")
        names = [
            _chosen(item, f"{path}.tools[{n}]", fields) for n, item in enumerate(allowed["tools"])
        ]
        return ("auto" if mode == "auto" else "required"), names
    raise unsupported_value("tool_choice", f"'tool_choice' of this type {_WHY}.")


def _chosen(value: Any, path: str, fields: ToolFields) -> str:
    if not isinstance(value, dict):
        raise wrong_type(path, "an object")
    if fields.holder:
        path = f"{path}.{fields.holder}"
        value = value.get(fields.holder)
        if not isinstance(value, dict):
            raise missing_parameter(path)
    return tool_name(value.get("name"), f"{path}.name")


def _named(tools: list[Tool], name: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequestError(
        f"Invalid value for 'tool_choice': there is no function '{name}' in 'tools'.",
        param="tool_choice",
        code="invalid_value",
    )
