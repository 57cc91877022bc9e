"""The versions of langchain-core and openai that this package works with, checked at import.

Looks at installed metadata only: nothing is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

#: What to type when something is missing or of another version.
INSTALL = "pip install 'parrot-gateway[langchain]'"


class Range(NamedTuple):
    """Versions from `first` to, and without, `end`; both as (major, minor)."""

    first: tuple[int, int]
    end: tuple[int, int]

    def __str__(self) -> str:
        (major, minor), (next_major, next_minor) = self
        upper = f"{next_major}.{next_minor}" if next_minor else str(next_major)
        return f">={major}.{minor},<{upper}"


#: The ranges of the extra `langchain` in pyproject.toml.
SUPPORTED: Mapping[str, Range] = {
    "langchain-core": Range((1, 7), (2, 0)),
    "openai": Range((2, 45), (4, 0)),
}


class VersionError(ImportError):
    """A library is missing, or of a version that does not work; the message says which one does."""


def check_versions(supported: Mapping[str, Range] = SUPPORTED) -> None:
    """Check that all libraries are there in a version that works.

    Raises:
        VersionError: for the first one that is not.
    """
    for library, versions in supported.items():
        try:
            found = version(library)
        except PackageNotFoundError:
            raise VersionError(
                f"langchain_parrot needs {library}{versions}, which is not installed: {INSTALL}",
                name=library,
            ) from None
        numbers = [int(number) for number in re.findall(r"\d+", found)[:2]]
        major, minor = (*numbers, 0, 0)[:2]
        if not versions.first <= (major, minor) < versions.end:
            raise VersionError(
                f"langchain_parrot works with {library}{versions}, and {library} {found} is "
                f"installed: {INSTALL}",
                name=library,
            )
