"""The thread that runs an engine's step loop.

Primitives are submitted from any thread; the events of each step go to one callback.
The link and the engine's own server share it. It knows nothing of sockets, text or models.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from parrot_engine.exceptions import AdapterError, ParrotEngineError
from parrot_engine.protocol import (
    AdapterInfo,
    AdapterLoading,
    BlockChanges,
    BlockReporting,
    Engine,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    FreeContext,
    LossReporting,
    Pooled,
    Preparing,
    Primitive,
)

_log = logging.getLogger(__name__)

#: Takes the events of one step, in the driver's thread. Blocking here pauses the engine, which is
#: how a slow consumer holds it back.
StepCallback: TypeAlias = Callable[[list[Event]], None]

#: Takes what has changed in the engine's cache, in the driver's thread; as `StepCallback`.
BlocksCallback: TypeAlias = Callable[[BlockChanges], None]

#: Statistics and changes of the cache are taken at most this often while steps are running.
_STATS_INTERVAL_S = 0.1


class DriverStoppedError(ParrotEngineError):
    """The driver was closed, or its engine broke down: nothing runs any more."""


class EngineDriver:
    """Runs an engine in a thread of its own.

    Args:
        engine: from now on touched by the driver's thread only; closed with the driver.
        max_pending: primitives that may wait for the next step; further ones fail as
            `overloaded`.
        on_crash: called once, in the driver's thread, when a step raises: engines turn all that
            can be expected into `Failed` events, so after an exception their state is not to be
            trusted. All contexts have been failed by then, and no step follows.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_pending: int = 65536,
        on_crash: Callable[[Exception], None] | None = None,
    ) -> None:
        self.info: EngineInfo = engine.info
        self._engine = engine
        self._max_pending = max_pending
        self._on_crash = on_crash
        self._wake = threading.Condition()
        # Guarded by `_wake`.
        self._pending: deque[Primitive] = deque()
        self._refused: list[int] = []
        self._resets: list[threading.Event] = []
        self._changes: list[tuple[Callable[[], None], threading.Event]] = []
        self._callback: StepCallback | None = None
        self._blocks_callback: BlocksCallback | None = None
        #: The callback attached last has not been sent the whole cache yet.
        self._reports_all = False
        self._stopping = False
        self._crashed = False
        #: A step would raise, although there may be nothing to do.
        self._lost = False
        #: The engine may have work to do ahead.
        self._prepares = isinstance(engine, Preparing)
        # Of the driver's thread; plain attributes are replaced whole, so others may read them.
        self._contexts: set[int] = set()
        self._stats = engine.stats()
        self._stats_at = 0.0
        self._busy_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine-driver", daemon=True)

    def start(self) -> None:
        if isinstance(self._engine, LossReporting):
            self._engine.on_loss(self._note_loss)
        self._thread.start()

    def attach(
        self, callback: StepCallback | None, on_blocks: BlocksCallback | None = None
    ) -> None:
        """Send the events of further steps here; None drops them.

        `on_blocks` gets all that the engine caches, and then what changes of it.
        """
        with self._wake:
            self._callback = callback
            reports = isinstance(self._engine, BlockReporting) and self.info.reports_blocks
            self._blocks_callback = on_blocks if reports else None
            self._reports_all = self._blocks_callback is not None
            self._wake.notify()

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Queue primitives, in order. Never blocks; what there is no room for fails.

        Raises:
            DriverStoppedError: no step will run any more.
        """
        with self._wake:
            if self._stopping or self._crashed:
                raise DriverStoppedError("the engine has stopped")
            room = self._max_pending - len(self._pending)
            if len(primitives) <= room:
                self._pending.extend(primitives)
            else:
                # A free is never refused: it makes room, and is not sent again.
                frees = [p for p in primitives if isinstance(p, FreeContext)]
                refused = {p.context_id for p in primitives if not isinstance(p, FreeContext)}
                self._pending.extend(frees)
                self._refused.extend(refused - {p.context_id for p in frees})
            self._wake.notify()

    def stats(self) -> EngineStats:
        """Statistics of a moment ago. Safe from any thread."""
        return self._stats

    @property
    def num_contexts(self) -> int:
        return len(self._contexts)

    @property
    def crashed(self) -> bool:
        """Return True if the engine was given up after a step that raised."""
        return self._crashed

    def reset(self, timeout_s: float | None = None) -> bool:
        """Free every context and drop all that is queued; blocks until that is done.

        Events of the old contexts are gone when it returns: none reaches a callback attached
        afterwards. Detach the old callback first if it may block.

        Returns:
            False when `timeout_s` ran out first; the reset still happens.
        """
        done = threading.Event()
        with self._wake:
            if self._stopping or self._crashed or not self._thread.is_alive():
                return True
            self._pending.clear()
            self._refused.clear()
            self._resets.append(done)
            self._wake.notify()
        return done.wait(timeout_s)

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new contexts may name. Safe from any thread."""
        return self._engine.adapters if isinstance(self._engine, AdapterLoading) else []

    def load_adapter(self, name: str, path: str) -> None:
        """Read the adapter in folder `path` in this thread, then have it served between two steps.

        Raises:
            AdapterError: it cannot be served; nothing has changed.
        """
        engine = self._engine
        if not isinstance(engine, AdapterLoading):
            raise AdapterError(f"{name}: this engine takes no adapters")
        adapter = engine.read_adapter(name, path)
        self._between_steps(lambda: engine.add_adapter(adapter))

    def remove_adapter(self, name: str) -> None:
        """Have an adapter serve no new contexts; an unknown name does nothing."""
        engine = self._engine
        if isinstance(engine, AdapterLoading):
            self._between_steps(lambda: engine.remove_adapter(name))

    def _between_steps(self, change: Callable[[], None]) -> None:
        """Have the driver's thread change the engine; returns once that is done.

        Raises:
            AdapterError: no step will run any more.
        """
        done = threading.Event()
        with self._wake:
            if self._stopping or self._crashed or not self._thread.is_alive():
                raise AdapterError("the engine has stopped")
            self._changes.append((change, done))
            self._wake.notify()
        done.wait()

    def close(self, timeout_s: float = 30.0) -> None:
        """Stop after the running step and close the engine. Safe to call twice."""
        with self._wake:
            self._stopping = True
            self._callback = self._blocks_callback = None
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.error("the engine's step did not end within %g s", timeout_s)
                return
        else:
            self._engine.close()

    def _run(self) -> None:
        has_work = False
        try:
            while True:
                with self._wake:
                    while not (
                        has_work
                        or self._pending
                        or self._refused
                        or self._resets
                        or self._changes
                        or self._reports_all
                        or self._lost
                        or self._stopping
                        or self._prepares
                    ):
                        self._wake.wait()
                    if self._stopping:
                        return
                    resets, self._resets = self._resets, []
                    changes, self._changes = self._changes, []
                    batch, refused = list(self._pending), self._refused
                    self._pending.clear()
                    self._refused = []
                    everything, self._reports_all = self._reports_all, False
                for change, changed in changes:
                    change()
                    changed.set()
                if everything and not self._crashed:
                    self._report_blocks(everything=True)
                if resets:
                    has_work = self._forget_everything()
                    for done in resets:
                        done.set()
                if not self._crashed and (batch or refused or has_work or self._lost):
                    has_work = self._turn(batch, refused)
                elif self._prepares and not self._crashed:
                    self._prepares = self._prepare()
                if self._crashed:
                    return
        finally:
            with self._wake:
                leftover, self._resets = self._resets, []
                leftover += [changed for _, changed in self._changes]
                self._changes = []
            for done in leftover:
                done.set()
            self._engine.close()

    def _prepare(self) -> bool:
        """Have the idle engine work ahead; return whether there is more to do."""
        assert isinstance(self._engine, Preparing)
        try:
            return self._engine.prepare()
        except Exception:
            _log.exception("the idle engine could not work ahead; it goes on without")
            return False

    def _note_loss(self) -> None:
        with self._wake:
            self._lost = True
            self._wake.notify()

    def _turn(self, batch: list[Primitive], refused: list[int]) -> bool:
        """One engine step; returns whether another one would do anything."""
        events: list[Event] = [
            Failed(context_id, "overloaded", "The engine's queue of primitives is full.")
            for context_id in refused
        ]
        batch += [FreeContext(context_id) for context_id in refused]
        self._note_submitted(batch)
        has_work, crash = False, None
        try:
            if batch:
                self._engine.submit(batch)
            began = time.monotonic()
            result = self._engine.step()
            self._busy_s += time.monotonic() - began
            events += result.events
            has_work = result.has_work
            self._take_stats(force=not has_work)
        except Exception as error:
            _log.exception("an engine step failed")
            crash = error
            message = "The engine failed while working on this; its log has the details."
            events += [Failed(c, "engine_lost", message) for c in sorted(self._contexts)]
        for event in events:
            if isinstance(event, Failed | Pooled):
                self._contexts.discard(event.context_id)
        if crash is not None:
            with self._wake:
                self._crashed = True
        self._emit(events)
        if crash is not None and self._on_crash is not None:
            self._on_crash(crash)
        return has_work

    def _forget_everything(self) -> bool:
        """Free all contexts and throw the events of that step away."""
        frees = [FreeContext(context_id) for context_id in sorted(self._contexts)]
        self._contexts.clear()
        try:
            if frees:
                self._engine.submit(frees)
            has_work = self._engine.step().has_work
            self._take_stats(force=True)
        except Exception as error:
            _log.exception("freeing all contexts failed")
            with self._wake:
                self._crashed = True
            if self._on_crash is not None:
                self._on_crash(error)
            return False
        return has_work

    def _note_submitted(self, batch: Sequence[Primitive]) -> None:
        for primitive in batch:
            if isinstance(primitive, FreeContext):
                self._contexts.discard(primitive.context_id)
            else:
                self._contexts.add(primitive.context_id)

    def _take_stats(self, *, force: bool) -> None:
        now = time.monotonic()
        if force or now - self._stats_at >= _STATS_INTERVAL_S:
            self._stats = replace(self._engine.stats(), busy_s=self._busy_s)
            self._stats_at = now
            self._report_blocks()

    def _report_blocks(self, *, everything: bool = False) -> None:
        with self._wake:
            callback = self._blocks_callback
        if callback is None or not isinstance(self._engine, BlockReporting):
            return
        changes = self._engine.take_block_changes(everything=everything)
        if changes.stored or changes.evicted:
            callback(changes)

    def _emit(self, events: list[Event]) -> None:
        if not events:
            return
        with self._wake:
            callback = self._callback
        if callback is None:
            return
        try:
            callback(events)
        except Exception:
            _log.exception("the consumer of an engine's events failed")
