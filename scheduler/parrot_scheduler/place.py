"""Where a task runs: the simple rule, until the application-level scheduler replaces it.

Pure: loads in, an index out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What counts of one engine at the moment of placing."""

    #: Generations in work or queued there.
    running: int
    #: Prompt tokens sent there and not yet filled.
    queued_tokens: int


def least_loaded(loads: Sequence[EngineLoad]) -> int:
    """The index of the engine with the fewest running generations.

    Ties go to the fewest queued prompt tokens, then to the first.

    Raises:
        ValueError: `loads` is empty.
    """
    if not loads:
        raise ValueError("there is no engine to place on")
    return min(range(len(loads)), key=lambda i: (loads[i].running, loads[i].queued_tokens, i))
