"""Packages that only some settings need, and the extras that install them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

#: Imported packages, by the name of their extra.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "engine": ("torch", "transformers", "safetensors", "llguidance"),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def missing_of(extra: str) -> list[str]:
    """List the packages of an extra that are not installed; imports at most their parents."""
    return [name for name in EXTRAS[extra] if not is_installed(name)]


def is_installed(package: str) -> bool:
    """Return true if a package can be imported by its dotted name."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def advice_on(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'parrot-gateway[{extra}]'"
