"""Checks settings for `serve --check`: lists what would be served, and all obstacles.

Starts nothing and downloads nothing. Examines packages, files, variables and the port, and asks
each upstream for its models once.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from parrot_scheduler.policies import policies_of

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.extras import advice_on, missing_of
from parrot_gateway.server.serve import bind
from parrot_gateway.settings import DEMO_MODEL
from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import ModelSettings, Settings, UpstreamSettings, api_key_of
from parrot_gateway.settings.secret_reference import read_secret, without_credentials
from parrot_gateway.settings.sources import SettingsSources, check_exposure
from parrot_gateway.settings.targets import lost_targets

_PROBE_TIMEOUT_S = 1.0
#: Time for all upstreams together, and the number asked at once.
_UPSTREAMS_TIMEOUT_S = 3.0
_UPSTREAMS_AT_ONCE = 32
#: Variables of ours that are not settings.
_VARIABLES = frozenset(
    {"PARROT_API_KEY", "PARROT_ADMIN_KEY", "PARROT_ADMIN_URL", "PARROT_BASE_URL",
     "PARROT_ENGINE_KEY", "PARROT_JOIN_KEY"}
)  # fmt: skip

#: Location of a setting, and its fault.
_Problem: TypeAlias = tuple[tuple[Any, ...], str]


class CheckedSettings(NamedTuple):
    """Result of checking settings."""

    #: Lines that describe what would be served.
    served: list[str]
    #: Lines that describe faults, each with the place where it was set.
    problems: list[str]
    #: Lines about faults that do not prevent a start.
    warnings: list[str]


def check_settings(sources: SettingsSources, settings: Settings) -> CheckedSettings:
    """Examine everything that the settings name.

    Args:
        sources: origins of the settings.
        settings: the merged settings.
    """
    secrets = list(_secrets(settings))
    found = [*secrets, *_packages(settings), *_models(settings), *_files(settings)]
    found += [*lost_targets(settings), *_policies(settings)]
    server, telemetry = settings.server, settings.telemetry
    note, problem = _port(server.host, server.port, "--port")
    if problem:
        found.append((("server", "port"), problem))
    if telemetry.metrics and telemetry.metrics_port is not None:
        where = telemetry.metrics_host, telemetry.metrics_port
        _, problem = _port(*where, "telemetry.metrics_port")
        if problem and not note:
            found.append((("telemetry", "metrics_port"), problem))
    problems = [_line(sources, *each) for each in found]
    if not any(place[-1] in ("api_key", "admin_key") for place, _ in secrets):
        try:
            check_exposure(settings)
        except ConfigError as error:
            problems.append(f"{sources.origin(('server',))}: {error}")
    unreadable = {place[1] for place, _ in secrets if place[0] == "upstreams"}
    doubtful = [*_batches(settings), *_upstreams(settings, unreadable)]
    warnings = [_line(sources, *each) for each in doubtful] + list(_variables(settings))
    return CheckedSettings(_served(settings, note), problems, warnings)


def _line(sources: SettingsSources, place: tuple[Any, ...], text: str) -> str:
    return f"{sources.origin(place)}: {'.'.join(map(str, place))}: {text}"


def _policies(settings: Settings) -> Iterator[_Problem]:
    """Find policies of the scheduler that cannot be loaded."""
    try:
        policies_of(settings.scheduler.config)
    except ValueError as error:
        field, _, text = str(error).partition(": ")
        yield ("scheduler", field), text


def _packages(settings: Settings) -> Iterator[_Problem]:
    """Find extras that are needed and not installed."""
    needed: dict[tuple[str, ...], str] = {("models",): "engine"} if settings.models else {}
    if settings.telemetry.traces_endpoint is not None:
        needed["telemetry", "traces_endpoint"] = "tracing"
    for place, extra in needed.items():
        missing = missing_of(extra)
        if missing:
            yield place, f"not installed: {', '.join(missing)}; {advice_on(extra)}"


def _references(settings: Settings) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the places of references to secrets, with the references."""
    references: list[tuple[tuple[Any, ...], str | None]] = [
        (("server", "api_key"), settings.server.api_key),
        (("server", "admin_key"), settings.server.admin_key),
        (("engines", "join_key"), settings.engines.join_key),
    ]
    for number, upstream in enumerate(settings.upstreams):
        references.append((("upstreams", number, "api_key"), upstream.api_key))
    return ((place, reference) for place, reference in references if reference is not None)


def _secrets(settings: Settings) -> Iterator[_Problem]:
    for place, reference in _references(settings):
        try:
            read_secret(reference)
        except ConfigError as error:
            yield place, str(error)


def _models(settings: Settings) -> Iterator[_Problem]:
    for number, model in enumerate(settings.models):
        problem = _problem_of(model.model) or _download_problem(model.model)
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
    """Return the reason why no such model can exist; None if it does, or a hub may have it."""
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


