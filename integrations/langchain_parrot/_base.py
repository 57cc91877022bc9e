"""The base of ChatParrot and ParrotLLM: connection, sampling, Parrot's fields, requests."""

from __future__ import annotations

import json
import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

from langchain_core.callbacks import BaseRunManager
from parrot_client.connection import (
    API_KEY_VARIABLES,
    DEFAULT_BASE_URL,
    Connection,
    OpenAIClients,
    default_api_key,
    default_base_url,
)
from parrot_client.fields import (
    ESSENTIAL_FIELDS,
    FIELDS,
    answer_metadata,
    merge_fields,
    take_fields,
)
from parrot_client.tokens import TokenCounter
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from langchain_parrot.deferred import DEFAULT_TIMEOUT_S, DeferredText, GatewayResolver, current_run
from langchain_parrot.exceptions import ParrotFeatureError
from langchain_parrot.linking import fields_here, fields_of_run

#: Alternative names used by ChatOpenAI and OpenAI, so that only the import has to change.
_OPENAI_NAMES = {
    "model_name": "model",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}

#: Value of `defer` for a call whose answer may be a reference; see `composition`.
PLANNED = object()


def _default_secret() -> SecretStr | None:
    key = default_api_key()
    return None if key is None else SecretStr(key)


class CallOptions(NamedTuple):
    """One call without its prompt or messages.

    Attributes:
        body: the other fields of the body, `parrot` included.
        client: arguments of the client: headers, query, timeout.
        parrot: the `parrot` object of `body`.
        stream_usage: true if a stream should end with its usage.
    """

    model: str
    body: dict[str, Any]
    client: dict[str, Any]
    parrot: dict[str, Any]
    stream_usage: bool

    @property
    def is_deferred(self) -> bool:
        """True if the answer is a reference."""
        return bool(self.parrot.get("defer"))

    def for_each(self, prompts: int) -> list[CallOptions]:
        """Return options for each of several prompts; only the first keeps the run's id."""
        parrot = {name: value for name, value in self.parrot.items() if name != "run"}
        other = self._replace(body={**self.body, "parrot": parrot}, parrot=parrot)
        return [self, *[other] * (prompts - 1)]

    def streamed(self) -> CallOptions:
        """Return the options of a streaming call."""
        body = dict(self.body)
        if self.stream_usage:
            body.setdefault("stream_options", {"include_usage": True})
        return self._replace(body=body)


class StreamAssembly(ABC):
    """Turns a stream's events into chunks, and its end into one with everything that comes once.

    Args:
        headers: the answer's headers.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.document: dict[str, Any] = {}
        self.usage: Mapping[str, Any] | None = None
        self.finish_reason: str | None = None

    def chunks(self, event: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the chunks of one event."""
        self.usage = event.get("usage") or self.usage
        for name in ("model", "system_fingerprint", "service_tier", "id"):
            if event.get(name):
                self.document[name] = event[name]
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            logprobs = choice.get("logprobs")
            yield self.chunk(choice, {"logprobs": logprobs} if logprobs else None)

    @abstractmethod
    def chunk(self, choice: Mapping[str, Any], information: dict[str, Any] | None) -> Any:
        """Build the chunk of one choice of an event."""

    @abstractmethod
    def last(self) -> Any:
        """Build the last chunk: usage, finish reason, model, and facts from the headers."""


