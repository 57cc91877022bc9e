"""Which versions of llama-index-core and `openai` work, told at import instead of at a call."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

#: Distribution, first version that works, first one that is not known to; as in pyproject.toml.
RANGES = (
    ("llama-index-core", (0, 14, 20), (0, 15)),
    ("openai", (2, 45), (4,)),
)


def check_versions() -> None:
    """Check what is installed.

    Raises:
        ImportError: a package is missing or out of its range; the message has the range.
    """
    for distribution, first, beyond in RANGES:
        wanted = f"{distribution}>={_text(first)},<{_text(beyond)}"
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            raise ImportError(
                f"llama_index.llms.parrot needs {wanted}, which is not installed: "
                f"pip install '{wanted}'"
            ) from None
        numbers = tuple(int(digits) for digits in re.findall(r"\d+", installed)[:3])
        if not first <= numbers < beyond:
            raise ImportError(
                f"llama_index.llms.parrot works with {wanted}, but {installed} is installed: "
                f"pip install '{wanted}'"
            )


def _text(numbers: tuple[int, ...]) -> str:
    return ".".join(str(number) for number in numbers)
