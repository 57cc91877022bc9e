"""Reads settings from their sources: defaults < YAML file < `PARROT_*` environment < command line.

Merges the four, lets `settings` check the result, and names the origin of each fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import EnvSettingsSource, SettingsError

from parrot_gateway.settings.config_file import ConfigError, ConfigFile
from parrot_gateway.settings.model import Settings, admin_key_of, api_key_of

#: Parts of a location that name no setting but the type that was tried.
_IS_TYPE = re.compile(r"function-|(?:list|dict|literal|constrained-\w+)\[")


class SettingsSources:
    """The file, the environment and the command line as they were read.

    Args:
        file: the YAML file, or an empty one.
        environment: nested values of `PARROT_*` variables.
        flags: nested values from the command line, only those given.
    """

    def __init__(
        self,
        file: ConfigFile,
        environment: Mapping[str, Any] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> None:
        self.file = file
        self.environment = dict(environment or {})
        self.flags = dict(flags or {})

    @classmethod
    def read(
        cls, flags: Mapping[str, Any] | None = None, config: Path | None = None
    ) -> SettingsSources:
        """Read all sources now.

        Raises:
            ConfigError: the file or a variable cannot be read.
        """
        file = ConfigFile.read(config) if config is not None else ConfigFile.empty()
        try:
            environment = EnvSettingsSource(Settings)()
        except SettingsError as error:
            field = re.search(r'field "(\w+)"', str(error))
            name = f"PARROT_{field[1].upper()}" if field else "A PARROT_* environment variable"
            raise ConfigError(
                f"{name} cannot be read ({error.__cause__ or error}). Lists and mappings are given "
                "as JSON there."
            ) from None
        return cls(file, environment, flags)

    def settings(self) -> Settings:
        """Merge and check all sources.

        Raises:
            ConfigError: a line for each fault, with the file's line and the field, the variable, or
                the command line.
        """
        merged = _merge(_merge(self.file.data, self.environment), self.flags)
        try:
            settings = Settings(**merged)
        except ValidationError as error:
            raise self._explain(error) from None
        return settings

    def origin(self, location: tuple[Any, ...]) -> str:
        """Name the origin of a setting's value."""
        if _holds(self.flags, location):
            return "command line"
        if _holds(self.environment, location):
            variable = "_".join(part for part in location[:2] if isinstance(part, str)).upper()
            return f"environment variable PARROT_{variable}"
        return self.file.locate(location)

    def is_given(self, location: tuple[Any, ...]) -> bool:
        """Return true if a setting was given rather than left at its default."""
        return any(
            _holds(values, location) for values in (self.flags, self.environment, self.file.data)
        )

    def _explain(self, error: ValidationError) -> ConfigError:
        """Write one line per fault: where it was set, the field, and the error."""
        lines, fields = [], []
        for fault in error.errors(include_url=False):
            location = tuple(part for part in fault["loc"] if not _IS_TYPE.match(str(part)))
            dotted = ".".join(str(part) for part in location)
            message = str(fault["msg"]).removeprefix("Value error, ")
            if fault["type"] == "extra_forbidden":
                message = "unknown setting" + _suggestion(location)
            fields.append(dotted)
            begin = f"{self.origin(location)}: "
            lines.append(f"{begin}{dotted}: {message}" if dotted else f"{begin}{message}")
        return ConfigError("\n".join(lines), fields[0] or None)


def load_settings(flags: dict[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Merge the four sources and check the result.

    Args:
        flags: nested values from the command line, only those given.
        config: a YAML file.

    Raises:
        ConfigError: names the file, line and field, or the variable, or the flag at fault.
    """
    settings = SettingsSources.read(flags, config).settings()
    check_exposure(settings)
    return settings


def check_exposure(settings: Settings) -> None:
    """Check that keys protect the gateway.

    Raises:
        ConfigError: strangers could use the gateway without a key, or clients have the admin key.
    """
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
    """Return true if an address can be reached only from this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _suggestion(location: tuple[Any, ...]) -> str:
    """Suggest a setting similar to an unknown one, of its section or another."""
    *above, name = [str(part) for part in location if not isinstance(part, int)]
    section: type[BaseModel] = Settings
    for part in above:
        field = section.model_fields.get(part)
        found = next(_sections(None if field is None else field.annotation), None)
        if found is None:
            return ""
        section = found
    near = [*above, *get_close_matches(name, section.model_fields, n=1)]
    if len(near) > len(above):
        return f"; is {'.'.join(near)} meant?"
    others = [
        f"{other}.{name}"
        for other, field in Settings.model_fields.items()
        for each in _sections(field.annotation)
        if name in each.model_fields
    ]
    return f"; is {' or '.join(others)} meant?" if others else ""


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation such as `list[ModelSettings]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged


def _holds(values: Any, location: tuple[Any, ...]) -> bool:
    for part in location[:2]:
        if isinstance(values, list):
            # Lists are not merged, so everything in this one was set here.
            return True
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return bool(location)
