"""Tool calls in the text of a model: how each kind of model writes them, read as they arrive.

Three ways of writing:

- `hermes` (Hermes, Qwen, and any model instructed to): `<tool_call>`, an object with `name` and
  `arguments`, `</tool_call>`; as often as there are calls.
- `llama` (Llama 3.1 and later): the whole answer is an object with `name` and `parameters`; several
  are separated by semicolons.
- `mistral`: `[TOOL_CALLS]` and an array of objects with `name` and `arguments`.

A tool whose input follows a grammar of its own gets it raw: `{"name": …, "input": <<<`, a line
break, the text, a line break, `>>>}`. It comes out as JSON like any other.

`ToolCallReader` is a pure state machine: text in, content and pieces of calls out. What looks like
a call and is none (not JSON, an unknown name) is content, unless some of it was given
out as a call before that showed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import msgspec

ToolFormat: TypeAlias = Literal["hermes", "llama", "mistral"]

#: Characters that a call may have before its name is known.
MAX_HEAD = 256 * 1024


class ContentPiece(NamedTuple):
    """Text that is no part of a call."""

    text: str


class ToolCallBegin(NamedTuple):
    """A call; its arguments follow."""

    call: int
    name: str
    #: Minted by `ToolCallText`, or given by an upstream.
    id: str = ""


class ArgumentsPiece(NamedTuple):
    """More of the arguments of a call, as JSON text."""

    call: int
    text: str


ToolPiece: TypeAlias = ContentPiece | ToolCallBegin | ArgumentsPiece


@dataclass(frozen=True, slots=True)
class Writing:
    """How a format writes calls."""

    #: What stands in front of the first call; empty: a call begins the answer, with a brace.
    opening: str
    #: What stands between the opening and the first call.
    inner_opening: str
    #: What stands between calls, if another may follow without an opening.
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

#: What stands before and behind a raw input, up to the end of the call's object.
RAW_OPENING = "<<<\n"
RAW_CLOSING = "\n>>>}"

_PYTHON_TAG = "<|python_tag|>"
#: What may stand between the objects of calls.
_GLUE = " \t\r\n,;[]"

#: A call up to its arguments, where these follow its name; texts such as a type may precede it.
_HEAD = re.compile(
    r'\{\s*(?:"(?!name")\w+"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    r'(?:"(?!arguments"|parameters")\w+"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:arguments|parameters)"\s*:'
    r"\s*(?=\{)"
)
#: The same of a call whose input is raw.
_RAW_HEAD = re.compile(r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"input"\s*:\s*' + RAW_OPENING)
#: Characters in which a head is looked for, so that its search costs the same for each push.
_HEAD_CHARACTERS = 4096
#: How an object begins, as far as it is there.
_OPENING = re.compile(r'\{\s*(?:["}]|\Z)')
_STRUCTURE = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NO_ARGUMENTS = msgspec.Raw(b"{}")


@dataclass(frozen=True, slots=True)
class ToolParsing:
    """How the text of a call that may use tools is read."""

    format: ToolFormat
    #: The tools that may be called.
    names: frozenset[str]
    #: The text holds nothing but calls; what looks like content is one that was cut off.
    calls_only: bool = False
    #: Several calls may be made; else those after the first are left out.
    parallel: bool = True


class ToolCallText:
    """Splits the text of one candidate into content and calls, each with an unguessable id."""

    __slots__ = ("_calls_only", "_parallel", "_reader", "has_calls")

    def __init__(self, parsing: ToolParsing) -> None:
        self._calls_only = parsing.calls_only
        self._parallel = parsing.parallel
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
            if not isinstance(piece, ContentPiece) and piece.call and not self._parallel:
                continue
            if isinstance(piece, ToolCallBegin):
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
        self._call: _ToolCallObject | None = None
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
        """The text has ended: the rest is content, or the end of a call cut short."""
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
        """Return whether a text only closes a call or opens another, perhaps cut short."""
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
            self._call = _ToolCallObject(self._names, self.num_calls)
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

    def _read_call(self, call: _ToolCallObject, pieces: list[ToolPiece]) -> bool:
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
        """Turn the text passed over, and `count` characters more, into content."""
        text = self._skipped + self._buffer[:count]
        self._buffer = self._buffer[count:]
        self._expects_call, self._skipped = False, ""
        if text.strip() or (text and not self.num_calls):
            pieces.append(ContentPiece(text))


class _ToolCallObject:
    """The object of one call as it arrives.

    Where its name comes first, the arguments are given out as they are written; any other call is
    read when it is whole.
    """

    __slots__ = ("_arguments_end", "_begin", "_depth", "_in_string", "_index", "_is_raw", "_names",
                 "_pending", "_scanned", "_shown", "is_broken", "is_complete", "is_shown",
                 "text")  # fmt: skip

    def __init__(self, names: Collection[str], index: int) -> None:
        self._names = names
        self._index = index
        #: All of it so far, and how much of that was scanned for the end.
        self.text = ""
        self._scanned = self._depth = 0
        self._in_string = self._is_raw = False
        #: Where the arguments begin and end in `text`, and how much of them was given out.
        self._begin = self._arguments_end = self._shown = -1
        self._pending: list[ToolPiece] = []
        self.is_shown = self.is_broken = self.is_complete = False

    def push(self, text: str) -> int:
        """Take characters up to the end of the object; returns how many."""
        start = len(self.text)
        self.text += text
        if self._begin < 0:
            self._read_head()
        if self._is_raw:
            self._show_raw()
            return len(self.text) - start
        end = self._scan()
        if end >= 0:
            self.text = self.text[:end]
        if self._begin >= 0:
            self._show()
            self.is_complete = end >= 0
        elif end >= 0:
            self._read_whole()
        elif len(self.text) > MAX_HEAD or not _OPENING.match(self.text):
            self.is_broken = True
        return len(self.text) - start

    def take(self) -> list[ToolPiece]:
        """The pieces that came about; none before the call has its name."""
        pieces, self._pending = self._pending, []
        return pieces

    def _read_head(self) -> None:
        head = _HEAD.match(self.text, 0, _HEAD_CHARACTERS)
        if head is None:
            head = _RAW_HEAD.match(self.text, 0, _HEAD_CHARACTERS)
            self._is_raw = head is not None and head["name"] in self._names
        if head is None:
            return
        if head["name"] in self._names:
            self._begin = self._shown = head.end()
            self._announce(head["name"])
            if self._is_raw:
                self._pending.append(ArgumentsPiece(self._index, '{"input": "'))
        else:
            self.is_broken = True

    def _scan(self) -> int:
        """Where the object ends; -1 when it goes on."""
        for match in _STRUCTURE.finditer(self.text, self._scanned):
            mark = match[0]
            if mark == "\\":
                # What it escapes is to come.
                self._scanned = match.start()
                return -1
            if mark == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark in "{[":
                self._depth += 1
            elif not self._in_string and mark in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return match.end()
                if self._depth == 1 and self._begin >= 0 > self._arguments_end:
                    self._arguments_end = match.end()
        self._scanned = len(self.text)
        return -1

    def _read_whole(self) -> None:
        try:
            fields = _OBJECT.decode(self.text)
            name = msgspec.json.decode(fields["name"])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError, KeyError):
            name = None
        arguments = None
        if isinstance(name, str) and name in self._names:
            given = fields.get("arguments", fields.get("parameters", _NO_ARGUMENTS))
            arguments = _opened(bytes(given).decode())
        if arguments is None:
            self.is_broken = True
            return
        self._announce(name)
        self._pending.append(ArgumentsPiece(self._index, arguments))
        self.is_complete = True

    def _announce(self, name: str) -> None:
        self.is_shown = True
        self._pending.append(ToolCallBegin(self._index, name))

    def _show(self) -> None:
        end = len(self.text) if self._arguments_end < 0 else self._arguments_end
        if end > self._shown:
            self._pending.append(ArgumentsPiece(self._index, self.text[self._shown : end]))
            self._shown = end

    def _show_raw(self) -> None:
        """Give out what is known of a raw input, as part of a string of JSON."""
        end = self.text.find(RAW_CLOSING, max(self._begin, self._shown - len(RAW_CLOSING)))
        known = len(self.text) - _overlap(self.text, RAW_CLOSING) if end < 0 else end
        more = json.dumps(self.text[self._shown : known], ensure_ascii=False)[1:-1]
        if end >= 0:
            self.text = self.text[: end + len(RAW_CLOSING)]
            self.is_complete, more = True, more + '"}'
        if more:
            self._pending.append(ArgumentsPiece(self._index, more))
        self._shown = max(self._shown, known)


def _opened(raw: str) -> str | None:
    """Arguments as an object's JSON: also from a JSON text in a string, and from null; None for
    anything else."""
    if raw.startswith("{"):
        return raw
    try:
        value = json.loads(raw)
        if isinstance(value, str):
            return value if isinstance(json.loads(value), dict) else None
    except (ValueError, RecursionError):
        return None
    return "{}" if value is None else None


def _overlap(text: str, marker: str) -> int:
    """Count the characters at the end of the text that may begin the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
