"""An engine process that has imported everything and waits to be told which model to load.

    python -m parrot_engine.server.standby

It takes one line of JSON on standard input, `{"arguments": [...], "environment": {...}}`, and goes
on as `python -m parrot_engine` with these arguments. Standard input that ends before ends it. Until
then it takes no memory of a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from parrot_engine.runner.torch_import import import_torch
from parrot_engine.server import command


def main() -> int:
    """Import ahead, wait for the line, and run the engine; returns its exit status."""
    import_torch()
    _import_engine()
    line = sys.stdin.buffer.readline()
    if not line:
        return 0
    order = json.loads(line)
    os.environ.update(order["environment"])
    return command.main(order["arguments"])


def _import_engine() -> None:
    import parrot_engine.engine.builtin_engine
    import parrot_engine.link.client
    import parrot_engine.text.loading

    if Path("/dev/nvidiactl").exists():
        # Only what runs on a GPU needs Triton.
        from triton.runtime.cache import triton_key

        import parrot_engine.models.triton_ops
        import parrot_engine.runner.graphs  # noqa: F401

        # A hash of Triton's own files, which takes 0.4 s and is kept for the first kernel.
        triton_key()


if __name__ == "__main__":
    sys.exit(main())
