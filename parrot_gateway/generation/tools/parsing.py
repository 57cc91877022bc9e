"""Tool calls in the text of a model: how each kind of model writes them, read as they arrive.

Three ways of writing:

- `hermes` (Hermes, Qwen, and any model told to): `<tool_call>`, an object with `name` and
  `arguments`, `</tool_call>`; as often as there are calls.
- `llama` (Llama 3.1 and later): the whole answer is an object with `name` and `parameters`; several
  are separated by semicolons.
- `mistral`: `[TOOL_CALLS]` and an array of objects with `name` and `arguments`.

`ToolCallReader` is a pure state machine: text in, content and pieces of calls out. What looks like
a call and is none (not JSON, a name that nobody offered) is content, unless some of it was given
out as a call before that showed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral"]

#: Characters that a call may have before its name is known.
MAX_HEAD = 256 * 1024


class ContentPiece(NamedTuple):
    """Text that is no part of a call."""

    text: str


class CallBegin(NamedTuple):
    """A call; its arguments follow."""

    call: int
    name: str
    #: Minted by `ToolCallText`, or given by an upstream.
    id: str = ""


class ArgumentsPiece(NamedTuple):
    """More of the arguments of a call, as JSON text."""

    call: int
    text: str


ToolPiece: TypeAlias = ContentPiece | CallBegin | ArgumentsPiece


@dataclass(frozen=True, slots=True)
class Writing:
    """How a format writes calls."""

    #: What stands in front of the first call; empty: a call begins the answer, with a brace.
    opening: str
    #: What stands between the opening and the first call.
    inner_opening: str
    #: What stands between calls, if another may follow without an opening of its own.
    separator: str
    #: What stands behind the last call.
    closing: str
    #: The name of the arguments' field.
    arguments: str


WRITINGS: dict[ToolFormat, Writing] = {
    "hermes": Writing("<tool_call>", "\n", "", "\n</tool_call>", "arguments"),
    "llama": Writing("", "", "; ", "", "parameters"),
    "mistral": Writing("[TOOL_CALLS]", "[", ", ", "]", "arguments"),
}

_PYTHON_TAG = "<|python_tag|>"
#: What may stand between the objects of calls.
_GLUE = " \t\r\n,;[]"


@dataclass(frozen=True, slots=True)
class ToolParsing:
    """How the text of a call that may use tools is read."""

    format: ToolFormat
    #: The tools that may be called.
    names: frozenset[str]
    #: The text holds nothing but calls; what looks like content is one that was cut off.
    calls_only: bool = False


class ToolCallText:
    """Splits the text of one candidate into content and calls, each with an unguessable id."""

    __slots__ = ("_calls_only", "_reader", "has_calls")

    def __init__(self, parsing: ToolParsing) -> None:
        self._calls_only = parsing.calls_only
        self._reader = ToolCallReader(parsing.format, parsing.names)
        #: Whether a call has begun.
        self.has_calls = False

    def push(self, text: str, *, ends: bool) -> list[ToolPiece]:
        """Take more text; `ends`: it is the last."""
        found = self._reader.push(text)
        if ends:
            found += self._reader.finish()
        pieces: list[ToolPiece] = []
        for piece in found:
            if isinstance(piece, CallBegin):
                self.has_calls = True
                pieces.append(piece._replace(id="call_" + secrets.token_hex(12)))
            elif not (self._calls_only and isinstance(piece, ContentPiece)):
                pieces.append(piece)
        return pieces


class ToolCallReader:
    """Reads one candidate.

    Args:
        format: how the model writes calls.
        names: the tools that there are.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]) -> None:
        self._writing = WRITINGS[format]
        self._names = names
        #: Text not understood yet.
        self._buffer = ""
        self._call: _CallText | None = None
        #: Whether a call may begin with a brace: behind an opening, or at the start of an answer.
        self._expects_call = not self._writing.opening
        #: What was passed over since then; content, if no call follows.
        self._skipped = ""
        self.num_calls = 0

    def push(self, text: str) -> list[ToolPiece]:
        """Take more text."""
        self._buffer += text
        pieces: list[ToolPiece] = []
        while self._buffer and self._advance(pieces):
            pass
        return pieces

    def finish(self) -> list[ToolPiece]:
        """No text comes any more: what is left, is content, or the end of a call cut short."""
        pieces: list[ToolPiece] = []
        if self._call is not None:
            self._skipped = "" if self._call.is_shown else self._skipped + self._call.text
        if self._expects_call and self._skipped.strip(" \t\r\n,;[]") == "" and self.num_calls:
            # Behind a call: its closing, not content.
            self._skipped = ""
        rest = self._skipped + self._buffer
        if self._is_glue_only(rest):
            rest = ""
        self._skipped = self._buffer = ""
        self._call = None
        if rest:
            pieces.append(ContentPiece(rest))
        return pieces

    def _is_glue_only(self, text: str) -> bool:
        """Whether it only closes a call; or begins to, or begins another, and was cut there."""
        if not self.num_calls:
            return False
        closing, opening = self._writing.closing.strip(), self._writing.opening
        left = text.replace(closing, "").strip(" \t\r\n,;[]") if closing else text.strip(" \t\r\n;")
        return closing.startswith(left) or opening.startswith(left)

    def _advance(self, pieces: list[ToolPiece]) -> bool:
        """One step; False when more text is needed."""
        if self._call is not None:
            return self._read_call(self._call, pieces)
        if self._expects_call:
            return self._seek_brace(pieces)
        return self._seek_opening(pieces)

    def _seek_opening(self, pieces: list[ToolPiece]) -> bool:
        """Give out content up to an opening, or to what may become one."""
        opening = self._writing.opening
        if not opening:
            pieces.append(ContentPiece(self._buffer))
            self._buffer = ""
            return False
        at = self._buffer.find(opening)
        if at >= 0:
            before, self._buffer = self._buffer[:at], self._buffer[at + len(opening) :]
            if self.num_calls and not before.strip():
                before = ""
            if before:
                pieces.append(ContentPiece(before))
            self._expects_call, self._skipped = True, opening
            return True
        held = _overlap(self._buffer, opening)
        if self.num_calls and not self._buffer[: len(self._buffer) - held].strip():
            # Blank space between calls shows as such at the end only.
            return False
        shown = self._buffer[: len(self._buffer) - held]
        self._buffer = self._buffer[len(shown) :]
        if shown:
            pieces.append(ContentPiece(shown))
        return False

    def _seek_brace(self, pieces: list[ToolPiece]) -> bool:
        """Pass over what stands between calls, up to the brace of the next one."""
        if not self._writing.opening and self.num_calls == 0:
            if _PYTHON_TAG.startswith(self._buffer):
                return False
            if self._buffer.startswith(_PYTHON_TAG):
                self._skipped += _PYTHON_TAG
                self._buffer = self._buffer[len(_PYTHON_TAG) :]
                return bool(self._buffer)
        closing = self._writing.closing.strip()
        first = self._buffer[0]
        if first == "{":
            self._call = _CallText(self._writing.arguments, self._names, self.num_calls)
            return True
        if closing and closing not in "]" and self.num_calls:
            if self._buffer.startswith(closing):
                self._buffer = self._buffer[len(closing) :]
                self._expects_call, self._skipped = False, ""
                return bool(self._buffer)
            if closing.startswith(self._buffer):
                return False
        if first in _GLUE:
            rest = self._buffer.lstrip(_GLUE)
            self._skipped += self._buffer[: len(self._buffer) - len(rest)]
            self._buffer = rest
            return bool(self._buffer)
        # No call after all.
        self._give_back(pieces)
        return bool(self._buffer)

    def _read_call(self, call: _CallText, pieces: list[ToolPiece]) -> bool:
        used = call.push(self._buffer)
        self._buffer = self._buffer[used:]
        if call.is_broken:
            if call.is_shown:
                # Part of it was given out; the rest cannot be anything else.
                pieces += call.take()
                self._end_call()
                return bool(self._buffer)
            self._buffer = call.text + self._buffer
            self._call = None
            self._give_back(pieces, 1)
            return bool(self._buffer)
        pieces += call.take()
        if call.is_complete:
            self._end_call()
            return bool(self._buffer)
        return False

    def _end_call(self) -> None:
        self._call = None
        self.num_calls += 1
        self._skipped = ""
        self._expects_call = True

    def _give_back(self, pieces: list[ToolPiece], count: int = 0) -> None:
        """What was passed over, and `count` characters more, are content."""
        text = self._skipped + self._buffer[:count]
        self._buffer = self._buffer[count:]
        self._expects_call, self._skipped = False, ""
        if text.strip() or (text and not self.num_calls):
            pieces.append(ContentPiece(text))


