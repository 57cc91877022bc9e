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

#: Names that ChatOpenAI and OpenAI have for the same things, so that one import is all to change.
_OPENAI_NAMES = {
    "model_name": "model",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}

#: The argument `defer` of a call whose answer may be a reference; see `composition`.
PLANNED = object()


def _default_secret() -> SecretStr | None:
    key = default_api_key()
    return None if key is None else SecretStr(key)


class CallOptions(NamedTuple):
    """One call without its prompt or messages.

    Attributes:
        body: the other fields of its body, `parrot` included.
        client: arguments of the client: headers, query, timeout.
        parrot: the `parrot` object of `body`.
        stream_usage: whether a stream ends with its usage.
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
        """The same for each of several prompts; the run that it is belongs to the first."""
        parrot = {name: value for name, value in self.parrot.items() if name != "run"}
        other = self._replace(body={**self.body, "parrot": parrot}, parrot=parrot)
        return [self, *[other] * (prompts - 1)]

    def streamed(self) -> CallOptions:
        """The same as a stream."""
        body = dict(self.body)
        if self.stream_usage:
            body.setdefault("stream_options", {"include_usage": True})
        return self._replace(body=body)


class StreamAssembly(ABC):
    """Turns the events of a stream into chunks, and the end into one with all that comes once.

    Args:
        headers: of the answer.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.document: dict[str, Any] = {}
        self.usage: Mapping[str, Any] | None = None
        self.finish_reason: str | None = None

    def chunks(self, event: Mapping[str, Any]) -> Iterator[Any]:
        """The chunks of one event."""
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
        """The chunk of one choice of an event."""

    @abstractmethod
    def last(self) -> Any:
        """The chunk at the end: usage, finish reason, model, and what the headers say."""


