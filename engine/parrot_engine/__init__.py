"""Engines: what executes Fill and Generate.

`LLM` and `SamplingParams` are the public way to use an engine without any server; they are
imported on first use, so that the light modules (`protocol`, `wire`, `text`) stay light.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parrot_engine.protocol import SamplingParams

if TYPE_CHECKING:
    from parrot_engine.llm import LLM

__all__ = ["LLM", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from parrot_engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