class ParrotModel(BaseModel):
    """Mixin of both models. Parrot's fields, from `session` on, are also arguments of a call.

    Attributes:
        model: a name listed by `GET /v1/models`; `model_name` is the same.
        base_url: the gateway's URL with `/v1`; by default PARROT_BASE_URL, OPENAI_API_BASE,
            OPENAI_BASE_URL, or this machine's port 8000.
        api_key: by default PARROT_API_KEY or OPENAI_API_KEY; an open gateway needs none.
        timeout: seconds for a call; the client's default is 600.
        max_retries: for calls that may be repeated; the client's default is 2.
        default_headers, default_query: sent with every request.
        model_kwargs: further fields of the body, such as `top_k`; unknown constructor arguments
            become such fields, with a warning.
        extra_body: further fields of the body, without a check for duplicate names.
        streaming: true: `invoke` and its variants use a stream internally.
        stream_usage: true asks for the token usage of a stream.
        http_client, http_async_client: your own objects for the `openai` client, of the HTTP
            library that its version uses.
        session: session of the calls, by id or any name; by default the LangGraph thread or the
            root run.
        output: name of the variable that the text of the call fills.
        inputs: values of `{{name}}` in a prompt: a variable (name, id or reference),
            `{"variable": …}` or `{"value": "text"}`.
        objective: `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.
        variable_transform: argument `transform`: applied to the text before it fills its
            variable, such as `json(/summary)`.
        context: named context of the session to continue.
        priority: an integer; larger runs earlier.
        dedupe: False runs a deferred call even if an identical one has run.
        name: label in pictures of the graph and in LangChain's traces.
        group: calls of a session with the same group are one task group.
        defer: inside compositions, do not wait for texts that only go into other prompts;
            see `composition`.
        linking: send session, run, parent, node name and group from LangChain's run tree. Explicit
            values win.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=()
    )

    #: The `openai` client's resource with `create`.
    _resource: ClassVar[str]
    _assembly: ClassVar[type[StreamAssembly]]
    #: Arguments that are body fields of the same name.
    _sampling: ClassVar[tuple[str, ...]] = (
        *("temperature", "max_tokens", "top_p", "n", "seed", "stop"),
        *("frequency_penalty", "presence_penalty", "logit_bias"),
    )

    model: str
    base_url: str = Field(default_factory=default_base_url, validate_default=True)
    api_key: SecretStr | None = Field(default_factory=_default_secret)
    timeout: Any = None
    max_retries: int | None = Field(default=None, ge=0)
    default_headers: Mapping[str, str] | None = None
    default_query: Mapping[str, Any] | None = None
    http_client: Any = Field(default=None, exclude=True)
    http_async_client: Any = Field(default=None, exclude=True)

    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    n: int | None = Field(default=None, ge=1)
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    extra_body: Mapping[str, Any] | None = None
    streaming: bool = False
    stream_usage: bool = True

    session: str | None = None
    output: str | None = None
    inputs: Mapping[str, Any] | None = None
    objective: str | None = None
    # NOTE: LangChain's runnables have a method `transform`.
    variable_transform: str | None = Field(default=None, alias="transform")
    context: str | None = None
    priority: int | None = None
    dedupe: bool | None = None
    name: str | None = None
    group: str | None = None
    defer: bool = False
    linking: bool = True

    _openai_clients: OpenAIClients | None = PrivateAttr(default=None)
    _counter: TokenCounter | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, values: Any) -> Any:
        """Accept ChatOpenAI's names; unknown arguments become fields of the body."""
        if not isinstance(values, dict):
            return values
        names = {field.alias or name: name for name, field in cls.model_fields.items()}
        names.update({name: name for name in cls.model_fields}, **_OPENAI_NAMES)
        known: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for given, value in values.items():
            name = names.get(given)
            if name is None:
                unknown[given] = value
            elif name in known:
                raise ValueError(f"'{name}' is given twice, once as '{given}'")
            else:
                known[name] = value
        # Programs pass None to leave the value to the environment.
        for name in ("base_url", "api_key"):
            if name in known and known[name] is None:
                del known[name]
        fields = dict(known.get("model_kwargs") or {})
        for given in fields:
            if given in names:
                raise ValueError(f"'{given}' is an argument of its own, not one of model_kwargs")
        if unknown:
            warnings.warn(
                f"{', '.join(map(repr, unknown))} not known to {cls.__name__}: sent along as "
                "model_kwargs. Give model_kwargs={…} if that is meant.",
                stacklevel=2,
            )
            double = fields.keys() & unknown.keys()
            if double:
                raise ValueError(f"{', '.join(sorted(double))} given twice")
            fields.update(unknown)
        if fields:
            known["model_kwargs"] = fields
        return known

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"base_url must begin with http:// or https://, such as {DEFAULT_BASE_URL}, "
                f"and is {url!r}"
            )
        return url.rstrip("/")

    @property
    def model_name(self) -> str:
        """Return `model` under the name that other LangChain models use."""
        return self.model

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return true: `langchain_core.load` can write it as JSON and read it back."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the package that `langchain_core.load` imports it from."""
        return ["langchain_parrot"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """Name the environment variable of the key, which is never written."""
        return {"api_key": API_KEY_VARIABLES[0]}

    def _own_stop(self) -> list[str] | None:
        """Return the constructor's `stop` for LangChain's tracers."""
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        return own or None

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Return the parameters that distinguish models in traces and cache keys."""
        parrot = merge_fields(self._own_fields())
        return {
            "model": self.model,
            "base_url": self.base_url,
            **self._default_params,
            **({"parrot": parrot} if parrot else {}),
        }

    @property
    def _default_params(self) -> dict[str, Any]:
        """Return the body fields that the constructor sets."""
        sampling = {name: getattr(self, name) for name in self._sampling}
        given = {name: value for name, value in sampling.items() if value not in (None, [])}
        return {**given, **self.model_kwargs, **(self.extra_body or {})}

    @property
    def _clients(self) -> OpenAIClients:
        """Return the clients of the current connection, as a copied model may use another one."""
        connection = Connection(
            base_url=self.base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            timeout=self.timeout,
            max_retries=self.max_retries,
            headers=self.default_headers or {},
            query=self.default_query or {},
            http_client=self.http_client,
            http_async_client=self.http_async_client,
        )
        if self._openai_clients is None or self._openai_clients.connection != connection:
            self._openai_clients = OpenAIClients(connection)
        return self._openai_clients

    def _own_fields(self) -> dict[str, Any]:
        return {
            name: getattr(self, "variable_transform" if name == "transform" else name)
            for name in FIELDS
        }

    def _options(
        self,
        stop: list[str] | None,
        run_manager: BaseRunManager | None,
        arguments: Mapping[str, Any],
    ) -> CallOptions:
        """Build the options of a call.

        Args:
            stop: LangChain's argument `stop`.
            run_manager: manager of the call's run.
            arguments: the other arguments of the call.
        """
        arguments = dict(arguments)
        linked = {}
        if self.linking:
            # LangChain calls a chat model's `_stream` without a run manager.
            linked = fields_here() if run_manager is None else fields_of_run(run_manager)
        parrot = merge_fields(linked, self._own_fields(), take_fields(arguments))
        # Without a plan it is unknown who reads the answer.
        if parrot.pop("defer", None) is PLANNED:
            parrot["defer"] = True
        if "inputs" in parrot:
            parrot["inputs"] = {name: _source(source) for name, source in parrot["inputs"].items()}
        client: dict[str, Any] = {
            name: arguments.pop(name)
            for name in ("extra_headers", "extra_query", "timeout")
            if name in arguments
        }
        extra_body = arguments.pop("extra_body", None) or {}
        stream_usage = arguments.pop("stream_usage", None)
        # LangChain's internal arguments for streams and tracers.
        for name in ("stream", "ls_structured_output_format"):
            arguments.pop(name, None)
        body = {**self._default_params, **arguments, **extra_body}
        if stop:
            body["stop"] = stop
        body = {name: value for name, value in body.items() if value is not None}
        if parrot:
            body["parrot"] = {**parrot, **body.get("parrot", {})}
        return CallOptions(
            model=body.pop("model", self.model),
            body=body,
            client=client,
            parrot=body.get("parrot", {}),
            stream_usage=self.stream_usage if stream_usage is None else stream_usage,
        )

    @abstractmethod
    def _prompt_fields(self, prompt: Any) -> dict[str, Any]:
        """Return the prompt or messages as a field of the body."""

    @abstractmethod
    def _result(
        self, call: CallOptions, prompt: Any, document: dict[str, Any], headers: Mapping[str, str]
    ) -> Any:
        """Convert an answer to LangChain's result."""

    @abstractmethod
    def _as_chunk(self, result: Any) -> Any:
        """Convert a deferred result to the only chunk of a stream."""

    def _create(self, client: Any, call: CallOptions, prompt: Any, **options: Any) -> Any:
        resource = operator.attrgetter(self._resource)(client)
        # NOTE: everything goes into `extra_body`, because the client refuses fields unknown to its
        # version.
        return resource.with_raw_response.create(
            model=call.model,
            extra_body=call.body,
            **self._prompt_fields(prompt),
            **call.client,
            **options,
        )

    def _answer(self, call: CallOptions, prompt: Any) -> Any:
        with self._translated():
            raw = self._create(self._clients.sync(), call, prompt)
        return self._read(call, prompt, raw.content, raw.headers)

    async def _aanswer(self, call: CallOptions, prompt: Any) -> Any:
        with self._translated():
            raw = await self._create(self._clients.of_running_loop(), call, prompt)
        return self._read(call, prompt, raw.content, raw.headers)

    def _stream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        call = self._options(stop, run_manager, kwargs)
        if call.is_deferred:
            yield self._as_chunk(self._answer(call, prompt))
            return
        with self._translated():
            raw = self._create(self._clients.sync(), call.streamed(), prompt, stream=True)
            self._check_understood(call, raw.headers)
            assembly = self._assembly(raw.headers)
            with raw.parse() as events:
                for event in events:
                    for chunk in assembly.chunks(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()

    async def _astream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        call = self._options(stop, run_manager, kwargs)
        if call.is_deferred:
            yield self._as_chunk(await self._aanswer(call, prompt))
            return
        with self._translated():
            client = self._clients.of_running_loop()
            raw = await self._create(client, call.streamed(), prompt, stream=True)
            self._check_understood(call, raw.headers)
            assembly = self._assembly(raw.headers)
            async with raw.parse() as events:
                async for event in events:
                    for chunk in assembly.chunks(event.model_dump(warnings=False)):
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk
            yield assembly.last()

    @property
    def _tokens(self) -> TokenCounter:
        clients = self._clients
        counter = self._counter
        if counter is None or (counter.clients, counter.model) != (clients, self.model):
            counter = self._counter = TokenCounter(clients, self.model)
        return counter

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's tokens of a text, counted by the gateway, without special ones.

        Raises:
            ParrotError: the gateway cannot be reached, or has no tokenizer of this model.
        """
        if self._own_token_ids is not None:
            return self._own_token_ids(text)
        with self._translated():
            return self._tokens.token_ids(prompt=text, add_special_tokens=False)

    def get_num_tokens(self, text: str) -> int:
        """Return the number of tokens; raises like `get_token_ids`."""
        if self._own_token_ids is not None:
            return len(self._own_token_ids(text))
        with self._translated():
            return self._tokens.count(prompt=text, add_special_tokens=False)

    @property
    def _own_token_ids(self) -> Callable[[str], list[int]] | None:
        """Return the user's own tokenizer from LangChain's field."""
        found: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        return found

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate exceptions of the `openai` client to this package's."""
        try:
            yield
        except Exception as error:
            from langchain_parrot._openai_errors import from_openai

            parrot_error = from_openai(error, self.base_url)
            if parrot_error is error:
                raise
            raise parrot_error from error

    def _read(
        self, call: CallOptions, prompt: Any, content: bytes, headers: Mapping[str, str]
    ) -> Any:
        """Convert an answer to a result.

        Raises:
            ParrotFeatureError: the answer is not OpenAI-compatible, or the server
                ignored fields that it depends on.
        """
        try:
            document = json.loads(content)
            document["choices"][0]
        except (ValueError, TypeError, KeyError, IndexError):
            raise ParrotFeatureError(
                f"The server at {self.base_url} gave an answer without choices, as no "
                f"OpenAI-compatible one does: {content[:200]!r}. A base URL ends in /v1."
            ) from None
        self._check_understood(call, headers)
        return self._result(call, prompt, document, headers)

    def _check_understood(self, call: CallOptions, headers: Mapping[str, str]) -> None:
        """Check that the server obeyed Parrot's fields of a call.

        Raises:
            ParrotFeatureError: it ignored fields that its answer depends on.
        """
        essential = [name for name in ESSENTIAL_FIELDS if name in call.parrot]
        if essential and "x-parrot-session" not in headers:
            raise ParrotFeatureError(
                f"The server at {self.base_url} passed over {', '.join(essential)}: it is no "
                "Parrot Gateway. Set base_url to one, or leave these arguments out."
            )

    def _note_reference(self, reference: str) -> None:
        """Register a reference that this model's server returned."""
        run = current_run()
        assert run is not None
        seconds = self.timeout if isinstance(self.timeout, int | float) else DEFAULT_TIMEOUT_S
        run.add(reference, GatewayResolver(self._clients), seconds)


def _source(source: Any) -> Any:
    """Convert one of `inputs` for the gateway."""
    if type(source) is not DeferredText:
        return source
    return {"value": source.get()} if source.is_resolved else source.reference


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def header_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    """Return `parrot` and `request_id` for `response_metadata`, from an answer's headers."""
    parrot = answer_metadata(headers)
    return present({"parrot": parrot or None, "request_id": headers.get("x-request-id")})


def token_usage(results: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Sum the `token_usage` of several `llm_output`s with all details, and keep their model."""
    total: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for result in results:
        if result is None:
            continue
        _add(total, result.get("token_usage") or {})
        for name in ("model_name", "system_fingerprint"):
            if result.get(name) is not None:
                others.setdefault(name, result[name])
    return {"token_usage": total, **others}


def _add(total: dict[str, Any], counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        if isinstance(count, Mapping):
            _add(total.setdefault(name, {}), count)
        elif isinstance(count, int):
            total[name] = total.get(name, 0) + count
