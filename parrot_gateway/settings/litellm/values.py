"""Values of a file: references to variables, numbers, addresses, keys; and the report on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from parrot_gateway.settings.litellm.providers import Provider

#: Keys and indexes from the top of the file.
Location: TypeAlias = tuple[str | int, ...]

#: References of LiteLLM to environment variables.
_REFERENCE = "os.environ/"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Values of `api_key` for servers that ask for none.
_NO_KEY = frozenset(
    {"", "none", "null", "empty", "dummy", "fake", "fake-key", "no-key", "na", "n/a", "anything",
     "not-needed", "not-required", "sk-no-key-required"}
)  # fmt: skip
#: References to variables that refer to others.
_MAX_REFERENCES = 4


@dataclass(frozen=True, slots=True)
class Remark:
    """Something of the file that became something else, or nothing."""

    location: Location
    text: str

    @property
    def path(self) -> str:
        """As `model_list[0].litellm_params.rpm`."""
        parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.location]
        return "".join(parts).removeprefix(".")


@dataclass(slots=True)
class Conversion:
    """What became of a file."""

    #: As in a settings file of the gateway.
    settings: dict[str, Any] = field(default_factory=dict)
    #: What is not carried over, and why.
    lost: list[Remark] = field(default_factory=list)
    #: What is carried over as something that differs.
    changed: list[Remark] = field(default_factory=list)
    #: Environment variables that the settings refer to, and where in the file their values are.
    variables: dict[str, str] = field(default_factory=dict)

    def lose(self, location: Iterable[str | int], why: str) -> None:
        self.lost.append(Remark(tuple(location), why))

    def change(self, location: Iterable[str | int], how: str) -> None:
        self.changed.append(Remark(tuple(location), how))


class ValueReader:
    """Reads single values, and reports those that cannot be used.

    Args:
        config: the parsed file.
        environment: variables of this process.
        report: gets what is not carried over.
    """

    def __init__(
        self, config: Mapping[str, Any], environment: Mapping[str, str], report: Conversion
    ) -> None:
        #: `environment_variables` of the file.
        self.given = mapping(config.get("environment_variables"))
        inside = {name: str(value) for name, value in self.given.items() if is_plain(value)}
        self._environment = {**inside, **environment}
        #: Variables that the file refers to, and those made for keys that stand in it.
        self._taken = {*self.given, *_references(config.get("model_list"))}
        #: The variables made for keys, by these.
        self._made: dict[str, str] = {}
        self._report = report
        #: Variables whose values were taken from here.
        self.resolved: set[str] = set()

    def number(self, values: dict[str, Any], location: Location) -> float | None:
        """Take a number, named by the end of `location`, out of a section; None without one."""
        value = values.pop(str(location[-1]), None)
        if isinstance(value, str):
            value = self._resolve(value)
            if value is None:
                self._report.lose(location, "its variable is not set: set it, and import again")
        if value is None or isinstance(value, bool):
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            self._report.lose(location, "is not a number")
            return None
        if not 0 <= number < 1e9:
            self._report.lose(location, "is out of range")
            return None
        return int(number) if number.is_integer() else number

    def url(self, location: Location, value: Any, provider: Provider, model: str) -> str | None:
        """The base URL of a server; None where there is none that can be used.

        Args:
            location: in the file.
            value: as it stands there.
            provider: whose server it is.
            model: the name of the model that is not served without.
        """
        url = self._resolve(value) if isinstance(value, str) else None
        if value is None:
            if provider.url:
                return provider.url
            fault = "is missing, and this provider has no address of its own"
        elif not isinstance(value, str):
            fault = "is not an address"
        elif url is None:
            variable = value.removeprefix(_REFERENCE)
            fault = f"{variable} is not set: set it, and import again; settings hold addresses"
        else:
            fault = _fault_of(url)
            if not fault:
                url = url.rstrip("/")
                return url if url.endswith(provider.suffix) else url + provider.suffix
        self._report.lose(location, f"'{model[:80]}': {fault}")
        return None

    def key(self, location: Location, value: Any, variable: str) -> str | None:
        """Where a key will be found, as `env:NAME`; None for servers that ask for none.

        Args:
            location: in the file.
            value: a reference or the key itself.
            variable: to be set to a key that stands in the file, if the name is free.
        """
        text = str(value).strip()
        if text.startswith(_REFERENCE):
            name = text.removeprefix(_REFERENCE)
            if _VARIABLE.fullmatch(name):
                return f"env:{name}"
            self._report.lose(location, "is not the name of a variable")
            return None
        if text.lower() in _NO_KEY or not is_plain(value):
            return None
        if text not in self._made:
            name, number = variable, 1
            while name in self._taken:
                number += 1
                name = f"{variable}_{number}"
            self._taken.add(name)
            self._made[text] = name
            remark = Remark(location, f"stands in the file: set the variable {name} to it")
            self._report.variables[name] = f"the value of {remark.path}"
            self._report.changed.append(remark)
        return f"env:{self._made[text]}"

    def _resolve(self, value: str) -> str | None:
        """A text, or that of the variable it refers to; None where that is not set."""
        for _ in range(_MAX_REFERENCES):
            if not value.startswith(_REFERENCE):
                return value
            name = value.removeprefix(_REFERENCE)
            value = self._environment.get(name, "")
            if not value:
                return None
            self.resolved.add(name)
        return None


def _fault_of(url: str) -> str:
    """Why an address cannot be used; empty where it can."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "is not an address"
    if parts.username or parts.password or parts.query or parts.fragment:
        return "an address with a password or a query is not taken"
    return ""


def mapping(value: Any) -> dict[str, Any]:
    """A mapping with texts as keys; empty for anything else."""
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else {}


def is_plain(value: Any) -> bool:
    """Whether a value is a text or a number."""
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def is_off(value: Any) -> bool:
    """Whether a setting says what is so without it."""
    return value is None or value is False or value in ("", [], {})


def _references(value: Any) -> Iterator[str]:
    """Names of variables that a part of the file refers to."""
    if isinstance(value, str) and value.startswith(_REFERENCE):
        yield value.removeprefix(_REFERENCE)
    for each in value.values() if isinstance(value, dict) else ():
        yield from _references(each)
    for each in value if isinstance(value, list) else ():
        yield from _references(each)
