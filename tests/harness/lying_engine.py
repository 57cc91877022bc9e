"""An engine program whose steps never end while a file exists; its heartbeats go on.

python lying_engine.py FILE [options of `parrot-gateway engine`]
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.protocol import StepResult
from parrot_engine.server.command import main

if __name__ == "__main__":
    marker = Path(sys.argv.pop(1))
    step = BuiltinEngine.step

    def lying_step(engine: BuiltinEngine) -> StepResult:
        if marker.exists():
            threading.Event().wait()
        return step(engine)

    BuiltinEngine.step = lying_step  # type: ignore[method-assign]
    sys.exit(main())
