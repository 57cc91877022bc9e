"""The code blocks of the documents, to be run as a reader who pastes them would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = sorted(
    path for folder in ("docs", "docs/tutorials") for path in (ROOT / folder).glob("*.md")
)
PAGES = ("README.md", *(str(path.relative_to(ROOT)) for path in DOCS))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A code block.

    Attributes:
        page: path below the repository.
        heading: the nearest one above it.
        number: among the blocks of its language in the page, from 1.
        language: as the fence names it; empty where it names none.
    """

    page: str
    heading: str
    number: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}, {self.heading}, {self.number}"


def blocks_of(page: str, language: str) -> list[Block]:
    """The blocks of a language in a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [match for match in _FENCE.finditer(text) if match[1] == language]
    # Headings are looked for outside of fences: shell comments look alike.
    prose = _FENCE.sub(lambda match: " " * len(match[0]), text)
    return [
        Block(page, _HEADING.findall(prose[: match.start()])[-1], number, language, match[2])
        for number, match in enumerate(found, start=1)
    ]
