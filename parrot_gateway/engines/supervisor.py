"""The gateway's own engine processes: started, watched, restarted, stopped.

A process joins over the link like any other engine, with a key made for this run of the gateway
and handed over in its environment. The supervisor itself only sends it signals.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import secrets
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from parrot_gateway.engines.registry import Change, EngineRegistry
from parrot_gateway.engines.remote import RemoteEngine
from parrot_gateway.settings.model import EngineLinkSettings, ModelSettings

logger = logging.getLogger(__name__)
#: What engine processes write, line by line.
engine_logger = logging.getLogger("parrot_engine")

State: TypeAlias = Literal["loading", "ready", "failed"]

#: Environment variable with the join key; the engine's worker reads it.
JOIN_KEY_VARIABLE = "PARROT_JOIN_KEY"

#: Exit status of a worker for which another try is pointless (sysexits' EX_CONFIG).
EXIT_CONFIG = 78

#: A process that dies this often without having worked for a while is given up.
_MAX_DEATHS = 3
#: Having been ready for this long forgives earlier deaths.
_FORGIVEN_AFTER_S = 10.0
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STOP_TIMEOUT_S = 10.0
#: A process whose link broke has this long to come back before it counts as hung: its pauses
#: between attempts are a sixth of that.
_REJOIN_TIMEOUT_S = 60.0
_KEPT_LINES = 20
_MAX_LINE_BYTES = 16 * 1024
#: How a process's own log begins a line; other lines are progress, or what broke it.
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) +")
#: Begins the reason for which a process gives up.
_ERROR = "error: "


# NOTE: an engine may run code that came with a checkpoint: of the environment it gets what finds
# Python, devices, caches and the hub, and none of the gateway's or the operator's keys.
#: Variables that are passed on.
_NAMES = frozenset(
    {"PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "VIRTUAL_ENV",
     "LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_CACHE_HOME", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}
)  # fmt: skip

#: Families of variables that are passed on.
_PREFIXES = (
    "LC_", "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "TORCH", "PYTORCH_", "TRITON_",
    "CUDA_", "NVIDIA_", "NCCL_", "OMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "SSL_", "PYTHON",
)  # fmt: skip

#: Proxies, in either case.
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


@dataclass(slots=True)
class EngineProcess:
    """One engine process and what became of it, over all its restarts."""

    model: ModelSettings
    #: The name under which it registers: how it is known again.
    name: str
    state: State = "loading"
    #: Why it failed.
    reason: str | None = None
    pid: int | None = None
    restarts: int = 0
    deaths: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    #: Set while it is ready or failed.
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    #: Set while its link is there, and while a link that it had is gone.
    linked: asyncio.Event = field(default_factory=asyncio.Event)
    unlinked: asyncio.Event = field(default_factory=asyncio.Event)
    #: When it became ready, by the event loop's clock.
    ready_at: float | None = None

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model.served_name,
            "name": self.name,
            "state": self.state,
            "pid": self.pid,
            "restarts": self.restarts,
            "reason": self.reason,
        }


def worker_command(model: ModelSettings, join_url: str, name: str) -> list[str]:
    """The command line of an engine process; holds no secret."""
    options = model.model_dump(mode="json", exclude={"name", "engines", "reasoning_parser"})
    options["name"] = model.served_name
    return [
        sys.executable,
        "-m",
        "parrot_engine",
        *("--options", json.dumps(options)),
        *("--join", join_url),
        *("--engine-name", name),
        # That it has joined is logged here, by the one that it joined.
        *("--log-level", "warning"),
        "--with-parent",
    ]


def _engine_environment() -> dict[str, str]:
    """The variables of this process that an engine process gets."""
    return {
        name: text
        for name, text in os.environ.items()
        if not name.upper().endswith("_API_KEY")
        and (name in _NAMES or name.lower() in _PROXIES or name.startswith(_PREFIXES))
    }


class EngineSupervisor:
    """Keeps the configured engine processes running.

    Args:
        models: which, and how many of each.
        registry: notifies when a process has joined.
        load_timeout_s: a process that takes longer to join is given up.
        command: makes the command line from model, join URL and engine name.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        registry: EngineRegistry,
        *,
        load_timeout_s: float = EngineLinkSettings().load_timeout_s,
        command: Callable[[ModelSettings, str, str], list[str]] = worker_command,
    ) -> None:
        self._registry = registry
        self._load_timeout_s = load_timeout_s
        self._command = command
        #: In the order of the settings.
        self.processes = [
            EngineProcess(
                model.on_device(index), f"{model.served_name}-{index}-{secrets.token_hex(4)}"
            )
            for model in models
            for index in range(model.engines)
        ]
        self._tasks: list[asyncio.Task[None]] = []
        #: The start is over: failures until then are reported by whoever waits for it.
        self._started = False
        self._unsubscribe: Callable[[], None] | None = None

    def models(self) -> list[str]:
        return list(dict.fromkeys(process.model.served_name for process in self.processes))

    def state(self, model: str) -> State | None:
        """The best state among a model's processes; None for a model that is not configured."""
        states = {p.state for p in self.processes if p.model.served_name == model}
        order: tuple[State, ...] = ("ready", "loading", "failed")
        return next((state for state in order if state in states), None)

    def failure(self, model: str) -> str | None:
        """Why a model cannot be served; None while any of its processes may still come up."""
        if self.state(model) != "failed":
            return None
        reasons = [p.reason for p in self.processes if p.model.served_name == model]
        return next((reason for reason in reasons if reason), None)

    def describe(self) -> list[dict[str, Any]]:
        return [process.describe() for process in self.processes]

    async def start(self, join_url: str, join_key: str) -> None:
        """Start every process; returns before any of them is ready."""
        self._unsubscribe = self._registry.subscribe(self._on_change)
        self._tasks = [
            asyncio.create_task(self._keep(process, join_url, join_key), name=process.name)
            for process in self.processes
        ]

    async def wait_ready(self) -> None:
        for process in self.processes:
            await process.settled.wait()
        self._started = True

    async def close(self) -> None:
        """Stop every process: SIGTERM, and SIGKILL for those that do not end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _on_change(self, change: Change, engine: RemoteEngine) -> None:
        for process in self.processes:
            if process.name != engine.name or process.state == "failed":
                continue
            if change != "joined" and self._has_other_link(process, engine):
                # An old link, noticed only after the process was back.
                continue
            if change == "joined":
                process.state = "ready"
                process.ready_at = asyncio.get_running_loop().time()
                process.settled.set()
                process.linked.set()
                process.unlinked.clear()
            else:
                process.state = "loading"
            if change == "left":
                process.linked.clear()
                process.unlinked.set()

    def _has_other_link(self, process: EngineProcess, engine: RemoteEngine) -> bool:
        return any(
            other.name == process.name and other is not engine and not other.draining
            for other in self._registry.joined.values()
        )

    async def _keep(self, process: EngineProcess, join_url: str, join_key: str) -> None:
        """Run one process again and again until it is given up or this is cancelled."""
        command = self._command(process.model, join_url, process.name)
        environment = {**_engine_environment(), JOIN_KEY_VARIABLE: join_key}
        while True:
            process.ready_at = None
            process.linked.clear()
            process.unlinked.clear()
            process.last_lines.clear()
            try:
                status = await self._run_once(process, command, environment)
            except OSError as error:
                self._give_up(process, f"it could not be started: {error}")
                return
            if process.state == "failed":
                return
            process.state = "loading"
            if status == EXIT_CONFIG:
                self._give_up(process, _refusal(process.last_lines))
                return
            if _worked_for_a_while(process):
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
        self, process: EngineProcess, command: list[str], environment: dict[str, str]
    ) -> int:
        """Start a process and wait for its end; on cancellation, end it. Returns its status."""
        child = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            # The worker ends when this pipe does, however this process may end.
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=_MAX_LINE_BYTES,
            # A Ctrl-C in the terminal is for the gateway, which drains first.
            start_new_session=True,
        )
        process.pid = child.pid
        pump = asyncio.create_task(_read_lines(child, process), name=f"{process.name}-stderr")
        guard = asyncio.create_task(self._guard(process, child), name=f"{process.name}-guard")
        try:
            return await child.wait()
        finally:
            guard.cancel()
            await _end(child)
            # Its last output is still in the pipe. A grandchild may hold the pipe open.
            await asyncio.wait([pump], timeout=1.0)
            pump.cancel()
            process.pid = None

    def _give_up(self, process: EngineProcess, reason: str) -> None:
        process.state = "failed"
        process.reason = reason
        process.settled.set()
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
            _signal(child, signal.SIGKILL)
            return
        while True:
            await process.unlinked.wait()
            if not await _within(_REJOIN_TIMEOUT_S, process.linked):
                logger.warning(
                    "engine %s lives, but did not come back within %g s; it is ended",
                    process.name,
                    _REJOIN_TIMEOUT_S,
                )
                _signal(child, signal.SIGKILL)
                return


async def _within(limit_s: float, event: asyncio.Event) -> bool:
    """Whether `event` is set within so many seconds."""
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


def _worked_for_a_while(process: EngineProcess) -> bool:
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


def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        child.send_signal(number)
    except ProcessLookupError:
        logger.debug("process %d had ended already", child.pid)


async def _end(child: asyncio.subprocess.Process) -> None:
    """End a process if it still runs: politely, then not."""
    if child.returncode is not None:
        return
    _signal(child, signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await child.wait()
    except TimeoutError:
        _signal(child, signal.SIGKILL)
        await child.wait()
