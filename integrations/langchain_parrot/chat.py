"""ChatParrot: LangChain's chat model on Parrot Gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_parrot import structured
from langchain_parrot._base import Call, ParrotModel, token_usage, told_by
from langchain_parrot._errors import translated
from langchain_parrot._messages import to_chunk, to_message, to_usage, to_wire
from langchain_parrot.deferred import deferred_message


class ChatParrot(ParrotModel, BaseChatModel):
    """A chat model behind Parrot Gateway, or behind any OpenAI-compatible server.

    All of LangChain's: streams, async, tools, structured output, callbacks, caching. Besides them
    Parrot's extras, see `ParrotFields`, as arguments of the constructor or of a call::

        llm = ChatParrot(model="parrot-demo", session="tale")
        llm.invoke("Tell me of a ship.", output="ship", priority=1)

    An answer's `response_metadata` has the model's name, the finish reason, and under `parrot` what
    the gateway told of the call: session, call, variable, engine, cached_tokens, queue_ms.
    """

    logprobs: bool | None = None
    top_logprobs: int | None = None
    reasoning_effort: str | None = None

    @property
    def _llm_type(self) -> str:
        return "chat-parrot"

    @classmethod
    def _sampling_names(cls) -> tuple[str, ...]:
        return (*super()._sampling_names(), "logprobs", "top_logprobs", "reasoning_effort")

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return super()._get_ls_params(stop=stop or self._own_stop(), **kwargs)

    def _combine_llm_outputs(self, llm_outputs: list[dict[str, Any] | None]) -> dict[str, Any]:
        return token_usage(llm_outputs)

    # -- whole answers ------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._answer(self._call(stop, run_manager, kwargs), messages)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return await self._aanswer(self._call(stop, run_manager, kwargs), messages)

    def _answer(self, call: Call, messages: Sequence[BaseMessage]) -> ChatResult:
        with translated(self.base_url):
            raw = self._clients.sync().chat.completions.with_raw_response.create(
                **self._arguments(call, messages)
            )
        return self._result(call, raw.content, raw.headers)

    async def _aanswer(self, call: Call, messages: Sequence[BaseMessage]) -> ChatResult:
        with translated(self.base_url):
            client = self._clients.of_running_loop()
            raw = await client.chat.completions.with_raw_response.create(
                **self._arguments(call, messages)
            )
        return self._result(call, raw.content, raw.headers)

    def _arguments(self, call: Call, messages: Sequence[BaseMessage]) -> dict[str, Any]:
        # NOTE: all in `extra_body`, since the client refuses fields that its version does not know.
        return {
            "model": call.model,
            "messages": to_wire(messages),
            "extra_body": call.body,
            **call.options,
        }

    def _result(self, call: Call, content: bytes, headers: Mapping[str, str]) -> ChatResult:
        document = self._document(content)
        self._check_understood(call, headers)
        usage = document.get("usage")
        about = _of_answer(document, headers)
        if call.is_deferred:
            text = self._deferred(document["choices"][0]["message"]["content"])
            message = deferred_message(text, response_metadata=about)
            return ChatResult(generations=[ChatGeneration(message=message)], llm_output=about)
        generations = [
            ChatGeneration(
                # All choices were one call: its tokens are told once.
                message=to_message(choice["message"], to_usage(usage) if number == 0 else None),
                generation_info=_of_choice(choice),
            )
            for number, choice in enumerate(document["choices"])
        ]
        for generation in generations:
            generation.message.response_metadata = dict(about)
        return ChatResult(generations=generations, llm_output={"token_usage": usage or {}, **about})

    # -- streams ------------------------------------------------------------------------------

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            yield _as_chunk(self._answer(call, messages))
            return
        with translated(self.base_url):
            raw = self._clients.sync().chat.completions.with_raw_response.create(
                stream=True, **self._arguments(call.streamed(), messages)
            )
            self._check_understood(call, raw.headers)
            assembly = _Assembly(raw.headers)
            with raw.parse() as events:
                for event in events:
                    for chunk in assembly.pieces(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(stop, run_manager, kwargs)
        if call.is_deferred:
            yield _as_chunk(await self._aanswer(call, messages))
            return
        with translated(self.base_url):
            client = self._clients.of_running_loop()
            raw = await client.chat.completions.with_raw_response.create(
                stream=True, **self._arguments(call.streamed(), messages)
            )
            self._check_understood(call, raw.headers)
            assembly = _Assembly(raw.headers)
            async with raw.parse() as events:
                async for event in events:
                    for chunk in assembly.pieces(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()

    # -- tools and structured output ----------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools to call.

        Args:
            tools: functions, classes, LangChain tools, or schemas in OpenAI's or Anthropic's form.
            tool_choice: `auto`, `none`, `required` or `any`, a tool's name, True for "one of them
                must be called", False for `none`, or OpenAI's object.
            strict: arguments are kept to the tools' schemas.
            parallel_tool_calls: False allows one call in an answer.
            **kwargs: further arguments of every call.

        Raises:
            ValueError: `tool_choice` names no tool that is bound.
        """
        offered = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        choice = structured.tool_choice_on_wire(tool_choice, offered)
        if choice is not None:
            kwargs["tool_choice"] = choice
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=offered, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: structured.Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """The model with answers of a schema's shape.

        Args:
            schema: a pydantic class, a TypedDict, a JSON Schema or an OpenAI tool; may be left out
                with `json_mode`.
            method: `json_schema` has the server keep to the schema while it writes,
                `function_calling` offers the schema as a tool that must be called, `json_mode` asks
                for any JSON object: the prompt has to say which.
            include_raw: answer a dict of `raw` (the message), `parsed` and `parsing_error`, instead
                of the parsed answer, and raise no error of the parser's.
            strict: given to the server as it is; Parrot Gateway always keeps to a schema.
            **kwargs: further arguments of every call.

        Raises:
            ValueError: no schema where one is needed, or an unknown method.
        """
        if schema is None and method != "json_mode":
            raise ValueError(f"method={method!r} needs a schema")
        told: dict[str, Any] = {
            "ls_structured_output_format": {
                "kwargs": {"method": method, "strict": strict},
                "schema": schema,
            }
        }
        if method == "function_calling":
            assert schema is not None
            name = structured.tool_name(schema)
            bound = self.bind_tools([schema], tool_choice=name, strict=strict, **told, **kwargs)
            return structured.chain(bound, structured.tool_parser(schema, name), include_raw)
        if method == "json_schema":
            wanted = structured.response_format(schema, strict)
        elif method == "json_mode":
            wanted = {"type": "json_object"}
        else:
            raise ValueError(
                f"method must be json_schema, function_calling or json_mode, and is {method!r}"
            )
        bound = self.bind(response_format=wanted, **told, **kwargs)
        return structured.chain(bound, structured.json_parser(schema), include_raw)


