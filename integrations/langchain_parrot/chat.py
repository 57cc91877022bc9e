"""ChatParrot: LangChain's chat model on Parrot Gateway, its tools and structured output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, get_buffer_string
from langchain_core.output_parsers import BaseOutputParser, JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from langchain_parrot._base import (
    CallOptions,
    ParrotModel,
    StreamAssembly,
    header_metadata,
    present,
    token_usage,
)
from langchain_parrot._messages import to_chunk, to_message, to_usage, to_wire

Method: TypeAlias = Literal["json_schema", "function_calling", "json_mode"]

_TOOL_CHOICES = ("auto", "none", "required")


class _ChatAssembly(StreamAssembly):
    def chunk(
        self, choice: Mapping[str, Any], information: dict[str, Any] | None
    ) -> ChatGenerationChunk:
        message = to_chunk(choice.get("delta") or {})
        return ChatGenerationChunk(message=message, generation_info=information)

    def last(self) -> ChatGenerationChunk:
        information = _answer_metadata(self.document, self.headers)
        if self.finish_reason is not None:
            information["finish_reason"] = self.finish_reason
        message = AIMessageChunk(
            content="", usage_metadata=to_usage(self.usage), chunk_position="last"
        )
        return ChatGenerationChunk(message=message, generation_info=information)


# LangChain passes `_stream`'s prompt by position, so its name may differ.
class ChatParrot(ParrotModel, BaseChatModel):  # type: ignore[misc]
    """A chat model behind Parrot Gateway, or behind any OpenAI-compatible server.

    Supports all LangChain features: streams, async, tools, structured output, callbacks, caching.
    Parrot's fields are arguments of the constructor or of a call::

        llm = ChatParrot(model="parrot-demo", session="tale")
        llm.invoke("Tell me of a ship.", output="ship", priority=1)

    An answer's `response_metadata` has the model's name, the finish reason, and under `parrot` the
    gateway's facts about the call: session, call, variable, engine, cached_tokens, queue_ms.
    """

    _resource: ClassVar[str] = "chat.completions"
    _assembly: ClassVar[type[StreamAssembly]] = _ChatAssembly
    _sampling: ClassVar[tuple[str, ...]] = (
        *ParrotModel._sampling,
        "logprobs",
        "top_logprobs",
        "reasoning_effort",
    )

    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None

    @property
    def _llm_type(self) -> str:
        return "chat-parrot"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self._own_stop(), **kwargs)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        return token_usage(llm_outputs)

    def get_num_tokens_from_messages(
        self, messages: list[BaseMessage], tools: Sequence[Any] | None = None
    ) -> int:
        """Return the length of the prompt that the model's chat template makes of messages.

        If the template refuses the messages, such as the end of a conversation, their texts count.

        Args:
            messages: an empty list has no tokens.
            tools: not counted, as in LangChain's own models.

        Raises:
            ParrotError: the gateway cannot be reached, or has no tokenizer of this model.
        """
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        if tools is not None:
            warnings.warn("Tools are not counted.", stacklevel=2)
        if not messages:
            return 0
        from langchain_parrot._openai_errors import ParrotInvalidRequestError

        try:
            with self._translated():
                return self._tokens.count(messages=to_wire(messages))
        except ParrotInvalidRequestError:
            return self.get_num_tokens(get_buffer_string(messages))

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        result: ChatResult = self._answer(self._options(stop, run_manager, kwargs), messages)
        return result

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._options(stop, run_manager, kwargs)
        result: ChatResult = await self._aanswer(call, messages)
        return result

    def _prompt_fields(self, prompt: Sequence[BaseMessage]) -> dict[str, Any]:
        return {"messages": to_wire(prompt)}

    def _result(
        self, call: CallOptions, prompt: Any, document: dict[str, Any], headers: Mapping[str, str]
    ) -> ChatResult:
        usage = document.get("usage")
        metadata = _answer_metadata(document, headers)
        if call.is_deferred:
            reference = document["choices"][0]["message"]["content"]
            self._note_reference(reference)
            message = AIMessage(content=reference, response_metadata=metadata)
            return ChatResult(generations=[ChatGeneration(message=message)], llm_output=metadata)
        generations = [
            ChatGeneration(
                # All choices belong to one call, so its tokens count once.
                message=to_message(choice["message"], to_usage(usage) if number == 0 else None),
                generation_info=present(
                    {name: choice.get(name) for name in ("finish_reason", "logprobs")}
                ),
            )
            for number, choice in enumerate(document["choices"])
        ]
        for generation in generations:
            generation.message.response_metadata = dict(metadata)
        return ChatResult(
            generations=generations, llm_output={"token_usage": usage or {}, **metadata}
        )

    def _as_chunk(self, result: ChatResult) -> ChatGenerationChunk:
        answer = result.generations[0].message
        message = AIMessageChunk(
            content=answer.content,
            response_metadata=answer.response_metadata,
            chunk_position="last",
        )
        return ChatGenerationChunk(message=message)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools to call.

        Args:
            tools: functions, classes, LangChain tools, or schemas in OpenAI's or Anthropic's form.
            tool_choice: `auto`, `none`, `required` or `any`, a tool's name, True for "one of them
                must be called", False for `none`, or OpenAI's object.
            strict: true restricts arguments to the tools' schemas.
            parallel_tool_calls: False allows one call in an answer.
            **kwargs: further arguments of every call.

        Raises:
            ValueError: `tool_choice` names a tool that is not bound.
        """
        offered = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = _tool_choice_on_wire(tool_choice, offered)
        if choice is not None:
            kwargs["tool_choice"] = choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=offered, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return the model with answers in a schema's shape.

        Args:
            schema: a pydantic class, a TypedDict, a JSON Schema or an OpenAI tool; may be left out
                with `json_mode`.
            method: `json_schema` restricts generation to the schema,
                `function_calling` offers the schema as a tool that must be called, `json_mode` asks
                for any JSON object, which the prompt must describe.
            include_raw: true returns a dict of `raw` (the message), `parsed` and `parsing_error`
                instead of the parsed answer, and raises no parser errors.
            strict: passed to the server; Parrot Gateway always keeps to a schema.
            **kwargs: further arguments of every call.

        Raises:
            ValueError: the schema is missing although needed, or the method is unknown.
        """
        if schema is None and method != "json_mode":
            raise ValueError(f"method={method!r} needs a schema")
        traced: dict[str, Any] = {
            "ls_structured_output_format": {
                "kwargs": {"method": method, "strict": strict},
                "schema": schema,
            }
        }
        if method == "function_calling":
            assert schema is not None
            name = convert_to_openai_tool(schema)["function"]["name"]
            bound = self.bind_tools([schema], tool_choice=name, strict=strict, **traced, **kwargs)
            return _parsed_chain(bound, _tool_parser(schema, name), include_raw)
        if method == "json_schema":
            response_format = _response_format(schema, strict)
        elif method == "json_mode":
            response_format = {"type": "json_object"}
        else:
            raise ValueError(
                f"method must be json_schema, function_calling or json_mode, and is {method!r}"
            )
        bound = self.bind(response_format=response_format, **traced, **kwargs)
        return _parsed_chain(bound, _json_parser(schema), include_raw)


def _answer_metadata(document: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """Return an answer's `response_metadata`: all except its choices."""
    metadata = {
        "model_provider": "parrot",
        "model_name": document.get("model"),
        "system_fingerprint": document.get("system_fingerprint"),
        "service_tier": document.get("service_tier"),
        "id": document.get("id"),
    }
    return {**present(metadata), **header_metadata(headers)}


