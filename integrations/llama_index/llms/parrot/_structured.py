"""Structured output and tools: answers of a declared shape.

A pydantic class is sent as `response_format`. The gateway's own models can write only matching
text, and most upstreams honour the field, so neither a tool call nor instructions in words are
needed. Other ways (`pydantic_program_mode`) still work.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ToolCallBlock
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.llms.utils import parse_partial_json
from llama_index.core.prompts import PromptTemplate
from llama_index.core.types import PydanticProgramMode

if TYPE_CHECKING:
    from llama_index.core.program.utils import FlexibleModel
    from llama_index.core.tools.types import BaseTool

Model = TypeVar("Model", bound=BaseModel)


class StructuredOutput(FunctionCallingLLM):
    """Methods that return instances of a pydantic class."""

    strict: bool

    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        """Return an instance of `output_cls`, written by the model.

        Raises:
            ValueError: the answer was cut off by max_tokens, or is not valid.
        """
        if not self._uses_response_format():
            instance: Model = super().structured_predict(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return instance
        messages, kwargs = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        return _parsed(output_cls, self.chat(messages, **kwargs))

    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        if not self._uses_response_format():
            instance: Model = await super().astructured_predict(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return instance
        messages, kwargs = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        return _parsed(output_cls, await self.achat(messages, **kwargs))

    def _structured_stream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None, None]:
        if not self._uses_response_format():
            yield from super()._structured_stream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
            return
        from llama_index.core.program.streaming_utils import process_streaming_content_incremental

        messages, kwargs = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        current: Any = None
        for response in self.stream_chat(messages, **kwargs):
            current = process_streaming_content_incremental(response, output_cls, current)
            yield current

    async def _structured_astream_call(
        self,
        output_cls: type[Model],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Model | list[Model] | FlexibleModel | list[FlexibleModel], None]:
        if not self._uses_response_format():
            return await super()._structured_astream_call(
                output_cls, prompt, llm_kwargs, **prompt_args
            )
        from llama_index.core.program.streaming_utils import process_streaming_content_incremental

        messages, kwargs = self._structured_call(output_cls, prompt, llm_kwargs, prompt_args)
        stream = await self.astream_chat(messages, **kwargs)

        async def generate() -> AsyncGenerator[Any, None]:
            current: Any = None
            async for response in stream:
                current = process_streaming_content_incremental(response, output_cls, current)
                yield current

        return generate()

    def _uses_response_format(self) -> bool:
        return self.pydantic_program_mode == PydanticProgramMode.DEFAULT

    def _structured_call(
        self,
        output_cls: type[BaseModel],
        prompt: PromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
        messages = self._extend_messages(prompt.format_messages(**prompt_args))
        kwargs = {**(llm_kwargs or {}), "response_format": response_format(output_cls, self.strict)}
        kwargs.pop("tool_choice", None)
        return messages, kwargs


def response_format(output_cls: type[BaseModel], strict: bool) -> dict[str, Any]:
    """Return `response_format` for a class; the gateway's own models follow it, strict or not.

    Objects are closed either way, because models tend to invent further properties.
    """
    schema = output_cls.model_json_schema()
    name = re.sub(r"[^a-zA-Z0-9_-]", "_", output_cls.__name__)[:64]
    described = {"name": name, "schema": closed(schema), "strict": strict}
    return {"type": "json_schema", "json_schema": described}


def closed(schema: Any) -> Any:
    """Convert a schema to OpenAI's strict form: objects closed, all their properties required."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    below = {name: closed(value) for name, value in schema.items()}
    if isinstance(below.get("properties"), dict):
        below |= {"additionalProperties": False, "required": list(below["properties"])}
    return below


def _parsed(output_cls: type[Model], response: Any) -> Model:
    text = response.message.content or ""
    if response.additional_kwargs.get("finish_reason") == "length":
        raise ValueError(
            f"The {output_cls.__name__} was cut off at max_tokens: raise it. So far: {text[:200]}"
        )
    return output_cls.model_validate_json(text)


# -- tools -----------------------------------------------------------------------------------


def tool_fields(
    tools: Sequence[BaseTool],
    *,
    strict: bool,
    required: bool,
    choice: str | dict[str, Any] | None,
    parallel: bool,
) -> dict[str, Any]:
    """Return the body fields that offer tools.

    Args:
        tools: at least one.
        strict: true if arguments must follow their schemas.
        required: true if one must be called and `choice` is None.
        choice: OpenAI's `tool_choice`, or the name of a tool.
        parallel: true if several may be called.
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
    """Drop all calls except the first."""
    superfluous = _calls_of(response)[1:]
    blocks = response.message.blocks
    response.message.blocks = [block for block in blocks if block not in superfluous]


def selections(response: ChatResponse, *, must_call: bool) -> list[ToolSelection]:
    """Return the tool calls of a response; a stream's arguments may still be incomplete.

    Raises:
        ValueError: there is no call, and `must_call` is true.
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
