r"""The grammar of transforms; the functions themselves are in `functions`.

    pipeline = step { "|" step }
    step     = name [ "(" [ argument { "," argument } ] ")" ]
    argument = [ name "=" ] value
    value    = string | word
    string   = "'" … "'" | '"' … '"', with the escapes \\ \' \" \n \r \t \xHH \uHHHH \UHHHHHHHH
    word     = anything but blanks, quotes, backslashes, ( ) [ ] { } , | =

Blanks between these parts are ignored. Inside a string every other backslash stays, so that
`'\d+'` is the pattern `\d+`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from parrot_gateway.exceptions import TransformSyntaxError

#: Maximum characters of a pipeline, and maximum steps.
MAX_CHARACTERS = 8192
MAX_STEPS = 64

_BLANKS = re.compile(r"[ \t\r\n]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KEYWORD = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)[ \t\r\n]*=")
_WORD = re.compile(r"""[^\s'"\\()\[\]{},|=]+""")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*+'|" r'"(?:[^"\\]|\\.)*+"', re.DOTALL)
_ESCAPE = re.compile(r"\\(x.{0,2}|u.{0,4}|U.{0,8}|.)", re.DOTALL)
_ESCAPES = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")


class Argument(NamedTuple):
    """One argument as written."""

    position: int
    keyword: str | None
    value: str
    #: True: in quotes, hence certainly a text.
    is_quoted: bool


class FunctionCall(NamedTuple):
    """One step of a pipeline as written."""

    position: int
    name: str
    arguments: tuple[Argument, ...]
    #: The characters of the step.
    source: str


def parse_pipeline(text: str) -> list[FunctionCall]:
    """Parse a pipeline into its steps, at least one; linear.

    Raises:
        TransformSyntaxError: the text does not follow the grammar, or is too long.
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
    """Reads a pipeline from left to right; between parts `position` is never at a blank."""

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
        """Skip the character if it is the next."""
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
        if self.take("("):
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
        is_quoted = self._text.startswith(("'", '"'), self.position)
        if is_quoted:
            value = self._string()
        else:
            word = _WORD.match(self._text, self.position)
            if word is None:
                raise self.error("an argument: a word, a number, or a text in quotes")
            self.position = word.end()
            value = word[0]
        self._skip_blanks()
        return Argument(start, name, value, is_quoted)

    def _string(self) -> str:
        match = _STRING.match(self._text, self.position)
        if match is None:
            quote = self._text[self.position]
            raise self.error(f"a closing {quote} for the text that begins here")
        inside, start = match[0][1:-1], self.position + 1
        self.position = match.end()
        return _ESCAPE.sub(
            lambda escape: self._character(escape[1], start + escape.start()), inside
        )

    def _character(self, escape: str, position: int) -> str:
        """Return the character of an escape; `escape` is the text after the backslash."""
        kind, digits = escape[0], escape[1:]
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        if kind not in _DIGITS:
            return "\\" + kind
        if len(digits) < _DIGITS[kind] or _HEX.fullmatch(digits) is None:
            raise self.error(f"{_DIGITS[kind]} hexadecimal digits behind \\{kind}", position)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self.error("the number of a Unicode character", position)
        return chr(code)
