"""The gateway's command, which tells what its event loop enters.

SIGUSR1 begins to note, SIGUSR2 ends and prints a line: by file of the gateway and the scheduler the
functions that were called.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from types import FrameType
from typing import Any

from parrot_gateway.cli.main import main

PACKAGES = ("/parrot_gateway/", "/parrot_scheduler/")
_entered: dict[str, set[str]] = {}


def _note(frame: FrameType, event: str, _: Any) -> None:
    name = frame.f_code.co_name
    # Bodies of modules run once, when something is imported.
    if event == "call" and name != "<module>":
        path = frame.f_code.co_filename
        for package in PACKAGES:
            _, found, file = path.rpartition(package)
            if found:
                _entered.setdefault(package[1:] + file, set()).add(name)


def _begin(*_: object) -> None:
    _entered.clear()
    print("tracing", flush=True)
    sys.setprofile(_note)


def _end(*_: object) -> None:
    # What goes on now is finished first: a call's client has its answer before the call has ended.
    asyncio.get_running_loop().call_soon_threadsafe(_tell)


def _tell() -> None:
    sys.setprofile(None)
    print(f"entered {json.dumps({file: sorted(names) for file, names in _entered.items()})}")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)
    main()