def _download_problem(model: str) -> str | None:
    """Return the reason why a model cannot be downloaded; None if it can, or need not."""
    if not _is_of_hub(model) or _is_cached(model):
        return None
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{model} is not in the hub cache {_hub_cache()}, and HF_HUB_OFFLINE is set"
    cannot = _cannot_write(_hub_cache())
    return None if cannot is None else f"{model} cannot be downloaded: {cannot}"


def _files(settings: Settings) -> Iterator[_Problem]:
    """Check the files that are written while the gateway runs."""
    record, profiles = settings.scheduler.record, settings.linking.profiles_file
    if record is not None:
        folder = record.expanduser().absolute().parent
        cannot = _cannot_write(folder) if folder.is_dir() else f"there is no folder {folder}"
        if cannot is not None:
            yield ("scheduler", "record"), cannot
    if profiles is not None:
        cannot = _cannot_write(profiles.expanduser().absolute().parent)
        if cannot is not None:
            yield ("linking", "profiles_file"), cannot


def _batches(settings: Settings) -> Iterator[_Problem]:
    """Check the folder of files and batches; without it all other calls are still served."""
    cannot = _cannot_write(settings.batches.data_folder)
    if cannot is not None:
        yield ("batches", "folder"), f"no files and batches: {cannot}"


def _cannot_write(folder: Path) -> str | None:
    """Return the reason why a folder, which need not exist yet, cannot be written."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    if there.is_dir() and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"nothing can be written into {folder}"


def _variables(settings: Settings) -> Iterator[str]:
    """Warn about variables that look like settings but are not."""
    known = {name.upper() for name in Settings.model_fields}
    references = {reference for _, reference in _references(settings)}
    for name in sorted(os.environ):
        section = name.removeprefix("PARROT_")
        is_setting = any(section == each or section.startswith(each + "_") for each in known)
        if section == name or is_setting or name in _VARIABLES or f"env:{name}" in references:
            continue
        yield f"environment variable {name}: is no setting, and is not read"


def _upstreams(settings: Settings, unreadable: Collection[int]) -> list[_Problem]:
    """Find upstreams that do not answer, except those whose keys cannot be read.

    Args:
        settings: the checked settings.
        unreadable: positions of upstreams with unreadable keys.
    """
    items = [each for each in enumerate(settings.upstreams) if each[0] not in unreadable]
    if not items:
        return []
    try:
        has_key = api_key_of(settings) is not None
    except ConfigError:
        has_key = True
    return asyncio.run(_ask_upstreams(items, has_key))


async def _ask_upstreams(
    items: Iterable[tuple[int, UpstreamSettings]], gateway_has_key: bool
) -> list[_Problem]:
    turns = asyncio.Semaphore(_UPSTREAMS_AT_ONCE)
    deadline = asyncio.get_running_loop().time() + _UPSTREAMS_TIMEOUT_S

    async def ask(number: int, item: UpstreamSettings, server: tuple[str, str]) -> list[_Problem]:
        upstream = Upstream(item, gateway_has_key=gateway_has_key, server=server)
        place = ("upstreams", number, "url" if item.url else "urls")
        try:
            async with asyncio.timeout_at(deadline), turns:
                await upstream.check()
        except TimeoutError:
            reason = f"no answer within {_UPSTREAMS_TIMEOUT_S:g} s"
        except GatewayError as error:
            reason = error.message
        else:
            return []
        finally:
            await upstream.close()
        return [(place, f"{upstream.name} ({without_credentials(server[1])}): {reason}")]

    asked = [ask(number, item, each) for number, item in items for each in item.servers.items()]
    return [problem for found in await asyncio.gather(*asked) for problem in found]


def _port(host: str, port: int, setting: str) -> tuple[str, str]:
    """Try an address; return a note about it and the reason why it is unavailable, either possibly
    empty.
    """
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
    """Ask for the version, which only a Parrot Gateway answers."""
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
    if _is_of_hub(model.model):
        source += ", in the hub cache" if _is_cached(model.model) else ", to be downloaded"
    count = "1 engine" if model.engines == 1 else f"{model.engines} engines"
    return f"model {model.served_name} ({source}; {count} on {model.device})"


def _is_of_hub(model: str) -> bool:
    """Return true if a model can only be on a hub: it is neither the demo model nor a folder."""
    is_folder = Path(model).expanduser().is_dir()
    return model != DEMO_MODEL and not is_folder and _problem_of(model) is None


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser().absolute()


def _is_cached(model: str) -> bool:
    return any(_hub_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))


def _upstream_line(upstream: UpstreamSettings) -> str:
    urls = ", ".join(map(without_credentials, upstream.servers.values()))
    reference = upstream.key_reference()
    key = "without a key" if reference is None else f"with the key in {reference}"
    models = "models as it lists them" if upstream.models is None else "any model"
    if isinstance(upstream.models, list):
        models = f"models {', '.join(upstream.models)}"
    return f"upstream {upstream.name} ({urls}, {key}; {models})"
