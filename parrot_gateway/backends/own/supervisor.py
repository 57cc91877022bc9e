"""The gateway's own engine processes: started, watched, restarted, stopped.

A process joins over the link like any other engine, with a key made for this run of the gateway
and handed over in its environment. The supervisor itself only sends it signals.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from parrot_gateway.backends.own.changes import Changes
from parrot_gateway.backends.own.child_process import end, engine_environment, send_signal, start
from parrot_gateway.backends.own.registry import REJOIN_TIMEOUT_S, Change, EngineRegistry
from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.backends.own.standby import Standby
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings

logger = logging.getLogger(__name__)
#: What engine processes write, line by line.
engine_logger = logging.getLogger("parrot_engine")

#: `unloading`: it is being ended for good. `idle`: it was ended for want of calls, and is started
#: again for the next one.
State: TypeAlias = Literal["loading", "ready", "failed", "unloading", "idle"]

#: Environment variable with the join key; the engine's worker reads it.
JOIN_KEY_VARIABLE = "PARROT_JOIN_KEY"

#: Begins the command line of an engine process.
_PROGRAM = (sys.executable, "-m", "parrot_engine")

#: Exit status of a worker for which another try is pointless (sysexits' EX_CONFIG).
EXIT_CONFIG = 78

#: A process that dies this often without having worked for a while is given up.
_MAX_DEATHS = 3
#: Having been ready for this long forgives earlier deaths, and so does having computed a prompt.
_FORGIVEN_AFTER_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STOP_TIMEOUT_S = 10.0
_KEPT_LINES = 20
#: How a process's own log begins a line; other lines are progress, or what broke it.
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +")
#: Begins the reason for which a process gives up.
_ERROR = "error: "


@dataclass(slots=True)
class EngineProcess:
    """One engine process and what became of it, over all its restarts."""

    model: ModelSettings
    #: The name under which it registers: how it is known again.
    name: str
    changes: Changes = field(repr=False)
    state: State = "loading"
    #: Why it failed.
    reason: str | None = None
    pid: int | None = None
    restarts: int = 0
    deaths: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    #: Set while it does not load.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set while its link is there, and while a link that it had is gone.
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    unlinked: asyncio.Event = field(default_factory=asyncio.Event)
    #: Its link was given up because it computed nothing: it will not come back by itself.
    is_stalled: bool = False
    #: When it was started and when it became ready, by the event loop's clock.
    started_at: float | None = None
    ready_at: float | None = None
    #: Seconds from the one to the other, the last time.
    load_s: float | None = None
    #: It has reported work since it was started.
    has_worked: bool = False
    #: Unix time since which it has been in its state.
    since: float = field(default_factory=time.time)
    #: Keeps it running; None while it does not run.
    task: asyncio.Task[None] | None = None

    @property
    def loads_first(self) -> bool:
        """Return whether it loads its model for the first time, not again after a crash."""
        return (
            self.state == "loading"
            and self.task is not None
            and self.ready_at is None
            and not self.deaths
        )

    def enter(self, state: State) -> None:
        if state == "loading":
            self.settled.clear()
        else:
            self.settled.set()
        if state != self.state:
            self.state, self.since = state, time.time()
            self.changes.notify()

    def note_ready(self, now: float) -> None:
        """It has joined; only the first time after its start it had to load its model."""
        if self.ready_at is None and self.started_at is not None:
            self.load_s = now - self.started_at
        self.ready_at = now

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model.served_name,
            "name": self.name,
            "state": self.state,
            "pid": self.pid,
            "restarts": self.restarts,
            "reason": self.reason,
            "since": int(self.since),
        }


def worker_command(model: ModelSettings, join_url: str, name: str) -> list[str]:
    """The command line of an engine process; holds no secret."""
    options = model.model_dump(
        mode="json", exclude={"name", "engines", "reasoning_parser", "idle_unload_s"}
    )
    options["name"] = model.served_name
    return [
        *_PROGRAM,
        *("--options", json.dumps(options)),
        *("--join", join_url),
        *("--engine-name", name),
        # That it has joined is logged here, by the one that it joined.
        *("--log-level", "warning"),
        "--with-parent",
    ]


class EngineSupervisor:
    """Keeps the configured engine processes running.

    Args:
        models: which, and how many of each.
        registry: notifies when a process has joined.
        load_timeout_s: a process that takes longer to join is given up.
        command: makes the command line from model, join URL and engine name.
        standby: its spare process runs what `worker_command` makes.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        registry: EngineRegistry,
        *,
        load_timeout_s: float = EngineLinkSettings().load_timeout_s,
        command: Callable[[ModelSettings, str, str], list[str]] = worker_command,
        standby: Standby | None = None,
    ) -> None:
        self._registry = registry
        self._load_timeout_s = load_timeout_s
        self._command = command
        self._standby = standby
        #: Of states of processes, and of what they write.
        self.changes = Changes()
        #: By model, the numbers of its processes: none is given out twice, and a name neither.
        self._numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
        #: In the order of the settings, then of loading.
        self.processes: list[EngineProcess] = []
        #: Models that are served, or will be once loaded; not those that are being unloaded.
        self.served: list[str] = []
        for model in models:
            self.add(model)
        #: Where processes join, and with which key, once they may be started.
        self._join: tuple[str, str] | None = None
        #: The start is over: failures until then are reported by whoever waits for it.
        self._started = False
        self._unsubscribe: Callable[[], None] | None = None

    def models(self) -> list[str]:
        """See `served`."""
        return self.served

    @property
    def is_running(self) -> bool:
        """Return whether processes may be started."""
        return self._join is not None

    def settings_of_models(self) -> dict[str, ModelSettings]:
        """Return the settings of the served models by name, as their first process has them."""
        found: dict[str, ModelSettings] = {}
        for process in self.processes:
            if process.state != "unloading":
                found.setdefault(process.model.served_name, process.model)
        return found

    def owns(self, name: str) -> bool:
        """Return whether an engine's name is that of a process."""
        return any(process.name == name for process in self.processes)

    def processes_of(self, model: str) -> list[EngineProcess]:
        return [process for process in self.processes if process.model.served_name == model]

    def add(self, model: ModelSettings) -> None:
        """Add the processes of a model, which `start_model` starts."""
        self.processes += [
            EngineProcess(
                model.on_device(index),
                f"{model.served_name}-{next(self._numbers[model.served_name])}",
                self.changes,
            )
            for index in range(model.engines)
        ]
        self._list_models()

    def start_model(self, model: str) -> None:
        """Start the processes of a model that do not run, unless this gateway starts none."""
        for process in self.processes_of(model):
            if self._join is not None and process.task is None:
                process.enter("loading")
                process.ready_at, process.deaths = None, 0
                process.task = asyncio.create_task(
                    self._keep(process, *self._join), name=process.name
                )

    def retire(self, model: str, state: Literal["unloading", "idle"]) -> None:
        """Begin to end the processes of a model: it is `unloading` or `idle` from now on, whatever
        they do; `stop_model` ends them."""
        for process in self.processes_of(model):
            process.enter(state)
        self._list_models()

    async def stop_model(self, model: str) -> None:
        """Stop the processes of a model: SIGTERM, and SIGKILL for those that do not end."""
        await _end_tasks(self.processes_of(model))

    def remove(self, model: str) -> None:
        """Forget a model whose processes have ended."""
        gone = self.processes_of(model)
        self.processes = [process for process in self.processes if process not in gone]
        self._list_models()

    def _list_models(self) -> None:
        served = [p.model.served_name for p in self.processes if p.state != "unloading"]
        self.served = list(dict.fromkeys(served))

    def state(self, model: str) -> State | None:
        """The best state among a model's processes; None for a model that is not configured."""
        states = {process.state for process in self.processes_of(model)}
        order: tuple[State, ...] = ("ready", "loading", "idle", "unloading", "failed")
        return next((state for state in order if state in states), None)

    def load_left_s(self, model: str) -> float | None:
        """Seconds until a model is loaded, by how long it took before; None: it is not known."""
        now = asyncio.get_running_loop().time()
        left = [
            process.load_s - (now - process.started_at)
            for process in self.processes_of(model)
            if process.state == "loading"
            and process.load_s is not None
            and process.started_at is not None
        ]
        return max(1.0, min(left)) if left else None

    def failure(self, model: str) -> str | None:
        """Why a model cannot be served; None while any of its processes may still come up."""
        if self.state(model) != "failed":
            return None
        reasons = [process.reason for process in self.processes_of(model)]
        return next((reason for reason in reasons if reason), None)

    def describe(self) -> list[dict[str, Any]]:
        return [process.describe() for process in self.processes]

    async def start(self, join_url: str, join_key: str) -> None:
        """Start every process; returns before any of them is ready."""
        self._unsubscribe = self._registry.subscribe(self._on_change)
        self._join = (join_url, join_key)
        for model in self.served:
            self.start_model(model)

    async def wait_ready(self) -> None:
        for process in list(self.processes):
            await process.settled.wait()
        self._started = True

    async def close(self) -> None:
        """Stop every process: SIGTERM, and SIGKILL for those that do not end."""
        self._join = None
        await _end_tasks(self.processes)
        if self._standby is not None:
            await self._standby.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _on_change(self, change: Change, engine: RemoteEngine) -> None:
        for process in self.processes:
            if process.name != engine.name or process.state not in ("loading", "ready"):
                continue
            if change in ("drained", "resumed"):
                continue
            if change != "joined" and self._has_other_link(process, engine):
                # An old link, noticed only after the process was back.
                continue
            if change == "joined":
                process.enter("ready")
                process.note_ready(asyncio.get_running_loop().time())
                process.linked.set()
                process.unlinked.clear()
                self._make_standby()
            else:
                process.enter("loading")
            if change == "left":
                process.has_worked |= _has_worked(engine)
                process.is_stalled = engine.loss_kind == "stalled"
                process.linked.clear()
                process.unlinked.set()

    def _make_standby(self) -> None:
        """Have a spare process made, once no other one loads a model."""
        is_loading = any(process.state == "loading" for process in self.processes)
        if self._standby is not None and self._join is not None and not is_loading:
            self._standby.make()

    def _has_other_link(self, process: EngineProcess, engine: RemoteEngine) -> bool:
        return any(
            other.name == process.name and other is not engine and not other.draining
            for other in self._registry.joined.values()
        )

    async def _keep(self, process: EngineProcess, join_url: str, join_key: str) -> None:
        """Run one process again and again until it is given up or this is cancelled."""
        command = self._command(process.model, join_url, process.name)
        secrets = {JOIN_KEY_VARIABLE: join_key}
        while True:
            process.started_at, process.ready_at = asyncio.get_running_loop().time(), None
            process.has_worked = False
            process.linked.clear()
            process.unlinked.clear()
            process.last_lines.clear()
            try:
                status = await self._run_once(process, command, secrets)
            except OSError as error:
                self._give_up(process, f"it could not be started: {error}")
                return
            if process.state not in ("loading", "ready"):
                return
            process.enter("loading")
            if status == EXIT_CONFIG:
                self._give_up(process, _refusal(process.last_lines))
                return
            # Its link may still be there.
            process.has_worked |= any(
                _has_worked(engine)
                for engine in self._registry.joined.values()
                if engine.name == process.name
            )
            if process.has_worked or _was_ready_for_a_while(process):
                process.deaths = 0
            process.deaths += 1
            if process.deaths >= _MAX_DEATHS:
                output = "\n".join(process.last_lines) or "no output"
                self._give_up(
                    process, f"it ended {process.deaths} times ({_how(status)}): {output}"
                )
                return
            pause_s = min(_FIRST_BACKOFF_S * 2 ** (process.deaths - 1), _MAX_BACKOFF_S)
            logger.warning("engine %s %s; again in %g s", process.name, _how(status), pause_s)
            await asyncio.sleep(pause_s)
            process.restarts += 1

    async def _run_once(
        self, process: EngineProcess, command: list[str], secrets: dict[str, str]
    ) -> int:
        """Start a process and wait for its end; on cancellation, end it. Returns its status."""
        child = None
        if self._standby is not None:
            child = await self._standby.take(command[len(_PROGRAM) :], secrets)
        if child is None:
            child = await start(command, {**engine_environment(), **secrets})
        process.pid = child.pid
        pump = asyncio.create_task(_read_lines(child, process), name=f"{process.name}-stderr")
        guard = asyncio.create_task(self._guard(process, child), name=f"{process.name}-guard")
        try:
            return await child.wait()
        finally:
            guard.cancel()
            await end(child, _STOP_TIMEOUT_S, reader=pump)
            process.pid = None

    def _give_up(self, process: EngineProcess, reason: str) -> None:
        process.reason = reason
        process.enter("failed")
        level = logging.ERROR if self._started else logging.DEBUG
        logger.log(level, "engine %s failed: %s", process.name, reason)

    async def _guard(self, process: EngineProcess, child: asyncio.subprocess.Process) -> None:
        """End a process that does not join, or that lives on without its link."""
        if not await _within(self._load_timeout_s, process.linked):
            self._give_up(
                process,
                f"it did not join within {self._load_timeout_s:g} s "
                "(setting engines.load_timeout_s)",
            )
            send_signal(child, signal.SIGKILL)
            return
        while True:
            await process.unlinked.wait()
            limit_s = 0.0 if process.is_stalled else REJOIN_TIMEOUT_S
            if not await _within(limit_s, process.linked):
                logger.warning(
                    "engine %s lives, but did not come back within %g s; it is ended",
                    process.name,
                    limit_s,
                )
                send_signal(child, signal.SIGKILL)
                return


