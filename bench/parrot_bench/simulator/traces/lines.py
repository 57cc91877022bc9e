"""Reading trace files line by line: plain or gzip, with errors that name the file and line."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Longest line that is read; a prompt of a million tokens in blocks of 16 needs about 1 MB.
MAX_LINE_BYTES = 64 * 1024 * 1024
#: Larger numbers of tokens are refused.
MAX_TOKENS = 1_000_000_000


class TraceError(ValueError):
    """A trace file cannot be read; the message names the file, the line and the field."""


class Line(NamedTuple):
    """One line of a file; counts from 1."""

    path: Path
    number: int
    text: str

    def error(self, message: str) -> TraceError:
        return TraceError(f"{self.path}:{self.number}: {message}")


def lines_of(path: Path) -> Iterator[Line]:
    """Lines that are not blank.

    Raises:
        TraceError: the file cannot be opened or decoded, or a line is too long.
    """
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(raw) > MAX_LINE_BYTES:
                    raise TraceError(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes")
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield Line(path, number, text)
    except UnicodeDecodeError:
        raise TraceError(f"{path}:{number}: not UTF-8 text") from None
    except (OSError, EOFError) as error:
        raise TraceError(f"{path}: {error}") from None


def objects_of(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """The JSON objects of a JSONL file.

    Raises:
        TraceError: as `lines_of`, or a line is not a JSON object.
    """
    for line in lines_of(path):
        try:
            row = json.loads(line.text)
        except (ValueError, RecursionError) as error:
            raise line.error(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise line.error("not a JSON object")
        yield line, row


def number_of(line: Line, row: dict[str, Any], *names: str, default: float | None = None) -> float:
    """The number under the first of `names` that the row has; finite and not negative.

    Raises:
        TraceError: it is missing and there is no default, or it is not such a number.
    """
    name = next((n for n in names if row.get(n) is not None), None)
    if name is None:
        if default is None:
            raise line.error(f"{names[0]} is missing")
        return default
    value = row[name]
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            number = float(value)
            if math.isfinite(number):
                return number
    except OverflowError:
        pass
    raise line.error(f"{name} must be a number of 0 or more, not {_short(value)}")


def tokens_of(line: Line, row: dict[str, Any], *names: str) -> int:
    """A number of tokens, at least 1: engines generate one token where a trace has 0.

    Raises:
        TraceError: as `number_of`, or it is not whole, or too large to be true.
    """
    value = number_of(line, row, *names)
    if value != int(value) or value > MAX_TOKENS:
        raise line.error(f"{names[0]} must be a whole number of tokens, not {value:g}")
    return max(1, int(value))


def list_of(line: Line, row: dict[str, Any], name: str, kind: type) -> list[Any]:
    """A list whose items are all of one type; empty where it is missing.

    Raises:
        TraceError: it is not.
    """
    value = row.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(item) is kind for item in value):
        raise line.error(f"{name} must be a list of {kind.__name__}, not {_short(value)}")
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
