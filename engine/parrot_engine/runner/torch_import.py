"""Imports torch for a process that is about to load a model."""

from __future__ import annotations

import gc


def import_torch() -> None:
    """Import torch without the garbage collector, which would take a tenth of the time and find
    nothing.

    Imported objects live as long as the process and are never traversed again.
    """
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
