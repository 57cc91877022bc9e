"""The thread that drives an engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from harness.engine_checks import ENGINE_CHECKS, check_engine, greedy
from harness.scripted_engine import ScriptedEngine
from parrot_engine.engine.driver import DriverStoppedError, EngineDriver
from parrot_engine.protocol import (
    BlockChanges,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
)

WAIT_S = 10.0


class Consumer:
    """Collects events in the test's thread."""

    def __init__(self) -> None:
        self.steps: queue.Queue[list[Event]] = queue.Queue()
        #: What came in the same step behind the event that was waited for.
        self.rest: list[Event] = []

    def __call__(self, events: list[Event]) -> None:
        self.steps.put(events)

    def until(self, condition: type[Event] | None = None, *, finished: int = 1) -> list[Event]:
        """Events up to `finished` ended generations, or the first of a type."""
        seen: list[Event] = []
        while True:
            step = self.steps.get(timeout=WAIT_S)
            for index, event in enumerate(step):
                seen.append(event)
                if condition is not None and isinstance(event, condition):
                    self.rest = step[index + 1 :]
                    return seen
                if isinstance(event, Generated) and event.finish_reason is not None:
                    finished -= 1
            if finished == 0:
                return seen


class Gate:
    """Lets single steps through."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.open = False

    def __call__(self) -> None:
        self.entered.release()
        if not self.open:
            assert self.permits.acquire(timeout=WAIT_S)

    def leave_open(self) -> None:
        self.open = True
        self.permits.release(1000)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[EngineDriver]:
    made = EngineDriver(ScriptedEngine())
    made.start()
    yield made
    made.close(WAIT_S)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_scripted_engine_follows_the_protocol(check: object) -> None:
    check(ScriptedEngine())  # type: ignore[operator]


def test_a_wrong_engine_does_not_pass_the_checks() -> None:
    class Forgetful(ScriptedEngine):
        def _finish(self, context):  # type: ignore[no-untyped-def, override]
            context.token_ids.pop()
            ScriptedEngine._finish(context)

    with pytest.raises(AssertionError):
        check_engine(Forgetful)


def test_runs_what_is_submitted(driver: EngineDriver) -> None:
    consumer = Consumer()
    driver.attach(consumer)
    driver.submit([Fill(1, [1, 2]), Generate(1, greedy(3))])
    events = consumer.until()
    assert isinstance(events[0], Filled)
    assert driver.num_contexts == 1
    assert driver.stats().generated_tokens == 3
    driver.submit([FreeContext(1), Fill(2, [1]), Generate(2, greedy(1))])
    consumer.until()
    assert driver.num_contexts == 1


def test_many_threads_submit(driver: EngineDriver) -> None:
    consumer = Consumer()
    driver.attach(consumer)
    threads = [
        threading.Thread(target=lambda n=n: driver.submit([Fill(n, [n]), Generate(n, greedy(5))]))
        for n in range(1, 21)
    ]
    for thread in threads:
        thread.start()
    events = consumer.until(finished=20)
    for n in range(1, 21):
        own = [e for e in events if e.context_id == n and isinstance(e, Generated)]
        assert sum(len(e.token_ids) for e in own) == 5


def test_reset_frees_all_and_nothing_old_arrives_later(gate: Gate) -> None:
    engine = ScriptedEngine(before_step=gate)
    driver = EngineDriver(engine)
    driver.start()
    driver.attach(Consumer())
    driver.submit([Fill(1, [1]), Generate(1, greedy(400))])
    assert gate.entered.acquire(timeout=WAIT_S)
    gate.leave_open()
    driver.attach(None)
    assert driver.reset(WAIT_S)
    assert driver.num_contexts == 0
    assert driver.stats().contexts == 0
    fresh = Consumer()
    driver.attach(fresh)
    driver.submit([Fill(1, [9]), Generate(1, greedy(2))])
    events = fresh.until()
    assert isinstance(events[0], Filled)
    assert sum(len(e.token_ids) for e in events if isinstance(e, Generated)) == 2
    driver.close(WAIT_S)


def test_a_full_queue_fails_what_does_not_fit_but_takes_frees(gate: Gate) -> None:
    driver = EngineDriver(ScriptedEngine(before_step=gate), max_pending=4)
    driver.start()
    consumer = Consumer()
    driver.attach(consumer)
    driver.submit([Fill(1, [1]), Generate(1, greedy(400))])
    assert gate.entered.acquire(timeout=WAIT_S)
    # The thread is inside a step: nothing is taken from the queue now.
    driver.submit([Fill(2, [1]), Fill(3, [1]), Fill(4, [1])])
    driver.submit([Fill(5, [1]), Generate(5, greedy(1)), FreeContext(1)])
    gate.leave_open()
    events = consumer.until(Failed)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert (failed.context_id, failed.code) == (5, "overloaded")
    driver.submit([Generate(2, greedy(1))])
    consumer.until()
    assert driver.num_contexts == 3
    driver.close(WAIT_S)


def test_an_engine_whose_step_raises_is_given_up() -> None:
    broken = threading.Event()

    def before_step() -> None:
        if broken.is_set():
            raise RuntimeError("out of paper")

    crashes: queue.Queue[Exception] = queue.Queue()
    driver = EngineDriver(ScriptedEngine(before_step=before_step), on_crash=crashes.put)
    driver.start()
    consumer = Consumer()
    driver.attach(consumer)
    driver.submit([Fill(1, [1]), Fill(2, [1])])
    consumer.until(Filled)
    broken.set()
    driver.submit([Generate(1, greedy(400))])
    failed = [e for e in consumer.until(Failed)[-1:] + consumer.rest if isinstance(e, Failed)]
    assert [(e.context_id, e.code) for e in failed] == [(1, "engine_lost"), (2, "engine_lost")]
    assert all("paper" not in e.message for e in failed)
    assert "paper" in str(crashes.get(timeout=WAIT_S))
    assert driver.crashed
    with pytest.raises(DriverStoppedError):
        driver.submit([Fill(2, [1])])
    assert driver.reset(WAIT_S)
    driver.close(WAIT_S)


def test_a_failing_consumer_does_not_stop_the_engine(driver: EngineDriver) -> None:
    called = threading.Event()

    def consumer(events: list[Event]) -> None:
        called.set()
        raise ValueError("no")

    driver.attach(consumer)
    driver.submit([Fill(1, [1])])
    assert called.wait(WAIT_S)
    good = Consumer()
    driver.attach(good)
    driver.submit([Generate(1, greedy(1))])
    good.until()


@pytest.mark.parametrize("started", [True, False])
def test_close_closes_the_engine(started: bool) -> None:
    engine = ScriptedEngine()
    driver = EngineDriver(engine)
    if started:
        driver.start()
    driver.close(WAIT_S)
    driver.close(WAIT_S)
    assert engine.closed
    with pytest.raises(DriverStoppedError):
        driver.submit([Fill(1, [1])])


class Caching(ScriptedEngine):
    """Caches a block for each Fill, named by its first token."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, reports_blocks=True)
        self._cached: list[int] = []
        self._new: list[int] = []

    def submit(self, primitives: Sequence[Primitive]) -> None:
        fills = [p.token_ids[0] for p in primitives if isinstance(p, Fill)]
        self._cached += fills
        self._new += fills
        super().submit(primitives)

    def take_block_changes(self, *, everything: bool = False) -> BlockChanges:
        told, self._new = self._cached if everything else self._new, []
        return BlockChanges(list(told), [])


