"""Settings of a LiteLLM proxy as settings of this gateway.

Pure: takes the parsed file, gives settings and a report. What has no counterpart is reported with
its place, never dropped in silence. No secret gets into either: a key that stands in the file
becomes the name of a variable to set, and no value of the file is repeated in the report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from parrot_gateway.settings.litellm import reasons
from parrot_gateway.settings.litellm.providers import PROVIDERS, split_model
from parrot_gateway.settings.litellm.upstreams import Deployment, ImportedUpstream, Upstreams
from parrot_gateway.settings.litellm.values import (
    Conversion,
    Location,
    ValueReader,
    is_off,
    mapping,
)
from parrot_gateway.settings.model import UpstreamSettings

#: Sections whose contents are looked at.
_SECTIONS = frozenset(
    {"model_list", "router_settings", "litellm_settings", "general_settings",
     "environment_variables", "credential_list"}
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_RETRIES = 10
_ONE_FALLBACK = "a model has one fallback; give that one this as its own"
#: Defaults of `UpstreamSettings` and `ServerSettings` that a file may exceed.
_MAX_BACKOFF_S = 8.0
_CALL_TIMEOUT_S = 600.0


def convert(config: Mapping[str, Any], environment: Mapping[str, str]) -> Conversion:
    """Settings with the same models, as far as there are such.

    Args:
        config: the parsed file.
        environment: for what settings here cannot refer to variables for, as addresses.
    """
    return _Converter(config, environment).run()


class _Converter:
    def __init__(self, config: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        self._config = config
        self._report = Conversion()
        self._read = ValueReader(config, environment, self._report)
        self._router = self._section("router_settings")
        self._litellm = self._section("litellm_settings")
        self._general = self._section("general_settings")
        self._group_aliases = mapping(self._router.pop("model_group_alias", None))
        #: Where those stand that models name.
        self._used_credentials: set[Location] = set()

    def run(self) -> Conversion:
        for name, value in self._config.items():
            if name not in _SECTIONS and not is_off(value):
                self._report.lose((name,), reasons.SECTIONS.get(name, "has no counterpart"))
        defaults = self._defaults()
        groups = self._groups(defaults)
        wildcards = [name for name in groups if "*" in name]
        upstreams = Upstreams()
        first: dict[str, tuple[ImportedUpstream, str]] = {}
        fallbacks = self._fallbacks(groups)
        for name, deployments in groups.items():
            if name not in wildcards:
                first[name] = self._chain(deployments, fallbacks.get(name), upstreams)
        patterns: dict[str, tuple[ImportedUpstream, str]] = {}
        for name in wildcards:
            for deployment in groups[name]:
                target = self._wildcard(deployment, upstreams)
                if target is not None:
                    patterns.setdefault(name, target)
        named = upstreams.named()
        settings = self._report.settings
        server = self._server(named)
        if server:
            settings["server"] = server
        if named:
            settings["upstreams"] = [each.settings() for each in named]
        aliases = self._aliases(first, patterns, named)
        if aliases:
            settings["aliases"] = aliases
        self._variables()
        return self._report

    # What the file says for all models.

    def _defaults(self) -> dict[str, float]:
        """Options of every upstream, of the sections beside the list of models."""
        defaults: dict[str, float] = {}
        for section, values in (("litellm_settings", self._litellm),
                                ("router_settings", self._router)):  # fmt: skip
            for name, setting in (
                ("request_timeout", "read_timeout_s"),
                ("timeout", "read_timeout_s"),
                ("num_retries", "max_retries"),
            ):
                self._take(values, (section, name), setting, defaults)
        self._take(
            self._router, ("router_settings", "default_max_parallel_requests"), "max_concurrency",
            defaults,
        )  # fmt: skip
        if "max_concurrency" not in defaults:
            self._take(
                self._general, ("general_settings", "max_parallel_requests"), "max_concurrency",
                defaults,
            )  # fmt: skip
        self._take(self._router, ("router_settings", "cooldown_time"), "breaker_open_s", defaults)
        self._take(self._router, ("router_settings", "retry_after"), "backoff_s", defaults)
        if defaults.get("backoff_s", 0) > _MAX_BACKOFF_S:
            defaults["max_backoff_s"] = defaults["backoff_s"]
        for section, values in (("router_settings", self._router),
                                ("litellm_settings", self._litellm)):  # fmt: skip
            location = (section, "allowed_fails")
            allowed = self._read.number(values, location)
            if allowed is not None and "breaker_failures" not in defaults:
                defaults["breaker_failures"] = int(allowed) + 1
                self._report.change(
                    location, "failures in a row count, of connections, time-outs and 5xx"
                )
        strategy = self._router.pop("routing_strategy", None)
        if strategy is not None:
            text = "several servers of a model are chosen from by the scheduler (`scheduler`)"
            self._report.change(("router_settings", "routing_strategy"), text)
        return defaults

    def _server(self, upstreams: Sequence[ImportedUpstream]) -> dict[str, Any]:
        server: dict[str, Any] = {}
        location: Location = ("general_settings", "master_key")
        if not is_off(self._general.get("master_key")):
            key = self._read.key(location, self._general.pop("master_key"), "PARROT_API_KEY")
            if key is not None:
                server["api_key"] = key
                self._report.change(
                    location,
                    "the key of all clients; it manages nothing: admin routes have a key of their "
                    "own (PARROT_ADMIN_KEY)",
                )
        location = ("general_settings", "global_max_parallel_requests")
        most = self._read.number(self._general, location)
        if most:
            server["max_running_calls"] = int(most)
        timeouts = [dict(each.options).get("read_timeout_s", 0) for each in upstreams]
        if max(timeouts, default=0) > _CALL_TIMEOUT_S:
            server["call_timeout_s"] = max(timeouts)
        if self._litellm.pop("set_verbose", None):
            server["log_level"] = "debug"
        if self._litellm.pop("json_logs", None):
            self._report.settings["telemetry"] = {"log_format": "json"}
        for section, values in (("router_settings", self._router),
                                ("litellm_settings", self._litellm),
                                ("general_settings", self._general)):  # fmt: skip
            for name, value in values.items():
                if not is_off(value):
                    self._report.lose(
                        (section, name), reasons.SETTINGS.get(name, "has no counterpart")
                    )
        return server

    def _fallbacks(self, groups: Mapping[str, Sequence[Deployment]]) -> dict[str, str]:
        """By the name of a model that of its first fallback."""
        wanted: dict[str, tuple[Location, list[Any]]] = {}
        for section, values in (("litellm_settings", self._litellm),
                                ("router_settings", self._router)):  # fmt: skip
            location: Location = (section, "default_fallbacks")
            default = values.pop("default_fallbacks", None)
            if isinstance(default, list):
                wanted["*"] = (location, default)
            elif not is_off(default):
                self._report.lose(location, "is not a list")
            given = values.pop("fallbacks", None)
            if not isinstance(given, list) and not is_off(given):
                self._report.lose((section, "fallbacks"), "is not a list")
            for index, each in enumerate(given if isinstance(given, list) else ()):
                place: Location = (section, "fallbacks", index)
                pairs = each.items() if isinstance(each, dict) else ()
                if not pairs:
                    self._report.lose(place, "is not a model with its fallbacks")
                for name, names in pairs:
                    chosen = names if isinstance(names, list) else [names]
                    wanted[str(name)] = ((*place, str(name)), chosen)
        found: dict[str, str] = {}
        for name in groups:
            own = name in wanted and name != "*"
            if not (own or "*" in wanted):
                continue
            location, names = wanted[name if own else "*"]
            if "*" in name:
                text = f"models by the pattern '{name[:80]}' have no fallback here"
                self._report.lose(location, text)
                continue
            others = (each for each in names if isinstance(each, str) and each != name)
            served = next((each for each in others if each in groups and "*" not in each), None)
            if served is not None:
                found[name] = served
        for name, (location, names) in wanted.items():
            if name != "*" and name not in groups:
                self._report.lose(location, "is of a model that is not carried over")
                continue
            for index, each in enumerate(names):
                if not isinstance(each, str):
                    self._report.lose((*location, index), "only names of models can be fallbacks")
                elif each not in groups:
                    self._report.lose((*location, index), "is a model that is not carried over")
                elif "*" in each:
                    self._report.lose((*location, index), "a pattern is no fallback")
            if name == "*":
                for index in range(2, len(names)):
                    self._report.lose((*location, index), _ONE_FALLBACK)
            else:
                self._check_order(location, name, names, found)
        return found

    def _check_order(
        self, location: Location, name: str, names: Sequence[Any], found: Mapping[str, str]
    ) -> None:
        """A model has one fallback; further ones only as fallbacks of that one."""
        follows = found.get(name)
        served = [each for each in names if isinstance(each, str) and each != name]
        for each in served[1:]:
            follows = found.get(follows) if follows is not None else None
            if follows != each:
                self._report.lose((*location, names.index(each)), _ONE_FALLBACK)
                return

    # Models.

    def _groups(self, defaults: Mapping[str, float]) -> dict[str, list[Deployment]]:
        """Deployments that can be carried over by the name of their model, best first."""
        entries = self._config.get("model_list")
        if not isinstance(entries, list):
            self._report.lose(
                ("model_list",), "is not there or not a list: there is nothing to serve"
            )
            return {}
        credentials = self._credentials()
        groups: dict[str, list[Deployment]] = {}
        for index, entry in enumerate(entries):
            deployment = self._deployment(index, entry, credentials, defaults)
            if deployment is not None:
                groups.setdefault(deployment.name, []).append(deployment)
        for place, _ in credentials.values():
            if place not in self._used_credentials:
                self._report.lose(place[:2], "no model that is carried over uses it")
        for deployments in groups.values():
            deployments.sort(key=lambda each: each.order)
        return groups

    def _credentials(self) -> dict[str, tuple[Location, dict[str, Any]]]:
        """Shared parameters by their name, and where they stand."""
        found: dict[str, tuple[Location, dict[str, Any]]] = {}
        given = self._config.get("credential_list")
        for index, each in enumerate(given if isinstance(given, list) else ()):
            location: Location = ("credential_list", index, "credential_values")
            values = mapping(mapping(each).get("credential_values"))
            found[str(mapping(each).get("credential_name"))] = location, values
        return found

    def _deployment(
        self,
        index: int,
        entry: Any,
        credentials: Mapping[str, tuple[Location, dict[str, Any]]],
        defaults: Mapping[str, float],
    ) -> Deployment | None:
        location: Location = ("model_list", index)
        if not (isinstance(entry, dict) and isinstance(entry.get("litellm_params"), dict)):
            self._report.lose(location, "is not a model with `litellm_params`")
            return None
        params = {str(name): value for name, value in entry["litellm_params"].items()}
        inside: Location = (*location, "litellm_params")
        model = params.pop("model", None)
        name = entry.get("model_name", model)
        if not (isinstance(model, str) and model and isinstance(name, str) and name):
            self._report.lose((*inside, "model"), "is not the name of a model")
            return None
        credential = params.pop("litellm_credential_name", None)
        key_at: Location = (*inside, "api_key")
        if credential is not None:
            if str(credential) not in credentials:
                self._report.lose(
                    (*inside, "litellm_credential_name"), "is not in `credential_list`"
                )
                return None
            place, shared = credentials[str(credential)]
            self._used_credentials.add(place)
            if "api_key" not in params:
                key_at = (*place, "api_key")
            params = {**shared, **params}
        base = params.pop("api_base", None) or params.pop("base_url", None)
        custom = params.pop("custom_llm_provider", None)
        owner, there = split_model(model, str(custom or ""), base is not None)
        provider = PROVIDERS.get(owner)
        if provider is None or not there:
            self._report.lose(location, f"'{name[:80]}': {reasons.not_passed_on(owner)}")
            return None
        url = self._read.url((*inside, "api_base"), base, provider, name)
        if url is None:
            return None
        if "azure_ad_token" in params or "client_secret" in params:
            self._report.lose(location, "tokens of Entra ID are not made here; an api_key is sent")
            return None
        variable = provider.key
        if "api_key" in params:
            variable = variable or re.sub(r"[^A-Za-z0-9]", "_", owner).upper() + "_API_KEY"
            key = self._read.key(key_at, params.pop("api_key"), variable)
        elif variable and provider.url and url != provider.url:
            key = None
            text = f"gets no key: {variable} is not sent to an address of your own unless named"
            self._report.change((*inside, "api_base"), text)
        else:
            key = f"env:{variable}" if variable else None
        options = self._options(inside, params, defaults)
        order = self._read.number(params, (*inside, "order"))
        if owner == "anthropic":
            text = "chats go to the chat completions of Anthropic, /v1/messages pass unchanged"
            self._report.change(location, text)
        if owner == "azure":
            params.pop("api_version", None)
            self._report.change(location, "is called by Azure's API without versions (/openai/v1)")
        for name_of, value in params.items():
            if not is_off(value):
                self._report.lose(
                    (*inside, name_of), reasons.PARAMS.get(name_of, reasons.OF_CALLERS)
                )
        for name_of, value in entry.items():
            if name_of not in ("model_name", "litellm_params") and not is_off(value):
                self._report.lose((*location, str(name_of)), "prices, limits and ids are not kept")
        found = Deployment(
            location, name, owner, there, url, key, options, 1e9 if order is None else order
        )
        try:
            UpstreamSettings(**Upstreams().of([found], None).settings())
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(str(part) for part in fault["loc"])
            self._report.lose(location, f"{where}: {fault['msg']}".removeprefix(": "))
            return None
        return found

    def _options(
        self, inside: Location, params: dict[str, Any], defaults: Mapping[str, float]
    ) -> tuple[tuple[str, float], ...]:
        options = dict(defaults)
        for name, setting in (
            ("timeout", "read_timeout_s"),
            ("num_retries", "max_retries"),
            ("max_retries", "max_retries"),
            ("max_parallel_requests", "max_concurrency"),
        ):
            self._take(params, (*inside, name), setting, options)
        return tuple(sorted(options.items()))

    def _chain(
        self, deployments: Sequence[Deployment], fallback: str | None, upstreams: Upstreams
    ) -> tuple[ImportedUpstream, str]:
        """The upstream of a model: several servers of one kind; other kinds follow as fallbacks."""
        kinds: dict[tuple[Any, ...], list[Deployment]] = {}
        for each in deployments:
            kinds.setdefault(each.server_kind, []).append(each)
        if len(kinds) > 1:
            text = (
                "other servers of this model have another key or another name for it: calls go to "
                "the first, to others where it cannot answer"
            )
            self._report.change((*deployments[0].location, "model_name"), text)
        target: str | tuple[ImportedUpstream, str] | None = fallback
        for servers in reversed(kinds.values()):
            for each in servers[1:]:
                if each.options != servers[0].options:
                    text = "time-outs, retries and limits are those of the model's first server"
                    self._report.lose((*each.location, "litellm_params"), text)
            upstream = upstreams.of(servers, target)
            upstream.models[servers[0].model] = None
            target = (upstream, servers[0].model)
        assert isinstance(target, tuple)
        return target

    def _wildcard(
        self, deployment: Deployment, upstreams: Upstreams
    ) -> tuple[ImportedUpstream, str] | None:
        """Add an upstream for a pattern; the target of an alias where the pattern stays one."""
        name, model = deployment.name, deployment.model
        prefix, slash, rest = name.partition("/")
        is_prefix = bool(slash) and rest == model and _NAME.fullmatch(prefix) is not None
        if "*" in model and not is_prefix and name != model:
            text = "a pattern cannot stand for names that differ at the server"
            self._report.lose((*deployment.location, "model_name"), text)
            return None
        upstream = upstreams.of([deployment], None, prefix if is_prefix and "*" in model else "")
        if "*" not in model:
            upstream.models[model] = None
            return upstream, model
        if name == "*":
            upstream.serves_any = True
        elif not is_prefix:
            upstream.asks = True
            text = "stands for the models that the server lists"
            self._report.change((*deployment.location, "model_name"), text)
        return None

    def _aliases(
        self,
        first: Mapping[str, tuple[ImportedUpstream, str]],
        patterns: Mapping[str, tuple[ImportedUpstream, str]],
        upstreams: Sequence[ImportedUpstream],
    ) -> dict[str, str]:
        listed = Counter(model for each in upstreams for model in each.models)
        open_ended = any(each.asks or each.serves_any for each in upstreams)
        aliases: dict[str, str] = {}
        for name, (upstream, model) in {**first, **patterns}.items():
            target = f"{upstream.name}/{model}"
            plain = name == model and listed[model] == 1 and not open_ended
            if name != target and not plain:
                aliases[name] = target
        location: Location = ("router_settings", "model_group_alias")
        for alias, each in self._group_aliases.items():
            group = each.get("model") if isinstance(each, dict) else each
            place = (*location, alias)
            if isinstance(each, dict) and each.get("hidden"):
                self._report.lose((*place, "hidden"), "models are listed under all their names")
            if isinstance(group, str) and group in first:
                upstream, model = first[group]
                aliases[alias] = f"{upstream.name}/{model}"
            else:
                self._report.lose(place, "is of a model that is not carried over")
        return aliases

    # Sections.

    def _section(self, name: str) -> dict[str, Any]:
        value = self._config.get(name)
        if not isinstance(value, dict):
            if not is_off(value):
                self._report.lose((name,), "is not a mapping")
            return {}
        return mapping(value)

    def _variables(self) -> None:
        """List the variables that the settings refer to, and those that nothing here reads."""
        settings = self._report.settings
        for each in (settings.get("server", {}), *settings.get("upstreams", ())):
            name = each.get("api_key", "").removeprefix("env:")
            if name and name not in self._report.variables:
                inside = name in self._read.given
                where = f"the value of environment_variables.{name}" if inside else ""
                self._report.variables[name] = where
        for name in self._read.given:
            if name not in self._report.variables and name not in self._read.resolved:
                self._report.lose(
                    ("environment_variables", name), "nothing here reads this variable"
                )

    def _take(
        self, values: dict[str, Any], location: Location, setting: str, into: dict[str, float]
    ) -> None:
        """A number of the file as an option of upstreams."""
        number = self._read.number(values, location)
        if number is None:
            return
        if setting == "max_retries":
            into[setting] = min(int(number), _MAX_RETRIES)
            if number > _MAX_RETRIES:
                self._report.change(location, f"{_MAX_RETRIES} at most")
        elif number > 0:
            into[setting] = int(number) if setting == "max_concurrency" else number
        if setting == "read_timeout_s":
            self._report.change(location, "limits each silence of the server, not the whole call")
