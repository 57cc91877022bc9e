"""Label values: their limits, and their text form."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from functools import lru_cache

#: Label of values beyond a limit.
OTHER = "other"

MAX_MODELS = 200
#: Part of them for models that no engine has and no upstream lists.
MAX_UNLISTED = 100
MAX_ENGINES = 200
MAX_TENANTS = 50
#: Limit for error codes, reasons and the like, which the gateway and upstreams define.
MAX_WORDS = 64
_MAX_CHARACTERS = 200


class BoundedValues:
    """Keeps the names of a label's first `limit` values; further ones become `other`.

    The number of series stays limited, whatever names clients invent.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        return len(self._known) >= self._limit

    @property
    def shown(self) -> Collection[str]:
        """Return the names in use."""
        return self._known.values()

    def keep(self, values: Container[str]) -> bool:
        """Forget all values except these; return true if there were others."""
        before = len(self._known)
        self._known = {value: name for value, name in self._known.items() if value in values}
        return len(self._known) < before

    def of(self, value: str, *, places: int | None = None) -> str:
        """Return the name under which a value is counted.

        Args:
            places: a new value gets its name only while fewer values than this have one; by default
                the limit. Otherwise it is counted as `other`.
        """
        known = self._known.get(value)
        if known is not None:
            return known
        if len(self._known) >= (self._limit if places is None else places):
            return OTHER
        self._known[value] = value[:_MAX_CHARACTERS]
        return self._known[value]


@lru_cache(maxsize=16_384)
def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Format labels as they follow a metric's name; empty without labels."""
    if not names:
        return ""
    return "{" + ",".join(map(_pair, names, values)) + "}"


def _pair(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'{name}="{escaped}"'


def within(limit: int, names: Iterable[str]) -> dict[str, str]:
    """Map names known beforehand to their labels: the first `limit` keep their names."""
    return {
        name: name[:_MAX_CHARACTERS] if number < limit else OTHER
        for number, name in enumerate(names)
    }
