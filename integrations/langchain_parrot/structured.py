"""Tools and structured output: LangChain's words for them in OpenAI's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from langchain_core.language_models import LanguageModelInput
from langchain_core.output_parsers import (
    BaseOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]

_WORDS = ("auto", "none", "required")


def tool_choice_on_wire(
    choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> str | dict[str, Any] | None:
    """`tool_choice` of a request.

    Args:
        choice: `auto`, `none`, `required` or `any`, a tool's name, True for "one of them must be
            called", False for `none`, or OpenAI's own object.
        tools: those that are offered, in OpenAI's form.

    Raises:
        ValueError: a name that is not offered.
    """
    names = [tool["function"]["name"] for tool in tools if "function" in tool]
    if choice is None or choice is False:
        return None if choice is None else "none"
    if isinstance(choice, Mapping):
        named = (choice.get("function") or {}).get("name")
        if choice.get("type") == "function" and named not in names:
            raise ValueError(_not_offered(str(named), names))
        return dict(choice)
    if choice is True or choice == "any":
        return "required"
    if choice in names:
        return {"type": "function", "function": {"name": choice}}
    if choice in _WORDS:
        return choice
    raise ValueError(_not_offered(choice, names))


def _not_offered(name: str, names: Sequence[str]) -> str:
    return (
        f"tool_choice {name!r} is none of the bound tools ({', '.join(names)}), nor any of "
        f"{', '.join(_WORDS)}, any."
    )


def response_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    """`response_format` of a request, for a schema in any form that langchain_core knows."""
    if isinstance(schema, Mapping) and schema.get("type") == "json_schema":
        return dict(schema)
    written = convert_to_json_schema(schema, strict=strict)
    name = written.pop("title", None) or "answer"
    described: dict[str, Any] = {"name": name}
    if "description" in written:
        described["description"] = written.pop("description")
    described["schema"] = written
    if strict is not None:
        described["strict"] = strict
    return {"type": "json_schema", "json_schema": described}


def json_parser(schema: Any) -> BaseOutputParser[Any]:
    """Reads what was written under a schema: an object of its class, or a dict."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def tool_parser(schema: Any, name: str) -> BaseOutputParser[Any]:
    """Reads the arguments of the first call of a tool: an object of its class, or a dict."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def tool_name(schema: Any) -> str:
    """What a schema is called as a tool."""
    name: str = convert_to_openai_tool(schema)["function"]["name"]
    return name


def chain(
    model: Runnable[LanguageModelInput, Any], parser: BaseOutputParser[Any], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """The model and its parser; with the raw message and the parser's error beside, if wanted."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    not_parsed = RunnablePassthrough.assign(parsed=lambda _: None)
    reading = parsed.with_fallbacks([not_parsed], exception_key="parsing_error")
    return RunnableMap(raw=model) | reading
