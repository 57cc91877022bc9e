"""The gateway's end of one engine: channels to its contexts, and how busy it is.

`RemoteEngine` is the state of a joined engine; it does no I/O. The link
(`parrot_gateway.api.engine_join`) hands in what arrives and takes out what is to be sent. Which
engine runs what is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from parrot_engine.link.wire import (
    Adapters,
    LoadAdapter,
    Register,
    Submit,
    UnloadAdapter,
    WireError,
    encode,
)
from parrot_engine.protocol import (
    AdapterInfo,
    BlockChanges,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generated,
    Pool,
    Pooled,
    Primitive,
    Retention,
)
from parrot_engine.text import TextAssets, Tokenizer

from parrot_gateway.exceptions import EngineLostError, LossKind, OverloadedError

#: Bytes that may wait for the socket before new work is refused.
MAX_UNSENT_BYTES = 64 * 1024 * 1024

#: What a primitive takes on the wire, roughly: more per token than MessagePack ever needs.
_BYTES_PER_TOKEN = 5
_BYTES_PER_PRIMITIVE = 64

#: Kept contexts remembered of one application; earlier ones of a conversation are part of later
#: ones.
_MAX_KEPT_EACH = 256


@dataclass(slots=True)
class _Load:
    """The unfinished work of one context."""

    #: Primitives that have not ended.
    unfinished: int = 0
    #: Tokens to fill.
    tokens: int = 0


class KeptContexts:
    """Ids of contexts that were freed with their KV kept, by application.

    Bounded, applications kept longest out first; what is forgotten here stays kept on the engine
    until others take its place.
    """

    def __init__(self, max_contexts: int = 20_000) -> None:
        self._max_contexts = max_contexts
        self._by_application: OrderedDict[str, list[int]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, application: str, context_ids: Sequence[int]) -> None:
        """These were freed, and their KV is kept for the application."""
        known = self.pop(application)
        ids = [*known, *context_ids][-_MAX_KEPT_EACH:]
        self._by_application[application] = ids
        self._count += len(ids)
        while self._count > self._max_contexts:
            self.pop(next(iter(self._by_application)))

    def pop(self, application: str) -> list[int]:
        """Forget the contexts of an application; returns them, in the order of freeing."""
        known = self._by_application.pop(application, [])
        self._count -= len(known)
        return known


class EngineObserver(Protocol):
    """Is notified of what joined engines report."""

    def stats_changed(self, engine: RemoteEngine) -> None:
        """A heartbeat came; `engine.stats` is new."""
        ...

    def blocks_changed(self, engine: RemoteEngine, changes: BlockChanges) -> None:
        """Blocks were stored in the engine's cache, or evicted from it."""
        ...


