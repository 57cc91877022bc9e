"""The models of own engines at run time: loaded, unloaded, ended while idle, started for a call.

    loading ──> ready ──> unloading ──> gone
       │        │ ^ └── no call for `idle_unload_s` ──> idle ── a call ──> loading
       │        └─┴──── a process ends, and is started again
       └──> failed

The supervisor keeps processes running; which of them there shall be is decided here.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Container, Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

from parrot_gateway.backends.own.changes import Changes
from parrot_gateway.backends.own.downloads import Downloads
from parrot_gateway.backends.own.registry import EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.supervisor import EngineProcess, EngineSupervisor
from parrot_gateway.exceptions import (
    ConflictError,
    GatewayError,
    ModelLoadError,
    ModelLoadingError,
    ModelNotFoundError,
    OverloadedError,
)
from parrot_gateway.settings.memory_shares import share_conflict
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings

logger = logging.getLogger(__name__)

#: Longest and shortest time between two looks at who is idle.
_MAX_LOOK_S = 5.0
_MIN_LOOK_S = 0.02
#: Seconds after which a client may try a model again that is still being loaded.
_RETRY_AFTER_S = 5.0
#: Models that could not be loaded, of which the reason is remembered.
_MAX_FAILED = 32
_UNLOADED = "its model was unloaded"


class ModelManager:
    """Loads and unloads models.

    Args:
        models: those of the settings, loaded with the start.
        settings: limits and deadlines.
        registry: the engines that joined.
        supervisor: of the engine processes.
        downloads: of hub repositories.
        last_used: `time.monotonic()` of the last call of each model, which calls note.
        reserved: the names that no model may have, asked for at each load.
        waiting: how many calls wait in the scheduler for an engine of a model.
        refuse_waiting: refuses those.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        settings: EngineLinkSettings,
        registry: EngineRegistry,
        supervisor: EngineSupervisor,
        downloads: Downloads,
        *,
        last_used: MutableMapping[str, float],
        reserved: Callable[[], Container[str]],
        waiting: Callable[[str], int],
        refuse_waiting: Callable[[str, GatewayError], None],
    ) -> None:
        #: Models that can be loaded by their names: those of the settings.
        self.configured: Mapping[str, ModelSettings] = {m.served_name: m for m in models}
        self.downloads = downloads
        self._settings = settings
        self._registry = registry
        self._supervisor = supervisor
        self._reserved = reserved
        self._waiting = waiting
        self._refuse_waiting = refuse_waiting
        #: Models whose loading was asked for here and failed.
        self._failed: dict[str, dict[str, Any]] = {}
        self._last_used = last_used
        #: What is being done with a model: its loading, its way to `idle` and back.
        self._work: dict[str, asyncio.Task[None]] = {}
        self._waking: set[str] = set()
        self._settling: dict[str, asyncio.Task[None]] = {}
        self._load_waiters = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def changes(self) -> list[Changes]:
        """With each of which what is described may be another."""
        return [self._supervisor.changes, self.downloads.changes]

    # -- lifetime -----------------------------------------------------------------------------

    def start(self) -> None:
        """Watch for models that are idle, from when engine processes may be started on."""
        self._watch = asyncio.create_task(self._unload_idle_models(), name="idle-models")

    async def close(self) -> None:
        """End downloads, and what is done with models; the supervisor ends their processes."""
        tasks = [*self._work.values(), *self._settling.values()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.downloads.close()

    # -- loading and unloading ----------------------------------------------------------------

    def load(self, model: ModelSettings, *, from_hub: bool) -> asyncio.Task[None]:
        """Begin to load a model; the task fails with what keeps it from being served.

        Args:
            model: its settings.
            from_hub: it is a hub repository, whose files are downloaded first.

        Raises:
            ConflictError: a model or something else of the name is there, or it does not fit.
            OverloadedError: this gateway starts no engine processes, or not any more.
        """
        if not self._supervisor.is_running:
            raise OverloadedError("This gateway starts no engine processes.")
        name = model.served_name
        state = self._supervisor.state(name)
        if state not in (None, "failed"):
            raise ConflictError(
                f"The model '{name}' is there already ({state}). Unload it first, or give this one "
                "another name.",
                param="model",
                code="model_already_loaded",
            )
        if name in self._reserved() or self._registry.of_model(name):
            raise ConflictError(
                f"The name '{name}' is taken by an upstream, an alias or an engine that joined; "
                "give the model another one with 'name'.",
                param="name",
                code="model_name_taken",
            )
        served = [each for each in self._loaded_settings() if each.served_name != name]
        if len(served) >= self._settings.max_models:
            raise ConflictError(
                f"{len(served)} models are served, which is this gateway's limit (setting "
                "engines.max_models). Unload one first.",
                code="too_many_models",
            )
        conflict = share_conflict([*served, model])
        if conflict is not None:
            raise ConflictError(
                f"The model '{name}' does not fit: {conflict}.",
                param="memory_share",
                code="memory_share_exceeded",
            )
        if state == "failed":
            self._supervisor.remove(name)
        self._failed.pop(name, None)
        self._supervisor.add(model)
        logger.info("model %s is loaded from %s", name, model.model)
        return self._begin(name, self._load(model, from_hub=from_hub))

    async def _load(self, model: ModelSettings, *, from_hub: bool) -> None:
        name = model.served_name
        try:
            if from_hub:
                await self.downloads.start(model.model).ended()
            self._supervisor.start_model(name)
            self._last_used[name] = time.monotonic()
            await self._any_settled(name)
            reason = self._supervisor.failure(name)
            if reason is not None:
                raise ModelLoadError(
                    f"The model '{name}' cannot be loaded: {reason}", param="model"
                )
        except GatewayError as error:
            await self._supervisor.stop_model(name)
            self._supervisor.remove(name)
            self._remember_failure(model, error)
            logger.warning("model %s was not loaded: %s", name, error.message)
            raise

    def _remember_failure(self, model: ModelSettings, error: GatewayError) -> None:
        while len(self._failed) >= _MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[model.served_name] = {
            "model": model.model,
            "since": int(time.time()),
            "reason": error.message,
            "code": error.code,
        }

    async def unload(self, name: str) -> int:
        """Unload a model: running calls may finish for `unload_timeout_s`, those that wait for an
        engine are refused. A model that is loading stops. Returns how many calls were cut off.

        A cancelled wait leaves it to go on.

        Raises:
            ModelNotFoundError: there is none of the name.
            ConflictError: it is being unloaded already.
        """
        if self._failed.pop(name, None) is not None:
            return 0
        if self._supervisor.state(name) == "unloading":
            raise ConflictError(
                f"The model '{name}' is being unloaded already.",
                param="model",
                code="model_unloading",
            )
        if name not in self._supervisor.models():
            raise ModelNotFoundError(f"No model '{name}' is loaded.", param="model")
        before = self._work.get(name)
        cut_off: list[int] = []
        self._supervisor.retire(name, "unloading")
        logger.info("model %s is unloaded", name)
        await asyncio.shield(self._begin(name, self._unload(name, before, cut_off)))
        return cut_off[0]

    async def _unload(
        self, name: str, before: asyncio.Task[None] | None, cut_off: list[int]
    ) -> None:
        if before is not None:
            before.cancel()
            await asyncio.wait({before})
        engines = self._drain(name)
        if not self._registry.serving.get(name):
            text = f"The model '{name}' was unloaded while this call waited for an engine."
            self._refuse_waiting(name, ModelNotFoundError(text, param="model"))
        try:
            async with asyncio.timeout(self._settings.unload_timeout_s):
                for engine in engines:
                    await engine.finish()
        except TimeoutError:
            logger.warning("model %s is unloaded with calls still running", name)
        cut_off.append(sum(engine.running for engine in engines))
        for engine in engines:
            self._registry.remove(engine.id, _UNLOADED, "unloaded")
        await self._supervisor.stop_model(name)
        self._supervisor.remove(name)
        self._last_used.pop(name, None)

    def _drain(self, name: str) -> list[RemoteEngine]:
        """Give the engines of a model's own processes no further work; returns them."""
        names = {process.name for process in self._supervisor.processes_of(name)}
        engines = [each for each in self._registry.joined.values() if each.name in names]
        for engine in engines:
            self._registry.drain(engine.id)
        return engines

    def _begin(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._work[name] = asyncio.create_task(work, name=f"model-{name}")

        def ended(task: asyncio.Task[None]) -> None:
            if self._work.get(name) is task:
                del self._work[name]
            if not task.cancelled():
                # Raised where it is awaited; retrieved here so that asyncio logs nothing.
                task.exception()

        task.add_done_callback(ended)
        return task

    # -- calls --------------------------------------------------------------------------------

    async def wait_loaded(self, model: str) -> None:
        """Return once an engine of a model is there, or none will be; an idle model is loaded.

        Raises:
            ModelLoadingError: it takes longer than a call may wait.
            OverloadedError: too many calls wait already.
        """
        self._last_used[model] = time.monotonic()
        if not self._is_coming(model):
            return
        if self._load_waiters >= self._settings.max_load_waiters:
            raise OverloadedError(
                f"{self._load_waiters} calls wait for models that are being loaded, which is this "
                "gateway's limit (setting engines.max_load_waiters).",
                code="model_loading",
                retry_after_s=self._retry_after_s(model),
            )
        self._load_waiters += 1
        try:
            await self.wait_again(model)
        finally:
            self._load_waiters -= 1

    async def wait_again(self, model: str) -> None:
        """The same for a call that has lost its engine, which counts for no limit."""
        if not self._is_coming(model):
            return
        loads_first = (
            model in self._work
            or self._supervisor.state(model) == "idle"
            or any(each.loads_first for each in self._supervisor.processes_of(model))
        )
        limit_s = self._settings.load_wait_s if loads_first else self._settings.restart_wait_s
        self._wake(model)
        settling = self._settling.get(model)
        if settling is None:
            settling = asyncio.create_task(self._settle(model), name=f"settling-{model}")
            self._settling[model] = settling
            settling.add_done_callback(lambda _: self._settling.pop(model, None))
        # Shared by all who wait, and not cancelled with one of them.
        await asyncio.wait({settling}, timeout=limit_s)
        self._last_used[model] = time.monotonic()
        if not self._registry.serving.get(model) and self._is_coming(model):
            raise ModelLoadingError(
                f"The model '{model}' is still being loaded.",
                retry_after_s=self._retry_after_s(model),
            )

    def _is_coming(self, model: str) -> bool:
        """True if a model that has no engine will have one, as far as can be known."""
        state = self._supervisor.state(model)
        if state is None:
            return model in self._registry.missing
        return model in self._work or state in ("idle", "loading")

    def _retry_after_s(self, model: str) -> float:
        left_s = self._supervisor.load_left_s(model)
        return _RETRY_AFTER_S if left_s is None else math.ceil(left_s)

    async def _settle(self, model: str) -> None:
        """Wait for what is done with a model, and for an engine of it or for its failure."""
        while model in self._work and not self._registry.serving.get(model):
            await asyncio.wait({self._work[model]})
        if self._supervisor.state(model) is None:
            await self._registry.wait_returned(model)
        await self._any_settled(model)

    async def _any_settled(self, model: str) -> None:
        """Wait for the first engine of a model, or for the failure of all."""
        while self._supervisor.state(model) == "loading":
            waits = [
                asyncio.create_task(process.settled.wait())
                for process in self._supervisor.processes_of(model)
                if process.state == "loading"
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    # -- idle models --------------------------------------------------------------------------

    def _wake(self, model: str) -> None:
        """Start the engines of an idle model, unless that is under way."""
        if self._supervisor.state(model) == "idle" and model not in self._waking:
            logger.info("model %s is loaded for a call", model)
            self._waking.add(model)
            self._begin(model, self._restart(model, self._work.get(model)))

    async def _restart(self, model: str, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait({before})
            self._supervisor.start_model(model)
        finally:
            self._waking.discard(model)

    def _idle_limit(self, model: ModelSettings) -> float | None:
        return model.idle_unload_s or self._settings.idle_unload_s

    async def _unload_idle_models(self) -> None:
        while True:
            limits = [self._idle_limit(model) for model in self._loaded_settings()]
            shortest = min((limit for limit in limits if limit is not None), default=_MAX_LOOK_S)
            await asyncio.sleep(max(_MIN_LOOK_S, min(_MAX_LOOK_S, shortest / 8)))
            now = time.monotonic()
            for model in self._loaded_settings():
                self._look_at(model, now)

    def _look_at(self, model: ModelSettings, now: float) -> None:
        name, limit = model.served_name, self._idle_limit(model)
        state = self._supervisor.state(name)
        if state == "idle" and self._waiting(name):
            # It was being prepared, or waited, when the last engine went.
            self._wake(name)
        if state == "loading":
            self._last_used[name] = now
        if state != "ready" or limit is None or name in self._work:
            return
        engines = self._registry.of_model(name)
        own = {process.name for process in self._supervisor.processes_of(name)}
        if any(engine.name not in own for engine in engines):
            # An engine of another host serves it as well.
            return
        if self._waiting(name) or any(each.running or each.drained for each in engines):
            self._last_used[name] = now
        elif now - self._last_used.setdefault(name, now) >= limit:
            logger.info("model %s had no call for %g s: its engines end", name, limit)
            self._supervisor.retire(name, "idle")
            self._begin(name, self._end_idle(name))

    async def _end_idle(self, name: str) -> None:
        for engine in self._drain(name):
            self._registry.remove(engine.id, "it was idle", "left")
        await self._supervisor.stop_model(name)

    # -- description --------------------------------------------------------------------------

    def _loaded_settings(self) -> list[ModelSettings]:
        """Settings of the models that are served or will be, one entry each."""
        return list(self._supervisor.settings_of_models().values())

    def describe(self) -> list[dict[str, Any]]:
        """Every model that is loaded, is being loaded or unloaded, could not be loaded, or can be
        loaded by its name; plain types."""
        names = list(dict.fromkeys(p.model.served_name for p in self._supervisor.processes))
        found = [self._describe_loaded(name) for name in names]
        found += [
            _entry(name, state="failed", **failure)
            for name, failure in self._failed.items()
            if name not in names
        ]
        found += [
            _entry(name, state="unloaded", model=model.model, settings=_given(model))
            for name, model in self.configured.items()
            if name not in names and name not in self._failed
        ]
        return found

    def find(self, name: str) -> dict[str, Any]:
        """The entry of one model.

        Raises:
            ModelNotFoundError: there is none of the name.
        """
        for entry in self.describe():
            if entry["id"] == name:
                return entry
        raise ModelNotFoundError(f"No model '{name[:200]}' is or was loaded.", param="model")

    def _describe_loaded(self, name: str) -> dict[str, Any]:
        processes = self._supervisor.processes_of(name)
        model = processes[0].model
        by_name = {engine.name: engine for engine in self._registry.joined.values()}
        state = self._supervisor.state(name)
        last = self._last_used.get(name)
        download = self.downloads.all.get(model.model)
        is_here = download is None or download.has_ended or state != "loading"
        return _entry(
            name,
            state=state,
            model=model.model,
            settings=_given(model),
            since=int(max(process.since for process in processes)),
            reason=self._supervisor.failure(name),
            unused_s=None if last is None else round(time.monotonic() - last, 1),
            download=None if is_here or download is None else download.describe(),
            engines=[_engine(process, by_name.get(process.name)) for process in processes],
        )


def _entry(name: str, *, state: str | None, model: str, **more: Any) -> dict[str, Any]:
    """A model's entry, with the same keys whatever its state."""
    empty: dict[str, Any] = {
        "since": None, "reason": None, "code": None, "unused_s": None, "settings": {},
        "download": None, "engines": [],
    }  # fmt: skip
    return {"id": name, "object": "model", "state": state, "model": model, **empty, **more}


def _given(model: ModelSettings) -> dict[str, Any]:
    """The settings of a model that are not as by default."""
    return model.model_dump(mode="json", exclude_defaults=True, exclude={"model", "name"})


def _engine(process: EngineProcess, engine: RemoteEngine | None) -> dict[str, Any]:
    """One engine process, and what it says of itself once it has joined."""
    described = {
        "name": process.name,
        "state": process.state,
        "since": int(process.since),
        "pid": process.pid,
        "restarts": process.restarts,
        "progress": process.last_lines[-1] if process.loads_first and process.last_lines else None,
        "kind": None, "device": None, "dtype": None, "memory": None, "running": 0,
    }  # fmt: skip
    if engine is not None:
        info, stats = engine.info, engine.stats
        described |= {
            "kind": info.kind,
            "device": info.device,
            "dtype": info.dtype,
            "running": engine.running,
            "memory": {
                "weight_bytes": info.weight_bytes,
                "kv_cache_bytes": info.kv_cache_bytes,
                "kv_blocks": info.num_blocks,
                "free_kv_blocks": stats.free_blocks,
                "kv_tokens": info.num_blocks * info.block_size,
            },
        }
    return described
