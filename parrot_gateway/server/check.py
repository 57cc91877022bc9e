"""`serve --check`: what would be served, and everything that keeps it from that.

Starts nothing and downloads nothing. Looks at files, variables and the port; upstreams are not
called.
"""

from __future__ import annotations

import errno
import http.client
import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from parrot_gateway.server.serve import bind
from parrot_gateway.settings import DEMO_MODEL
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import ModelSettings, Settings, UpstreamSettings
from parrot_gateway.settings.secret_reference import read_secret, without_credentials
from parrot_gateway.settings.sources import SettingsSources, check_exposure

_PROBE_TIMEOUT_S = 1.0

#: Where a setting is, and what is wrong with it.
_Problem: TypeAlias = tuple[tuple[Any, ...], str]


class CheckedSettings(NamedTuple):
    """What `serve` would do with settings."""

    #: Lines that say what would be served.
    served: list[str]
    #: Lines that say what is wrong, each with the place where it was set.
    problems: list[str]


def check_settings(sources: SettingsSources, settings: Settings) -> CheckedSettings:
    """Look at everything that settings name.

    Args:
        sources: where they come from.
        settings: as they are merged.
    """
    found = [*_secrets(settings), *_models(settings), *_files(settings), *_targets(settings)]
    server, telemetry = settings.server, settings.telemetry
    note, problem = _port(server.host, server.port, "--port")
    if problem:
        found.append((("server", "port"), problem))
    if telemetry.metrics and telemetry.metrics_port is not None:
        where = telemetry.metrics_host, telemetry.metrics_port
        _, problem = _port(*where, "telemetry.metrics_port")
        if problem and not note:
            found.append((("telemetry", "metrics_port"), problem))
    problems = [
        f"{sources.origin(place)}: {'.'.join(map(str, place))}: {text}" for place, text in found
    ]
    if not any(place[-1] in ("api_key", "admin_key") for place, _ in found):
        try:
            check_exposure(settings)
        except ConfigError as error:
            problems.append(f"{sources.origin(('server',))}: {error}")
    return CheckedSettings(_served(settings, note), problems)


def _secrets(settings: Settings) -> Iterator[_Problem]:
    server, engines = settings.server, settings.engines
    references: list[tuple[tuple[Any, ...], str | None]] = [
        (("server", "api_key"), server.api_key),
        (("server", "admin_key"), server.admin_key),
        (("engines", "join_key"), engines.join_key),
    ]
    for number, upstream in enumerate(settings.upstreams):
        references.append((("upstreams", number, "api_key"), upstream.api_key))
    for place, reference in references:
        if reference is not None:
            try:
                read_secret(reference)
            except ConfigError as error:
                yield place, str(error)


def _models(settings: Settings) -> Iterator[_Problem]:
    for number, model in enumerate(settings.models):
        problem = _problem_of(model.model)
        if problem is not None:
            yield ("models", number, "model"), problem
        for name, folder in model.adapters.items():
            if not Path(folder).expanduser().joinpath("adapter_config.json").is_file():
                yield ("models", number, "adapters", name), f"{folder} is no PEFT adapter"
        for index, folder in enumerate(model.adapter_folders):
            if not Path(folder).expanduser().is_dir():
                yield ("models", number, "adapter_folders", index), f"there is no folder {folder}"
    for index, path in enumerate(settings.engines.model_folders):
        if not path.expanduser().is_dir():
            yield ("engines", "model_folders", index), f"there is no folder {path}"


def _problem_of(model: str) -> str | None:
    """Why there can be no such model; None where there is, or where a hub may have it."""
    path = Path(model).expanduser()
    if model == DEMO_MODEL:
        return None
    if path.is_dir():
        return None if (path / "config.json").is_file() else f"{path} has no config.json"
    if path.exists():
        return f"{path} is a file; a model is a folder with config.json and safetensors files"
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return f"there is no folder {path}"
    return None


