"""Converts the settings of a LiteLLM proxy to settings of this gateway.

Pure: takes the parsed file, returns settings and a report. Values are taken out of a copy of the
file, and the report names all that remains in it. Neither contains a secret: a key in the file
becomes the name of a variable to set, and the report repeats no value of the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from parrot_gateway.settings.model import UpstreamSettings

#: Keys and indexes from the top of the file.
Location: TypeAlias = tuple[str | int, ...]


class Provider(NamedTuple):
    """A provider under LiteLLM's name that calls can be passed on to."""

    #: Base URL if the file has none; empty: the file must have one.
    url: str = ""
    #: Variable of the key if the file has none; empty: no key is sent.
    key: str = ""
    #: Path appended to the file's `api_base`, unless it ends with it.
    suffix: str = ""
    api: Literal["openai", "anthropic"] = "openai"


PROVIDERS: dict[str, Provider] = {
    "openai": Provider("https://api.openai.com/v1", "OPENAI_API_KEY"),
    "openai_like": Provider(),
    "anthropic": Provider("https://api.anthropic.com/v1", "ANTHROPIC_API_KEY", "/v1", "anthropic"),
    # Azure's API without versions names models by their deployments.
    "azure": Provider("", "AZURE_API_KEY", "/openai/v1"),
    "cerebras": Provider("https://api.cerebras.ai/v1", "CEREBRAS_API_KEY"),
    "cohere": Provider("https://api.cohere.ai/compatibility/v1", "COHERE_API_KEY"),
    "dashscope": Provider("https://dashscope.aliyuncs.com/compatible-mode/v1", "DASHSCOPE_API_KEY"),
    "deepinfra": Provider("https://api.deepinfra.com/v1/openai", "DEEPINFRA_API_KEY"),
    "deepseek": Provider("https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "fireworks_ai": Provider("https://api.fireworks.ai/inference/v1", "FIREWORKS_AI_API_KEY"),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", "GEMINI_API_KEY"),
    "groq": Provider("https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "hosted_vllm": Provider(),
    "huggingface": Provider("https://router.huggingface.co/v1", "HF_TOKEN", "/v1"),
    "litellm_proxy": Provider("", "LITELLM_PROXY_API_KEY"),
    "lm_studio": Provider(),
    "mistral": Provider("https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "moonshot": Provider("https://api.moonshot.ai/v1", "MOONSHOT_API_KEY"),
    "nvidia_nim": Provider("https://integrate.api.nvidia.com/v1", "NVIDIA_NIM_API_KEY"),
    "ollama": Provider("http://localhost:11434/v1", "", "/v1"),
    "ollama_chat": Provider("http://localhost:11434/v1", "", "/v1"),
    "openrouter": Provider("https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "perplexity": Provider("https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
    "sambanova": Provider("https://api.sambanova.ai/v1", "SAMBANOVA_API_KEY"),
    "together_ai": Provider("https://api.together.ai/v1", "TOGETHERAI_API_KEY"),
    "vercel_ai_gateway": Provider("https://ai-gateway.vercel.sh/v1", "VERCEL_AI_GATEWAY_API_KEY"),
    "xai": Provider("https://api.x.ai/v1", "XAI_API_KEY"),
    "xinference": Provider(),
    "zai": Provider("https://api.z.ai/api/paas/v4", "ZAI_API_KEY"),
}
#: Prefixes of models that a file names without their provider.
_BARE = {
    "openai": r"gpt-|chatgpt-|o\d|ft:|text-embedding-|davinci|babbage|dall-e|whisper|tts-",
    "anthropic": r"claude",
    "cohere": r"command|embed-|rerank-",
}
#: By name of a number in any section: the upstream setting and its minimum.
_NUMBERS = {
    "request_timeout": ("read_timeout_s", 1e-3),
    "timeout": ("read_timeout_s", 1e-3),
    "num_retries": ("max_retries", 0),
    "max_retries": ("max_retries", 0),
    "max_parallel_requests": ("max_concurrency", 1),
    "default_max_parallel_requests": ("max_concurrency", 1),
    "cooldown_time": ("breaker_open_s", 1e-3),
    "retry_after": ("backoff_s", 1e-3),
    "allowed_fails": ("breaker_failures", 0),
}
_SECTIONS = ("general_settings", "litellm_settings", "router_settings", "environment_variables")
_REFERENCE = "os.environ/"
#: Values of `api_key` for servers without keys.
_NO_KEY = re.compile(
    r"|none|null|empty|dummy|fake(-key)?|(sk-)?no-key.*|n/?a|anything|not-.*", re.I
)
#: Limits and defaults of `UpstreamSettings` and `ServerSettings` that a file may exceed.
_MAX_RETRIES = 10
_MAX_BACKOFF_S = 8.0
_CALL_TIMEOUT_S = 600.0


class Remark(NamedTuple):
    """A place of the file that is not carried over, and the reason."""

    location: Location
    text: str

    @property
    def path(self) -> str:
        """Return the location as text, such as `model_list[0].litellm_params.rpm`."""
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.location]
        return "".join(parts).removeprefix(".")


@dataclass(slots=True)
class Conversion:
    """The result of converting a file."""

    #: Content of a settings file of the gateway.
    settings: dict[str, Any] = field(default_factory=dict)
    lost: list[Remark] = field(default_factory=list)
    #: Environment variables that the settings refer to, and the places of their values in the file.
    variables: dict[str, str] = field(default_factory=dict)


class _Deployment(NamedTuple):
    """One entry of `model_list` with its name."""

    name: str
    #: The server's name of the model.
    model: str
    provider: str
    url: str
    key: str | None
    options: tuple[tuple[str, float], ...]


@dataclass(slots=True, eq=False)
class _Upstream:
    """An upstream under construction; all its servers are like the first."""

    first: _Deployment
    urls: Sequence[str]
    #: A name that clients use, or an upstream and one of its models.
    fallback: str | tuple[_Upstream, str] | None = None
    name: str = "unnamed"
    #: The listed models. None: the upstream lists them itself; `*`: it takes any name.
    models: dict[str, None] | Literal["*"] | None = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return the entry of `upstreams`."""
        found: dict[str, Any] = {"name": self.name}
        found |= {"urls": list(self.urls)} if len(self.urls) > 1 else {"url": self.urls[0]}
        if PROVIDERS[self.first.provider].api != "openai":
            found["api"] = PROVIDERS[self.first.provider].api
        if self.first.key is not None:
            found["api_key"] = self.first.key
        if self.models is not None:
            found["models"] = "*" if self.models == "*" else list(self.models)
        found |= dict(self.first.options)
        if self.fallback is not None:
            target = self.fallback
            found["fallback"] = target if isinstance(target, str) else _target(*target)
        return found


class _NotServedError(Exception):
    """A model to which calls cannot be passed on."""


def convert(config: Mapping[str, Any], environment: Mapping[str, str]) -> Conversion:
    """Build settings with the same models as far as possible.

    Args:
        config: the parsed file.
        environment: values of variables that settings cannot refer to, such as addresses.
    """
    return _Converter(config, environment).run()


class _Converter:
    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._left = _copy(config)
        found = (self._left.get(name) for name in _SECTIONS)
        sections = [section if isinstance(section, dict) else {} for section in found]
        self._general, self._litellm, self._router, self._given = sections
        self._environment = {**{k: str(v) for k, v in self._given.items()}, **environment}
        #: Variables named in the file, and variables made for keys written in it.
        self._taken = {*self._given, *re.findall(_REFERENCE + r"(\w+)", str(config))}
        self._made: dict[str, str] = {}
        self._found = Conversion()

    def run(self) -> Conversion:
        groups = self._groups()
        upstreams, targets = self._upstreams(groups, self._fallbacks(groups))
        _give_names(upstreams)
        server, settings = self._server(upstreams), self._found.settings
        settings |= {"server": server} if server else {}
        settings |= {"upstreams": [each.settings() for each in upstreams]} if upstreams else {}
        aliases = self._aliases(upstreams, targets)
        settings |= {"aliases": aliases} if aliases else {}
        for entry in (server, *settings.get("upstreams", ())):
            name = entry.get("api_key", "").removeprefix("env:")
            if name and name not in self._found.variables:
                inside = self._given.pop(name, None) is not None
                where = f"the value of environment_variables.{name}" if inside else ""
                self._found.variables[name] = where
        for name, value in self._left.items():
            inside = name in _SECTIONS and isinstance(value, dict)
            self._lose_all((name,), value) if inside else self._lose_all((), {name: value})
        return self._found

    def _lose(self, location: Location, why: str) -> None:
        self._found.lost.append(Remark(location, why))

    def _lose_all(self, location: Location, values: Mapping[str, Any]) -> None:
        """Report all values that were not taken out and are not empty."""
        for name, value in values.items():
            if not (value is None or value is False or value in ("", [], {})):
                self._lose((*location, name), "has no counterpart here")

    def _server(self, upstreams: Sequence[_Upstream]) -> dict[str, Any]:
        server: dict[str, Any] = {}
        key = self._general.pop("master_key", None)
        if key:
            place = ("general_settings", "master_key")
            server["api_key"] = self._key(place, str(key), "PARROT_API_KEY")
        most = self._number(self._general, "global_max_parallel_requests", 1)
        if most is not None:
            server["max_running_calls"] = int(most)
        longest = max(
            [dict(each.first.options).get("read_timeout_s", 0) for each in upstreams] or [0]
        )
        if longest > _CALL_TIMEOUT_S:
            server["call_timeout_s"] = longest
        return server

    def _resolve(self, value: Any) -> Any:
        """Return the value, or that of the variable it refers to; None if that is not set."""
        if not isinstance(value, str) or not value.startswith(_REFERENCE):
            return value
        name = value.removeprefix(_REFERENCE)
        self._given.pop(name, None)
        return self._environment.get(name) or None

    def _number(self, values: dict[str, Any], name: str, least: float) -> float | None:
        """Take a number out; an unusable one stays and is thus reported."""
        value = self._resolve(values.get(name))
        try:
            number = float("nan" if isinstance(value, bool) else value)
        except (TypeError, ValueError, OverflowError):
            return None
        if not least <= number < 1e9:
            return None
        del values[name]
        return int(number) if number.is_integer() else number

    def _options(self, values: dict[str, Any], before: Mapping[str, float]) -> dict[str, float]:
        """Return an upstream's options: earlier ones, updated from a section or a model's
        parameters.
        """
        options = dict(before)
        for name, (setting, least) in _NUMBERS.items():
            number = self._number(values, name, least)
            if number is None:
                continue
            if setting == "max_retries":
                number = min(int(number), _MAX_RETRIES)
            elif setting == "breaker_failures":
                number = int(number) + 1
            options[setting] = int(number) if setting == "max_concurrency" else number
        if options.get("backoff_s", 0) > _MAX_BACKOFF_S:
            options["max_backoff_s"] = options["backoff_s"]
        return options

    def _key(self, location: Location, text: str, variable: str) -> str:
        """Return `env:NAME` for the named variable, or for a new one that should hold the given
        key.
        """
        if text.startswith(_REFERENCE):
            return f"env:{text.removeprefix(_REFERENCE)}"
        if text not in self._made:
            name, number = variable, 1
            while name in self._taken:
                number += 1
                name = f"{variable}_{number}"
            self._taken.add(name)
            self._made[text] = name
            self._found.variables[name] = f"the value of {Remark(location, '').path}"
        return f"env:{self._made[text]}"

    def _groups(self) -> dict[str, list[_Deployment]]:
        """Return the usable deployments by the name of their model."""
        entries = self._left.pop("model_list", None)
        if not isinstance(entries, list):
            self._lose(("model_list",), "is not there or not a list: there is nothing to serve")
            entries = []
        defaults: dict[str, float] = {}
        for section in (self._general, self._litellm, self._router):
            defaults = self._options(section, defaults)
        groups: dict[str, list[_Deployment]] = {}
        for index, entry in enumerate(entries):
            try:
                found = self._deployment(("model_list", index), entry, defaults)
            except _NotServedError as error:
                self._lose(("model_list", index), str(error))
                continue
            if "*" in found.name and found.name in groups:
                self._lose(("model_list", index), "a pattern has one server here, its first")
            else:
                groups.setdefault(found.name, []).append(found)
        return groups

    def _deployment(
        self, location: Location, entry: Any, defaults: Mapping[str, float]
    ) -> _Deployment:
        """Read one entry of `model_list`.

        Raises:
            _NotServedError: calls cannot be passed on to it.
        """
        params = entry.pop("litellm_params", None) if isinstance(entry, dict) else None
        if not isinstance(params, dict):
            raise _NotServedError("is not a model with `litellm_params`")
        inside: Location = (*location, "litellm_params")
        model = params.pop("model", None)
        name = entry.pop("model_name", model)
        if not (isinstance(model, str) and model and isinstance(name, str) and name):
            raise _NotServedError("`model` is not the name of a model")
        shown = f"'{name[:80]}'"
        base = params.pop("api_base", None) or params.pop("base_url", None)
        owner, there = _split(model, str(params.pop("custom_llm_provider", None) or ""), base)
        provider = PROVIDERS.get(owner)
        if provider is None or not there:
            raise _NotServedError(
                f"{shown}: calls cannot be passed on to {owner[:40] or 'its provider'}: no OpenAI-"
                'compatible address of it is known here (see "From LiteLLM" in docs/operations.md)'
            )
        if ("*" in name) != ("*" in there) or ("*" in name and there not in ("*", name)):
            raise _NotServedError(f"{shown}: a pattern stands for the same names at the server")
        url = self._resolve(base) if base else provider.url
        if not isinstance(url, str) or not url:
            raise _NotServedError(f"{shown}: its api_base is missing, or its variable is not set")
        if base:
            url = url.rstrip("/").removesuffix(provider.suffix) + provider.suffix
        key, given = None, params.pop("api_key", None)
        if given is not None:
            if not _NO_KEY.fullmatch(str(given).strip()):
                variable = provider.key or re.sub(r"\W", "_", owner).upper() + "_API_KEY"
                key = self._key((*inside, "api_key"), str(given).strip(), variable)
        elif provider.key and provider.url in ("", url):
            key = f"env:{provider.key}"
        options = tuple(self._options(params, defaults).items())
        found = _Deployment(name, there, owner, url, key, options)
        try:
            UpstreamSettings(**_Upstream(found, [url]).settings())
            is_usable = "@" not in urlsplit(url).netloc
        except ValueError:
            is_usable = False
        if not is_usable:
            raise _NotServedError(
                f"{shown}: expected an api_base that is an address (http:// or https://, no "
                "password, no query), and os.environ/NAME as api_key"
            )
        if given is key is None and provider.key:
            text = f"gets no key: {provider.key} is not sent to an address of your own unless named"
            self._lose((*inside, "api_base"), text)
        self._lose_all(inside, params)
        self._lose_all(location, entry)
        return found

    def _upstreams(
        self, groups: Mapping[str, Sequence[_Deployment]], fallbacks: Mapping[str, str]
    ) -> tuple[list[_Upstream], dict[str, tuple[_Upstream, str]]]:
        """Build all upstreams, and the targets of names without patterns.

        Servers with the same model, key and options form one upstream. Others of the same name
        become its fallbacks.
        """
        known: dict[Hashable, _Upstream] = {}
        targets: dict[str, tuple[_Upstream, str]] = {}
        for name, deployments in groups.items():
            if "*" in name:
                known[name] = self._pattern(name, deployments[0])
                continue
            kinds: dict[Hashable, dict[str, _Deployment]] = {}
            for each in deployments:
                kind = (PROVIDERS[each.provider].api, each.model, each.key, each.options)
                kinds.setdefault(kind, {})[each.url] = each
            target: str | tuple[_Upstream, str] | None = fallbacks.get(name)
            for servers in reversed(kinds.values()):
                first = next(iter(servers.values()))
                same = (first.provider, frozenset(servers), first.key, first.options, target)
                upstream = known.setdefault(same, _Upstream(first, [*servers], target))
                assert isinstance(upstream.models, dict)
                upstream.models[first.model] = None
                target = targets[name] = (upstream, first.model)
        order = [each for deployments in groups.values() for each in deployments]
        return sorted(known.values(), key=lambda each: order.index(each.first)), targets

    def _pattern(self, name: str, deployment: _Deployment) -> _Upstream:
        """Serve `NAME/*` by an upstream of that name, `*` by one that takes any model, and other
        patterns by one that lists its models."""
        upstream = _Upstream(deployment, [deployment.url])
        prefix, _, rest = name.partition("/")
        if rest == deployment.model == "*" and re.fullmatch(r"[A-Za-z0-9][\w.-]*", prefix, re.A):
            upstream.name = prefix
        else:
            upstream.models = "*" if name == deployment.model == "*" else None
        return upstream

    def _fallbacks(self, groups: Mapping[str, Any]) -> dict[str, str]:
        """Return the first fallback of each model with fallbacks."""
        found: dict[str, str] = {}
        named = {name for name in groups if "*" not in name}
        wanted: list[tuple[Location, set[str], Any]] = []
        sections = (("router_settings", self._router), ("litellm_settings", self._litellm))
        for section, values in sections:
            for index, each in enumerate(_list(values, "fallbacks")):
                for name, others in each.items() if isinstance(each, dict) else [("", each)]:
                    wanted.append(((section, "fallbacks", index, name), {name}, others))
        for section, values in sections:
            if default := _list(values, "default_fallbacks"):
                wanted.append(((section, "default_fallbacks"), named, default))
        for place, names, others in wanted:
            chosen = others if isinstance(others, list) else [others]
            first = next((each for each in chosen if isinstance(each, str) and each in named), None)
            if first is None or not named & names:
                self._lose(place, "names models that are not carried over")
                continue
            if len(chosen) > 1:
                self._lose(place, f"a model has one fallback, here '{first[:80]}'")
            for name in (named & names) - {first}:
                found.setdefault(name, first)
        return found

    def _aliases(
        self, upstreams: Sequence[_Upstream], targets: Mapping[str, tuple[_Upstream, str]]
    ) -> dict[str, str]:
        listed = Counter(model for each in upstreams for model in each.models or ())
        is_open = any(not isinstance(each.models, dict) for each in upstreams)
        aliases = {
            name: _target(*target)
            for name, target in targets.items()
            if name != _target(*target) and (name != target[1] or listed[name] > 1 or is_open)
        }
        given = self._router.pop("model_group_alias", None)
        for alias, group in given.items() if isinstance(given, dict) else ():
            name = group.get("model") if isinstance(group, dict) else group
            if isinstance(name, str) and name in targets:
                aliases[alias] = _target(*targets[name])
            else:
                place = ("router_settings", "model_group_alias", alias)
                self._lose(place, "is of a model that is not carried over")
        return aliases


def _give_names(upstreams: Sequence[_Upstream]) -> None:
    """Name upstreams after their providers, so that each `NAME/model` stands for one model."""
    used = {each.name for each in upstreams}
    used |= {model.partition("/")[0] for each in upstreams for model in each.models or ()}
    for each in upstreams:
        base, number = each.first.provider, 1
        if each.first.key is None and PROVIDERS[base].key:
            # NOTE: without a key of its own an upstream reads NAME_API_KEY, and this server is not
            # the provider's.
            base += "-compatible"
        name = base
        while each.name == "unnamed" and name in used:
            number += 1
            name = f"{base}-{number}"
        each.name = name if each.name == "unnamed" else each.name
        used |= {name, *(f"{name}-{index + 1}" for index in range(len(each.urls)))}


def _target(upstream: _Upstream, model: str) -> str:
    return f"{upstream.name}/{model}"


def _split(model: str, custom: str, base: Any) -> tuple[str, str]:
    """Return the provider and its name of the model; the provider is empty if unknown."""
    owner, slash, rest = model.partition("/")
    if custom:
        return custom, rest if slash and owner == custom else model
    if slash and owner in PROVIDERS:
        # The model may include the API's path: openai/responses/gpt-4o.
        return owner, rest.removeprefix("responses/") if owner == "openai" else rest
    for name, beginning in _BARE.items():
        if re.match(beginning, model):
            return name, model
    return (owner, rest) if slash else ("openai" if base else "", model)


def _copy(value: Any) -> Any:
    """Copy a value so that nothing is shared and all keys are texts."""
    if isinstance(value, Mapping):
        return {str(key): _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _list(values: dict[str, Any], name: str) -> list[Any]:
    """Take a list out; anything else stays and is thus reported."""
    return values.pop(name) if isinstance(values.get(name), list) else []