class RemoteEngine:
    """One joined engine. Used in the event loop's thread only.

    Args:
        engine_id: unique within this gateway.
        registration: the engine's description of itself.
        tokenizer: that of another engine with equal text assets, to be shared.
        observers: notified of heartbeats and of changes in the engine's cache; may grow.
        max_unsent_bytes: bound of the outgoing buffer.
    """

    def __init__(
        self,
        engine_id: str,
        registration: Register,
        *,
        tokenizer: Tokenizer | None = None,
        observers: Sequence[EngineObserver] = (),
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.id = engine_id
        self.name = registration.name
        self.info: EngineInfo = registration.info
        #: Engines of one model share it: a large vocabulary's is 10 MB.
        self.text: TextAssets = registration.text if tokenizer is None else tokenizer.assets
        #: Adapters that it has loaded, by name.
        self.adapters: dict[str, AdapterInfo] = {}
        self._set_adapters(registration.adapters)
        #: Seeds of calls that give none.
        self.seeds = random.Random(self.info.seed)  # noqa: S311  sampling, not secrets
        self._commands: dict[int, asyncio.Future[str | None]] = {}
        self._command_numbers = itertools.count(1)
        self.stats = EngineStats()
        self._stats_at = time.monotonic()
        self.joined_at = time.time()
        #: The engine finishes what it has and takes nothing new.
        self.draining = False
        #: The operator gives it no new calls; those that have a place there run.
        self.drained = False
        self._observers = observers
        #: Set with something to send; the link waits on it.
        self.has_outgoing = asyncio.Event()
        #: Contexts with unfinished primitives.
        self.running = 0
        #: Tokens submitted to be filled and not reported as filled.
        self.queued_tokens = 0
        self._tokenizer = tokenizer
        self._max_unsent_bytes = max_unsent_bytes
        self._context_ids = itertools.count(1)
        self._channels: dict[int, EngineChannel] = {}
        self._kept = KeptContexts()
        self._loads: dict[int, _Load] = {}
        self._collected: list[Primitive] = []
        self._collected_bytes = 0
        self._flush_scheduled = False
        self._outgoing: deque[bytes] = deque()
        self._outgoing_bytes = 0
        #: The link is gone.
        self.lost = False
        self.loss_kind: LossKind = "link"
        self._lost_reason = ""
        #: It has said that all it had is gone.
        self.has_crashed = False
        #: Those who wait until there is less to do, and whether it must be nothing at all.
        self._idle_waiters: dict[asyncio.Future[None], bool] = {}

    @property
    def takes_calls(self) -> bool:
        """Return whether new calls may be placed on it."""
        return not (self.draining or self.drained)

    @property
    def parses_reasoning(self) -> bool:
        """Always, as far as an engine is concerned; `ModelPlacer` knows the setting."""
        return True

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; building it at first use takes up to a second."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(self.text)
        return self._tokenizer

    async def load_adapter(self, name: str, path: str) -> str | None:
        """Have the engine load an adapter; why it could not, if so.

        Raises:
            EngineLostError: the link is gone, or ends meanwhile.
        """
        return await self._command(LoadAdapter(next(self._command_numbers), name, path))

    async def unload_adapter(self, name: str) -> str | None:
        """Have the engine take no new contexts with an adapter; as `load_adapter`."""
        return await self._command(UnloadAdapter(next(self._command_numbers), name))

    async def _command(self, command: LoadAdapter | UnloadAdapter) -> str | None:
        self._check_open()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._commands[command.number] = answer
        data = encode(command)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        self.has_outgoing.set()
        try:
            return await answer
        finally:
            self._commands.pop(command.number, None)

    def note_adapters(self, answer: Adapters) -> None:
        """The answer to a command; whoever waits for it goes on."""
        self._set_adapters(answer.adapters)
        waiter = self._commands.get(answer.number)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer.problem)

    def _set_adapters(self, adapters: Sequence[AdapterInfo]) -> None:
        self.adapters = {adapter.name: adapter for adapter in adapters}

    def open(
        self,
        count: int,
        *,
        salt: str = "",
        adapter: str = "",
        retention: Retention = "normal",
        application: str = "",
    ) -> EngineChannel:
        """A channel with `count` fresh contexts, to be used in a `with` block.

        Args:
            count: contexts, at least one.
            salt, adapter: for every Fill without one; the adapter by its id.
            retention: what becomes of their KV when they are freed.
            application: whose they are; see `drop_kept`.

        Raises:
            EngineLostError: the link is gone, or the engine is leaving.
            OverloadedError: too much waits to be sent to it.
        """
        if count < 1:
            raise ValueError("a channel has at least one context")
        self._check_open()
        if self.draining:
            raise EngineLostError(f"The engine of model '{self.info.model}' is shutting down.")
        channel = EngineChannel(self, salt, adapter, retention, application)
        self._add_contexts(channel, count)
        return channel

    def drop_kept(self, application: str) -> None:
        """The KV that was kept for an application is of no use any more."""
        dropped = tuple(FreeContext(i, "drop") for i in self._kept.pop(application))
        if dropped:
            self._submit(dropped)

    def is_idle(self, *, idle: bool) -> bool:
        """See `wait_idle`; a lost engine is idle."""
        return self.lost or not (self.queued_tokens or (idle and self.running))

    async def wait_idle(self, *, idle: bool) -> None:
        """Return once no prompt waits to be filled; with `idle` once nothing at all runs.

        Raises:
            EngineLostError: the link is gone.
            OverloadedError: the engine is leaving, or too much waits to be sent to it.
        """
        while not self.is_idle(idle=idle):
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters[waiter] = idle
            try:
                await waiter
            finally:
                del self._idle_waiters[waiter]
        self._check_open()

    async def finish(self) -> None:
        """Return once nothing runs, for an engine that takes nothing new; at once if it is lost."""
        with suppress(EngineLostError, OverloadedError):
            await self.wait_idle(idle=True)

    @property
    def stats_age_s(self) -> float:
        """Seconds since the last heartbeat, or since it joined."""
        return time.monotonic() - self._stats_at

    def describe(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "model": self.info.model,
            "kind": self.info.kind,
            "device": self.info.device,
            "dtype": self.info.dtype,
            "max_context_tokens": self.info.max_context_tokens,
            "adapters": [adapter.name for adapter in self.adapters.values()],
            "state": "lost" if self.lost else "ready" if self.takes_calls else "draining",
            "drained": self.drained,
            "running": self.running,
            "queued_tokens": self.queued_tokens,
            "stats": self.stats.to_dict(),
            "stats_age_s": round(self.stats_age_s, 3),
        }

    def note_stats(self, stats: EngineStats) -> None:
        self.stats = stats
        self._stats_at = time.monotonic()
        for observer in self._observers:
            observer.stats_changed(self)

    def note_blocks(self, changes: BlockChanges) -> None:
        for observer in self._observers:
            observer.blocks_changed(self, changes)

    @property
    def num_calls(self) -> int:
        """Calls that have contexts on it."""
        return len(set(self._channels.values()))

    def deliver(self, events: list[Event]) -> None:
        """Hand the events of one engine step to their channels. Events of freed contexts drop."""
        for event in events:
            channel = self._channels.get(event.context_id)
            if channel is None:
                continue
            if not isinstance(event, Generated) or event.finish_reason is not None:
                self._note_progress(event)
                if isinstance(event, Pooled):
                    del self._channels[event.context_id]
                    channel._forget(event.context_id)
            channel._push(event)
        if self._idle_waiters:
            self._wake_idle_waiters()

    def take_outgoing(self) -> bytes | None:
        """The next message to send; None, and `has_outgoing` cleared, when there is none."""
        if not self._outgoing:
            self.has_outgoing.clear()
            return None
        data = self._outgoing.popleft()
        self._outgoing_bytes -= len(data)
        return data

    def lose(self, reason: str, kind: LossKind = "link") -> None:
        """The link is gone: everything open on this engine fails. Safe to call twice."""
        if self.lost:
            return
        self.lost, self._lost_reason, self.loss_kind = True, reason, kind
        self.running = self.queued_tokens = 0
        self._loads.clear()
        self._collected.clear()
        self._outgoing.clear()
        for waiter in self._commands.values():
            if not waiter.done():
                waiter.set_exception(self.lost_error())
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            channel._wake()
        self._wake_idle_waiters()

    def lost_error(self) -> EngineLostError:
        return EngineLostError(
            f"The engine that ran this call was lost ({self._lost_reason}); please send it again.",
            self.loss_kind,
        )

    def _check_open(self) -> None:
        if self.lost:
            raise self.lost_error()
        if self._outgoing_bytes + self._collected_bytes > self._max_unsent_bytes:
            raise OverloadedError(
                f"The engine of model '{self.info.model}' does not take work as fast as it comes."
            )

    def _wake_idle_waiters(self) -> None:
        for waiter, idle in self._idle_waiters.items():
            if not waiter.done() and self.is_idle(idle=idle):
                waiter.set_result(None)

    def _add_contexts(self, channel: EngineChannel, count: int) -> list[int]:
        added = [next(self._context_ids) for _ in range(count)]
        channel.context_ids += added
        for context_id in added:
            self._channels[context_id] = channel
        return added

    def _submit(self, primitives: tuple[Primitive, ...]) -> None:
        if self.lost:
            return
        for primitive in primitives:
            self._note_submitted(primitive)
            size = len(primitive.token_ids) if isinstance(primitive, Fill | Pool) else 0
            self._collected_bytes += size * _BYTES_PER_TOKEN + _BYTES_PER_PRIMITIVE
        self._collected += primitives
        if not self._flush_scheduled:
            # What is submitted within one turn of the loop travels in one message.
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        collected, self._collected = self._collected, []
        self._collected_bytes = 0
        if self.lost or not collected:
            return
        try:
            messages = [encode(Submit(collected))]
        except WireError:
            messages = self._encode_one_by_one(collected)
        self._outgoing += messages
        self._outgoing_bytes += sum(map(len, messages))
        self.has_outgoing.set()

    def _encode_one_by_one(self, primitives: list[Primitive]) -> list[bytes]:
        """Some value does not fit the wire: only its own context fails."""
        messages: list[bytes] = []
        for primitive in primitives:
            try:
                messages.append(encode(Submit([primitive])))
            except WireError as error:
                message = f"The request cannot be sent to the engine: {error}"
                self.deliver([Failed(primitive.context_id, "invalid_request", message)])
        return messages

    def _free(
        self, context_ids: list[int], submitted: set[int], retention: Retention, application: str
    ) -> None:
        for context_id in context_ids:
            self._channels.pop(context_id, None)
        if application and retention == "keep":
            self._kept.add(application, context_ids)
        self._submit(tuple([FreeContext(i, retention) for i in context_ids if i in submitted]))
        if self._idle_waiters:
            self._wake_idle_waiters()

    def _note_submitted(self, primitive: Primitive) -> None:
        context_id = primitive.context_id
        if isinstance(primitive, FreeContext):
            self._forget_load(context_id)
            return
        load = self._loads.get(context_id)
        if load is None:
            load = self._loads[context_id] = _Load()
        self.running += load.unfinished == 0
        load.unfinished += 1
        if isinstance(primitive, Fill | Pool):
            load.tokens += len(primitive.token_ids)
            self.queued_tokens += len(primitive.token_ids)

    def _note_progress(self, event: Event) -> None:
        load = self._loads.get(event.context_id)
        if isinstance(event, Failed):
            self.has_crashed = self.has_crashed or event.code == "engine_lost"
        if load is None:
            return
        if isinstance(event, Failed):
            self._forget_load(event.context_id)
            return
        if isinstance(event, Filled):
            done = min(event.num_tokens, load.tokens)
            load.tokens -= done
            self.queued_tokens -= done
        if load.unfinished == 1:
            self._forget_load(event.context_id)
        else:
            load.unfinished -= 1

    def _forget_load(self, context_id: int) -> None:
        load = self._loads.pop(context_id, None)
        if load is not None:
            self.queued_tokens -= load.tokens
            self.running -= 1


