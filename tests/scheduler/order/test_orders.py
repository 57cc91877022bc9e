"""Orders: who goes first, fairness between tenants, and that nobody starves."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.order import POLICIES
from parrot_scheduler.order.fair import BATCH_SHARE, Fair, charge_of
from parrot_scheduler.order.ranked import AGING_SHARE
from parrot_scheduler.policy import OrderPolicy
from parrot_scheduler.task import GroupRef, Objective, Task
from parrot_scheduler.task_state import Application, TaskState

CONFIG = SchedulerConfig(starvation_s=60.0, max_tenants=4)
WHAT = ["push", "push", "push", "pop", "remove", "block", "unblock", "update", "end"]
LATENCY = Objective("latency")
BATCH = Objective()


class Queue:
    """An order, driven as the scheduler drives it, with time and applications."""

    def __init__(self, name: str) -> None:
        self.order: OrderPolicy = POLICIES[name](CONFIG, random.Random(0))
        self.now = 0.0
        self.applications: dict[str, Application] = {}
        self._ids = count(1)

    def application(self, name: str, tenant: str = "t", template: str = "") -> Application:
        if name not in self.applications:
            templates = [template] if template else []
            self.applications[name] = Application(
                name, tenant, self.now, sequence=len(self.applications), templates=templates
            )
        return self.applications[name]

    def push(
        self,
        application: str,
        tenant: str = "t",
        *,
        prompt: int = 100,
        output: int = 10,
        objective: Objective = BATCH,
        priority: int = 0,
        successors: int = 0,
        groups: tuple[GroupRef, ...] = (),
        template: str = "",
    ) -> TaskState:
        number = next(self._ids)
        task = Task(
            number,
            "m",
            tenant,
            application,
            prompt,
            output,
            objective=objective,
            groups=groups,
            template=template,
        )
        timed = objective.kind == "deadline" and objective.seconds is not None
        state = TaskState(
            task,
            number,
            self.now,
            output,
            objective,
            groups,
            priority,
            successors,
            status="queued",
            deadline=self.now + (objective.seconds or 0.0) if timed else None,
        )
        self.order.push(state, self.application(application, tenant, template), self.now)
        return state

    def pop(self) -> TaskState:
        state = self.order.first(self.now)
        assert state is not None
        application = self.applications[state.task.application]
        self.order.pop(state, application, self.now)
        state.status = "placed"
        state.placed_at = self.now
        return state

    def finish(self, state: TaskState, generated: int | None = None, cached: int = 0) -> None:
        application = self.applications[state.task.application]
        state.generated_tokens = state.expected_output if generated is None else generated
        state.cached_tokens = cached
        application.served_tokens += state.task.prompt_tokens - cached + state.generated_tokens
        self.order.finished(state, application, self.now)

    def run(self, state: TaskState) -> None:
        self.finish(state)

    def drain(self) -> list[TaskState]:
        return [self.pop() for _ in range(len(self.order))]


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_every_task_comes_out_once(name: str, data: st.DataObject) -> None:
    """Push, block, update and remove tasks in between."""
    queue = Queue(name)
    queued: dict[TaskState, None] = {}
    blocked: dict[TaskState, None] = {}
    placed: list[TaskState] = []
    for _ in range(data.draw(st.integers(1, 60))):
        queue.now += data.draw(st.sampled_from([0.0, 0.1, 40.0]))
        what = data.draw(st.sampled_from(WHAT))
        some = data.draw(st.sampled_from(list(queued))) if queued else None
        if what == "push":
            tenant = data.draw(st.sampled_from("abcdef"))
            groups = data.draw(st.sampled_from([(), (GroupRef("g", 3),)]))
            objective = data.draw(st.sampled_from([BATCH, LATENCY, Objective("deadline", 3.0)]))
            state = queue.push(
                f"{tenant}{data.draw(st.integers(0, 2))}",
                tenant,
                groups=groups,
                objective=objective,
                output=data.draw(st.integers(1, 300)),
                priority=data.draw(st.integers(-1, 1)),
                template=tenant,
            )
            queued[state] = None
        elif what == "pop" and len(queued) > len(blocked):
            state = queue.pop()
            assert state in queued
            assert state not in blocked
            del queued[state]
            placed.append(state)
        elif what == "remove" and some is not None:
            queue.order.remove(some)
            queue.order.remove(some)
            del queued[some]
            blocked.pop(some, None)
        elif what == "block" and len(queued) > len(blocked):
            first = queue.order.first(queue.now)
            assert first is not None
            queue.order.block(first)
            blocked[first] = None
        elif what == "unblock":
            queue.order.unblock(queue.now)
            blocked.clear()
        elif what == "update" and some is not None:
            some.priority = data.draw(st.integers(-300, 300))
            some.objective = data.draw(st.sampled_from([BATCH, LATENCY]))
            some.groups = data.draw(st.sampled_from([(), (GroupRef("h", 3),)]))
            application = queue.applications[some.task.application]
            queue.order.update(some, application, queue.now)
        elif what == "end" and placed:
            queue.finish(placed.pop(0), data.draw(st.integers(0, 300)))
        assert len(queue.order) == len(queued)
    queue.order.unblock(queue.now)
    assert set(queue.drain()) == set(queued)
    assert queue.order.first(queue.now) is None


def test_first_come_first_served() -> None:
    queue = Queue("fcfs")
    states = [queue.push(name, priority=-i) for i, name in enumerate("abab")]
    assert queue.drain() == states


def test_application_fifo_serves_the_earliest_application_first() -> None:
    """The order that the paper shows for interleaved chains: all of the first one's calls."""
    queue = Queue("application-fifo")
    a, b = queue.push("a"), queue.push("b")
    assert queue.pop() is a
    queue.finish(a)
    a_again = queue.push("a")
    assert queue.drain() == [a_again, b]


