"""Checks the versions of an integration's libraries when it is imported.

Reads installed metadata only, without importing anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


class VersionError(ImportError):
    """A library is missing or has an incompatible version; the message names both."""


def check_versions(package: str, extra: str, ranges: Mapping[str, str]) -> None:
    """Check that all libraries are installed in compatible versions.

    Args:
        package: the integration, for the message.
        extra: extra of `parrot-gateway` that installs the libraries.
        ranges: versions by distribution, as in pyproject.toml: `>=1.7,<2`.

    Raises:
        VersionError: a library is missing or incompatible; names the first one.
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
