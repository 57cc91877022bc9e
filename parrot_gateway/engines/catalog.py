"""Which model a name stands for, and who serves it.

Resolution, first match wins:

1. an exact alias, which replaces the name once;
2. a model of an engine that joined (or is loading);
3. a model that an upstream lists, in the order of the settings;
4. `UPSTREAM/model`, or `UPSTREAM` alone when it lists one model only;
5. an upstream declared to serve any name (`models: "*"`);
6. an alias pattern such as `gpt-*` or `*`, longest first.

Holds no state of its own: it asks the registry of engines and the upstreams at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Protocol, TypeAlias

from parrot_gateway.exceptions import (
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
)


class UpstreamModels(Protocol):
    """What the catalog needs to know of an upstream."""

    @property
    def name(self) -> str:
        """The operator's name for it."""
        ...

    def serves(self, model: str) -> bool:
        """Whether it lists this model."""
        ...

    def serves_any(self) -> bool:
        """Whether it takes every name."""
        ...

    def models(self) -> Sequence[str]:
        """The models it lists."""
        ...

    @property
    def ready(self) -> bool:
        """Whether its list of models is known."""
        ...


class EngineTarget(NamedTuple):
    """A model run by engines of our own."""

    model: str


class UpstreamTarget(NamedTuple):
    """A model of an upstream server, under the name that it knows."""

    upstream: str
    model: str


Target: TypeAlias = EngineTarget | UpstreamTarget


class Catalog:
    """Resolves model names.

    Args:
        engine_models: names of models that engines serve now or are about to.
        upstreams: by name, in the order of the settings.
        aliases: from the settings.
    """

    def __init__(
        self,
        engine_models: Callable[[], Sequence[str]],
        upstreams: Mapping[str, UpstreamModels],
        aliases: Mapping[str, str],
    ) -> None:
        self._engine_models = engine_models
        self._upstreams = upstreams
        self._exact = {name: target for name, target in aliases.items() if "*" not in name}
        patterns = [(name, target) for name, target in aliases.items() if "*" in name]
        self._patterns = sorted(patterns, key=lambda item: len(item[0]), reverse=True)

    def resolve(self, name: str) -> Target:
        """Who serves `name`.

        Raises:
            ModelNotFoundError: nobody does.
            ModelLoadingError: nobody does so far, but an upstream has not listed its models yet; or
                this is the name of such an upstream.
            InvalidRequestError: an upstream's name alone, while it lists none or several models.
        """
        target = self._direct(self._exact.get(name, name))
        if target is not None:
            return target
        for pattern, alias in self._patterns:
            if fnmatchcase(name, pattern):
                target = self._direct(alias)
                if target is not None:
                    return target
        silent = [upstream.name for upstream in self._upstreams.values() if not upstream.ready]
        if silent:
            raise ModelLoadingError(
                f"The model '{name}' is not known yet: the upstream '{silent[0]}' has not told "
                "its models so far."
            )
        what = f"The model '{name}' does not exist."
        if name in self._exact:
            what = f"'{name}' is an alias of '{self._exact[name]}', which nothing serves."
        raise ModelNotFoundError(f"{what} {self._known()}", param="model")

    def dangling(self) -> list[str]:
        """Aliases and patterns of names that nothing serves, as far as that is known by now."""
        if not all(upstream.ready for upstream in self._upstreams.values()):
            return []
        pairs = [*self._exact.items(), *self._patterns]
        return [alias for alias, name in pairs if not self._leads_somewhere(name)]

    def aliases(self) -> list[str]:
        """The exact aliases, which `/v1/models` lists too."""
        return list(self._exact)

    def _direct(self, name: str) -> Target | None:
        if name in self._engine_models():
            return EngineTarget(name)
        for upstream in self._upstreams.values():
            if upstream.serves(name):
                return UpstreamTarget(upstream.name, name)
        owner, _, rest = name.partition("/")
        named = self._upstreams.get(owner)
        if named is not None:
            return UpstreamTarget(owner, rest or _only_model(named))
        for upstream in self._upstreams.values():
            if upstream.serves_any():
                return UpstreamTarget(upstream.name, name)
        return None

    def _leads_somewhere(self, name: str) -> bool:
        try:
            return self._direct(name) is not None
        except (InvalidRequestError, ModelLoadingError):
            return False

    def _known(self) -> str:
        served = [alias for alias, name in self._exact.items() if self._leads_somewhere(name)]
        names = [*self._engine_models(), *served]
        for upstream in self._upstreams.values():
            names += upstream.models()
        names = list(dict.fromkeys(names))
        if not names:
            return "No model is being served yet."
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        return f"Served here: {shown}."


def _only_model(upstream: UpstreamModels) -> str:
    models = upstream.models()
    if len(models) == 1:
        return models[0]
    if not upstream.ready:
        raise ModelLoadingError(
            f"The upstream '{upstream.name}' has not told its models so far, and '{upstream.name}' "
            f"alone stands for the only one. Name it as '{upstream.name}/MODEL', or try again."
        )
    raise InvalidRequestError(
        f"The upstream '{upstream.name}' serves {len(models)} models; name one as "
        f"'{upstream.name}/MODEL'.",
        param="model",
    )
