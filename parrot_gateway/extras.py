"""Packages that only some settings need, and the extras of the distribution that bring them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

#: By the name of an extra, what is imported of it.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    "engine": ("torch", "transformers", "safetensors", "llguidance"),
    "tracing": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def missing_of(extra: str) -> list[str]:
    """List the packages of an extra that are not installed; at most their parents are imported."""
    return [name for name in EXTRAS[extra] if not is_installed(name)]


def is_installed(package: str) -> bool:
    """Tell if a package, by its dotted name, can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def advice_on(extra: str) -> str:
    """The command that installs it."""
    return f"pip install 'parrot-gateway[{extra}]'"
