"""Where the time of an engine's steps goes, for benchmarks that ask why one took long.

`StepLog` stands between an engine and its runner, and between its host tier and the copies, and
notes for every step what was launched and how (through a graph, through one that was captured
first, or kernel by kernel), which outcome was waited for, which copies were requested and which
ended, and how long each of these kept the thread. On a GPU events around a launch give how long
the device took for it, waiting for copies included. Nothing is waited for because of the log.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from parrot_engine.batch import Launch, RowOutcome, Runner, StepBatch
from parrot_engine.kv_cache.host_copies import BlockCopies, Copy
from parrot_engine.runner.model_runner import ModelRunner

#: How many of the longest gaps between tokens are reported with their causes: a share of all, but
#: not fewer than this.
_LONGEST_SHARE, _LEAST_LONGEST = 0.01, 3
#: Names of the times that `StepRecord.to_dict` gives.
_TIMES = ("ms", "cpu_ms", "launch_ms", "wait_ms", "copies_ms", "rest_ms", "garbage_ms", "device_ms")


@dataclass(slots=True)
class StepRecord:
    """One step of an engine; seconds of the thread that drives it."""

    begin: float = 0.0
    end: float = 0.0
    #: Its CPU time: less than from `begin` to `end` where the thread waited.
    cpu_s: float = 0.0
    #: What was launched, how, and of which launch the outcome was waited for.
    launched: str = ""
    how: str = "nothing"
    awaited: str = ""
    launch_s: float = 0.0
    wait_s: float = 0.0
    #: In asking for copies of blocks; in collecting garbage, which is part of whatever it
    #: interrupted.
    copies_s: float = 0.0
    garbage_s: float = 0.0
    #: Blocks whose copies were requested, and those whose copies ended.
    blocks_in: int = 0
    blocks_out: int = 0
    arrived: int = 0
    left: int = 0
    #: Copies that must have read their blocks before what was launched may write into them.
    overtaken: int = 0
    #: Whether it brought a token for those whose time between tokens is measured.
    is_tick: bool = False
    marks: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.end - self.begin

    def device_s(self) -> float | None:
        """What the device took for what was launched; waits for it. None without a GPU."""
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def to_dict(self) -> dict[str, Any]:
        """All figures, times in milliseconds; `rest_ms` is planning and applying."""
        parts = {"launch_ms": self.launch_s, "wait_ms": self.wait_s, "copies_ms": self.copies_s}
        device_s = self.device_s()
        return {
            "ms": _ms(self.seconds),
            "cpu_ms": _ms(self.cpu_s),
            "launched": self.launched,
            "awaited": self.awaited,
            **{name: _ms(seconds) for name, seconds in parts.items()},
            "rest_ms": _ms(self.seconds - sum(parts.values())),
            "garbage_ms": _ms(self.garbage_s),
            "device_ms": None if device_s is None else _ms(device_s),
            "blocks_in": self.blocks_in,
            "blocks_out": self.blocks_out,
            "arrived": self.arrived,
            "left": self.left,
            "overtaken": self.overtaken,
        }


class Gap(NamedTuple):
    """The time between the ends of two steps that brought tokens."""

    seconds: float
    #: Those that ended in it, the one that brought the tokens last.
    steps: list[StepRecord]

    def to_dict(self) -> dict[str, Any]:
        """Its figures and those of its steps, times in milliseconds."""
        outside = self.seconds - sum(step.seconds for step in self.steps)
        return {
            "ms": _ms(self.seconds),
            "outside_ms": _ms(outside),
            "steps": [step.to_dict() for step in self.steps],
        }


class StepLog:
    """What the steps of one engine did. One thread uses it."""

    def __init__(self, runner: ModelRunner, copies: BlockCopies | None = None) -> None:
        #: To be given to the engine in place of those.
        self.runner = _LoggedRunner(runner, self)
        self.copies = None if copies is None else _LoggedCopies(copies, self)
        self.steps: list[StepRecord] = []
        self.now = StepRecord()
        #: Copies that have not ended: how many blocks, and whether they come in.
        self.pending: list[tuple[Copy, int, bool]] = []
        self._garbage_begin = 0.0

    @contextmanager
    def step(self) -> Iterator[StepRecord]:
        """Around one step of the engine."""
        self.now = StepRecord(begin=time.perf_counter())
        cpu = time.thread_time()
        gc.callbacks.append(self._on_garbage)
        try:
            yield self.now
        finally:
            gc.callbacks.remove(self._on_garbage)
        self._look_at_copies()
        self.now.cpu_s = time.thread_time() - cpu
        self.now.end = time.perf_counter()
        self.steps.append(self.now)

    def gaps(self, since: int = 0) -> list[Gap]:
        """The gaps between the ticks among the steps from number `since` on."""
        ticks = [at for at in range(since, len(self.steps)) if self.steps[at].is_tick]
        return [
            Gap(self.steps[last].end - self.steps[first].end, self.steps[first + 1 : last + 1])
            for first, last in pairwise(ticks)
        ]

    def _look_at_copies(self) -> None:
        still = []
        for copy, count, is_in in self.pending:
            if not copy.is_done():
                still.append((copy, count, is_in))
            elif is_in:
                self.now.arrived += count
            else:
                self.now.left += count
        self.pending = still

    def _on_garbage(self, phase: str, info: dict[str, int]) -> None:
        del info
        if phase == "start":
            self._garbage_begin = time.perf_counter()
        else:
            self.now.garbage_s += time.perf_counter() - self._garbage_begin


def longest(gaps: Sequence[Gap]) -> list[dict[str, Any]]:
    """Where the longest gaps come from, the longest first; below them the median one."""
    if not gaps:
        return []
    ordered = sorted(gaps, key=lambda gap: gap.seconds, reverse=True)
    count = max(_LEAST_LONGEST, round(_LONGEST_SHARE * len(gaps)))
    return [gap.to_dict() for gap in [*ordered[:count], ordered[len(ordered) // 2]]]


def line(gap: dict[str, Any]) -> str:
    """What `Gap.to_dict` gives, for people: a line for the gap and one for each of its steps."""
    lines = [f"{gap['ms']:8.2f} ms, of which outside of steps {gap['outside_ms']:.2f}"]
    for step in gap["steps"]:
        device = "" if step["device_ms"] is None else f", device {step['device_ms']:.2f}"
        lines.append(
            f"{step['ms']:12.2f} = launch {step['launch_ms']:.2f} ({step['launched'] or '-'}), "
            f"wait {step['wait_ms']:.2f} ({step['awaited'] or '-'}), "
            f"copies {step['copies_ms']:.2f}, rest {step['rest_ms']:.2f}; "
            f"garbage {step['garbage_ms']:.2f}, CPU {step['cpu_ms']:.2f}{device}; "
            f"blocks in {step['blocks_in']} out {step['blocks_out']} "
            f"arrived {step['arrived']} left {step['left']} overtaken {step['overtaken']}"
        )
    return "\n".join(lines)


def by_kind(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Steps by how they were launched and whether they requested blocks of the host.

    Of each kind the number of steps, and median and largest of each of their times.
    """
    kinds: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for step in steps:
        kinds.setdefault((step.how, step.blocks_in > 0), []).append(step.to_dict())
    return [
        {
            "launched": how,
            "asks_for_blocks": asks,
            "steps": len(entries),
            **{
                name: [statistics.median(values), max(values)]
                for name in _TIMES
                if (values := [entry[name] for entry in entries if entry[name] is not None])
            },
        }
        for (how, asks), entries in sorted(kinds.items())
    ]


