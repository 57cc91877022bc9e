"""Joins the text of an answer that broke off with the text of the server that goes on.

Pure. Servers trim blanks from the end of an answer that they are to continue, or refuse them. So
the request leaves them out, and they are cut from the beginning of what follows. Some servers
repeat the text that they were given: that is cut as well.
"""

from __future__ import annotations

#: A repetition counts as one from this length on, unless the server is known to repeat.
MIN_ECHO_CHARACTERS = 32


class Seam:
    """Takes the text that follows and returns what the client has not got yet.

    Args:
        given: the text in the request of the server that goes on.
        left_out: blanks behind it that the client has got.
        may_echo: the server may begin with `given` once more.
        is_known_to_echo: it does so, however short `given` is.
    """

    __slots__ = ("_echo", "_held", "_left_out")

    def __init__(
        self, given: str, left_out: str, *, may_echo: bool = False, is_known_to_echo: bool = False
    ) -> None:
        is_long = is_known_to_echo or len(given) >= MIN_ECHO_CHARACTERS
        self._echo = given if may_echo and is_long else ""
        self._left_out = left_out
        self._held = ""

    def feed(self, text: str) -> str:
        """Take text; returns what is new, maybe nothing while it could be a repetition."""
        if self._echo:
            self._held += text
            if len(self._held) < len(self._echo) and self._echo.startswith(self._held):
                return ""
            text, self._held = self._held.removeprefix(self._echo), ""
            self._echo = ""
        while text and self._left_out:
            if text[0] != self._left_out[0]:
                self._left_out = ""
                break
            text, self._left_out = text[1:], self._left_out[1:]
        return text

    def end(self) -> str:
        """The answer is over: text that was the beginning of a repetition at most is new."""
        self._echo, held, self._held = "", self._held, ""
        return self.feed(held)
