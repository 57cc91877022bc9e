"""What ChatParrot and ParrotLLM have in common: connection, sampling, and what a call sends."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from langchain_core.callbacks import BaseRunManager
from pydantic import (
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    field_validator,
    model_validator,
)

from langchain_parrot._client import Clients, Endpoint
from langchain_parrot._errors import ParrotFeatureError
from langchain_parrot._fields import ESSENTIAL, ParrotFields
from langchain_parrot._messages import plain
from langchain_parrot._resolver import GatewayResolver
from langchain_parrot.deferred import DeferredText
from langchain_parrot.linking import fields_here, fields_of_run

DEFAULT_BASE_URL = "http://127.0.0.1:8000/v1"
#: Where the address is looked for, in this order.
BASE_URL_VARIABLES = ("PARROT_BASE_URL", "OPENAI_API_BASE", "OPENAI_BASE_URL")
API_KEY_VARIABLES = ("PARROT_API_KEY", "OPENAI_API_KEY")

#: Names that ChatOpenAI and OpenAI have for the same things, so that one import is all to change.
_OTHER_NAMES = {
    "model_name": "model",
    "openai_api_key": "api_key",
    "openai_api_base": "base_url",
    "request_timeout": "timeout",
    "stop_sequences": "stop",
}

#: Response header, its name in `response_metadata["parrot"]`, and how it is read.
_HEADERS = (
    ("x-parrot-session", "session", str),
    ("x-parrot-call", "call", str),
    ("x-parrot-variable", "variable", str),
    ("x-parrot-engine", "engine", str),
    ("x-parrot-cached-tokens", "cached_tokens", int),
    ("x-parrot-queue-ms", "queue_ms", float),
)


def _environment(names: Iterable[str]) -> str | None:
    return next((text for name in names if (text := os.environ.get(name, "").strip())), None)


def _default_base_url() -> str:
    return _environment(BASE_URL_VARIABLES) or DEFAULT_BASE_URL


def _default_api_key() -> SecretStr | None:
    key = _environment(API_KEY_VARIABLES)
    return None if key is None else SecretStr(key)


class Call(NamedTuple):
    """One call, but for its prompt or messages.

    Attributes:
        model: its model.
        body: the other fields of its body, `parrot` included.
        options: arguments of the client: headers, query, timeout.
        parrot: what `body` has under `parrot`.
        stream_usage: whether a stream shall tell its usage.
    """

    model: str
    body: dict[str, Any]
    options: dict[str, Any]
    parrot: dict[str, Any]
    stream_usage: bool

    @property
    def is_deferred(self) -> bool:
        """Whether it is answered with a reference."""
        return bool(self.parrot.get("defer"))

    def for_each(self, prompts: int) -> list[Call]:
        """One like it for each of so many prompts; the run that it is belongs to the first."""
        parrot = {name: value for name, value in self.parrot.items() if name != "run"}
        other = self._replace(body={**self.body, "parrot": parrot}, parrot=parrot)
        return [self, *[other] * (prompts - 1)]

    def streamed(self) -> Call:
        """The same as a stream."""
        body = dict(self.body)
        if self.stream_usage:
            body.setdefault("stream_options", {"include_usage": True})
        return self._replace(body=body)


class ParrotModel(ParrotFields):
    """Mixin of both models: connection, sampling parameters, and what a call sends.

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
        extra_body: the same, for what shall not be checked for double names.
        streaming: `invoke` and its like use a stream inside.
        stream_usage: ask for the tokens of a stream.
        http_client, http_async_client: your own objects for the `openai` client, of the HTTP
            library that its version uses.
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, protected_namespaces=()
    )

    model: str
    base_url: str = Field(default_factory=_default_base_url, validate_default=True)
    api_key: SecretStr | None = Field(default_factory=_default_api_key)
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

    _made: Clients | None = PrivateAttr(default=None)

    # -- construction -------------------------------------------------------------------------

    @model_validator(mode="before")
    @classmethod
    def _accept_other_names(cls, values: Any) -> Any:
        """Arguments as other OpenAI models of LangChain name them; unknown ones to the body."""
        if not isinstance(values, dict):
            return values
        names = {field.alias or name: name for name, field in cls.model_fields.items()}
        names.update({name: name for name in cls.model_fields}, **_OTHER_NAMES)
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
        """The model, as other models of LangChain call it."""
        return self.model

    # -- LangChain's conventions --------------------------------------------------------------

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """It can be written as JSON and read back."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Where it is found when it is read back."""
        return ["langchain_parrot"]

    @property
    def lc_secrets(self) -> dict[str, str]:
        """What is never written: the key, which is read back from the environment."""
        return {"api_key": API_KEY_VARIABLES[0]}

    def _own_stop(self) -> list[str] | None:
        """The constructor's `stop`, as LangChain's tracers want it."""
        own = [self.stop] if isinstance(self.stop, str) else self.stop
        return own or None

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What makes two models different: of traces and cache keys."""
        parrot = self.parrot_fields({})
        return {
            "model": self.model,
            "base_url": self.base_url,
            **self._default_params,
            **({"parrot": parrot} if parrot else {}),
        }

    @property
    def _default_params(self) -> dict[str, Any]:
        """Fields of the body that the constructor gave."""
        sampling = {name: getattr(self, name) for name in self._sampling_names()}
        given = {name: value for name, value in sampling.items() if value not in (None, [])}
        return {**given, **self.model_kwargs, **(self.extra_body or {})}

    @classmethod
    def _sampling_names(cls) -> tuple[str, ...]:
        """The constructor's arguments that are fields of the body as they are."""
        return (
            "temperature",
            "max_tokens",
            "top_p",
            "n",
            "seed",
            "stop",
            "frequency_penalty",
            "presence_penalty",
            "logit_bias",
        )

    # -- calls --------------------------------------------------------------------------------

    @property
    def _clients(self) -> Clients:
        """Those of the connection as it is now: a copy of a model may go elsewhere."""
        endpoint = Endpoint(
            base_url=self.base_url,
            api_key=None if self.api_key is None else self.api_key.get_secret_value(),
            timeout=self.timeout,
            max_retries=self.max_retries,
            headers=self.default_headers or {},
            query=self.default_query or {},
            http_client=self.http_client,
            http_async_client=self.http_async_client,
        )
        if self._made is None or self._made.endpoint != endpoint:
            self._made = Clients(endpoint)
        return self._made

    def _deferred(self, reference: str) -> DeferredText:
        """The text that a reference of this model's server stands for."""
        clients = self._clients
        resolver = GatewayResolver(clients.sync, clients.of_running_loop)
        if self.timeout is None or not isinstance(self.timeout, int | float):
            return DeferredText(reference, resolver)
        return DeferredText(reference, resolver, timeout=self.timeout)

    def _call(
        self, stop: list[str] | None, run_manager: BaseRunManager | None, given: Mapping[str, Any]
    ) -> Call:
        """What a call sends besides its prompt or messages.

        Args:
            stop: LangChain's argument of that name.
            run_manager: of the run that the call is.
            given: the other arguments of the call.
        """
        arguments = dict(given)
        parrot = self.parrot_fields(arguments)
        if self.linking:
            # LangChain gives `_stream` of chat models no run manager.
            linked = fields_here() if run_manager is None else fields_of_run(run_manager)
            parrot = {**linked, **parrot}
        if "inputs" in parrot:
            parrot["inputs"] = {
                name: plain(source) if isinstance(source, str) else source
                for name, source in parrot["inputs"].items()
            }
        options: dict[str, Any] = {
            name: arguments.pop(name)
            for name in ("extra_headers", "extra_query", "timeout")
            if name in arguments
        }
        extra_body = arguments.pop("extra_body", None) or {}
        stream_usage = arguments.pop("stream_usage", None)
        # How LangChain asks for a stream, and what it tells its tracers.
        for name in ("stream", "ls_structured_output_format"):
            arguments.pop(name, None)
        body = {**self._default_params, **arguments, **extra_body}
        if stop:
            body["stop"] = stop
        body = {name: value for name, value in body.items() if value is not None}
        if parrot:
            body["parrot"] = {**parrot, **body.get("parrot", {})}
        return Call(
            model=body.pop("model", self.model),
            body=body,
            options=options,
            parrot=body.get("parrot", {}),
            stream_usage=self.stream_usage if stream_usage is None else stream_usage,
        )

    def _check_understood(self, call: Call, headers: Mapping[str, str]) -> None:
        """Check that the server did what Parrot's fields of a call say.

        Raises:
            ParrotFeatureError: it passed over fields that its answer depends on.
        """
        essential = [name for name in ESSENTIAL if name in call.parrot]
        if essential and "x-parrot-session" not in headers:
            raise ParrotFeatureError(
                f"The server at {self.base_url} passed over {', '.join(essential)}: it is no "
                "Parrot Gateway. Set base_url to one, or leave these arguments out."
            )

    def _document(self, content: bytes) -> dict[str, Any]:
        """The JSON object of a whole answer.

        Raises:
            ParrotFeatureError: it is none that an OpenAI-compatible server gives.
        """
        try:
            document = json.loads(content)
            document["choices"][0]
        except (ValueError, TypeError, KeyError, IndexError):
            raise ParrotFeatureError(
                f"The server at {self.base_url} gave an answer without choices, as no "
                f"OpenAI-compatible one does: {content[:200]!r}. A base URL ends in /v1."
            ) from None
        whole: dict[str, Any] = document
        return whole


def told_by(headers: Mapping[str, str]) -> dict[str, Any]:
    """What an answer's headers say, for `response_metadata`: `parrot` and `request_id`."""
    parrot = {name: read(text) for header, name, read in _HEADERS if (text := headers.get(header))}
    told: dict[str, Any] = {"parrot": parrot} if parrot else {}
    request_id = headers.get("x-request-id")
    return {**told, "request_id": request_id} if request_id else told


def token_usage(results: Iterable[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The sum of the `token_usage` of several `llm_output`s, with all details, and their model."""
    total: dict[str, Any] = {}
    combined: dict[str, Any] = {}
    for result in results:
        if result is None:
            continue
        _add(total, result.get("token_usage") or {})
        for name in ("model_name", "system_fingerprint"):
            if result.get(name) is not None:
                combined.setdefault(name, result[name])
    return {"token_usage": total, **combined}


def _add(total: dict[str, Any], counts: Mapping[str, Any]) -> None:
    for name, count in counts.items():
        if isinstance(count, Mapping):
            _add(total.setdefault(name, {}), count)
        elif isinstance(count, int):
            total[name] = total.get(name, 0) + count