class _CallText:
    """The object of one call, character by character."""

    __slots__ = (
        "_arguments",
        "_begin",
        "_depth",
        "_escaped",
        "_in_string",
        "_index",
        "_key",
        "_name",
        "_names",
        "_pending",
        "_shown",
        "_string_start",
        "_value_start",
        "is_broken",
        "is_complete",
        "is_shown",
        "text",
    )  # fmt: skip

    def __init__(self, arguments: str, names: Collection[str], index: int) -> None:
        self._arguments = (arguments, "arguments" if arguments != "arguments" else "parameters")
        self._names = names
        self._index = index
        #: All of it so far.
        self.text = ""
        self._depth = 0
        self._in_string = self._escaped = False
        self._string_start = -1
        #: The key whose value comes, at the top level, and where that begins.
        self._key: str | None = None
        self._value_start = -1
        self._name: str | None = None
        #: Where the arguments begin in `text`, and how much of them was given out.
        self._begin = -1
        self._shown = -1
        self._pending: list[ToolPiece] = []
        self.is_shown = self.is_broken = self.is_complete = False

    def push(self, text: str) -> int:
        """Take characters up to the end of the object; returns how many."""
        # NOTE: all at once, because strings that grow character by character are copied each time.
        start = len(self.text)
        self.text += text
        for count, char in enumerate(text):
            self._scan(char, start + count)
            if self.is_broken or self.is_complete:
                self.text = self.text[: start + count + 1]
                return count + 1
        if self._name is None and len(self.text) > MAX_HEAD:
            self.is_broken = True
        self._show(len(self.text))
        return len(text)

    def take(self) -> list[ToolPiece]:
        """The pieces that came about; none before the call has its name."""
        if not self.is_shown:
            return []
        pieces, self._pending = self._pending, []
        return pieces

    def _scan(self, char: str, position: int) -> None:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._end_top_string(position + 1)
            return
        if self._depth == 1 and self._key is not None and self._value_start < 0:
            if char in " \t\r\n":
                return
            self._begin_value(position)
        if char == '"':
            self._in_string = True
            self._string_start = position
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._end_value(position)
                self._end(char)
                return
            self._depth -= 1
            if self._depth == 1:
                self._end_value(position + 1)
        elif self._depth == 1 and char == ",":
            self._end_value(position)
            self._key = None
        elif self._depth == 1 and char == ":" and self._key is None:
            self.is_broken = self._string_start < 0
            if not self.is_broken:
                self._set_key(position)

    def _set_key(self, position: int) -> None:
        try:
            key = json.loads(self.text[self._string_start : position].strip())
        except ValueError:
            self.is_broken = True
            return
        self._key = str(key)
        self._value_start = -1

    def _begin_value(self, position: int) -> None:
        self._value_start = position
        if self._key in self._arguments and self.text[position] == "{":
            self._begin = position

    def _end_top_string(self, end: int) -> None:
        if self._key is not None and self._value_start >= 0:
            self._end_value(end)

    def _end_value(self, end: int) -> None:
        """A value at the top level ends here."""
        if self._key is None or self._value_start < 0:
            return
        raw = self.text[self._value_start : end].strip()
        key, self._key = self._key, None
        start, self._value_start = self._value_start, -1
        if key == "name":
            try:
                name = json.loads(raw)
            except ValueError:
                name = None
            if not isinstance(name, str) or name not in self._names:
                self.is_broken = True
                return
            self._name = name
        elif key in self._arguments:
            if self._begin == start:
                self._show(end)
                self._begin = -2
                if self._name is None:
                    # The name comes behind its arguments.
                    self._held_arguments(raw)
            else:
                self._held_arguments(_opened(raw))

    def _held_arguments(self, text: str | None) -> None:
        if text is None:
            self.is_broken = True
            return
        self._begin = -2
        self._pending.append(ArgumentsPiece(self._index, text))

    def _show(self, end: int) -> None:
        """Give out what is known up to a position: nothing before the arguments begin."""
        if self._name is not None and self._begin >= 0 and not self.is_broken:
            self._announce()
            start = max(self._begin, self._shown)
            if end > start:
                self._pending.append(ArgumentsPiece(self._index, self.text[start:end]))
                self._shown = end

    def _announce(self) -> None:
        if not self.is_shown and self._name is not None:
            self.is_shown = True
            self._pending.insert(0, CallBegin(self._index, self._name))

    def _end(self, char: str) -> None:
        if self.is_broken:
            return
        if char != "}" or self._name is None:
            self.is_broken = True
            return
        if self._begin == -1:
            # A call without arguments.
            self._pending.append(ArgumentsPiece(self._index, "{}"))
        self._announce()
        self.is_complete = True


def _opened(raw: str) -> str | None:
    """Arguments that were written as a JSON text within a string; None for anything else."""
    try:
        value = json.loads(raw)
        if isinstance(value, str):
            return value if isinstance(json.loads(value), dict) else None
    except (ValueError, RecursionError):
        return None
    return "{}" if value is None else None


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