class ParrotModel(BaseModel):
    """Mixin of both models. Parrot's fields, also as arguments of a call, are those from `session`.

    Attributes:
        model: its name, one of those that `GET /v1/models` lists; `model_name` is the same.
        base_url: of the gateway, with `/v1`; else PARROT_BASE_URL, OPENAI_API_BASE,
            OPENAI_BASE_URL, and this machine's port 8000.
        api_key: else PARROT_API_KEY, OPENAI_API_KEY; an open gateway needs none.
        timeout: seconds for a call; the client's 600 if not given.
        max_retries: of calls that may be repeated; the client's 2 if not given.
        default_headers, default_query: with every request.
        model_kwargs: further fields of the body, such as `top_k`; unknown constructor arguments
            become such, with a warning.
        extra_body: the same, without the check for double names.
        streaming: `invoke` and its like use a stream inside.
        stream_usage: ask for the tokens of a stream.
        http_client, http_async_client: your own objects for the `openai` client, of the HTTP
            library that its version uses.
        session: the session of the calls, by id or by any name; a LangGraph thread or the root run
            where none is given.
        output: name of the variable that the text of the call fills.
        inputs: what `{{name}}` in a prompt stands for: a variable (name, id or reference),
            `{"variable": …}` or `{"value": "text"}`.
        objective: `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.
        variable_transform: argument `transform`: what is done to the text before it fills its
            variable, such as `json(/summary)`.
        context: goes on from a named context of the session.
        priority: an integer; larger runs earlier.
        dedupe: False runs a deferred call even if an identical one was run.
        name: what pictures of the graph, and LangChain's traces, call it.
        group: calls of a session with the same group are one task group.
        defer: inside compositions, go on without waiting for texts that only go into other
            prompts; see `composition`.
        linking: send session, run, parent, node name and group from LangChain's run tree. What is
            given here or with a call wins.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=()
    )

    #: The resource of the `openai` client that has `create`.
    _resource: ClassVar[str]
    _assembly: ClassVar[type[StreamAssembly]]
    #: Arguments that are fields of the body under the same name.
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

    # -- construction -------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, values: Any) -> Any:
        """Take the names that ChatOpenAI has; what is unknown becomes a field of the body."""
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
        # None is what a program passes that leaves it to the environment.
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
        """`model` under the name that other models of LangChain have."""
        return self.model

    # -- LangChain's conventions --------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """True: `langchain_core.load` writes it as JSON and reads it back."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """The package that `langchain_core.load` reads it from."""
        return ["langchain_parrot"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The key is never written; it is read back from the environment."""
        return {"api_key": API_KEY_VARIABLES[0]}

    def _own_stop(self) -> list[str] | None:
        """The constructor's `stop` for LangChain's tracers."""
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        return own or None

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Parameters that distinguish two models in traces and cache keys."""
        parrot = merge_fields(self._own_fields())
        return {
            "model": self.model,
            "base_url": self.base_url,
            **self._default_params,
            **({"parrot": parrot} if parrot else {}),
        }

    @property
    def _default_params(self) -> dict[str, Any]:
        """Fields of the body that the constructor sets."""
        sampling = {name: getattr(self, name) for name in self._sampling}
        given = {name: value for name, value in sampling.items() if value not in (None, [])}
        return {**given, **self.model_kwargs, **(self.extra_body or {})}

    # -- requests -----------------------------------------------------------------------------

    @property
    def _clients(self) -> OpenAIClients:
        """The clients of the connection as it is now: a copy of a model may go elsewhere."""
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
        """The options of a call.

        Args:
            stop: LangChain's argument of that name.
            run_manager: of the run that the call is.
            arguments: the other arguments of the call.
        """
        arguments = dict(arguments)
        linked = {}
        if self.linking:
            # LangChain gives `_stream` of chat models no run manager.
            linked = fields_here() if run_manager is None else fields_of_run(run_manager)
        parrot = merge_fields(linked, self._own_fields(), take_fields(arguments))
        # Without a plan nobody knows who reads the answer.
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
        # How LangChain asks for a stream, and what it says to its tracers.
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
        """The prompt or the messages as a field of the body."""

    @abstractmethod
    def _result(
        self, call: CallOptions, prompt: Any, document: dict[str, Any], headers: Mapping[str, str]
    ) -> Any:
        """LangChain's result of an answer."""

    @abstractmethod
    def _as_chunk(self, result: Any) -> Any:
        """A deferred result as the only chunk of a stream."""

    def _create(self, client: Any, call: CallOptions, prompt: Any, **options: Any) -> Any:
        resource = operator.attrgetter(self._resource)(client)
        # NOTE: all in `extra_body`, since the client refuses fields that its version does not know.
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

    # -- tokens -------------------------------------------------------------------------------

    @property
    def _tokens(self) -> TokenCounter:
        clients = self._clients
        counter = self._counter
        if counter is None or (counter.clients, counter.model) != (clients, self.model):
            counter = self._counter = TokenCounter(clients, self.model)
        return counter

    def get_token_ids(self, text: str) -> list[int]:
        """The model's tokens of a text, from the gateway, without special ones.

        Raises:
            ParrotError: the gateway is not there, or has no tokenizer of this model.
        """
        if self._own_token_ids is not None:
            return self._own_token_ids(text)
        with self._translated():
            return self._tokens.token_ids(prompt=text, add_special_tokens=False)

    def get_num_tokens(self, text: str) -> int:
        """The number of `get_token_ids`; raises as that."""
        if self._own_token_ids is not None:
            return len(self._own_token_ids(text))
        with self._translated():
            return self._tokens.count(prompt=text, add_special_tokens=False)

    @property
    def _own_token_ids(self) -> Callable[[str], list[int]] | None:
        """LangChain's field for the user's own tokenizer."""
        found: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        return found

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Inside, what the `openai` client raises becomes an error of this package."""
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
        """The result of an answer.

        Raises:
            ParrotFeatureError: it is none that an OpenAI-compatible server gives, or the server
                passed over fields that it depends on.
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
        """Check that the server did what Parrot's fields of a call say.

        Raises:
            ParrotFeatureError: it passed over fields that its answer depends on.
        """
        essential = [name for name in ESSENTIAL_FIELDS if name in call.parrot]
        if essential and "x-parrot-session" not in headers:
            raise ParrotFeatureError(
                f"The server at {self.base_url} passed over {', '.join(essential)}: it is no "
                "Parrot Gateway. Set base_url to one, or leave these arguments out."
            )

    def _note_reference(self, reference: str) -> None:
        """Take note of a reference that this model's server answered with."""
        run = current_run()
        assert run is not None
        seconds = self.timeout if isinstance(self.timeout, int | float) else DEFAULT_TIMEOUT_S
        run.add(reference, GatewayResolver(self._clients), seconds)


def _source(source: Any) -> Any:
    """One of `inputs` as the gateway takes it."""
    if type(source) is not DeferredText:
        return source
    return {"value": source.get()} if source.is_resolved else source.reference


def present(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def header_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    """`parrot` and `request_id` of `response_metadata`, from an answer's headers."""
    parrot = answer_metadata(headers)
    return present({"parrot": parrot or None, "request_id": headers.get("x-request-id")})


def token_usage(results: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The sum of the `token_usage` of several `llm_output`s, with all details, and their model."""
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
