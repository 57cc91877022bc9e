"""The input of a custom tool, out of the arguments of the call that a model makes of it.

To a model a custom tool is a function with the one argument `input`, a string; to its caller it
takes the text itself.
"""

from __future__ import annotations

import json
import re

_BEGIN = re.compile(r'\{\s*"input"\s*:\s*"')
#: One character of a string of JSON, halves of pairs together.
_CHARACTERS = re.compile(
    r'(?:[^"\\]+|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..))*"
)


class CustomInput:
    """Takes the arguments as they are written, gives the input as it becomes known."""

    __slots__ = ("_arguments", "_at")

    def __init__(self) -> None:
        self._arguments = ""
        #: How much of the arguments was given out; -1 before the text begins.
        self._at = -1

    def push(self, text: str, *, ends: bool = False) -> str:
        """Take more of the arguments; returns more of the input.

        With `ends`, arguments of any other shape are the input as they are: nothing is lost.
        """
        self._arguments += text
        if self._at < 0:
            begin = _BEGIN.match(self._arguments)
            if begin is None:
                if not ends:
                    return ""
                rest, self._arguments = self._arguments, ""
                return rest
            self._at = begin.end()
        known = _CHARACTERS.match(self._arguments, self._at)
        assert known is not None
        self._at = known.end()
        try:
            told = str(json.loads(f'"{known[0]}"', strict=False))
        except ValueError:
            return known[0]
        return told.encode(errors="surrogatepass").decode(errors="replace")
