"""Engines over several ranks, one after the other, in a process of their own.

`Process` starts it, from a test; `python ranks.py FOLDER DEVICE JSON` is what runs in it. Each
*story* says what became of it in one line of standard output. A process that a story's deadline
finds still at work is ended, with all that it started: nothing here waits longer than that.
Imports torch in the started process alone, and no transformers.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from parrot_engine.engine.builtin_engine import BuiltinEngine
    from parrot_engine.runner.model_runner import ModelRunner

#: Seconds until the first story of a process is over, kernels that are compiled in it included,
#: until another one is, and until a process has ended that has nothing left to do.
FIRST_DEADLINE_S, DEADLINE_S, END_DEADLINE_S = 120.0, 90.0, 40.0

#: Seconds until an engine must know that it has lost a rank.
LOSS_DEADLINE_S = 30.0

#: Steps of 96, 96, 20, then 2 and 1 tokens, at last 21 and 1: four graphs, and kernels for few.
PROMPT = [(7 * index + 3) % 250 for index in range(200)]


class Story(NamedTuple):
    """An engine with these settings, and what it is asked."""

    name: str
    settings: dict[str, Any]
    kind: str = "conversation"
    #: Folders of adapters that are loaded while it runs.
    adapters: Sequence[str] = ()


# In the started process


def conversation(engine: BuiltinEngine, adapters: Sequence[str]) -> dict[str, Any]:
    """A prompt, a prefix of it, a fork; greedy, drawn, with a penalty; then with adapters."""
    from parrot_engine.protocol import Failed, Fill, FreeContext, Generate, SamplingParams

    from harness.engine_checks import greedy, run_until_idle, tokens_of

    drawn = SamplingParams(20, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    events = run_until_idle(
        engine,
        Fill(1, PROMPT),
        Generate(1, greedy(40)),
        Fill(2, PROMPT[:60]),
        Generate(2, drawn),
        Fill(3, [9, 8, 7, 6] * 5, parent_context_id=1),
        Generate(3, greedy(30, repetition_penalty=1.3)),
    )
    ids = []
    for folder in adapters:
        read = engine.read_adapter(folder, folder)
        engine.add_adapter(read)
        ids.append(read.adapter.id)
    numbers = range(4, 4 + len(ids))
    events += run_until_idle(
        engine,
        *(FreeContext(context_id) for context_id in (1, 2, 3)),
        *(Fill(number, PROMPT, adapter=name) for number, name in zip(numbers, ids, strict=True)),
        *(Generate(number, greedy(20)) for number in numbers),
    )
    for event in events:
        assert not isinstance(event, Failed), event.message
    return {
        "said": [tokens_of(events, context_id) for context_id in (1, 2, 3)],
        "adapted": [tokens_of(events, number) for number in numbers],
    }


def loss(engine: BuiltinEngine, adapters: Sequence[str]) -> dict[str, Any]:
    """The same, and then rank 1 is killed in the middle of a generation."""
    from parrot_engine.distributed.leader import LeaderRunner
    from parrot_engine.exceptions import ShardError
    from parrot_engine.protocol import Fill, Generate

    from harness.engine_checks import greedy

    told = conversation(engine, adapters)
    engine.submit([Fill(40, PROMPT[:60]), Generate(40, greedy(400))])
    for _ in range(20):
        engine.step()
    runner = _runner(engine)
    assert isinstance(runner, LeaderRunner)
    assert runner.group is not None
    (pid,) = runner.group.workers.pids
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LOSS_DEADLINE_S
    try:
        while time.monotonic() < deadline:
            engine.step()
    except ShardError as error:
        return {**told, "problem": str(error)}
    return {**told, "problem": f"not noticed within {LOSS_DEADLINE_S:g} s"}


_KINDS: dict[str, Callable[[BuiltinEngine, Sequence[str]], dict[str, Any]]] = {
    "conversation": conversation,
    "loss": loss,
}


def _runner(engine: BuiltinEngine) -> ModelRunner:
    from parrot_engine.runner.model_runner import ModelRunner

    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    return runner


def _looked_at(engine: BuiltinEngine) -> dict[str, Any]:
    """How an engine computed; holds nothing that its ranks have in common."""
    runner = _runner(engine)
    graphs = runner._graphs
    return {
        "has_peers": getattr(runner._collective, "_peers", None) is not None,
        "graph_steps": 0 if graphs is None else graphs.num_replays,
        "num_blocks": engine.info.num_blocks,
    }


def tell(story: Story, folder: Path, device: str) -> dict[str, Any]:
    """Run one story; what became of it, and where its seconds went."""
    from parrot_engine.engine.builtin_engine import BuiltinEngine
    from parrot_engine.settings import BuiltinSettings

    given: dict[str, Any] = {"dtype": "float32", "block_size": 16, "num_blocks": 64, "seed": 5}
    given.update(story.settings)
    settings = BuiltinSettings.for_device(
        "cuda", device=device, max_batch_tokens=96, max_batch_size=8, **given
    )
    begin = time.perf_counter()
    engine = BuiltinEngine.load(folder, settings, model="m")
    loaded = time.perf_counter()
    try:
        told = {**_KINDS[story.kind](engine, story.adapters), **_looked_at(engine)}
        asked = time.perf_counter()
        if story.kind == "loss":
            # Taking leave of a rank that is lost is no part of the story.
            _say(story.name, told, begin, loaded, asked, asked)
    finally:
        engine.close()
    return _timed(told, begin, loaded, asked, time.perf_counter())


def _timed(
    told: dict[str, Any], begin: float, loaded: float, asked: float, closed: float
) -> dict[str, Any]:
    seconds = {"load": loaded - begin, "steps": asked - loaded, "close": closed - asked}
    return {**told, "seconds": {name: round(value, 1) for name, value in seconds.items()}}


def _say(name: str, told: dict[str, Any], *times: float) -> None:
    print(json.dumps({"name": name, **(_timed(told, *times) if times else told)}), flush=True)


def main() -> None:
    """Tell the stories of the command line, in their order."""
    folder, device, stories = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    for story in (Story(*fields) for fields in stories):
        try:
            told = tell(story, folder, device)
        except Exception:
            told = {"error": traceback.format_exc()}
        if story.kind != "loss" or "error" in told:
            _say(story.name, told)


# In the test


class Process:
    """The process, as the test that started it sees it."""

    def __init__(self, folder: Path, device: str, stories: Sequence[Story], log: Path) -> None:
        self._log = log
        self._told: dict[str, dict[str, Any]] = {}
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._problem = ""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(folder), device, json.dumps(stories)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # The ranks that it starts are ended along with it.
                start_new_session=True,
            )
        assert self._process.stdout is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()

    def told(self, name: str) -> dict[str, Any]:
        """Return the result of a story; fail, and end the process, if it is not known in time."""
        while name not in self._told:
            if self._problem:
                raise AssertionError(f"{name}: {self._problem}")
            deadline = DEADLINE_S if self._told else FIRST_DEADLINE_S
            try:
                line = self._lines.get(timeout=deadline)
            except queue.Empty:
                self._give_up(f"no story was over for {deadline:g} s, waiting for {name}")
                continue
            if line is None:
                self._give_up(f"the process ended before {name} was over")
            elif line.startswith("{"):
                story = json.loads(line)
                self._told[story.pop("name")] = story
        told = self._told[name]
        if "error" in told:
            raise AssertionError(f"{name}: {told['error']}\nThe log ends:\n{self._log_end()}")
        return told

    def status(self) -> int:
        """The exit status of a process that has nothing left to do; fails when it does not end."""
        try:
            return self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._give_up(f"it did not end within {END_DEADLINE_S:g} s")
            raise AssertionError(self._problem) from None

    def end(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            # Longer only where the driver does not let it go: then nobody waits for it.
            self._process.wait(END_DEADLINE_S)

    def _give_up(self, problem: str) -> None:
        self.end()
        status = self._process.poll()
        self._problem = f"{problem} (status {status}); its log ends:\n{self._log_end()}"

    def _log_end(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-4000:]

    def _read(self, said: IO[str]) -> None:
        with said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)


@contextlib.contextmanager
def started(folder: Path, device: str, stories: Sequence[Story], log: Path) -> Iterator[Process]:
    """A process that does not outlive the `with` block."""
    process = Process(folder, device, stories, log)
    try:
        yield process
    finally:
        process.end()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
