"""Work that a call does, in a measure that no clock disturbs."""

from __future__ import annotations

import sys
from collections.abc import Callable


def calls_during(action: Callable[[], object]) -> int:
    """Function calls, C functions included."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count