def kind_line(kind: dict[str, Any]) -> str:
    """An entry of `by_kind` for people."""
    times = ", ".join(
        f"{name} {kind[name][0]:.2f}/{kind[name][1]:.2f}" for name in _TIMES if name in kind
    )
    what = ", blocks requested" if kind["asks_for_blocks"] else ""
    return f"  {kind['steps']} steps, {kind['launched']}{what}: median/largest {times}"


class _LoggedRunner(Runner):
    """A runner whose launches are noted."""

    def __init__(self, runner: ModelRunner, log: StepLog) -> None:
        self._runner = runner
        self._log = log
        self._is_on_gpu = runner.device.startswith("cuda")
        for name in Runner.__annotations__:
            setattr(self, name, getattr(runner, name))

    def launch(self, batch: StepBatch) -> Launch:
        """Launch it, and note how."""
        step, graphs = self._log.now, self._runner._graphs
        before = (0, 0) if graphs is None else (len(graphs._graphs), graphs.num_replays)
        if not step.marks:
            self.mark()
        begin = time.perf_counter()
        launch = self._runner.launch(batch)
        step.launch_s += time.perf_counter() - begin
        self.mark()
        how = "kernel by kernel"
        if graphs is not None and graphs.num_replays > before[1]:
            how = "graph, captured first" if len(graphs._graphs) > before[0] else "graph"
        step.how = how
        step.launched = f"{batch.num_tokens} tokens of {len(batch.rows)} rows, {how}"
        return _LoggedLaunch(launch, step.launched, self._log)

    def mark(self) -> None:
        """Note when the device gets here."""
        if self._is_on_gpu:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self._log.now.marks.append(mark)

    def close(self) -> None:
        self._runner.close()

    def check(self) -> None:
        self._runner.check()

    def on_loss(self, callback: Callable[[], None]) -> None:
        self._runner.on_loss(callback)


