"""Models by name: who serves them, and placements of calls on the engines of one.

Resolution, first match wins:

1. an exact alias, which replaces the name once;
2. a model of an engine that joined (or is loading), or an adapter of one;
3. a model that an upstream lists, in the order of the settings;
4. `UPSTREAM/model`, or `UPSTREAM` alone when it lists one model only;
5. an upstream declared to serve any name (`models: "*"`);
6. an alias pattern such as `gpt-*` or `*`, longest first.

Keeps no state: the registry of engines and the upstreams have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from parrot_gateway.backends.own.model_manager import ModelManager
from parrot_gateway.backends.own.placement import Placer
from parrot_gateway.backends.own.registry import Change, EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.supervisor import EngineSupervisor
from parrot_gateway.backends.upstreams.client import Upstream, UpstreamClient
from parrot_gateway.calls.metadata import CallMetadata
from parrot_gateway.calls.reasoning import writes_reasoning
from parrot_gateway.calls.tools.definitions import template_source
from parrot_gateway.exceptions import (
    DrainedError,
    GatewayError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
    UpstreamError,
)
from parrot_gateway.routing.fleet.call import FleetCall
from parrot_gateway.routing.fleet.fleet import UpstreamFleet
from parrot_gateway.routing.placer import ModelPlacer, SchedulerRunner
from parrot_gateway.routing.task_updates import TaskUpdater

#: Characters of a name that nothing serves that are compared with those that are served.
_MAX_COMPARED = 200
#: What Parrot's API calls models of own engines, and those behind an API of texts.
ModelType: TypeAlias = Literal["token_id", "text"]
MODEL_TYPES: tuple[ModelType, ...] = ("token_id", "text")


class Target(NamedTuple):
    """A model and the backend that serves it."""

    #: Under the name that whoever serves it knows; of own engines also an adapter.
    model: str
    #: Name of the upstream; None: engines of our own.
    upstream: str | None = None


class Catalog:
    """Resolves model names.

    Args:
        engine_models: names of models that engines serve now or are about to.
        upstreams: by name, in the order of the settings.
        aliases: from the settings.
        base_of: the model that an adapter of this name belongs to; None: there is none.
    """

    def __init__(
        self,
        engine_models: Callable[[], Sequence[str]],
        upstreams: Mapping[str, Upstream | UpstreamFleet],
        aliases: Mapping[str, str],
        base_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        self._engine_models = engine_models
        self._base_of = base_of
        self._upstreams = upstreams
        self._exact: Mapping[str, str] = {}
        self._patterns: Sequence[tuple[str, str]] = ()
        self.set_aliases(aliases)

    def set_aliases(self, aliases: Mapping[str, str]) -> None:
        """Resolve by these aliases from now on."""
        self._exact = {name: target for name, target in aliases.items() if "*" not in name}
        patterns = [(name, target) for name, target in aliases.items() if "*" in name]
        self._patterns = sorted(patterns, key=lambda item: len(item[0]), reverse=True)

    def resolve(self, name: str) -> Target:
        """Find the engine or upstream that serves `name`.

        Raises:
            ModelNotFoundError: no engine and no upstream does.
            UpstreamError: none does so far, and an upstream refuses to list its models.
            ModelLoadingError: none does so far, but an upstream has not listed its models yet; or
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
        silent = [upstream for upstream in self._upstreams.values() if not upstream.ready]
        refusals = [each.refusal for each in silent if each.refusal is not None]
        if silent and len(refusals) < len(silent):
            first = next(each.name for each in silent if each.refusal is None)
            raise ModelLoadingError(
                f"The model '{name}' is not known yet: the upstream '{first}' has not "
                "listed its models so far."
            )
        if refusals:
            raise type(refusals[0])(f"The model '{name}' is not known. {refusals[0].message}")
        what = f"The model '{name}' does not exist."
        if name in self._exact:
            what = f"'{name}' is an alias of '{self._exact[name]}', which nothing serves."
        hint = self._known(self._exact.get(name, name))
        raise ModelNotFoundError(f"{what} {hint}", param="model")

    def knows(self, name: str) -> bool:
        """Return true if a name is that of a model or of an alias; patterns do not count."""
        listed = (upstream.serves(name) for upstream in self._upstreams.values())
        return name in self._exact or name in self._engine_models() or any(listed)

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
        if name in self._engine_models() or self._base_of(name) is not None:
            return Target(name)
        for upstream in self._upstreams.values():
            if upstream.serves(name):
                return Target(name, upstream.name)
        owner, _, rest = name.partition("/")
        named = self._upstreams.get(owner)
        if named is not None:
            return Target(rest or _only_model(named), owner)
        for upstream in self._upstreams.values():
            if upstream.serves_any():
                return Target(name, upstream.name)
        return None

    def _leads_somewhere(self, name: str) -> bool:
        try:
            return self._direct(name) is not None
        except (InvalidRequestError, ModelLoadingError, UpstreamError):
            return False

    def _known(self, name: str) -> str:
        """The models that are served, for an error; first the one whose name is most alike."""
        served = [alias for alias, name in self._exact.items() if self._leads_somewhere(name)]
        names = [*self._engine_models(), *served]
        for upstream in self._upstreams.values():
            names += upstream.models()
        names = list(dict.fromkeys(names))
        if not names:
            return "No model is being served yet."
        alike = get_close_matches(name[:_MAX_COMPARED], names, 1)
        hint = f"Did you mean '{alike[0]}'? " if alike else ""
        shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        return f"{hint}Served here: {shown}."