async def _end_tasks(processes: Sequence[EngineProcess]) -> None:
    tasks = [process.task for process in processes if process.task is not None]
    for task in tasks:
        # A second cancellation would interrupt the end of its process.
        if not task.cancelling():
            task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for process in processes:
        process.task = None


async def _within(limit_s: float, event: asyncio.Event) -> bool:
    """Wait until `event` is set; False if that takes longer than `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _refusal(lines: Sequence[str]) -> str:
    """Why a worker refused to start: its output from the last `error: ` on, as one line."""
    output = list(lines)
    begins = [number for number, line in enumerate(output) if line.startswith(_ERROR)]
    output = output[begins[-1] if begins else -1 :]
    return " ".join(output).removeprefix(_ERROR) or "no output"


def _has_worked(engine: RemoteEngine) -> bool:
    return engine.stats.filled_tokens > 0


def _was_ready_for_a_while(process: EngineProcess) -> bool:
    now = asyncio.get_running_loop().time()
    return process.ready_at is not None and now - process.ready_at >= _FORGIVEN_AFTER_S


def _how(status: int) -> str:
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return f"ended with status {status}"


async def _read_lines(child: asyncio.subprocess.Process, process: EngineProcess) -> None:
    """Log the process's messages and remember the last ones."""
    assert child.stderr is not None
    gives_up = False
    while True:
        try:
            raw = await child.stderr.readline()
        except ValueError:
            # A line beyond the limit: asyncio has dropped it.
            continue
        if not raw:
            return
        # A progress bar redraws its line; what stands at the end counts.
        line = raw.decode(errors="replace").rstrip().rpartition("\r")[2]
        if line:
            process.last_lines.append(line)
            process.changes.notify()
            # From here on it is the reason that is reported once the process has ended.
            gives_up = gives_up or line.startswith(_ERROR)
            found = _LEVEL.match(line)
            if gives_up:
                level = logging.DEBUG
            elif found is not None:
                level, line = logging.getLevelNamesMapping()[found[1]], line[found.end() :]
            else:
                level = logging.INFO if process.ready_at is None else logging.WARNING
            engine_logger.log(level, "%s: %s", process.name, line)
