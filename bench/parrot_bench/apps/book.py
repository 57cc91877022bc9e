"""The long document that workloads read: a public-domain book, cut at blanks.

Cuts by characters, not by tokens: how many characters make a token is for the caller to know.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def text() -> str:
    """The whole book, about 142,000 characters."""
    data = files("parrot_bench") / "data" / "alice.txt"
    return " ".join(data.read_text(encoding="utf-8").split())


def passage(characters: int, start: int = 0) -> str:
    """About that many characters of the book (a word less at most), whole words.

    Args:
        characters: at least 1.
        start: offset in characters; past the end it wraps around.
    """
    whole = text()
    start %= len(whole)
    if start:
        start = whole.find(" ", start) + 1
    found = whole[start : start + characters]
    while len(found) < characters:
        found += " " + whole[: characters - len(found) - 1]
    if start + characters < len(whole) and whole[start + characters] != " ":
        found = found.rpartition(" ")[0] or found
    return found.strip()


def chunks(count: int, characters: int) -> list[str]:
    """`count` passages that follow each other, without overlap as far as the book goes."""
    return [passage(characters, number * characters) for number in range(count)]
