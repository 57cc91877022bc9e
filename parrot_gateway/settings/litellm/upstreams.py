"""Deployments of a file put together to upstreams: servers, models, names."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot_gateway.settings.litellm.providers import PROVIDERS
from parrot_gateway.settings.litellm.values import Location


@dataclass(frozen=True, slots=True)
class Deployment:
    """One entry of `model_list`."""

    location: Location
    #: As clients call the model.
    name: str
    provider: str
    #: As the server calls it.
    model: str
    url: str
    key: str | None
    options: tuple[tuple[str, float], ...]
    order: float

    @property
    def server_kind(self) -> tuple[Any, ...]:
        """Equal for servers that can be taken one for another."""
        return (PROVIDERS[self.provider].api, self.model, self.key)


@dataclass(slots=True, eq=False)
class ImportedUpstream:
    """An upstream that is being put together."""

    provider: str
    urls: tuple[str, ...]
    key: str | None
    options: tuple[tuple[str, float], ...]
    #: A name that clients use, or an upstream with a model of it.
    fallback: str | tuple[ImportedUpstream, str] | None
    #: Of its first deployment in the file.
    position: int
    #: What clients put before its models (`openai/…`), where the file has that for any model.
    prefix: str = ""
    models: dict[str, None] = field(default_factory=dict)
    #: Whether it serves what it lists itself, or any name.
    asks: bool = False
    serves_any: bool = False
    name: str = ""

    def settings(self) -> dict[str, Any]:
        """As an entry of `upstreams`."""
        settings: dict[str, Any] = {"name": self.name or self.provider}
        if len(self.urls) > 1:
            settings["urls"] = list(self.urls)
        else:
            settings["url"] = self.urls[0]
        if PROVIDERS[self.provider].api != "openai":
            settings["api"] = PROVIDERS[self.provider].api
        if self.key is not None:
            settings["api_key"] = self.key
        if self.serves_any:
            settings["models"] = "*"
        elif not self.asks:
            settings["models"] = list(self.models)
        settings |= dict(self.options)
        if isinstance(self.fallback, str):
            settings["fallback"] = self.fallback
        elif self.fallback is not None:
            other, model = self.fallback
            settings["fallback"] = f"{other.name}/{model}"
        return settings

    @property
    def base_name(self) -> str:
        """What it is called if nothing else is."""
        if self.prefix:
            return self.prefix
        if self.key is None and PROVIDERS[self.provider].key:
            # NOTE: the gateway reads NAME_API_KEY where an upstream has no key, and this one's
            # server is not the provider's.
            return f"{self.provider}-compatible"
        return self.provider


class Upstreams:
    """Upstreams by what their models have in common."""

    def __init__(self) -> None:
        self._all: list[ImportedUpstream] = []
        self._known: dict[Hashable, ImportedUpstream] = {}

    def of(
        self,
        servers: Sequence[Deployment],
        fallback: str | tuple[ImportedUpstream, str] | None,
        prefix: str = "",
    ) -> ImportedUpstream:
        """The upstream of these servers, made when there is none yet.

        Args:
            servers: at least one, all of one kind; settings are the first one's.
            fallback: of the model that they are for.
            prefix: what clients put before the names of its models.
        """
        first = servers[0]
        urls = tuple(dict.fromkeys(each.url for each in servers))
        position = min(int(each.location[1]) for each in servers)
        identity = (
            PROVIDERS[first.provider].api, frozenset(urls), first.key, first.options, fallback
        )  # fmt: skip
        upstream = self._known.get((*identity, prefix))
        if upstream is None and prefix:
            upstream = self._known.get((*identity, ""))
            if upstream is not None and not upstream.prefix:
                upstream.prefix = prefix
                self._known[(*identity, prefix)] = upstream
            else:
                upstream = None
        if upstream is None:
            upstream = ImportedUpstream(
                first.provider, urls, first.key, first.options, fallback, position, prefix
            )
            self._all.append(upstream)
            self._known[(*identity, prefix)] = upstream
        upstream.position = min(upstream.position, position)
        return upstream

    def named(self) -> list[ImportedUpstream]:
        """All of them in the order of the file, with names."""
        used: set[str] = set()
        numbers: dict[str, int] = {}
        # `NAME/model` must be no model that another upstream lists.
        taken = {model.partition("/")[0] for each in self._all for model in each.models}
        asking = sum(each.asks for each in self._all)
        self._all.sort(key=lambda each: each.position)
        for upstream in sorted(self._all, key=lambda each: not each.prefix):
            base = upstream.base_name
            may_be_plain = upstream.prefix or not (base in taken or asking - upstream.asks)
            number = numbers.get(base, 0 if may_be_plain else 1)
            while True:
                number += 1
                name = base if number == 1 else f"{base}-{number}"
                several = range(1, len(upstream.urls) + 1) if len(upstream.urls) > 1 else ()
                names = {name, *(f"{name}-{each}" for each in several)}
                if not names & used:
                    break
            numbers[base] = number
            used |= names
            upstream.name = name
        return self._all
