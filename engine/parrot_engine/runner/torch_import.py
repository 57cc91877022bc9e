"""Torch for a process that is about to load a model."""

from __future__ import annotations

import gc


def import_torch() -> None:
    """Import it without the garbage collector, which takes a tenth of the time and finds nothing.

    What was imported lives as long as the process and is never walked again.
    """
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()
