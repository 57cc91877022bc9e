"""Values of labels: bounded in number, and as they are written."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from functools import lru_cache

#: What values beyond a limit are counted under.
OTHER = "other"

MAX_MODELS = 200
#: Of these, models that no engine has and no upstream lists.
MAX_UNLISTED = 100
MAX_ENGINES = 200
MAX_TENANTS = 50
#: Of error codes, reasons and the like, which are words of the gateway and of upstreams.
MAX_WORDS = 64
_MAX_CHARACTERS = 200


class BoundedValues:
    """The first `limit` values of a label keep their names, further ones are `other`.

    Series stay as many as they are however many names clients make up.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._known: dict[str, str] = {}

    @property
    def is_full(self) -> bool:
        return len(self._known) >= self._limit

    @property
    def shown(self) -> Collection[str]:
        """The names that there are."""
        return self._known.values()

    def keep(self, values: Container[str]) -> bool:
        """Forget all others; True if there were any."""
        before = len(self._known)
        self._known = {value: name for value, name in self._known.items() if value in values}
        return len(self._known) < before

    def of(self, value: str, *, places: int | None = None) -> str:
        """Give the name under which a value is counted.

        Args:
            places: a new value gets its name only while fewer values than this have one; the limit
                by default. Otherwise it is counted as `other`.
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
    """Labels as they stand behind a metric's name; empty without any."""
    if not names:
        return ""
    return "{" + ",".join(map(_pair, names, values)) + "}"


def _pair(name: str, value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    return f'{name}="{escaped}"'


def within(limit: int, names: Iterable[str]) -> dict[str, str]:
    """By name what it is counted under: of names known beforehand the first `limit` keep theirs."""
    return {
        name: name[:_MAX_CHARACTERS] if number < limit else OTHER
        for number, name in enumerate(names)
    }
