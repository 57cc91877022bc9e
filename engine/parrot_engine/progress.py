"""Reports progress of long waits as whole lines on standard error.

An engine process has no terminal: its parent reads its lines and passes them on. So no bar is
redrawn, and a short wait prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

#: Seconds before the first line, and between lines.
FIRST_LINE_S = 1.0
INTERVAL_S = 2.0


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class ProgressLines:
    """Writes `(done, total)` as lines, at most one per `INTERVAL_S`.

    Args:
        what: the beginning of each line.
        write: writes a line.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        what: str,
        write: Callable[[str], None] = print_line,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._write = write
        self._clock = clock
        self._due = clock() + FIRST_LINE_S

    def __call__(self, done: int, total: int) -> None:
        """Note that `done` of `total` are done."""
        now = self._clock()
        if now >= self._due:
            self._due = now + INTERVAL_S
            self._write(f"{self._what}: {100 * done // max(total, 1)} % ({done} of {total})")


def download_bar() -> type[Any]:
    """Return a tqdm class that writes lines, for libraries that show progress with tqdm."""
    from tqdm import tqdm

    class LineBar(tqdm):
        """Writes each state that tqdm would draw as a line."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs |= {"mininterval": INTERVAL_S, "delay": FIRST_LINE_S, "leave": False}
            kwargs |= {"ascii": True, "ncols": 78}
            super().__init__(*args, **kwargs)

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Write the current state; called by tqdm instead of a redraw."""
            if not pos and (msg is None or msg.strip()):
                print_line((msg if msg is not None else str(self)).strip())

    return LineBar
