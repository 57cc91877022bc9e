"""Keeps the answers of a running batch in two files, a line for each request.

The files become the batch's output and error files. A killed process leaves at most half a line at
their ends, which the next process cuts off. The complete lines show which requests are answered.
Every method blocks; call them in a thread.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from parrot_gateway.batches.lines import LineUsage, read_written


class Journal:
    """The answers of one batch.

    Args:
        output: path for answers with a 2xx.
        errors: path for all others.
    """

    def __init__(self, output: Path, errors: Path) -> None:
        self.output = output
        self.errors = errors
        #: Numbers of the answered requests.
        self.done: set[int] = set()
        self.completed = 0
        self.failed = 0
        self.usage = LineUsage()
        self._lock = threading.Lock()
        self._closed = False
        self.completed = self._read(output)
        self.failed = self._read(errors)

    def add(self, number: int, line: bytes, *, succeeded: bool) -> bool:
        """Append an answer; return false if the request has one already or the journal is closed.

        Args:
            number: the request's number.
            line: including its line break.
            succeeded: true for the output file, false for the error file.

        Raises:
            OSError: the disk is full or fails.
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
        """Refuse further answers; all answers are on disk on return."""
        with self._lock:
            self._closed = True
            for path in (self.output, self.errors):
                if path.exists():
                    with path.open("ab") as file:
                        os.fsync(file.fileno())

    def _read(self, path: Path) -> int:
        """Read a file, cut off an incomplete last line, and return the number of lines."""
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
