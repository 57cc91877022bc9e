"""Names of models in the settings that lead nowhere, as far as the settings alone can tell."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from parrot_gateway.settings.config_file import ConfigError
from parrot_gateway.settings.model import Settings, admin_key_of
from parrot_gateway.settings.sources import SettingsSources


def lost_targets(settings: Settings) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Find aliases and fallbacks that nothing can serve: their places, and what is wrong."""
    for alias, target in settings.aliases.items():
        if not _may_be_served(settings, target):
            yield ("aliases", alias), f"nothing serves '{target}'"
    for number, upstream in enumerate(settings.upstreams):
        if upstream.fallback is not None:
            names = [alias for alias in settings.aliases if fnmatchcase(upstream.fallback, alias)]
            if not names and not _may_be_served(settings, upstream.fallback):
                yield ("upstreams", number, "fallback"), f"nothing serves '{upstream.fallback}'"


def check_targets(sources: SettingsSources, settings: Settings) -> None:
    """Refuse aliases and fallbacks that nothing can serve.

    Raises:
        ConfigError: names the first one, and where it was set.
    """
    for place, text in lost_targets(settings):
        if not _loads_models(settings):
            raise ConfigError(f"{sources.origin(place)}: {'.'.join(map(str, place))}: {text}")


def _loads_models(settings: Settings) -> bool:
    """Return whether an operator may load further models into the running gateway."""
    try:
        return admin_key_of(settings) is not None
    except ConfigError:
        return True


def _may_be_served(settings: Settings, name: str) -> bool:
    own = {model.served_name for model in settings.models}
    own |= {adapter for model in settings.models for adapter in model.adapters}
    if name in own or name.partition("/")[0] in {each.name for each in settings.upstreams}:
        return True
    if settings.engines.join_key is not None:
        # Joining engines bring their own names.
        return True
    if any(model.adapter_folders for model in settings.models):
        # So do adapters that are found in folders.
        return True
    return any(
        not isinstance(upstream.models, list) or name in upstream.models
        for upstream in settings.upstreams
    )
