"""`Parrot`: a LlamaIndex model on Parrot Gateway.

This file has the class and its requests. The wire form of messages and answers is in `_messages`,
facts from LlamaIndex's spans in `linking`, tools and structured output in `_structured`, references
in `_deferred`, and the model's window in `_window`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from llama_index.core.base.llms.generic_utils import (
    achat_to_completion_decorator,
    acompletion_to_chat_decorator,
    astream_chat_to_completion_decorator,
    astream_completion_to_chat_decorator,
    chat_to_completion_decorator,
    completion_to_chat_decorator,
    stream_chat_to_completion_decorator,
    stream_completion_to_chat_decorator,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection
from llama_index.core.utils import get_tokenizer
from llama_index.llms.parrot import linking
from llama_index.llms.parrot._deferred import resolve_request, resolved
from llama_index.llms.parrot._errors import with_advice
from llama_index.llms.parrot._messages import CHAT, COMPLETION, Endpoint
from llama_index.llms.parrot._structured import (
    StructuredOutput,
    keep_one_call,
    selections,
    tool_fields,
)
from llama_index.llms.parrot._synthesis import passes_texts_on, watch_synthesizers
from llama_index.llms.parrot._window import Window, ask_window, reference_counter
from parrot_client.connection import Connection, OpenAIClients, default_api_key, default_base_url
from parrot_client.fields import FIELDS, answer_metadata, merge_fields, take_fields
from parrot_client.tokens import TokenCounter
from pydantic import AliasChoices

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool

T = TypeVar("T")

watch_synthesizers()


class Parrot(StructuredOutput):
    """A model behind a Parrot Gateway.

    Accepts the arguments of LlamaIndex's OpenAI model, and the gateway's fields `session` to
    `defer` below, each also as a keyword argument of a single call. Calls made by query engines,
    chat engines, agents and functions with `@dispatcher.span` are linked: the gateway learns which
    belong together, and shows them at `/v1/sessions/{id}/graph`.

    No request is made before the first call or the first look at `metadata`.

    Examples:
        ```python
        from llama_index.llms.parrot import Parrot

        llm = Parrot(model="parrot-demo", max_tokens=60)
        print(llm.complete("Once upon a time"))
        ```
    """

    model: str = Field(description="A model that the gateway serves, or an alias.")
    base_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("base_url", "api_base"),
        description=(
            "Where the gateway is, up to /v1; else PARROT_BASE_URL, OPENAI_API_BASE or "
            "OPENAI_BASE_URL, else http://127.0.0.1:8000/v1."
        ),
    )
    api_key: str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description="The gateway's key; else PARROT_API_KEY or OPENAI_API_KEY.",
    )
    temperature: float | None = Field(
        default=None, ge=0.0, le=2.0, description="If not set, the model's own."
    )
    max_tokens: int | None = Field(
        default=None,
        gt=0,
        description=(
            "The most tokens that a call writes. If not set, what the window leaves for chat, and "
            f"{DEFAULT_NUM_OUTPUTS} for completions."
        ),
    )
    timeout: float = Field(default=600.0, gt=0, description="Of one request, in seconds.")
    max_retries: int = Field(default=3, ge=0, description="Of requests that may be repeated.")
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More fields of the request's body: seed, stop, top_k, …"
    )
    default_headers: dict[str, str] | None = Field(
        default=None, exclude=True, repr=False, description="Sent with every request."
    )
    is_chat_model: bool = Field(
        default=True, description="Whether to use /v1/chat/completions, or /v1/completions."
    )
    context_window: int | None = Field(
        default=None,
        gt=0,
        description=(
            "In tokens of LlamaIndex's tokenizer; if not set, from what the gateway says of the "
            "model."
        ),
    )
    strict: bool = Field(
        default=False, description="Strict mode of tools and of structured output."
    )
    linking: bool = Field(default=True, description="Whether to send which calls belong together.")

    session: str | None = Field(default=None, description="Instead of the root span.")
    output: str | None = Field(default=None, description="Name of the variable to fill.")
    inputs: dict[str, Any] | None = Field(
        default=None, description="What {{placeholders}} of the prompt stand for."
    )
    objective: str | None = Field(default=None, description="latency, throughput, deadline=2s, …")
    transform: str | None = Field(
        default=None, description="What is done to the text before it fills its variable."
    )
    context: str | None = Field(default=None, description="A named context to go on from.")
    priority: int | None = Field(default=None, description="Larger runs earlier.")
    dedupe: bool | None = Field(
        default=None, description="False: run a deferred call even if an identical one was run."
    )
    name: str | None = Field(default=None, description="What pictures of the graph call it.")
    group: str | None = Field(
        default=None, description="Calls of a session with the same group are one task group."
    )
    defer: bool = Field(
        default=False,
        description="In synthesizers, do not wait for texts that only go into other prompts.",
    )

    _openai_clients: OpenAIClients | None = PrivateAttr(default=None)
    _windows: dict[Any, Window] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any) -> None:
        """Start watching spans before the first call is made."""
        super().model_post_init(context)
        if self.linking:
            linking.install()

    @classmethod
    def class_name(cls) -> str:
        """Return the class's name in serialised components."""
        return "parrot_llm"

    @property
    def metadata(self) -> LLMMetadata:
        """Return the model's facts for LlamaIndex; the first access asks the gateway.

        Raises:
            openai.APIError: no gateway answers, or the key is wrong; the message says what to do.
        """
        return LLMMetadata(
            context_window=self.context_window or self._window().tokens,
            num_output=self.max_tokens or -1,
            is_chat_model=self.is_chat_model,
            is_function_calling_model=self.is_chat_model,
            model_name=self.model,
            system_role=MessageRole.SYSTEM,
        )

    def tokenizer(self) -> Callable[[str], list[Any]]:
        """Return a tokenizer for counting: `Settings.tokenizer = llm.tokenizer()`, or any
        `tokenizer` or `tokenizer_fn` in LlamaIndex.

        The gateway counts texts of its own engines' models, whose tokenizers it has; other models
        are counted with LlamaIndex's current tokenizer. A reference counts as much as its text may
        have, so splitters and prompt helpers see a deferred text as `max_tokens` long. It counts at
        most a quarter of the window, so that no splitter ever cuts a reference.

        Returns:
            one zero per token of a text, special tokens excluded. A failed request to the gateway
            raises `openai.APIError`.

        Raises:
            openai.APIError: no gateway answers, or the key is wrong.
        """
        window = self._window()
        tokens = self.max_tokens or DEFAULT_NUM_OUTPUTS
        if not window.is_own:
            room = self.context_window or window.tokens
            return reference_counter(get_tokenizer(), min(tokens, room // 4))
        counter = TokenCounter(self._clients, self.model)

        def count(text: str) -> list[Any]:
            with with_advice(counter.clients.connection.base_url):
                return [0] * counter.count(prompt=text, add_special_tokens=False)

        room = self.context_window or math.floor(window.tokens * window.ratio)
        return reference_counter(count, min(tokens, room // 4))

    def resolve(self, value: T, timeout: float | None = None) -> T:
        """Wait for the texts of references in a value; return it with the texts in place.

        Args:
            value: a text, a response of a query engine or of a model, or any JSON value.
            timeout: in seconds; by default the gateway's `server.call_timeout_s`.

        Raises:
            openai.APIError: a call failed, expired or took too long; the message says what to do.
            TypeError: the value is a streaming response, which must be read first.
        """
        request = resolve_request(value, timeout)
        if request is None:
            return value
        with self._with_advice():
            answer = self._clients.sync().post(**request)
        return resolved(value, answer)

    async def aresolve(self, value: T, timeout: float | None = None) -> T:
        request = resolve_request(value, timeout)
        if request is None:
            return value
        with self._with_advice():
            answer = await self._clients.of_running_loop().post(**request)
        return resolved(value, answer)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer messages."""
        ask = self._as_chat(self._answer, completion_to_chat_decorator)
        response: ChatResponse = ask(messages, **kwargs)
        return response

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        ask = self._as_chat(self._aanswer, acompletion_to_chat_decorator)
        response: ChatResponse = await ask(messages, **kwargs)
        return response

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Answer messages, piece by piece; the last piece has the token counts."""
        ask = self._as_chat(self._stream, stream_completion_to_chat_decorator)
        stream: ChatResponseGen = ask(messages, **kwargs)
        return stream

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        ask = self._as_chat(self._astream, astream_completion_to_chat_decorator)
        stream: ChatResponseAsyncGen = await ask(messages, **kwargs)
        return stream

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text (`is_chat_model=False`), or answer it as a message."""
        ask = self._as_completion(self._answer, chat_to_completion_decorator)
        response: CompletionResponse = ask(self._formatted(prompt, formatted), **kwargs)
        return response

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        ask = self._as_completion(self._aanswer, achat_to_completion_decorator)
        response: CompletionResponse = await ask(self._formatted(prompt, formatted), **kwargs)
        return response

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        ask = self._as_completion(self._stream, stream_chat_to_completion_decorator)
        stream: CompletionResponseGen = ask(self._formatted(prompt, formatted), **kwargs)
        return stream

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        """Do the same as `stream_complete` without blocking the event loop."""
        ask = self._as_completion(self._astream, astream_chat_to_completion_decorator)
        stream: CompletionResponseAsyncGen = await ask(self._formatted(prompt, formatted), **kwargs)
        return stream

    def _as_chat(self, ask: Callable[..., Any], from_completion: Any) -> Any:
        """Return `ask` over this model's endpoint, adapted to messages."""
        if self.is_chat_model:
            return partial(ask, CHAT)
        return from_completion(partial(ask, COMPLETION))

    def _as_completion(self, ask: Callable[..., Any], from_chat: Any) -> Any:
        """Return `ask` over this model's endpoint, adapted to a text."""
        return from_chat(partial(ask, CHAT)) if self.is_chat_model else partial(ask, COMPLETION)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return arguments for `chat`: messages, tools, and which of them must be called."""
        messages = list(chat_history or [])
        if user_msg is not None:
            if isinstance(user_msg, str):
                user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
            messages.append(user_msg)
        arguments: dict[str, Any] = {"messages": messages, **kwargs}
        if tools:
            arguments |= tool_fields(
                tools,
                strict=self.strict if strict is None else strict,
                required=tool_required,
                choice=tool_choice,
                parallel=allow_parallel_tool_calls,
            )
        return arguments

    def _validate_chat_with_tools_response(
        self,
        response: ChatResponse,
        tools: Sequence[BaseTool],
        allow_parallel_tool_calls: bool = False,
        **kwargs: Any,
    ) -> ChatResponse:
        """Keep only the first call if several are forbidden, as not every model obeys the field."""
        if not allow_parallel_tool_calls:
            keep_one_call(response)
        return response

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tool calls of a response; a stream's arguments may still be incomplete.

        Raises:
            ValueError: there is no call, and `error_on_no_tool_call` is true.
        """
        return selections(response, must_call=error_on_no_tool_call)

    @property
    def _clients(self) -> OpenAIClients:
        """Return the clients of the current connection."""
        connection = Connection(
            base_url=self.base_url or default_base_url(),
            api_key=self.api_key or default_api_key(),
            timeout=self.timeout,
            max_retries=self.max_retries,
            headers=self.default_headers or {},
        )
        if self._openai_clients is None or self._openai_clients.connection != connection:
            self._openai_clients = OpenAIClients(connection)
        return self._openai_clients

    def _with_advice(self) -> AbstractContextManager[None]:
        return with_advice(self._clients.connection.base_url)

    def _window(self) -> Window:
        where = self._clients.connection
        # The window is counted with LlamaIndex's tokenizer, which may be set later.
        key = (where.base_url, where.api_key, self.model, get_tokenizer())
        window = self._windows.get(key)
        if window is None:
            with self._with_advice():
                window = ask_window(self._clients, self.model)
            if window.is_final:
                self._windows[key] = window
        return window

    def _formatted(self, prompt: str, formatted: bool) -> str:
        if formatted or self.is_chat_model or self.completion_to_prompt is None:
            return prompt
        return self.completion_to_prompt(prompt)

    def _linked(self) -> Mapping[str, str]:
        return linking.fields_of_call() if self.linking else {}

    async def _alinked(self) -> Mapping[str, str]:
        if self.linking:
            await linking.siblings_begun()
        return self._linked()

    def _request(
        self,
        endpoint: Endpoint,
        prompt: Any,
        kwargs: dict[str, Any],
        linked: Mapping[str, str],
        *,
        stream: bool = False,
    ) -> dict[str, Any]:
        """Return arguments for the client's `create`.

        Everything goes through `extra_body`, because the gateway accepts fields that the client
        does not name.
        """
        kwargs = {**self.additional_kwargs, **kwargs}
        own = {name: getattr(self, name) for name in FIELDS} | take_fields(kwargs)
        arguments: dict[str, Any] = {
            name: kwargs.pop(name)
            for name in ("extra_headers", "extra_query", "timeout")
            if name in kwargs
        }
        body: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "stream_options": {"include_usage": True},
            **kwargs.pop("extra_body", {}),
            **kwargs,
        }
        if not stream:
            del body["stream_options"]
        if not self.is_chat_model and body["max_tokens"] is None:
            # OpenAI's default is 16; LlamaIndex reserves room for this many.
            body["max_tokens"] = DEFAULT_NUM_OUTPUTS
        fields = merge_fields(linked, own)
        if own["output"] is not None and own["name"] is None:
            # The gateway shows the output's name, which the user chose.
            fields.pop("name", None)
        if stream or not passes_texts_on() or body.get("tools") or body.get("response_format"):
            # These answers are read at once, or are tool calls rather than text.
            fields.pop("defer", None)
        if "defer" not in fields and "output" not in fields and fields.get("transform") == "strip":
            # Only a synthesizer's next prompt needs it.
            del fields["transform"]
        fields |= body.pop("parrot", {})
        if fields:
            body["parrot"] = fields
        return {
            "model": body.pop("model", self.model),
            "stream": stream,
            "extra_body": {name: value for name, value in body.items() if value is not None},
            **endpoint.prompt_fields(prompt),
            **arguments,
        }

    def _answer(self, endpoint: Endpoint, prompt: Any, **kwargs: Any) -> Any:
        request = self._request(endpoint, prompt, kwargs, self._linked())
        with self._with_advice():
            raw = _create(endpoint, self._clients.sync(), request)
            return endpoint.response(raw.parse(), answer_metadata(raw.headers))

    async def _aanswer(self, endpoint: Endpoint, prompt: Any, **kwargs: Any) -> Any:
        request = self._request(endpoint, prompt, kwargs, await self._alinked())
        with self._with_advice():
            raw = await _create(endpoint, self._clients.of_running_loop(), request)
            return endpoint.response(raw.parse(), answer_metadata(raw.headers))

    # NOTE: a stream is sent when its first piece is requested. The request reads the spans before
    # that, because the program may be in another span by then.

    def _stream(self, endpoint: Endpoint, prompt: Any, **kwargs: Any) -> Generator[Any, None, None]:
        request = self._request(endpoint, prompt, kwargs, self._linked(), stream=True)
        return self._pieces(endpoint, self._clients.sync(), request)

    async def _astream(
        self, endpoint: Endpoint, prompt: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        request = self._request(endpoint, prompt, kwargs, await self._alinked(), stream=True)
        return self._apieces(endpoint, self._clients.of_running_loop(), request)

    def _pieces(
        self, endpoint: Endpoint, client: Any, request: dict[str, Any]
    ) -> Generator[Any, None, None]:
        with self._with_advice():
            raw = _create(endpoint, client, request)
            assembly, metadata = endpoint.assembly(), answer_metadata(raw.headers)
            with raw.parse() as stream:
                for chunk in stream:
                    yield assembly.add(chunk, metadata)

    async def _apieces(
        self, endpoint: Endpoint, client: Any, request: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        with self._with_advice():
            raw = await _create(endpoint, client, request)
            assembly, metadata = endpoint.assembly(), answer_metadata(raw.headers)
            async with raw.parse() as stream:
                async for chunk in stream:
                    yield assembly.add(chunk, metadata)


def _create(endpoint: Endpoint, client: Any, request: dict[str, Any]) -> Any:
    resource = operator.attrgetter(endpoint.resource)(client)
    return resource.with_raw_response.create(**request)
