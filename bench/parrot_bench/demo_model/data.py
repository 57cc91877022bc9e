"""Reads text, evens out its typography, and holds passages back for validation.

Knows nothing about tokens. A source is a folder of ``.txt`` files, one text file, or a file of
JSON lines with a ``text`` field (``id``, ``title``, ``author`` optional); ``.gz`` is read too.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

#: A passage closes at the first paragraph end after this many characters.
PASSAGE_CHARS = 6000

_CURLY = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " "})
_OPENING_SINGLE = re.compile(
    r"(?<![^\s(\[\u2014\"])'(?=[A-Z\u2014]|(?!(?:tis|twas|twere|twill|twould|em|un|im|er|bout)\b)\w)"
)
_SLURS = re.compile(r"nigger|\bnegr|darkey|darkies|\bcoons?\b|\bsquaw", re.IGNORECASE)
_CLOSING_SINGLE = re.compile(r"(?<=[.,!?;:\u2014)])'(?=[\s\u2014)\]\"]|$)|(?<=\w)'(?=[.,!?;])")


@dataclass(frozen=True, slots=True)
class Book:
    """One source text. ``paragraphs`` keep their inner line ends (verse)."""

    id: str
    title: str
    author: str
    paragraphs: tuple[str, ...]


class Split(NamedTuple):
    """Books cut into runs of consecutive paragraphs; no passage is in both parts."""

    train: list[Book]
    validation: list[Book]


def normalise(text: str) -> str:
    """Straight quotes, em dashes for double hyphens, double quotes around speech, no markup."""
    text = text.replace("\r\n", "\n").translate(_CURLY)
    text = re.sub(r" ?-{2,} ?", "\u2014", text)
    text = re.sub(r"\[(?:Illustration|Footnote)[^\]]*\]", "", text)
    text = re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", text)
    text = re.sub(r"[ \t]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    # British single-quoted speech: swap the two levels of quotation marks.
    if text.count('"') * 5 < text.count("'") and text.count("'") > 100:
        text = text.replace('"', "\0")
        text = _CLOSING_SINGLE.sub('"', _OPENING_SINGLE.sub('"', text))
        text = text.replace("\0", "'")
    return text


def read_books(source: Path) -> list[Book]:
    """All texts of `source`, in a fixed order; paragraphs with racial slurs are left out.

    Raises:
        ValueError: nothing readable there, or a JSON line without ``text``.
    """
    books = []
    for number, record in enumerate(_records(source)):
        text = record.get("text")
        if not isinstance(text, str):
            raise ValueError(f"{source}: record {number} has no 'text'")
        parts = (part.strip() for part in normalise(text).split("\n\n"))
        books.append(
            Book(
                id=str(record.get("id", number)),
                title=str(record.get("title", "")),
                author=str(record.get("author", "")),
                paragraphs=tuple(part for part in parts if part and not _SLURS.search(part)),
            )
        )
    if not books:
        raise ValueError(f"{source}: no text found (expected .txt files or JSON lines)")
    return books


def _records(source: Path) -> Iterator[dict[str, object]]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and ".txt" in path.suffixes[-2:]:
                yield {"id": path.stem, "title": path.stem, "text": _read(path)}
    elif {".jsonl", ".ndjson"} & set(source.suffixes):
        yield from (json.loads(line) for line in _read(source).splitlines() if line.strip())
    else:
        yield {"id": source.stem, "title": source.stem, "text": _read(source)}


def _read(path: Path) -> str:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def split(books: list[Book], *, fraction: float, seed: int) -> Split:
    """Holds back about `fraction` of the passages of each book, chosen by hash.

    Raises:
        ValueError: fewer than two passages in all.
    """
    passages = [
        (book, number, passage)
        for book in books
        for number, passage in enumerate(_passages(book.paragraphs))
    ]
    if len(passages) < 2:
        raise ValueError(f"too little text: {len(passages)} passage(s), at least 2 are needed")
    held = [_share(seed, book.id, number) < fraction for book, number, _ in passages]
    if not any(held):
        held[-1] = True
    if all(held):
        held[0] = False

    train: list[Book] = []
    validation: list[Book] = []
    joins = False  # does this passage directly follow one that went to the training part?
    for (book, number, passage), is_held in zip(passages, held, strict=True):
        if is_held:
            validation.append(Book(book.id, book.title, book.author, passage))
        elif joins and number > 0:
            last = train[-1]
            joined = last.paragraphs + passage
            train[-1] = Book(last.id, last.title, last.author, joined)
        else:
            train.append(Book(book.id, book.title, book.author, passage))
        joins = not is_held
    return Split(train, validation)


def _passages(paragraphs: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    start = size = 0
    for index, paragraph in enumerate(paragraphs):
        size += len(paragraph)
        if size >= PASSAGE_CHARS:
            yield paragraphs[start : index + 1]
            start, size = index + 1, 0
    if start < len(paragraphs):
        yield paragraphs[start:]


def _share(seed: int, book: str, number: int) -> float:
    digest = hashlib.blake2b(f"{seed}:{book}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