class _Assembly:
    """What a stream's events become: pieces, and a last chunk with all that is told once."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._about: dict[str, Any] = {}
        self._usage: Mapping[str, Any] | None = None

    def pieces(self, event: Mapping[str, Any]) -> Iterator[ChatGenerationChunk]:
        """The chunks of one event."""
        self._usage = event.get("usage") or self._usage
        for name in ("model", "system_fingerprint", "service_tier", "id"):
            if event.get(name):
                self._about[name] = event[name]
        for choice in event.get("choices") or ():
            information = _of_choice(choice)
            finish_reason = information.pop("finish_reason", None)
            if finish_reason is not None:
                self._about["finish_reason"] = finish_reason
            yield ChatGenerationChunk(
                message=to_chunk(choice.get("delta") or {}), generation_info=information or None
            )

    def last(self) -> ChatGenerationChunk:
        """The end: usage, finish reason, model, and what the headers say."""
        finish_reason = self._about.pop("finish_reason", None)
        information = _of_answer(self._about, self._headers)
        if finish_reason is not None:
            information["finish_reason"] = finish_reason
        message = AIMessageChunk(
            content="", usage_metadata=to_usage(self._usage), chunk_position="last"
        )
        return ChatGenerationChunk(message=message, generation_info=information)


def _as_chunk(deferred: ChatResult) -> ChatGenerationChunk:
    """A deferred answer as the only chunk of a stream."""
    answered = deferred.generations[0].message
    message = AIMessageChunk(
        content="", response_metadata=answered.response_metadata, chunk_position="last"
    )
    chunk = ChatGenerationChunk(message=message)
    # Validation would make a plain string of the text.
    message.content = answered.content
    return chunk


def _of_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """What one choice says besides its message."""
    told = {name: choice.get(name) for name in ("finish_reason", "logprobs")}
    return {name: value for name, value in told.items() if value is not None}


def _of_answer(document: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """What a whole answer says besides its choices, under LangChain's names."""
    told = {
        "model_name": document.get("model"),
        "system_fingerprint": document.get("system_fingerprint"),
        "service_tier": document.get("service_tier"),
        "id": document.get("id"),
    }
    return {
        "model_provider": "parrot",
        **{name: value for name, value in told.items() if value is not None},
        **told_by(headers),
    }
