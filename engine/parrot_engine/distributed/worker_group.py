"""The worker processes of a tensor-parallel engine: start, steps, status, loss.

Each is started here with three channels: its standard input for commands, whose end (that of this
process) ends it; a socket for steps; and a pipe for status reports, which a thread per worker
reads. Once a worker is lost, every request to the engine raises `ShardError`, because the others
compute parts of sums that nobody completes.

Work on a GPU that waits for a lost rank never ends. Therefore results are not awaited in the CUDA
driver but polled (`WatchedLaunch`); if this process is stuck in the driver all the same, it exits.
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

#: Time limits for workers to start, and to load the model once rank 0 has.
START_TIMEOUT_S: Final = 120.0
LOAD_TIMEOUT_S: Final = 600.0
#: Time limit for workers to read an adapter.
ADAPTER_TIMEOUT_S: Final = 300.0
#: Time limit of a step, including kernels compiled in it.
STEP_TIMEOUT_S: Final = 300.0
#: Time limits for workers to read a step, to leave, and to report the reason of a failure.
_SEND_TIMEOUT_S: Final = 60.0
_LEAVE_TIMEOUT_S: Final = 10.0
_REASON_TIMEOUT_S: Final = 5.0
#: Longest time for which this process may be stuck in work that can no longer end.
_STUCK_S: Final = 20.0
_EXIT_STUCK: Final = 70
#: Time between polls of a step.
_LOOK_S: Final = 50e-6


class _WorkerProcess:
    def __init__(self, rank: int, device: str, start: dict[str, object]) -> None:
        self.rank = rank
        #: Its last report: empty, `here`, `ready`.
        self.status = ""
        self.error = ""
        #: By number of an adapter that it read: the error, or "".
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
        """Write a line to its standard input; its loss shows elsewhere."""
        assert self.lifeline is not None
        with suppress(BrokenPipeError):
            self.lifeline.write(json.dumps(command).encode() + b"\n")
            self.lifeline.flush()


class WorkerGroup:
    """All ranks except the first. One thread uses it; `close` ends every process it started."""

    def __init__(
        self, folder: Path, settings: BuiltinSettings, store: Path, devices: list[str]
    ) -> None:
        """Start a process for each of `devices` except the first, which is ours.

        Each loads its part of the model in `folder` and meets the others through the file `store`.
        """
        self._changed = threading.Condition()
        # Guarded by `_changed`.
        self._problem = ""
        self._leaving = False
        self._busy = 0
        self._on_loss: Callable[[], None] | None = None
        self._has_gpu = devices[0] != "cpu"
        #: Number of adapters that workers were asked to read.
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
            ShardError: a worker is lost, or takes too long.
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
        """Return true if a GPU may wait for a lost rank for ever. Nothing may wait for it then."""
        return self._has_gpu and bool(self._problem)

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Register a callback that is called in another thread once a rank is lost; at once if one
        is.
        """
        with self._changed:
            self._on_loss = callback
            is_lost = bool(self._problem)
        if is_lost:
            callback()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Surround work that all ranks do together: its errors concern the whole engine.

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
            # A lost rank may show here before its end is noticed.
            with self._changed:
                if self._changed.wait_for(lambda: self._problem, _REASON_TIMEOUT_S):
                    raise ShardError(self._problem) from error
                self._problem = f"rank 0 failed in the middle of a step: {error}"
                raise ShardError(self._problem) from error
        finally:
            self._count(-1)

    def send(self, message: StepMessage | AdapterChange) -> None:
        """Send the workers a step to compute or an adapter change, in the order of calls.

        Raises:
            ShardError: a rank is lost.
        """
        data = encode(message)
        with self.together():
            for worker in self._workers:
                worker.steps.sendall(data)

    def read_adapter(self, folder: str, adapter_id: str) -> int:
        """Make all workers read their parts of an adapter; from any thread, beside steps.

        Returns the number under which they keep it for an `AdapterChange`.

        Raises:
            AdapterError: a worker cannot, or takes too long; then none keeps it.
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
        """Return the launch with an outcome that fails once a rank is lost."""
        return WatchedLaunch(launch, self)

    def dismiss(self) -> None:
        """Let the workers end after everything that was sent. May be called twice."""
        if self.is_stuck:
            # This rank may have failed by itself, so exit as if a loss was noticed.
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
        """Read the reports of a worker until it ends."""
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
                # The interpreter's own exit waits for the GPU.
                atexit.register(_end_at_once)
            is_free = self._changed.wait_for(lambda: not self._busy or self._leaving, _STUCK_S)
        if not is_free and self._has_gpu:
            # NOTE: work on a GPU that waits for another one cannot be cancelled.
            _log.critical("work that waits for a lost rank cannot be ended: this process ends")
            _end_at_once()


class WatchedLaunch:
    """A launch on all ranks; implements `Launch`."""

    def __init__(self, launch: Launch, workers: WorkerGroup) -> None:
        self._launch = launch
        self._workers = workers

    def sample(self) -> None:
        self._launch.sample()

    def ready(self) -> bool:
        """Return true if the outcome is ready; `outcome` raises errors of the device."""
        try:
            return self._launch.ready()
        except Exception:
            return True

    def outcome(self) -> Sequence[RowOutcome]:
        """Wait for the outcome; see `Launch`.

        Raises:
            ShardError: a rank is lost, the step fails on the device (where a lost rank may show
                first, as missing memory), or it does not end.
        """
        with self._workers.together():
            wait_for(self._launch.ready, self._workers.check)
            return self._launch.outcome()


def wait_for(
    ready: Callable[[], bool], check: Callable[[], None], timeout_s: float = STEP_TIMEOUT_S
) -> None:
    """Poll until `ready`, and let `check` raise meanwhile.

    Raises:
        ShardError: the wait exceeds `timeout_s`.
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
