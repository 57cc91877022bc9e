"""Exchanges settings of a running gateway: all changes or none.

Keys, upstreams, aliases and the log level are applied (`LIVE`). A change of any other setting is
refused and needs a restart. Running calls end on the upstream that they began with.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel

from parrot_gateway.exceptions import (
    ConflictError,
    ForbiddenError,
    GatewayError,
    InvalidRequestError,
    PreconditionFailedError,
)
from parrot_gateway.http.dispatch import KeyCheck
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.config_file import ConfigError, ConfigFile
from parrot_gateway.settings.model import Settings, admin_key_of, api_key_of
from parrot_gateway.settings.secret_reference import HIDDEN, without_credentials
from parrot_gateway.settings.sources import SettingsSources, check_exposure
from parrot_gateway.telemetry.logs import set_log_level

logger = logging.getLogger(__name__)

#: Settings that a running gateway applies.
LIVE = frozenset({"server.api_key", "server.admin_key", "server.log_level", "upstreams", "aliases"})

#: Name of a request's body in messages.
_BODY = "request body"


class SettingsReloader:
    """Applies new settings.

    Args:
        gateway: the gateway with the settings.
        sources: origins of the current settings.
        read: reads all sources again; None if there is no file to reread.
    """

    def __init__(
        self,
        gateway: Gateway,
        sources: SettingsSources,
        read: Callable[[], SettingsSources] | None = None,
    ) -> None:
        self._gateway = gateway
        self._sources = sources
        self._read = read
        self._lock = asyncio.Lock()
        #: Key checks for callers and for the operator.
        self.keys = KeyCheck(api_key_of(gateway.settings))
        self.admin_keys = KeyCheck(admin_key_of(gateway.settings))

    @property
    def etag(self) -> str:
        """Return the current settings' name for the header `ETag`."""
        data = msgspec.json.encode(self._gateway.settings.model_dump(mode="json"), order="sorted")
        return f'"{hashlib.sha256(data).hexdigest()[:32]}"'

    def describe(self) -> dict[str, Any]:
        """Describe the current settings: values, origins of those set, and whether each applies
        live or needs a restart.
        """
        settings = self._gateway.settings
        names = list(fields_of(settings))
        places = {name: tuple(name.split(".")) for name in names}
        return {
            "settings": _hide(settings.model_dump(mode="json")),
            "origins": {
                name: self._sources.origin(place)
                for name, place in places.items()
                if self._sources.is_given(place)
            },
            "reload": {name: "live" if name in LIVE else "restart" for name in names},
        }

    async def reload(self) -> None:
        """Apply what the sources contain now, or nothing; log the outcome."""
        if self._read is None:
            logger.warning("settings not reloaded: there is no file to read")
            return
        async with self._lock:
            try:
                sources = await asyncio.to_thread(self._read)
                changed = await self._take(sources, from_file=True)
            except (ConfigError, GatewayError) as error:
                reason = "; ".join(str(error).splitlines())
                logger.error("settings not reloaded, nothing has changed: %s", reason)
                return
            except Exception:
                logger.exception("settings not reloaded")
                return
        logger.info("settings reloaded: %s", ", ".join(changed) or "nothing has changed")

    async def put(self, body: bytes, if_match: str) -> list[str]:
        """Replace all settings by those of a request.

        Args:
            body: all settings that differ from the default, as JSON or YAML.
            if_match: the `ETag` of the settings that they replace; `*` for any.

        Returns: names of the changed settings.

        Raises:
            InvalidRequestError: the settings are invalid, or cannot be used.
            PreconditionFailedError: someone else has changed the settings meanwhile.
            ConflictError, ForbiddenError: they change a setting that cannot be changed this way.
        """
        async with self._lock:
            if if_match != "*" and self.etag not in if_match:
                raise PreconditionFailedError(
                    "The settings have changed since you read them. Read them again "
                    f"(now {self.etag}), and send yours with that tag."
                )
            try:
                file = await asyncio.to_thread(_parse, body)
                _unhide(file.data, self._gateway.settings)
                changed = await self._take(SettingsSources(file), from_file=False)
            except ConfigError as error:
                raise InvalidRequestError(
                    str(error), param=error.field, code="invalid_settings"
                ) from None
        logger.warning("settings changed by a request: %s", ", ".join(changed) or "nothing")
        return changed

    async def _take(self, sources: SettingsSources, *, from_file: bool) -> list[str]:
        gateway = self._gateway
        settings = await asyncio.to_thread(sources.settings)
        check_exposure(settings)
        changed = _changed_fields(gateway.settings, settings)
        new_keys = {
            "server.api_key": (self.keys, api_key_of(settings)),
            "server.admin_key": (self.admin_keys, admin_key_of(settings)),
        }
        fixed = [name for name in changed if name not in LIVE]
        # Routes and key checks depend on the presence of a key, which therefore cannot change.
        fixed += [
            name for name, (keys, key) in new_keys.items() if keys.required != (key is not None)
        ]
        if fixed:
            raise ConflictError(
                f"{', '.join(fixed)}: changed by a restart only. Nothing has changed.",
                param=fixed[0],
                code="restart_required",
            )
        files = _key_files(settings) - _key_files(gateway.settings)
        if files and not from_file:
            raise ForbiddenError(
                f"{', '.join(sorted(files))}: files are named in the settings file only.",
                param="api_key",
                code="file_only",
            )
        upstreams = await gateway.upstreams.prepare(settings.upstreams)
        # NOTE: nothing waits or fails from here on.
        if any(upstreams[name] is not gateway.upstreams.get(name) for name in upstreams):
            changed += [] if "upstreams" in changed else ["upstreams.api_key"]
        gateway.take_settings(settings, upstreams)
        for name, (keys, key) in new_keys.items():
            if key is not None and not keys.is_key(key.encode()):
                keys.use(key)
                changed.append(name)
        self._sources = sources
        set_log_level(settings.server.log_level)
        return list(dict.fromkeys(changed))