def _only_model(upstream: Upstream | UpstreamFleet) -> str:
    models = upstream.models()
    if len(models) == 1:
        return models[0]
    if not upstream.ready:
        if upstream.refusal is not None:
            raise type(upstream.refusal)(upstream.refusal.message)
        raise ModelLoadingError(
            f"The upstream '{upstream.name}' has not listed its models so far, and its name alone "
            f"stands for the only one. Name it as '{upstream.name}/MODEL', or try again."
        )
    raise InvalidRequestError(
        f"The upstream '{upstream.name}' serves {len(models)} models; name one as "
        f"'{upstream.name}/MODEL'.",
        param="model",
    )


class ModelDirectory(Catalog):
    """The models of own engines and of upstreams.

    Args:
        registry: the engines that joined.
        supervisor: the engine processes of this gateway, which may still be loading.
        manager: loads models that were unloaded while they were idle.
        last_used: gets `time.monotonic()` of each call by its model, for the manager.
        upstreams: by name, in the order of the settings.
        aliases: from the settings.
        scheduler: places calls.
        updater: passes on what becomes known of calls later.
        base_of: as of `Catalog`.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        manager: ModelManager,
        last_used: MutableMapping[str, float],
        upstreams: Mapping[str, Upstream | UpstreamFleet],
        aliases: Mapping[str, str],
        scheduler: SchedulerRunner,
        updater: TaskUpdater,
        base_of: Callable[[str], str | None] = lambda _: None,
    ) -> None:
        super().__init__(self.engine_models, upstreams, aliases, base_of)
        self.upstreams = upstreams
        self._registry = registry
        self._supervisor = supervisor
        self._manager = manager
        self._last_used = last_used
        self._scheduler = scheduler
        self._updater = updater
        #: Of the models that joined, whether reasoning is parted from the content.
        self._parses_reasoning: dict[str, bool] = {}
        registry.subscribe(self._engines_changed)

    def _engines_changed(self, change: Change, engine: RemoteEngine) -> None:
        model = engine.info.model
        if change == "joined":
            settings = self._supervisor.settings_of_models().get(model)
            self._parses_reasoning[model] = (
                settings is None or settings.reasoning_parser == "auto"
            ) and writes_reasoning(template_source(engine.text))
        elif change == "left" and not self._registry.of_model(model):
            self._parses_reasoning.pop(model, None)

    def engine_models(self) -> list[str]:
        """Models of engines that joined, and of own engines that are still loading."""
        registry = self._registry
        joined = (*registry.serving, *registry.drained)
        return list(dict.fromkeys((*joined, *self._supervisor.served, *registry.missing)))

    def engines_for(self, model: str) -> list[RemoteEngine]:
        """The engines of a model, or with an adapter, that have joined."""
        registry = self._registry
        return list(registry.serving.get(model) or registry.adapted.get(model, ()))

    def least_busy_engine(self, model: str) -> RemoteEngine | None:
        """The engine where the next call for a model, as callers name it, will probably run; None
        when there is none, or the name is an adapter's."""
        try:
            target = self.resolve(model)
        except GatewayError:
            return None
        if target.upstream is not None:
            return None
        engines = self._registry.serving.get(target.model, ())
        return min(engines, key=lambda each: (each.queued_tokens, each.running), default=None)

    async def loaded(self, model: str) -> None:
        """Wait for a model of own engines that is being loaded, or is to be for this call.

        Raises:
            ModelLoadingError: it takes longer than a call may wait.
            OverloadedError: too many calls wait already.
        """
        if model in self._registry.serving:
            return
        base = self._base_of(model) or model
        if base not in self._registry.serving:
            await self._manager.wait_loaded(base)

    async def engine_coming(self, model: str, lost: OverloadedError) -> None:
        """Return once an engine of a model takes calls, for a call that has lost its own.

        Raises:
            OverloadedError: there will be none: `lost`; or there is none for too long.
        """
        if model not in self._registry.serving:
            await self._manager.wait_again(model)
            if model not in self._registry.serving:
                raise lost

    async def loaded_engine(self, model: str) -> RemoteEngine:
        """Any engine of a model, once it is loaded; see `loaded` and `engine_of`."""
        await self.loaded(model)
        return self.engine_of(model)

    def engine_of(self, model: str) -> RemoteEngine:
        """Any engine of a model, or with an adapter, for what all of them have in common.

        Raises:
            ModelLoadingError: no engine of it is ready yet.
            DrainedError: the operator has drained all of them.
            OverloadedError: its engines could not be started.
        """
        engines = self._registry.serving.get(model) or self._registry.adapted.get(model)
        if not engines:
            model = self._base_of(model) or model
            if model in self._registry.drained:
                raise DrainedError(f"All engines of the model '{model}' are drained")
            if self._supervisor.failure(model) is not None:
                # NOTE: why is the operator's: an engine's last words may be a stack trace.
                raise OverloadedError(
                    f"The engine of model '{model}' could not be started. The operator's log has "
                    "the details, and so has /health.",
                    code="engine_failed",
                    retry_after_s=30.0,
                )
            raise ModelLoadingError(f"The model '{model}' is still being loaded.")
        self._last_used[engines[0].info.model] = time.monotonic()
        return engines[0]

    def upstream(self, name: str, metadata: Callable[[], CallMetadata]) -> UpstreamClient:
        """An upstream for one call.

        Args:
            name: the operator's for it.
            metadata: of the call; called where there are several servers to choose from.
        """
        upstream = self.upstreams[name]
        return upstream if isinstance(upstream, Upstream) else FleetCall(upstream, metadata())

    @property
    def explains(self) -> bool:
        """True if placements are remembered with what they are explained by."""
        return self._scheduler.explanations is not None

    def placer(self, model: str, metadata: CallMetadata) -> Placer:
        """The engines of a model for one call.

        Args:
            model: as engines know it.
            metadata: of the call.

        Raises:
            ModelLoadingError, OverloadedError: as `engine_of`.
        """
        engine = self.engine_of(model)
        base = engine.info.model
        return ModelPlacer(
            self._scheduler,
            self._updater,
            self._registry.joined,
            engine,
            metadata,
            partial(self.engine_coming, base),
            self._registry.changes,
            adapter=None if model == base else engine.adapters.get(model),
            parses_reasoning=self._parses_reasoning.get(base, True),
        )


