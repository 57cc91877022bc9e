"""The answers of a running batch so far: two files that only grow, a line for each request.

They become its output and error files. A process that is killed leaves at most half a line at their
ends, which the next one cuts off; what is whole says which requests have their answer. Every method
blocks; call them in a thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from parrot_gateway.batches.lines import LineUsage, read_written


class Journal:
    """The answers of one batch.

    Args:
        output: path of the answers with 2xx.
        errors: path of all others.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.output = output
        self.errors = errors
        #: Numbers of the requests that have their answer.
        self.done: set[int] = set()
        self.completed = 0
        self.failed = 0
        self.usage = LineUsage()
        self._lock = threading.Lock()
        self._closed = False
        self.completed = self._read(output)
        self.failed = self._read(errors)

    def add(self, number: int, line: bytes, *, succeeded: bool) -> bool:
        """Append an answer; False where there is one already, or no more are taken.

        Args:
            number: of the request.
            line: with its line break.
            succeeded: which of the two files it belongs to.

        Raises:
            OSError: the disk takes no more.
        """
        with self._lock:
            if self._closed or number in self.done:
                return False
            with (self.output if succeeded else self.errors).open("ab") as file:
                file.write(line)
            self.done.add(number)
            if succeeded:
                self.completed += 1
            else:
                self.failed += 1
            written = read_written(line)
            if written is not None:
                self.usage += written.usage
            return True

    def close(self) -> None:
        """Take no more; all of it is on the disk when this returns."""
        with self._lock:
            self._closed = True
            for path in (self.output, self.errors):
                if path.exists():
                    with path.open("ab") as file:
                        os.fsync(file.fileno())

    def _read(self, path: Path) -> int:
        """Read a file back, and cut off what is not whole; the number of its lines."""
        if not path.exists():
            return 0
        count = whole = 0
        with path.open("r+b") as file:
            for raw in file:
                written = read_written(raw) if raw.endswith(b"\n") else None
                if written is None:
                    break
                whole += len(raw)
                count += 1
                self.done.add(written.number)
                self.usage += written.usage
            file.truncate(whole)
        return count