def fields_of(settings: Settings) -> dict[str, Any]:
    """Return all settings by `section.field`, or by `field` without a section."""
    found: dict[str, Any] = {}
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        if isinstance(section, BaseModel):
            fields = type(section).model_fields
            found |= {f"{name}.{field}": getattr(section, field) for field in fields}
        else:
            found[name] = section
    return found


def _changed_fields(before: Settings, after: Settings) -> list[str]:
    """Return the names of the settings that differ."""
    old, new = fields_of(before), fields_of(after)
    return [name for name in old if old[name] != new[name]]


def _key_files(settings: Settings) -> set[str]:
    """Return the files that keys are read from."""
    references = [settings.server.api_key, settings.server.admin_key, settings.engines.join_key]
    references += [upstream.api_key for upstream in settings.upstreams]
    return {each for each in references if each is not None and each.startswith("file:")}


def _parse(body: bytes) -> ConfigFile:
    """Parse the settings of a request."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ConfigFile.parse(body.decode(errors="replace"), _BODY)
    if not isinstance(data, dict):
        raise ConfigError(f"{_BODY}: it must be an object of settings")
    return ConfigFile(_BODY, data, None)


def _hide(data: dict[str, Any]) -> dict[str, Any]:
    """Hide secrets: keys are references already, but a URL may contain a password."""
    for upstream in data["upstreams"]:
        upstream["url"] = without_credentials(upstream["url"], HIDDEN)
        upstream["urls"] = [without_credentials(url, HIDDEN) for url in upstream["urls"]]
    return data


def _unhide(data: dict[str, Any], settings: Settings) -> None:
    """Restore what `_hide` removed from URLs that are otherwise equal."""
    known = {
        (each.name, without_credentials(url, HIDDEN)): url
        for each in settings.upstreams
        for url in each.servers.values()
    }
    upstreams = data.get("upstreams")
    for upstream in upstreams if isinstance(upstreams, list) else ():
        if not isinstance(upstream, dict):
            continue
        name, urls = upstream.get("name"), upstream.get("urls")
        if isinstance(name, str) and isinstance(upstream.get("url"), str):
            upstream["url"] = known.get((name, upstream["url"]), upstream["url"])
        if isinstance(name, str) and isinstance(urls, list):
            upstream["urls"] = [
                known.get((name, url), url) if isinstance(url, str) else url for url in urls
            ]