def _files(settings: Settings) -> Iterator[_Problem]:
    """Files that are written while the gateway runs."""
    written = {
        ("scheduler", "record"): settings.scheduler.record,
        ("linking", "profiles_file"): settings.linking.profiles_file,
    }
    for place, path in written.items():
        folder = None if path is None else path.expanduser().absolute().parent
        if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            yield place, f"nothing can be written into {folder}"


def _targets(settings: Settings) -> Iterator[_Problem]:
    """Names that lead nowhere, as far as that is known without asking upstreams."""
    for alias, target in settings.aliases.items():
        if not _leads_somewhere(settings, target):
            yield ("aliases", alias), f"nothing serves '{target}'"
    for number, upstream in enumerate(settings.upstreams):
        if upstream.fallback is not None:
            names = [alias for alias in settings.aliases if fnmatchcase(upstream.fallback, alias)]
            if not names and not _leads_somewhere(settings, upstream.fallback):
                yield ("upstreams", number, "fallback"), f"nothing serves '{upstream.fallback}'"


def _leads_somewhere(settings: Settings, name: str) -> bool:
    own = {model.served_name for model in settings.models}
    own |= {adapter for model in settings.models for adapter in model.adapters}
    if name in own or name.partition("/")[0] in {each.name for each in settings.upstreams}:
        return True
    if settings.engines.join_key is not None:
        # Engines that join bring their names.
        return True
    return any(
        not isinstance(upstream.models, list) or name in upstream.models
        for upstream in settings.upstreams
    )


def _port(host: str, port: int, setting: str) -> tuple[str, str]:
    """A note on an address, and why it cannot be had; both may be empty."""
    try:
        bind(host, port, setting).close()
    except ConfigError as error:
        cause = error.__context__
        in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        if in_use and _is_gateway(host, port):
            return "  (a gateway runs there already)", ""
        return "", str(error)
    return "", ""


def _is_gateway(host: str, port: int) -> bool:
    """Whether a Parrot Gateway answers there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    connection = http.client.HTTPConnection(host, port, timeout=_PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/version")
        return "version" in json.loads(connection.getresponse().read(4096))
    except (OSError, ValueError, TypeError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _served(settings: Settings, note: str) -> list[str]:
    server = settings.server
    host = f"[{server.host}]" if ":" in server.host else server.host
    key = server.api_key or ("env:PARROT_API_KEY" if os.environ.get("PARROT_API_KEY") else None)
    admin = server.admin_key or os.environ.get("PARROT_ADMIN_KEY")
    lines = [
        f"http://{host}:{server.port}/v1, {f'with the key in {key}' if key else 'without a key'}, "
        f"admin routes {'on' if admin else 'off'}{note}"
    ]
    lines += [_model_line(model) for model in settings.models]
    lines += [_upstream_line(upstream) for upstream in settings.upstreams]
    if settings.engines.join_key is not None:
        lines.append(f"engines that join with the key in {settings.engines.join_key}")
    lines += [f"alias {alias} -> {target}" for alias, target in settings.aliases.items()]
    return lines


def _model_line(model: ModelSettings) -> str:
    source = model.model
    is_hub_id = _problem_of(model.model) is None and not Path(model.model).expanduser().is_dir()
    if is_hub_id and model.model != DEMO_MODEL:
        source += ", in the hub cache" if _is_cached(model.model) else ", to be downloaded"
    count = "1 engine" if model.engines == 1 else f"{model.engines} engines"
    return f"model {model.served_name} ({source}; {count} on {model.device})"


def _is_cached(model: str) -> bool:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    return any(cache.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))


def _upstream_line(upstream: UpstreamSettings) -> str:
    urls = ", ".join(map(without_credentials, upstream.servers.values()))
    reference = upstream.key_reference()
    key = "without a key" if reference is None else f"with the key in {reference}"
    models = "models as it lists them" if upstream.models is None else "any model"
    if isinstance(upstream.models, list):
        models = f"models {', '.join(upstream.models)}"
    return f"upstream {upstream.name} ({urls}, {key}; {models})"
