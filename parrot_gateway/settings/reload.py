"""Which settings a running gateway takes over, and what differs between two sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from parrot_gateway.settings.model import Settings

#: `live`: taken over by the next call. `file`: the same, but only from the settings file, as it may
#: name folders, or code to be run. `restart`: kept until the next start.
Reload: TypeAlias = Literal["live", "file", "restart"]

#: By section, or by `section.field`, which wins.
RELOADS: Mapping[str, Reload] = {
    "server": "live",
    "server.host": "restart",
    "server.port": "restart",
    "server.cors_origins": "restart",
    "server.client_timeout_s": "restart",
    "models": "file",
    "upstreams": "live",
    "aliases": "live",
    "engines": "restart",
    "engines.idle_unload_s": "live",
    "engines.load_wait_s": "live",
    "engines.max_load_waiters": "live",
    "engines.unload_timeout_s": "live",
    "engines.max_models": "live",
    "engines.model_folders": "file",
    "engines.hub_models": "file",
    "scheduler": "restart",
    "sessions": "live",
    "sessions.fill_ahead_tokens": "restart",
    "linking": "restart",
    "linking.headers": "live",
    "linking.use": "live",
    "linking.session_wait_s": "live",
    "linking.session_wait_memory": "live",
    "linking.session_header": "live",
    "linking.exclude_tenants": "live",
    "telemetry": "restart",
    "ui": "restart",
    "parrot_v3": "live",
    "responses": "live",
    "batches": "restart",
}


def fields_of(settings: Settings) -> dict[str, Any]:
    """All settings by `section.field`, or by `field` where there is no section."""
    found: dict[str, Any] = {}
    for name in type(settings).model_fields:
        section = getattr(settings, name)
        if isinstance(section, BaseModel):
            fields = type(section).model_fields
            found |= {f"{name}.{field}": getattr(section, field) for field in fields}
        else:
            found[name] = section
    return found


def reload_of(field: str) -> Reload:
    """How a setting, by its name in `fields_of`, is taken over."""
    return RELOADS.get(field) or RELOADS[field.partition(".")[0]]


def changed_fields(before: Settings, after: Settings) -> list[str]:
    """Names of the settings that differ."""
    old, new = fields_of(before), fields_of(after)
    return [name for name in old if old[name] != new[name]]
