"""Versions of the libraries that an integration works with, checked when it is imported.

Looks at installed metadata only: nothing is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


class VersionError(ImportError):
    """A library is missing, or of a version that does not work; the message names both."""


def check_versions(package: str, extra: str, ranges: Mapping[str, str]) -> None:
    """Check that all libraries are installed in a version that works.

    Args:
        package: the integration, for the message.
        extra: of `parrot-gateway`, which installs what is needed.
        ranges: by distribution, as in pyproject.toml: `>=1.7,<2`.

    Raises:
        VersionError: for the first one that is not.
    """
    install = f"pip install 'parrot-gateway[{extra}]'"
    for library, supported in ranges.items():
        try:
            installed = version(library)
        except PackageNotFoundError:
            raise VersionError(
                f"{package} needs {library}{supported}, which is not installed: {install}",
                name=library,
            ) from None
        first, end = (_numbers(bound) for bound in supported.split(","))
        if not first <= _numbers(installed) < end:
            raise VersionError(
                f"{package} works with {library}{supported}, and {library} {installed} is "
                f"installed: {install}",
                name=library,
            )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text)[:3])
