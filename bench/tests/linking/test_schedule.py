"""Sessions are interleaved as their clients would send them."""

from __future__ import annotations

from parrot_bench.linking.adversarial import adversarial
from parrot_bench.linking.applications import applications
from parrot_bench.linking.schedule import Event, schedule
from parrot_bench.linking.script import Script


def test_every_call_is_sent_and_answered_once_after_what_it_waits_for() -> None:
    scripts = applications(18, seed=1)
    events = list(schedule(scripts, live=6))
    calls = {call.id for script in scripts for call in script.calls.values()}
    assert sorted(event.call.id for event in events if event.what == "request") == sorted(calls)
    assert sorted(event.call.id for event in events if event.what == "answer") == sorted(calls)
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    answered: set[str] = set()
    for event in events:
        if event.what == "request":
            assert answered.issuperset(event.call.after)
        else:
            answered.add(event.call.id)


def test_no_more_sessions_run_than_are_live() -> None:
    scripts = applications(30, seed=1)
    left = {script.session: 2 * len(script.calls) for script in scripts}
    running: set[str] = set()
    for event in schedule(scripts, live=5):
        running.add(event.call.session)
        assert len(running) <= 5
        left[event.call.session] -= 1
        if not left[event.call.session]:
            running.remove(event.call.session)


def test_equal_seeds_give_equal_schedules() -> None:
    def run(seed: int) -> list[tuple[float, str]]:
        return [(event.at_s, event.call.id) for event in schedule(applications(9, 0), seed=seed)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_sessions_of_one_task_begin_in_the_same_moment() -> None:
    scripts = adversarial("equal_trials", range(20))
    begins = first_requests(list(schedule(scripts, live=20, start="tasks")))
    by_task: dict[str, set[float]] = {}
    for script in scripts:
        by_task.setdefault(script.task, set()).add(begins[script.session])
    assert {len(times) for times in by_task.values()} == {1}
    assert len({times.pop() for times in by_task.values()}) == 4


def test_a_call_without_an_answer_ends_at_once() -> None:
    script = Script("s")
    script.chat([{"role": "user", "content": "Hello?"}], None)
    assert [event.what for event in schedule([script])] == ["request"]


def first_requests(events: list[Event]) -> dict[str, float]:
    found: dict[str, float] = {}
    for event in events:
        found.setdefault(event.call.session, event.at_s)
    return found
