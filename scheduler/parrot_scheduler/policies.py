"""Policies by name, or by the import path of a class: `package.module:Class`.

Loading a class runs its module's code, so paths come only from an operator, never from the network.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any, Final, NamedTuple

from parrot_scheduler import admission, order, placement, retention
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.policy import (
    AdmissionPolicy,
    OrderPolicy,
    PlacementPolicy,
    Policies,
    Policy,
    RetentionPolicy,
)

#: Name of the default policy.
DEFAULT: Final = "parrot"
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class _Kind(NamedTuple):
    base: type[Policy]
    #: Factories by name.
    known: Mapping[str, Callable[..., Any]]


#: By the field of `SchedulerConfig` that names a policy.
_KINDS = {
    "admission": _Kind(AdmissionPolicy, admission.POLICIES),
    "order": _Kind(OrderPolicy, order.POLICIES),
    "place": _Kind(PlacementPolicy, placement.POLICIES),
    "keep": _Kind(RetentionPolicy, retention.POLICIES),
}


def check_name(field: str, name: str) -> None:
    """Check a policy's name, or the form of its import path, without importing anything.

    Args:
        field: of `SchedulerConfig`; `policy` names all four.
        name: its value.

    Raises:
        ValueError: no policy has this name; lists the known ones.
    """
    known = _KINDS[field].known if field in _KINDS else (DEFAULT,)
    if name not in known and not _PATH.fullmatch(name):
        raise ValueError(
            f"no policy is called {name!r}; there are {', '.join(sorted(known))}, or a class by "
            "its import path (package.module:Class)"
        )


def preset_of(policy: str) -> SchedulerConfig:
    """Return a whole configuration: `parrot`, or the default one with a class in its place.

    `Policy.setup` of the class names its other settings.

    Raises:
        ValueError: there is no such policy, or it cannot be loaded; begins with `policy: `.
    """
    _check("policy", policy)
    if policy == DEFAULT:
        return SchedulerConfig()
    found = _load("policy", policy, Policy)
    (field,) = (field for field, kind in _KINDS.items() if issubclass(found, kind.base))
    try:
        return replace(SchedulerConfig(), **{**found.setup, field: policy})
    except TypeError as error:
        raise ValueError(f"policy: the setup of {policy}: {error}") from None


def paths_in(config: SchedulerConfig) -> list[str]:
    """Return the import paths in a configuration."""
    return [name for field in _KINDS if ":" in (name := getattr(config, field))]


def policies_of(config: SchedulerConfig) -> Policies:
    """Return the policies of a configuration.

    Raises:
        ValueError: a policy is unknown, or cannot be loaded or constructed; begins with its field.
    """
    admission_, order_, place, keep = (_factory(field, config) for field in _KINDS)
    return Policies(admission_, order_, place, keep)


def _factory(field: str, config: SchedulerConfig) -> Callable[..., Any]:
    name, kind = getattr(config, field), _KINDS[field]
    _check(field, name)
    if name in kind.known:
        return kind.known[name]
    found = _load(field, name, kind.base)
    try:
        # Construct one now: a later failure would interrupt a step.
        found.make(config, random.Random(0))  # noqa: S311 - choices, not secrets
    except Exception as error:
        raise ValueError(f"{field}: {name} cannot be made: {error}") from error
    return found.make


def _check(field: str, name: str) -> None:
    try:
        check_name(field, name)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def _load(field: str, path: str, base: type[Policy]) -> type[Policy]:
    """Import a class, and check that it is a policy of this kind."""
    module, _, name = path.partition(":")
    try:
        found = getattr(import_module(module), name)
    except AttributeError:
        raise ValueError(f"{field}: {module} has no class {name}") from None
    except Exception as error:
        raise ValueError(f"{field}: {module} cannot be imported: {error}") from error
    bases = [kind.base for kind in _KINDS.values()] if base is Policy else [base]
    if not (isinstance(found, type) and issubclass(found, Policy) and issubclass(found, (*bases,))):
        names = ", ".join(each.__name__ for each in bases)
        raise ValueError(f"{field}: {path} is no policy: it does not inherit from {names}")
    return found
