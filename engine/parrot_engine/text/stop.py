"""Stop strings in a stream of text: the part that may be shown, and its end.

Works on text alone. It finds stop strings across several pieces and never shows any part of one.
Text is held back only while it could be the beginning of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that may be shown now, and the stop string that ended it, if any."""

    text: str
    matched: str | None


class StopStrings:
    """Cuts a stream of text before the first stop string.

    The match that *begins* first wins; among those with the same start, the one completed first,
    then the one given first. Empty stop strings are ignored.
    """

    __slots__ = ("_done", "_held", "_stops")

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stops = tuple(string for string in stop if string)
        self._held = ""
        self._done = False

    def push(self, text: str) -> StopResult:
        """Take the next piece of text.

        Returns:
            The text that is certainly outside any stop string. After a match it is everything
            before the match that was not shown yet, and further pieces are dropped.
        """
        if not self._stops:
            return StopResult(text, None)
        if self._done:
            return StopResult("", None)
        whole = self._held + text
        start, matched = self._first_match(whole)
        keep_from = self._first_open(whole)
        if matched is not None and start <= keep_from:
            self._done = True
            self._held = ""
            return StopResult(whole[:start], matched)
        # NOTE: a complete match behind an open one must wait, because the open one begins earlier.
        self._held = whole[keep_from:]
        return StopResult(whole[:keep_from], None)

    def flush(self) -> StopResult:
        """End the stream: return held-back text, unless a match was waiting."""
        held, self._held = self._held, ""
        start, matched = self._first_match(held)
        if matched is not None:
            self._done = True
            return StopResult(held[:start], matched)
        return StopResult(held, None)

    def _first_match(self, text: str) -> tuple[int, str | None]:
        best, matched = len(text), None
        for stop in self._stops:
            # A match that begins at `best` may still be the shorter one.
            found = text.find(stop, 0, best + len(stop))
            if found == -1:
                continue
            if matched is None or found < best or len(stop) < len(matched):
                best, matched = found, stop
        return best, matched

    def _first_open(self, text: str) -> int:
        """Return the start of the longest suffix that begins, but does not complete, a stop
        string.
        """
        first = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while start != -1:
                if stop.startswith(text[start:]):
                    first = start
                    break
                start = text.find(stop[0], start + 1, first)
        return first
