"""The engines that have joined, and the models that they serve.

Notifies listeners of changes. Lives in the event loop's thread; no I/O.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias

from parrot_engine.link.wire import Adapters, Register
from parrot_engine.protocol import EngineInfo
from parrot_engine.text import Tokenizer

from parrot_gateway.backends.own.changes import Changes
from parrot_gateway.backends.own.remote import EngineObserver, RemoteEngine
from parrot_gateway.exceptions import LossKind

logger = logging.getLogger(__name__)

#: `draining`: it says that it leaves. `drained`: the operator gives it no new calls, until it is
#: `resumed`.
Change: TypeAlias = Literal["joined", "draining", "drained", "resumed", "left"]
Listener: TypeAlias = Callable[[Change, RemoteEngine], None]

#: An engine whose link broke has this long to come back: its pauses between attempts are a sixth of
#: that.
REJOIN_TIMEOUT_S = 60.0

#: Counters of lost engines, one a model and kind: engines name their models.
_MAX_LOSS_COUNTERS = 4096


class ServedModel(NamedTuple):
    """A model that some engine serves now."""

    id: str
    #: Unix time at which its first engine joined.
    created: int
    info: EngineInfo


class RegistrationRefused(Exception):
    """An engine may not join; `retry`: whether it may try again later."""

    def __init__(self, reason: str, *, retry: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry = retry


class EngineRegistry:
    """The joined engines of a gateway.

    Args:
        max_engines: further ones are refused.
    """

    def __init__(self, *, max_engines: int) -> None:
        #: By id, in the order of joining.
        self.joined: dict[str, RemoteEngine] = {}
        #: Those that take new work, by model.
        self.serving: Mapping[str, Sequence[RemoteEngine]] = {}
        #: Those of them that have an adapter, by its name; all have the same one.
        self.adapted: Mapping[str, Sequence[RemoteEngine]] = {}
        #: Models whose engines are all drained by the operator.
        self.drained: Mapping[str, Sequence[RemoteEngine]] = {}
        self._max_engines = max_engines
        #: Ids are short enough for tables: those of one run differ by their numbers, those of
        #: several runs by these digits.
        self._run = secrets.token_hex(2)
        self._numbers = itertools.count(1)
        #: Names of engines that the operator has drained, for those that come back; the oldest is
        #: forgotten first.
        self._drained_names: dict[str, None] = {}
        #: Models without an engine whose last one was lost, with `time.monotonic()` of that and
        #: what is set once another joins. They are forgotten after `REJOIN_TIMEOUT_S`.
        self._missing: dict[str, tuple[float, asyncio.Event]] = {}
        #: With each of which engines or their adapters may be others.
        self.changes = Changes()
        #: Engines that left, by model and kind of loss.
        self.losses: dict[tuple[str, LossKind], int] = {}
        self._listeners: list[Listener] = []
        self._observers: list[EngineObserver] = []

    def check(self, registration: Register) -> None:
        """Refuse an engine that may not join.

        Raises:
            RegistrationRefused: the registry is full, or the engine's model is served with
                another tokenizer under the same name.
        """
        if len(self.joined) >= self._max_engines:
            raise RegistrationRefused(
                f"{len(self.joined)} engines have joined, which is this gateway's limit "
                "(setting engines.max_engines)",
                retry=True,
            )
        model = registration.info.model
        for engine in self.of_model(model):
            if engine.text != registration.text:
                raise RegistrationRefused(
                    f"the model '{model}' is already served with another tokenizer or chat "
                    "template; give this one another name",
                    retry=False,
                )

    def shared_tokenizer(self, registration: Register) -> Tokenizer | None:
        """The tokenizer that an engine of the same model has built already."""
        for engine in self.of_model(registration.info.model):
            if engine.text == registration.text:
                return engine.tokenizer
        return None

    def add(self, registration: Register, tokenizer: Tokenizer | None = None) -> RemoteEngine:
        """Let an engine join.

        Raises:
            RegistrationRefused: see `check`.
        """
        self.check(registration)
        engine = RemoteEngine(
            f"eng_{self._run}{next(self._numbers)}",
            registration,
            tokenizer=tokenizer,
            observers=self._observers,
        )
        self.joined[engine.id] = engine
        missing = self._missing.pop(engine.info.model, None)
        self._notify("joined", engine)
        if missing is not None:
            missing[1].set()
        if engine.name in self._drained_names:
            self._set_drained(engine, drained=True)
        return engine

    def remove(self, engine_id: str, reason: str, kind: LossKind = "link") -> None:
        """An engine left or was lost: its open channels fail. Unknown ids do nothing."""
        engine = self.joined.pop(engine_id, None)
        if engine is None:
            return
        model = engine.info.model
        if not engine.draining and not any(each.takes_calls for each in self.of_model(model)):
            self._missing[model] = (time.monotonic(), asyncio.Event())
        num_calls = engine.num_calls
        engine.lose(reason, kind)
        level = logging.WARNING if num_calls else logging.INFO
        logger.log(level, "engine %s left: %s; calls on it: %d", engine.name, reason, num_calls)
        key = (model, kind)
        if key in self.losses or len(self.losses) < _MAX_LOSS_COUNTERS:
            self.losses[key] = self.losses.get(key, 0) + 1
        self._notify("left", engine)

    @property
    def missing(self) -> list[str]:
        """Models without an engine whose last one was lost and may come back."""
        oldest = time.monotonic() - REJOIN_TIMEOUT_S
        for model in [name for name, (since, _) in self._missing.items() if since < oldest]:
            del self._missing[model]
        return list(self._missing)

    async def wait_returned(self, model: str) -> None:
        """Return once a `missing` model has an engine again, or none is expected any more."""
        if model in self.missing:
            since, joined = self._missing[model]
            with suppress(TimeoutError):
                async with asyncio.timeout(since + REJOIN_TIMEOUT_S - time.monotonic()):
                    await joined.wait()

    def drain(self, engine_id: str) -> None:
        """An engine is leaving: it finishes what it has and gets nothing new."""
        engine = self.joined.get(engine_id)
        if engine is not None and not engine.draining:
            engine.draining = True
            self._notify("draining", engine)

    def set_drained(self, name: str, *, drained: bool) -> list[RemoteEngine]:
        """Give an engine no new calls, or calls again; what it runs goes on.

        An engine that leaves and comes back under its name stays drained.

        Args:
            name: its id, or its name, which several may have.

        Returns: those that there are of the name, whether they were drained before or not.
        """
        found = [each for each in self.joined.values() if name in (each.id, each.name)]
        for engine in found:
            self._drained_names.pop(engine.name, None)
            if drained:
                self._drained_names[engine.name] = None
            if engine.drained != drained:
                self._set_drained(engine, drained=drained)
        while len(self._drained_names) > self._max_engines:
            del self._drained_names[next(iter(self._drained_names))]
        return found

    def _set_drained(self, engine: RemoteEngine, *, drained: bool) -> None:
        engine.drained = drained
        if not engine.draining:
            self._notify("drained" if drained else "resumed", engine)

    def models(self) -> list[ServedModel]:
        """List the models that are served now or drained, in the order of joining."""
        return [
            ServedModel(name, int(engines[0].joined_at), engines[0].info)
            for name, engines in (*self.serving.items(), *self.drained.items())
        ]

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` at each change; the result ends that."""
        self._listeners.append(listener)

        def unsubscribe() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return unsubscribe

    def observe(self, observer: EngineObserver) -> None:
        """Notify `observer` of the reports of all engines, from now on."""
        self._observers.append(observer)

    def of_model(self, model: str) -> list[RemoteEngine]:
        """Its engines that have joined, whether they take calls or not."""
        return [engine for engine in self.joined.values() if engine.info.model == model]

    def note_adapters(self, engine: RemoteEngine, answer: Adapters) -> None:
        """An engine has loaded or unloaded an adapter, or could not."""
        engine.note_adapters(answer)
        self._index()

    def _index(self) -> None:
        serving: dict[str, list[RemoteEngine]] = {}
        adapted: dict[str, list[RemoteEngine]] = {}
        drained: dict[str, list[RemoteEngine]] = {}
        for each in self.joined.values():
            if not each.takes_calls:
                if not each.draining:
                    drained.setdefault(each.info.model, []).append(each)
                continue
            serving.setdefault(each.info.model, []).append(each)
            for name, adapter in each.adapters.items():
                engines = adapted.setdefault(name, [])
                # Of two that differ under one name the first counts.
                if not engines or (
                    engines[0].info.model == each.info.model
                    and engines[0].adapters[name].id == adapter.id
                ):
                    engines.append(each)
        self.serving, self.adapted = serving, adapted
        self.changes.notify()
        self.drained = {name: found for name, found in drained.items() if name not in serving}

    def _notify(self, change: Change, engine: RemoteEngine) -> None:
        self._index()
        for listener in list(self._listeners):
            listener(change, engine)