class ChosenModel(NamedTuple):
    """A model, and whether engines of our own run it."""

    name: str
    is_own: bool


def choose_model(
    allowed: Sequence[str],
    model_type: ModelType,
    *,
    resolve: Callable[[str], Target],
    own: Sequence[str],
    listed: Sequence[str],
) -> ChosenModel:
    """The first allowed model that is served here; the default when none is named.

    The default is the first model of the kind that `model_type` prefers, else the first of the
    other kind.

    Args:
        allowed: an allow-list; empty for any model.
        resolve: finds the target of a name, as `Catalog.resolve`.
        own, listed: models of own engines, and those that upstreams list.

    Raises:
        ModelNotFoundError: none of those allowed is served.
        ModelLoadingError: none so far, but that may change.
        InvalidRequestError: there is no default.
    """
    if allowed:
        return _first_served(allowed, resolve)
    ordered = [*own, *listed] if model_type == "token_id" else [*listed, *own]
    if not ordered:
        raise InvalidRequestError(
            "No model is listed here that could be taken by default; name one in 'models'.",
            param="models",
            code="model_required",
        )
    return ChosenModel(ordered[0], resolve(ordered[0]).upstream is None)


def _first_served(allowed: Sequence[str], resolve: Callable[[str], Target]) -> ChosenModel:
    loading: ModelLoadingError | None = None
    for name in allowed:
        try:
            return ChosenModel(name, resolve(name).upstream is None)
        except ModelLoadingError as error:
            loading = loading or error
        except GatewayError:
            continue
    if loading is not None:
        raise loading
    shown = ", ".join(f"'{name[:64]}'" for name in allowed[:8])
    more = ", …" if len(allowed) > 8 else ""
    raise ModelNotFoundError(f"None of the models {shown}{more} is served here.", param="models")