class _LoggedLaunch:
    """Implements `parrot_engine.batch.Launch`."""

    def __init__(self, launch: Launch, what: str, log: StepLog) -> None:
        self._launch = launch
        self._what = what
        self._log = log

    def sample(self) -> None:
        """See `Launch`."""
        self._launch.sample()

    def ready(self) -> bool:
        """See `Launch`."""
        return self._launch.ready()

    def outcome(self) -> Sequence[RowOutcome]:
        """Wait for it, and note how long."""
        begin = time.perf_counter()
        outcomes = self._launch.outcome()
        self._log.now.wait_s += time.perf_counter() - begin
        self._log.now.awaited = self._what
        return outcomes


class _LoggedCopies:
    """Implements `parrot_engine.kv_cache.host_copies.BlockCopies`."""

    def __init__(self, copies: BlockCopies, log: StepLog) -> None:
        self._copies = copies
        self._log = log
        self.num_slots = copies.num_slots
        self.chunk = copies.chunk

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> Copy:
        """See `BlockCopies`."""
        self._log.now.blocks_out += len(blocks)
        with self._timed():
            copy = self._copies.store(blocks, slots)
        self._log.pending.append((copy, len(blocks), False))
        return copy

    def load(
        self, slots: Sequence[int], blocks: Sequence[int], *, after: int, behind: Sequence[Copy]
    ) -> Copy:
        """See `BlockCopies`."""
        self._log.now.blocks_in += len(blocks)
        with self._timed():
            copy = self._copies.load(slots, blocks, after=after, behind=behind)
        self._log.pending.append((copy, len(blocks), True))
        return copy

    def before_launch(self, behind: Sequence[Copy]) -> None:
        """See `BlockCopies`; what the device waits here counts as the step's."""
        self._log.now.overtaken += len(behind)
        self._log.runner.mark()
        with self._timed():
            self._copies.before_launch(behind)

    def after_launch(self, number: int) -> None:
        """See `BlockCopies`."""
        self._copies.after_launch(number)

    def close(self) -> None:
        """See `BlockCopies`."""
        self._copies.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._log.now.copies_s += time.perf_counter() - begin


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