def _tool_choice_on_wire(
    choice: str | bool | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]]
) -> str | dict[str, Any] | None:
    """Return a request's `tool_choice`.

    Args:
        choice: `auto`, `none`, `required` or `any`, a tool's name, True for "one of them must be
            called", False for `none`, or OpenAI's own object.
        tools: the offered tools, in OpenAI's form.

    Raises:
        ValueError: the name is not offered.
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
    if choice in _TOOL_CHOICES:
        return choice
    raise ValueError(_not_offered(choice, names))


def _not_offered(name: str, names: Sequence[str]) -> str:
    return (
        f"tool_choice {name!r} is none of the bound tools ({', '.join(names)}), nor any of "
        f"{', '.join(_TOOL_CHOICES)}, any."
    )


def _response_format(schema: Any, strict: bool | None) -> dict[str, Any]:
    """Return a request's `response_format` for a schema in any form that langchain_core knows."""
    if isinstance(schema, Mapping) and schema.get("type") == "json_schema":
        return dict(schema)
    json_schema = convert_to_json_schema(schema, strict=strict)
    name = json_schema.pop("title", None) or "answer"
    described: dict[str, Any] = {"name": name}
    if "description" in json_schema:
        described["description"] = json_schema.pop("description")
    described["schema"] = json_schema
    if strict is not None:
        described["strict"] = strict
    return {"type": "json_schema", "json_schema": described}


def _json_parser(schema: Any) -> BaseOutputParser[Any]:
    """Return a parser for `json_schema` answers: an object of the schema's class, or a dict."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticOutputParser(pydantic_object=schema)
    return JsonOutputParser()


def _tool_parser(schema: Any, name: str) -> BaseOutputParser[Any]:
    """Return a parser for the arguments of a tool's first call: an object of its class, or a
    dict.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        return PydanticToolsParser(tools=[schema], first_tool_only=True)
    return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)


def _parsed_chain(
    model: Runnable[LanguageModelInput, Any], parser: BaseOutputParser[Any], include_raw: bool
) -> Runnable[LanguageModelInput, Any]:
    """Chain the model and its parser; `include_raw` adds the message and the parser's error."""
    if not include_raw:
        return model | parser
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    not_parsed = RunnablePassthrough.assign(parsed=lambda _: None)
    reading = parsed.with_fallbacks([not_parsed], exception_key="parsing_error")
    return RunnableMap(raw=model) | reading