def test_plas_serves_the_application_that_had_least() -> None:
    queue = Queue("plas")
    queue.finish(_placed(queue, queue.push("old", output=500)))
    queue.finish(_placed(queue, queue.push("young", output=5)))
    old, young, new = queue.push("old"), queue.push("young"), queue.push("new")
    assert queue.drain() == [new, young, old]


def test_atlas_counts_the_longest_chain_where_plas_counts_all() -> None:
    ranks = {}
    for name in ("plas", "atlas"):
        queue = Queue(name)
        wide = [queue.push("wide") for _ in range(4)]
        for state in wide:
            assert queue.pop() is state
        for state in wide:
            queue.finish(state)
        queue.finish(_placed(queue, queue.push("chain", output=100)))
        ranks[name] = queue.push("wide"), queue.push("chain"), queue.drain()
    wide_call, chain_call, drained = ranks["atlas"]
    assert drained == [wide_call, chain_call]
    wide_call, chain_call, drained = ranks["plas"]
    assert drained == [chain_call, wide_call]


def test_atlas_adds_up_calls_that_ran_one_after_another() -> None:
    queue = Queue("atlas")
    for _ in range(3):
        queue.finish(_placed(queue, queue.push("chain", output=100)))
    queue.finish(_placed(queue, queue.push("long", output=300)))
    chain_call, long_call = queue.push("chain"), queue.push("long")
    assert queue.drain() == [long_call, chain_call]


def _placed(queue: Queue, state: TaskState) -> TaskState:
    assert queue.pop() is state
    return state


# Fair


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 4000), st.integers(1, 1000)), min_size=40, max_size=120
    ),
    few=st.integers(1, 30),
)
@settings(max_examples=50, deadline=None)
def test_backlogged_tenants_are_served_the_same_up_to_one_task(
    sizes: list[tuple[int, int]], few: int
) -> None:
    """The bound: charges differ by at most the largest charge of one task."""
    queue = Queue("fair")
    for number, (prompt, output) in enumerate(sizes):
        # One tenant has many applications, the other few.
        queue.push(f"a{number}", "a", prompt=prompt, output=output)
        queue.push(f"b{number % few}", "b", prompt=output, output=prompt)
    bound = max(max(p + 2 * o, o + 2 * p) for p, o in sizes)
    served = {"a": 0.0, "b": 0.0}
    left = {"a": len(sizes), "b": len(sizes)}
    while all(left.values()):
        state = queue.pop()
        queue.finish(state)
        served[state.task.tenant] += charge_of(state, 0, state.expected_output)
        left[state.task.tenant] -= 1
        assert abs(served["a"] - served["b"]) <= bound


