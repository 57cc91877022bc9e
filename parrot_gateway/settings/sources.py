"""Where settings come from: defaults < YAML file < `PARROT_*` environment < command line.

Merges the four, lets `settings` check the result, and names the place of each fault.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from parrot_gateway.settings.config_file import ConfigError, ConfigFile
from parrot_gateway.settings.model import Settings, admin_key_of, api_key_of


def load_settings(flags: dict[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Merge the four sources and check the result.

    Args:
        flags: nested values from the command line, only those given.
        config: a YAML file.

    Raises:
        ConfigError: names the file, line and field, or the variable, or the flag at fault.
    """
    file = ConfigFile.read(config) if config is not None else ConfigFile.empty()
    environment = EnvSettingsSource(Settings)
    try:
        from_environment = environment()
    except SettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = f"PARROT_{field[1].upper()}" if field else "A PARROT_* environment variable"
        raise ConfigError(
            f"{name} cannot be read ({error.__cause__ or error}). Lists and mappings are given as "
            "JSON there."
        ) from None
    merged = _merge(_merge(file.data, from_environment), flags or {})
    try:
        settings = Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, file, from_environment, flags or {})) from None
    _check_exposure(settings)
    return settings


def _check_exposure(settings: Settings) -> None:
    if api_key_of(settings) is None and not is_loopback(settings.server.host):
        raise ConfigError(
            f"Refusing to listen on {settings.server.host} without a key: anybody on the network "
            "could use it. Set PARROT_API_KEY, or name the variable: --api-key env:NAME."
        )
    admin_key = admin_key_of(settings)
    if admin_key is not None and admin_key == api_key_of(settings):
        raise ConfigError(
            "server.admin_key is the key of calls too, so that every client could load and unload "
            "models: give it a value of its own."
        )


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _explain(
    error: ValidationError, file: ConfigFile, environment: dict[str, Any], flags: dict[str, Any]
) -> str:
    """One line a fault: where it was set, which field, what is wrong."""
    lines = []
    for fault in error.errors(include_url=False):
        location = tuple(part for part in fault["loc"] if not str(part).startswith("function-"))
        dotted = ".".join(str(part) for part in location)
        if _holds(flags, location):
            origin = "command line"
        elif _holds(environment, location):
            variable = "_".join(part for part in location[:2] if isinstance(part, str)).upper()
            origin = f"environment variable PARROT_{variable}"
        else:
            origin = file.locate(location)
        message = str(fault["msg"]).removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            message = "unknown setting"
        lines.append(f"{origin}: {dotted}: {message}" if dotted else f"{origin}: {message}")
    return "\n".join(lines)


def _holds(values: Any, location: tuple[Any, ...]) -> bool:
    for part in location[:2]:
        if isinstance(values, list):
            # Lists are not merged: what is in this one was set here.
            return True
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return bool(location)
