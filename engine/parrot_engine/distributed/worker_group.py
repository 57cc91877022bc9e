"""The worker processes of a tensor-parallel engine: start, steps, status, loss.

Each is started here, with three pipes: its standard input for commands, which ends when this
process does and takes it along; a socket by which it gets steps; and a pipe on which it reports its
status. A thread for each reads that. Once one is lost, whatever the engine is asked raises
`ShardError`: what the others compute is a part of a sum that nobody completes.

Work on a GPU that waits for a lost rank never ends. Outcomes are therefore not waited for in the
CUDA driver but polled (`WatchedLaunch`); where this process is stuck in the driver all the same, it
ends.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Final

from parrot_engine.batch import Launch, RowOutcome
from parrot_engine.distributed.step_message import AdapterChange, StepMessage, encode
from parrot_engine.exceptions import AdapterError, ShardError
from parrot_engine.settings import BuiltinSettings

_log = logging.getLogger(__name__)

#: How long workers may take to start, and to load the model once rank 0 has.
START_TIMEOUT_S: Final = 120.0
LOAD_TIMEOUT_S: Final = 600.0
#: How long workers may take to read an adapter.
ADAPTER_TIMEOUT_S: Final = 300.0
#: How long a step may take, kernels that are compiled in it included.
STEP_TIMEOUT_S: Final = 300.0
#: How long workers may take to read a step, to leave, and to report why they fail.
_SEND_TIMEOUT_S: Final = 60.0
_LEAVE_TIMEOUT_S: Final = 10.0
_REASON_TIMEOUT_S: Final = 5.0
#: How long this process may be stuck in work that can not end any more.
_STUCK_S: Final = 20.0
_EXIT_STUCK: Final = 70
#: Between two looks at a step.
_LOOK_S: Final = 50e-6


class _WorkerProcess:
    def __init__(self, rank: int, device: str, start: dict[str, object]) -> None:
        self.rank = rank
        #: Its last report: nothing, `here`, `ready`.
        self.status = ""
        self.error = ""
        #: By the number of an adapter that it read: why that failed, or nothing.
        self.reads: dict[int, str] = {}
        steps, theirs = socket.socketpair()
        reports, their_reports = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603 -- our own interpreter
                [
                    sys.executable,
                    "-m",
                    "parrot_engine.distributed.worker",
                    str(theirs.fileno()),
                    str(their_reports),
                ],
                stdin=subprocess.PIPE,
                # Our own output may be a pipe that is read to its end.
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), their_reports),
            )
        except BaseException:
            steps.close()
            os.close(reports)
            raise
        finally:
            theirs.close()
            os.close(their_reports)
        self.steps = steps
        self.steps.settimeout(_SEND_TIMEOUT_S)
        self.reports = os.fdopen(reports, encoding="utf-8")
        self.lifeline: IO[bytes] | None = self.process.stdin
        self.tell({**start, "rank": rank, "device": device})

    def tell(self, command: dict[str, object]) -> None:
        """Write a line to its standard input; that it is gone shows elsewhere."""
        assert self.lifeline is not None
        with suppress(BrokenPipeError):
            self.lifeline.write(json.dumps(command).encode() + b"\n")
            self.lifeline.flush()


class WorkerGroup:
    """All ranks but the first. One thread uses it; `close` ends every process it started."""

    def __init__(
        self, folder: Path, settings: BuiltinSettings, store: Path, devices: list[str]
    ) -> None:
        """Start a process for each of `devices` but the first, which is ours.

        Each loads its part of the model in `folder` and meets the others by the file `store`.
        """
        self._changed = threading.Condition()
        # Guarded by `_changed`.
        self._problem = ""
        self._leaving = False
        self._busy = 0
        self._on_loss: Callable[[], None] | None = None
        self._has_gpu = devices[0] != "cpu"
        #: Adapters that workers were asked to read.
        self._num_reads = 0
        self._threads: list[threading.Thread] = []
        self._workers: list[_WorkerProcess] = []
        start = {
            "folder": str(folder),
            "store": str(store),
            "size": len(devices),
            "settings": asdict(replace(settings, device="auto")),
        }
        try:
            for rank, device in enumerate(devices[1:], start=1):
                self._workers.append(_WorkerProcess(rank, device, start))
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            thread = threading.Thread(
                target=self._listen, args=(worker,), name=f"rank-{worker.rank}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers]

    def wait_until(self, status: str, timeout_s: float) -> None:
        """Wait until all report the status `here` or `ready`.

        Raises:
            ShardError: one is lost, or takes too long.
        """

        def is_over() -> bool:
            return bool(self._problem) or all(f.status == status for f in self._workers)

        with self._changed:
            in_time = self._changed.wait_for(is_over, timeout_s)
        self.check()
        if not in_time:
            raise ShardError(f"a rank of the engine was not {status} after {timeout_s:g} s")

    def check(self) -> None:
        if self._problem:
            raise ShardError(self._problem)

    @property
    def is_stuck(self) -> bool:
        """Return True if a GPU may wait for a lost rank for ever. Nothing may wait for it then."""
        return self._has_gpu and bool(self._problem)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call this, from another thread, once a rank is lost; at once if one is."""
        with self._changed:
            self._on_loss = callback
            is_lost = bool(self._problem)
        if is_lost:
            callback()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do at the same time: its errors are those of the whole engine.

        Raises:
            ShardError: a rank is lost, or something failed on this one.
        """
        self.check()
        self._count(1)
        try:
            yield
        except ShardError:
            raise
        except Exception as error:
            # A lost rank shows here before its end is noticed.
            with self._changed:
                if self._changed.wait_for(lambda: self._problem, _REASON_TIMEOUT_S):
                    raise ShardError(self._problem) from error
                self._problem = f"rank 0 failed in the middle of a step: {error}"
                raise ShardError(self._problem) from error
        finally:
            self._count(-1)

    def send(self, message: StepMessage | AdapterChange) -> None:
        """Let the workers compute a step as well, or change adapters, in the order of calls.

        Raises:
            ShardError: a rank is lost.
        """
        data = encode(message)
        with self.together():
            for worker in self._workers:
                worker.steps.sendall(data)

    def read_adapter(self, folder: str, adapter_id: str) -> int:
        """Have all workers read their parts of an adapter; from any thread, beside steps.

        Returns the number under which they keep it for an `AdapterChange`.

        Raises:
            AdapterError: one of them cannot, or takes too long; none keeps it then.
            ShardError: a rank is lost.
        """
        with self._changed:
            number = self._num_reads = self._num_reads + 1
            for worker in self._workers:
                worker.tell({"number": number, "folder": folder, "id": adapter_id})
            self._changed.wait_for(
                lambda: self._problem or all(number in each.reads for each in self._workers),
                ADAPTER_TIMEOUT_S,
            )
            self.check()
            problems = [
                f"rank {each.rank}: {problem}"
                for each in self._workers
                if (problem := each.reads.pop(number, "it takes too long"))
            ]
            if problems:
                for worker in self._workers:
                    worker.tell({"number": number, "folder": None})
                raise AdapterError("; ".join(problems))
        return number

    def watch(self, launch: Launch) -> Launch:
        """The same launch, whose outcome is not waited for longer than the ranks live."""
        return WatchedLaunch(launch, self)

    def dismiss(self) -> None:
        """Let the workers end, after all that was sent. May be called twice."""
        if self.is_stuck:
            # As where a loss is noticed: this rank may have failed by itself.
            atexit.register(_end_at_once)
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.steps.close()
            if self._problem:
                worker.process.kill()

    def close(self) -> None:
        """Dismiss the workers, and end those that do not leave; returns when none is left."""
        self.dismiss()
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _log.warning("rank %d does not leave and is ended", worker.rank)
                worker.process.kill()
                worker.process.wait()
            if worker.lifeline is not None:
                with suppress(BrokenPipeError):
                    worker.lifeline.close()
        for thread in self._threads:
            thread.join(_LEAVE_TIMEOUT_S)

    def _count(self, change: int) -> None:
        with self._changed:
            self._busy += change
            self._changed.notify_all()

    def _listen(self, worker: _WorkerProcess) -> None:
        """Read the reports of a worker, until it ends."""
        with worker.reports as reports:
            for line in reports:
                report = json.loads(line)
                with self._changed:
                    worker.status = report.get("status", worker.status)
                    worker.error = report.get("error", worker.error)
                    if "read" in report:
                        worker.reads[report["read"]] = report["problem"]
                    self._changed.notify_all()
        try:
            code = worker.process.wait(_LEAVE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            code = worker.process.wait()
        with self._changed:
            if self._leaving:
                return
            reason = worker.error or _ending(code)
            if not self._problem:
                self._problem = f"rank {worker.rank} of the engine was lost: {reason}"
                _log.error("%s (process %d)", self._problem, worker.process.pid)
            self._changed.notify_all()
            on_loss = self._on_loss
        if on_loss is not None:
            on_loss()
        with self._changed:
            if self._has_gpu:
                # The interpreter's own end waits for the GPU.
                atexit.register(_end_at_once)
            is_free = self._changed.wait_for(lambda: not self._busy or self._leaving, _STUCK_S)
        if not is_free and self._has_gpu:
            # NOTE: nothing can call back work on a GPU that waits for another one.
            _log.critical("work that waits for a lost rank cannot be ended: this process ends")
            _end_at_once()


class WatchedLaunch:
    """A launch of all ranks; implements `Launch`."""

    def __init__(self, launch: Launch, workers: WorkerGroup) -> None:
        self._launch = launch
        self._workers = workers

    def sample(self) -> None:
        self._launch.sample()

    def ready(self) -> bool:
        """See `Launch`; errors of the device are raised by `outcome`."""
        try:
            return self._launch.ready()
        except Exception:
            return True

    def outcome(self) -> Sequence[RowOutcome]:
        """See `Launch`.

        Raises:
            ShardError: a rank is lost, or the step fails on the device (where a lost rank may show
                first, as memory that is gone), or it does not end.
        """
        with self._workers.together():
            wait_for(self._launch.ready, self._workers.check)
            return self._launch.outcome()


def wait_for(
    ready: Callable[[], bool], check: Callable[[], None], timeout_s: float = STEP_TIMEOUT_S
) -> None:
    """Look until `ready`, and whether `check` raises meanwhile.

    Raises:
        ShardError: it takes longer than `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not ready():
        check()
        if time.monotonic() > deadline:
            raise ShardError(f"a step of several ranks is not over after {timeout_s:g} s")
        time.sleep(_LOOK_S)


def _end_at_once() -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(_EXIT_STUCK)


def _ending(code: int) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return f"it ended with status {code}; its log has the details"