def test_only_uncached_tokens_are_charged() -> None:
    queue = Queue("fair")
    for _ in range(2):
        state = queue.push("a", "a", prompt=1000, output=10)
        before = queue.order.service_by_tenant()["a"]
        state.expected_cached = 900
        _placed(queue, state)
        # While it runs by what was expected, in the end by what was found.
        assert queue.order.service_by_tenant() == {"a": before + 100 + 2 * 10}
        queue.finish(state, cached=990)
    assert queue.order.service_by_tenant() == {"a": 2 * (10 + 2 * 10)}


def test_a_tenant_that_comes_back_does_not_make_up_for_its_absence() -> None:
    queue = Queue("fair")
    queue.finish(_placed(queue, queue.push("b", "b")))
    for _ in range(50):
        queue.finish(_placed(queue, queue.push("a", "a")))
    for _ in range(10):
        queue.push("a", "a")
        queue.push("b", "b")
    first = [state.task.tenant for state in (queue.pop() for _ in range(10))]
    assert 4 <= first.count("b") <= 6


def test_priority_counts_within_a_tenant_only() -> None:
    queue = Queue("fair")
    low, high = queue.push("a", "a", priority=5), queue.push("b", "a", priority=-5)
    other = queue.push("c", "c", priority=100)
    drained = queue.drain()
    assert drained.index(high) < drained.index(low)
    assert drained.index(other) < 2


def test_deadlines_by_slack_across_applications_and_before_batch() -> None:
    queue = Queue("fair")
    batch = queue.push("batch")
    late = queue.push("late", objective=Objective("deadline", 100.0), output=10)
    # A later deadline, but so much work before it that it has to start sooner.
    long = queue.push("long", objective=Objective("deadline", 110.0), output=1000, successors=1)
    soon = queue.push("soon", objective=Objective("ttft", 1.0))
    assert queue.drain() == [soon, long, late, batch]


def test_of_calls_that_are_due_together_the_longest_chain_starts_first() -> None:
    queue = Queue("fair")
    short = queue.push("a", objective=LATENCY)
    long = queue.push("a", objective=LATENCY, successors=5)
    assert queue.drain() == [long, short]


def test_batch_gets_its_share_beside_urgent_calls() -> None:
    queue = Queue("fair")
    for number in range(40):
        queue.push(f"batch{number}")
        queue.push(f"chat{number}", objective=LATENCY)
    kinds = [state.objective.kind for state in (queue.pop() for _ in range(4 * BATCH_SHARE))]
    assert kinds.count("throughput") == 4


@pytest.mark.parametrize(("seen", "overtakes"), [(2, False), (3, True)])
def test_applications_of_a_known_kind_go_by_their_whole_work(seen: int, overtakes: bool) -> None:
    """A small one that comes later overtakes a large one, once three of each kind have ended."""
    queue = Queue("fair")

    def run_one(name: str, template: str, calls: int) -> None:
        for _ in range(calls):
            queue.finish(_placed(queue, queue.push(name, template=template)))
        queue.order.application_finished(queue.applications[name], queue.now)

    for number in range(seen):
        run_one(f"large{number}", "large", 12)
        run_one(f"small{number}", "small", 1)
    large = queue.push("large", template="large")
    small = queue.push("small", template="small")
    assert queue.drain() == ([small, large] if overtakes else [large, small])


def test_a_new_application_is_admitted_behind_what_came_before_others_were_served() -> None:
    """Virtual time goes on: else whatever is new would go before all that returns."""
    queue = Queue("fair")
    queue.run(_placed(queue, queue.push("old")))
    for _ in range(10):
        queue.run(_placed(queue, queue.push("busy", "other")))
    held = queue.push("old")
    returning = queue.order.admission_rank(held, queue.application("old"), queue.now)
    queue.order.remove(held)
    newcomer = replace(held, task=replace(held.task, application="new"))
    new = queue.order.admission_rank(newcomer, queue.application("new"), queue.now)
    assert returning.tenant == new.tenant == "t"
    assert returning.rank < new.rank
    # But not one that has done more than anybody.
    queue.finish(_placed(queue, queue.push("old", output=900)))
    returning = queue.order.admission_rank(held, queue.application("old"), queue.now)
    assert new.rank < returning.rank


def test_an_unknown_application_falls_behind_as_it_goes_on() -> None:
    queue = Queue("fair")
    queue.finish(_placed(queue, queue.push("long", output=900)))
    long, new = queue.push("long"), queue.push("new")
    assert queue.drain() == [new, long]


