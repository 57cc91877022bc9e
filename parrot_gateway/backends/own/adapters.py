"""LoRA adapters loaded and unloaded while engines run.

Every engine of the base gets the same ones: those of the settings when it starts, those loaded
since when it joins. What was loaded this way is forgotten with the gateway.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from parrot_gateway.backends.own.registry import Change, EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.exceptions import (
    GatewayError,
    InvalidRequestError,
    ModelLoadingError,
    ModelNotFoundError,
)

logger = logging.getLogger(__name__)

#: Adapters that may be loaded by name.
MAX_ADAPTERS = 1024


class _Loaded(NamedTuple):
    path: str
    base: str


class AdapterService:
    """Loads adapters on all engines of their base.

    Args:
        registry: the engines.
        configured: bases of the adapters of the settings, by name.
        is_taken: whether a name is that of something else.
        timeout_s: an engine that takes longer to answer has failed.
    """

    def __init__(
        self,
        registry: EngineRegistry,
        configured: Mapping[str, str],
        is_taken: Callable[[str], bool],
        timeout_s: float,
    ) -> None:
        self._registry = registry
        self._configured = configured
        self._is_taken = is_taken
        self._timeout_s = timeout_s
        self._loaded: dict[str, _Loaded] = {}
        #: Adapters of the settings that were unloaded.
        self._unloaded: set[str] = set()
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        registry.subscribe(self._engines_changed)

    def base_of(self, name: str) -> str | None:
        """The model that an adapter belongs to, which may be loading; None: there is none."""
        engines = self._registry.adapted.get(name)
        if engines:
            return engines[0].info.model
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded.base
        base = self._configured.get(name)
        # An engine that has joined without it will not get it.
        return None if base is None or base in self._registry.serving else base

    async def load(
        self, name: str, path: str, *, base: str | None = None, in_place: bool = False
    ) -> None:
        """Load the adapter in folder `path` on every engine of a base; on all or none.

        Args:
            name: the model name that will choose it.
            path: on the engines' machine.
            base: its model; None where there is only one that takes adapters.
            in_place: it may replace one of this name, whose calls go on with it.

        Raises:
            InvalidRequestError: it cannot be loaded; the message says why.
            ModelLoadingError: no engine of the base is there.
        """
        async with self._lock(name):
            if name in self._registry.adapted and not in_place:
                raise InvalidRequestError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    "adapter in place, set 'load_inplace' to True.",
                    param="lora_name",
                )
            if name not in self._registry.adapted and self._is_taken(name):
                raise InvalidRequestError(
                    f"'{name}' is the name of a model that is served here.", param="lora_name"
                )
            if len(self._loaded) >= MAX_ADAPTERS and name not in self._loaded:
                raise InvalidRequestError(f"{MAX_ADAPTERS} adapters are loaded already.")
            base = self._base_of(name, base)
            engines = self._engines_of(base)
            problems = await asyncio.gather(
                *(self._ask(engine.load_adapter(name, path)) for engine in engines)
            )
            problem = next((each for each in problems if each is not None), None)
            if problem is not None:
                done = [engine for engine, each in zip(engines, problems, strict=True) if not each]
                if name not in self._loaded and name not in self._configured:
                    for engine in done:
                        await self._ask(engine.unload_adapter(name))
                raise InvalidRequestError(problem, param="lora_path")
            self._loaded[name] = _Loaded(path, base)
            self._unloaded.discard(name)
        logger.info("adapter %s of %s was loaded from %s", name, base, path)

    async def unload(self, name: str) -> None:
        """Take an adapter from all engines; calls that run with it end as they would.

        Raises:
            ModelNotFoundError: there is none of this name.
        """
        async with self._lock(name):
            # Drained ones too, which take calls again some day.
            engines = [each for each in self._registry.joined.values() if name in each.adapters]
            if not engines and name not in self._loaded:
                raise ModelNotFoundError(
                    f"The lora adapter '{name}' cannot be found.", param="lora_name"
                )
            self._loaded.pop(name, None)
            if name in self._configured:
                self._unloaded.add(name)
            await asyncio.gather(*(self._ask(engine.unload_adapter(name)) for engine in engines))
        logger.info("adapter %s was unloaded", name)

    async def close(self) -> None:
        """End what engines that joined are still asked for."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _lock(self, name: str) -> asyncio.Lock:
        if len(self._locks) > 2 * MAX_ADAPTERS:
            for other in [other for other, lock in self._locks.items() if not lock.locked()]:
                del self._locks[other]
        return self._locks[name]

    def _base_of(self, name: str, base: str | None) -> str:
        known = self._registry.adapted.get(name)
        if known and base in (None, known[0].info.model):
            return known[0].info.model
        taking = [
            model
            for model, engines in self._registry.serving.items()
            if any(engine.info.max_loras for engine in engines)
        ]
        if base is not None:
            if base not in taking or known:
                raise InvalidRequestError(
                    f"The model '{base}' takes no adapter of this name.", param="base_model"
                )
            return base
        if not taking:
            raise InvalidRequestError(
                "No model here takes adapters: set 'adapter_folders' and 'max_loras' of one."
            )
        if len(taking) > 1:
            raise InvalidRequestError(
                f"Name the adapter's model as 'base_model', one of {', '.join(taking)}.",
                param="base_model",
            )
        return taking[0]

    def _engines_of(self, base: str) -> list[RemoteEngine]:
        engines = [each for each in self._registry.of_model(base) if not each.draining]
        if not engines:
            raise ModelLoadingError(f"The model '{base}' is still being loaded.")
        return engines

    async def _ask(self, answer: Awaitable[str | None]) -> str | None:
        """Why an engine refuses a command; None when it was carried out."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            return f"an engine did not answer within {self._timeout_s:g} s"
        except GatewayError as error:
            return error.message

    def _engines_changed(self, change: Change, engine: RemoteEngine) -> None:
        if change != "joined":
            return
        lacking = {
            name: loaded.path
            for name, loaded in self._loaded.items()
            if loaded.base == engine.info.model
        }
        surplus = [name for name in self._unloaded if name in engine.adapters]
        if lacking or surplus:
            task = asyncio.create_task(self._bring_up(engine, lacking, surplus), name="adapters")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _bring_up(
        self, engine: RemoteEngine, lacking: Mapping[str, str], surplus: Sequence[str]
    ) -> None:
        """Give an engine that joined the adapters that were loaded since the gateway started."""
        for name in surplus:
            await self._ask(engine.unload_adapter(name))
        for name, path in lacking.items():
            problem = await self._ask(engine.load_adapter(name, path))
            if problem is None or engine.lost:
                continue
            logger.warning("engine %s lacks an adapter: %s", engine.name, problem)
            if name not in self._registry.adapted:
                # Nobody will get it any more.
                self._loaded.pop(name, None)