def test_what_is_cached_is_told_to_whoever_attaches_and_then_what_changes() -> None:
    driver = EngineDriver(Caching())
    driver.start()
    told: queue.Queue[BlockChanges] = queue.Queue()
    consumer = Consumer()
    driver.attach(consumer, told.put)
    driver.submit([Fill(1, [7]), Generate(1, greedy(1))])
    consumer.until()
    assert told.get(timeout=WAIT_S).stored == [7]
    # Somebody new, who knows nothing, is told although the engine has nothing to do.
    driver.attach(consumer, told.put)
    assert told.get(timeout=WAIT_S).stored == [7]
    driver.attach(consumer)
    driver.submit([Fill(2, [8]), Generate(2, greedy(1))])
    consumer.until()
    driver.close(WAIT_S)
    assert told.empty()


class WorkingAhead(ScriptedEngine):
    """Has three pieces of work for when it is idle; the last may be one that fails."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.prepared = 0
        self.is_over = threading.Event()
        self._fails = fails

    def prepare(self) -> bool:
        self.prepared += 1
        if self.prepared < 3:
            return True
        self.is_over.set()
        if self._fails:
            raise RuntimeError("no graph can be captured")
        return False


@pytest.mark.parametrize("fails", [False, True])
def test_an_idle_engine_works_ahead_until_nothing_is_left(*, fails: bool) -> None:
    engine = WorkingAhead(fails=fails)
    driver = EngineDriver(engine)
    driver.start()
    assert engine.is_over.wait(WAIT_S)
    consumer = Consumer()
    driver.attach(consumer)
    driver.submit([Fill(1, [1]), Generate(1, greedy(2))])
    consumer.until()
    driver.close(WAIT_S)
    assert engine.prepared == 3
    assert not driver.crashed


def test_steps_come_before_work_ahead() -> None:
    engine = WorkingAhead()
    prepared: list[int] = []
    engine._before_step = lambda: prepared.append(engine.prepared)
    driver = EngineDriver(engine)
    consumer = Consumer()
    driver.attach(consumer)
    # Waiting already when the driver's thread starts.
    driver.submit([Fill(1, [1]), Generate(1, greedy(5))])
    driver.start()
    consumer.until()
    driver.close(WAIT_S)
    assert prepared
    assert set(prepared) == {0}