def test_what_is_foretold_counts_from_the_first_task_on_and_does_not_grow() -> None:
    queue = Queue("fair")
    long, short = queue.push("long", successors=5), queue.push("short", successors=1)
    assert queue.pop() is short
    queue.finish(queue.pop())
    # Half of its work is done: it is still before one that comes now and is as long.
    rest = queue.push("long", successors=4)
    queue.push("new", successors=5)
    assert queue.pop() is rest
    assert long is not rest


def test_a_large_application_does_not_wait_for_all_that_come_after_it() -> None:
    """Virtual time goes on with what is served: later small ones end up behind it."""
    queue = Queue("fair")
    large = queue.push("large", output=3000)
    for number in range(200):
        queue.push(f"small{number}", output=300)
        state = queue.pop()
        if state is large:
            break
        queue.finish(state)
    assert state is large


def test_within_an_application_the_longest_path_first() -> None:
    queue = Queue("fair")
    short = queue.push("a", output=10)
    deep = queue.push("a", output=10, successors=3)
    long = queue.push("a", output=100)
    assert queue.drain() == [long, deep, short]


def test_a_group_goes_by_its_slowest_member_and_stays_together() -> None:
    queue = Queue("fair")
    group = (GroupRef("g", 3),)
    members = [queue.push("a", output=output, groups=group) for output in (5, 7)]
    single = queue.push("a", output=50)
    slowest = queue.push("a", output=100, groups=group)
    assert queue.drain() == [slowest, members[1], members[0], single]


@pytest.mark.parametrize("name", ["fair", "plas", "atlas"])
def test_nobody_starves(name: str) -> None:
    """A task that waited too long is placed within `AGING_SHARE` placements, whatever comes."""
    queue = Queue(name)
    queue.finish(_placed(queue, queue.push("greedy", "g", prompt=10**6, output=10**5)))
    victim = queue.push("greedy", "g", priority=100)
    for number in range(30):
        queue.push(f"a{number}", "g", objective=LATENCY)
        assert queue.pop() is not victim
        queue.now += 1.9
    queue.now += 10.0
    placements = 0
    while True:
        placements += 1
        queue.push(f"b{placements}", "g", objective=LATENCY, priority=-5)
        if queue.pop() is victim:
            break
    assert placements <= AGING_SHARE


def test_tenants_are_forgotten_only_when_nothing_of_them_waits() -> None:
    queue = Queue("fair")
    waiting = [queue.push(f"w{number}", f"w{number}") for number in range(6)]
    for number in range(20):
        state = queue.push(f"x{number}", f"x{number}")
        queue.order.remove(state)
    assert isinstance(queue.order, Fair)
    assert len(queue.order.service_by_tenant()) <= 8
    assert set(queue.drain()) == set(waiting)


def test_the_tenant_that_came_longest_ago_is_forgotten() -> None:
    queue = Queue("fair")
    for tenant in ("a", "b", "c", "d", "a", "e"):
        queue.order.remove(queue.push(f"of-{tenant}", tenant))
    assert set(queue.order.service_by_tenant()) == {"a", "c", "d", "e"}


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 9)), max_size=200))
def test_a_heap_follows_keys_that_change(changes: list[tuple[int, int | None]]) -> None:
    """None stands for leaving; it agrees with a plain search for the smallest key at any time."""
    heap: LazyHeap[int] = LazyHeap()
    keys: dict[int, int] = {}
    for item, key in changes:
        if key is None:
            assert heap.remove(item) == (keys.pop(item, None) is not None)
        else:
            heap.push(item, key)
            keys[item] = key
        assert heap.first_key() == min(keys.values(), default=None)
        assert len(heap) == len(keys)
        assert not keys or keys[heap.first() or 0] == heap.first_key()


def test_a_task_that_waits_alone_is_ranked_by_what_was_known_when_it_came() -> None:
    """Others end faster than expected meanwhile, so that it could begin later."""
    queue = Queue("fair")
    for number in range(80):
        queue.push(f"a{number}")
    running = queue.drain()
    alone = queue.push("alone", output=100, objective=Objective("deadline", 10.0))
    queue.now = 0.01
    for state in running:
        queue.finish(state)
    later = queue.push("later", objective=Objective("deadline", 9.0))
    assert queue.drain() == [alone, later]
