r"""The grammar of transforms; which functions there are is not its business.

    pipeline = step { "|" step }
    step     = name [ "(" [ argument { "," argument } ] ")" ]
    argument = [ name "=" ] value
    value    = string | word
    string   = "'" … "'" | '"' … '"', with the escapes \\ \' \" \n \r \t \xHH \uHHHH \UHHHHHHHH
    word     = anything but blanks, quotes, backslashes, ( ) [ ] { } , | =

Blanks between these parts do not count. Inside a string every other backslash stays, so that
`'\d+'` is the pattern `\d+`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from parrot_gateway.exceptions import TransformSyntaxError

#: Characters of a pipeline, and steps in it.
MAX_CHARACTERS = 8192
MAX_STEPS = 64

_BLANKS = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t\r\n]*=")
_WORD = re.compile(r"""[^\s'"\\()\[\]{},|=]+""")
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")


class Argument(NamedTuple):
    """One argument as written."""

    position: int
    keyword: str | None
    value: str
    #: In quotes, hence a text and nothing else.
    is_quoted: bool


class FunctionCall(NamedTuple):
    """One step of a pipeline as written."""

    position: int
    name: str
    arguments: tuple[Argument, ...]
    #: The characters of the step.
    source: str


def parse_pipeline(text: str) -> list[FunctionCall]:
    """The steps of a pipeline, at least one; linear.

    Raises:
        TransformSyntaxError: it does not follow the grammar, or is too long.
    """
    if len(text) > MAX_CHARACTERS:
        raise TransformSyntaxError(
            text, MAX_CHARACTERS, f"the end: a transform has at most {MAX_CHARACTERS} characters"
        )
    reader = _Reader(text)
    calls = [reader.call()]
    while reader.take("|"):
        if len(calls) == MAX_STEPS:
            raise reader.error(f"the end: a transform has at most {MAX_STEPS} steps")
        calls.append(reader.call())
    if reader.position < len(text):
        raise reader.error("'|' or the end")
    return calls


class _Reader:
    """Reads a pipeline from left to right; between parts it stands on no blank."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.position = 0
        self._skip_blanks()

    def error(self, expected: str, position: int | None = None) -> TransformSyntaxError:
        where = self.position if position is None else position
        return TransformSyntaxError(self._text, where, expected)

    def _skip_blanks(self) -> None:
        match = _BLANKS.match(self._text, self.position)
        assert match is not None
        self.position = match.end()

    def take(self, character: str) -> bool:
        """Go over the character if it is the next."""
        if not self._text.startswith(character, self.position):
            return False
        self.position += 1
        self._skip_blanks()
        return True

    def call(self) -> FunctionCall:
        start = self.position
        match = _NAME.match(self._text, start)
        if match is None:
            raise self.error("the name of a function")
        self.position = end = match.end()
        self._skip_blanks()
        arguments: list[Argument] = []
        if self._text.startswith("(", self.position):
            self.take("(")
            if not self._text.startswith(")", self.position):
                arguments.append(self._argument())
                while self.take(","):
                    arguments.append(self._argument())
            if not self._text.startswith(")", self.position):
                raise self.error("',' or ')'")
            end = self.position + 1
            self.take(")")
        return FunctionCall(start, match[0], tuple(arguments), self._text[start:end])

    def _argument(self) -> Argument:
        start = self.position
        keyword = _KEYWORD.match(self._text, start)
        if keyword is not None:
            self.position = keyword.end()
            self._skip_blanks()
        name = None if keyword is None else keyword[1]
        if self._text[self.position : self.position + 1] in ("'", '"'):
            value = self._string()
            is_quoted = True
        else:
            word = _WORD.match(self._text, self.position)
            if word is None:
                raise self.error("an argument: a word, a number, or a text in quotes")
            self.position = word.end()
            value = word[0]
            is_quoted = False
        self._skip_blanks()
        return Argument(start, name, value, is_quoted)

    def _string(self) -> str:
        text, start = self._text, self.position
        quote = text[start]
        pieces: list[str] = []
        position = start + 1
        while position < len(text) and text[position] != quote:
            if text[position] == "\\" and position + 1 < len(text):
                piece, position = self._escape(position)
                pieces.append(piece)
            else:
                pieces.append(text[position])
                position += 1
        if position >= len(text):
            raise self.error(f"a closing {quote} for the text that begins here", start)
        self.position = position + 1
        return "".join(pieces)

    def _escape(self, position: int) -> tuple[str, int]:
        """What the backslash at `position` stands for, and where it ends."""
        kind = self._text[position + 1]
        if kind in _ESCAPES:
            return _ESCAPES[kind], position + 2
        if kind not in _DIGITS:
            return "\\" + kind, position + 2
        end = position + 2 + _DIGITS[kind]
        digits = self._text[position + 2 : end]
        if len(digits) < _DIGITS[kind] or _HEX.fullmatch(digits) is None:
            raise self.error(f"{_DIGITS[kind]} hexadecimal digits behind \\{kind}", position)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self.error("the number of a Unicode character", position)
        return chr(code), end