class EngineChannel:
    """The contexts of one call on one engine.

    A context manager: leaving it frees every context that was used, whatever happened, a
    cancellation included. The queue of events is bounded by what was submitted: an engine reports
    each token once.
    """

    def __init__(
        self, engine: RemoteEngine, salt: str, adapter: str, retention: Retention, application: str
    ) -> None:
        #: All ids that it was given on this engine, freed ones included.
        self.context_ids: list[int] = []
        self._engine = engine
        self._salt = salt
        self._adapter = adapter
        self._retention = retention
        self._application = application
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._submitted: set[int] = set()
        self._closed = False

    def __enter__(self) -> EngineChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the contexts. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._events.clear()
            self._engine._free(
                self.context_ids, self._submitted, self._retention, self._application
            )

    def extend(self, count: int) -> list[int]:
        """Add fresh contexts to this channel, also while the engine is leaving.

        Raises:
            EngineLostError: the link is gone.
            OverloadedError: too much waits to be sent.
        """
        self._engine._check_open()
        return self._engine._add_contexts(self, count)

    def submit(self, *primitives: Primitive) -> None:
        """Send primitives of this channel's contexts, in order. Never blocks.

        Raises:
            EngineLostError: the link is gone.
            OverloadedError: too much waits to be sent; nothing of this was. Frees always go.
        """
        engine, submitted = self._engine, self._submitted
        for primitive in primitives:
            if not isinstance(primitive, FreeContext):
                engine._check_open()
                break
        else:
            if engine.lost:
                raise engine.lost_error()
        if self._salt or self._adapter:
            primitives = tuple(
                replace(p, salt=p.salt or self._salt, adapter=p.adapter or self._adapter)
                if isinstance(p, Fill)
                else p
                for p in primitives
            )
        if self._retention != "normal":
            primitives = tuple(
                replace(p, retention=self._retention) if isinstance(p, FreeContext) else p
                for p in primitives
            )
        for primitive in primitives:
            if isinstance(primitive, FreeContext):
                submitted.discard(primitive.context_id)
            else:
                submitted.add(primitive.context_id)
        engine._submit(primitives)

    async def next(self, timeout_s: float | None = None) -> Event:
        """The next event of these contexts. A cancelled wait loses none; one waiter at a time.

        Raises:
            EngineLostError: the link is gone, and all that came before has been returned.
            TimeoutError: there was none for so long.
        """
        while not self._events:
            if self._engine.lost:
                raise self._engine.lost_error()
            loop = asyncio.get_running_loop()
            waiter = self._waiter = loop.create_future()
            # NOTE: a timer takes a sixth of the time of `asyncio.timeout`, for each token.
            timer = None if timeout_s is None else loop.call_later(timeout_s, _expire, waiter)
            try:
                await waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        return self._events.popleft()

    def _forget(self, context_id: int) -> None:
        """The engine has no such context any more: there is nothing to free."""
        self._submitted.discard(context_id)

    def _push(self, event: Event) -> None:
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _expire(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
