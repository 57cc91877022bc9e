"""Explanations of placements, and how long they are remembered."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from harness.gateway.scripted_remote import SYSTEM, fills, small_engine
from harness.gateway.serving import Service, serving
from harness.own_policies import STAYS
from harness.waiting import until
from parrot_scheduler.actions import Alternative, Reasons
from parrot_scheduler.task import LATENCY, GroupRef, Task

from parrot_gateway.routing.explanations import MAX_CALLS, Explanations, seconds_text
from parrot_gateway.settings.model import SchedulerSettings

KEY = ("tenant", "call_1")


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


def a_task(**more: object) -> Task:
    return Task(1, "m", "tenant", "app", 2040, 16, objective=LATENCY, **more)  # type: ignore[arg-type]


def reasons(decided_by: str, waited_s: float = 0.0, held_s: float = 0.0) -> Reasons:
    others = (
        Alternative("e2", 1812, 3, 0.31, has_room=True),
        Alternative("e0", 0, 0, 0.52, has_room=True),
        Alternative("e1", 16, 4, 0.61, has_room=False),
    )
    return Reasons("p", decided_by, waited_s, held_s, 1812, 16, 3, 1.0, alternatives=others)


def told(why: Reasons, **more: object) -> str:
    explanations = Explanations(lambda each: f"engine-{each[1:]}", Clock())
    explanations.submitted(KEY, a_task(**more))
    explanations.placed(KEY, "e2", why)
    found = explanations.of(*KEY)
    assert found is not None
    return str(found["text"])


def test_a_sentence_has_when_where_why_and_what_else() -> None:
    assert told(reasons("prefix", waited_s=0.4)) == (
        "Ran on engine-2 after 0.40 s in the queue: 1,812 of its 2,040 prompt tokens were cached "
        "there (0.31 s to the end expected; engine-0, idle, would have taken 0.52 s; engine-1, "
        "without room, with 16 cached, would have taken 0.61 s)."
    )


@pytest.mark.parametrize(
    ("decided_by", "words"),
    [
        ("session", "at once: its session runs there, 1,812 of"),
        ("bound", "what it goes on from is there"),
        ("only", "the only engine that could take it"),
        ("preferred", "what it reads was written or filled there"),
        ("replicate", "were too busy"),
        ("starved", "an engine was kept free for it"),
        ("turn", "that engine's turn"),
        ("a policy of one's own", "at once: 1,812 of"),
    ],
)
def test_what_decided_is_said(decided_by: str, words: str) -> None:
    assert words in told(reasons(decided_by))


def test_a_group_is_said_with_its_size() -> None:
    text = told(reasons("group"), groups=(GroupRef("g", 16),))
    assert "its task group of 16 is kept together there, 1,812 of" in text


def test_held_and_queued_are_told_apart() -> None:
    text = told(reasons("load", waited_s=3.5, held_s=2.0))
    assert "after 2.00 s held with its application, until there was room and 1.50 s in" in text


def test_a_call_that_waits_says_for_what() -> None:
    clock = Clock()
    explanations = Explanations(str, clock)
    explanations.submitted(KEY, a_task())
    explanations.held("app", "the working set is full")
    clock.now += 1.5
    held = explanations.of(*KEY)
    explanations.released("app")
    queued = explanations.of(*KEY)
    explanations.ended(KEY, 0, succeeded=False)
    clock.now += 9
    ended = explanations.of(*KEY)
    assert held is not None
    assert queued is not None
    assert ended is not None
    assert held["text"] == (
        "Held for 1.50 s so far, with its whole application: the working set is full."
    )
    assert queued["text"] == "Waits for an engine with room, for 1.50 s so far."
    assert ended["text"] == "Ended after 1.50 s without a place on an engine."


def test_how_long_it_took_is_said_of_a_call_that_ended_well() -> None:
    clock = Clock()
    explanations = Explanations(str, clock)
    explanations.submitted(KEY, a_task())
    explanations.placed(KEY, "e2", reasons("load"))
    clock.now += 0.25
    explanations.ended(KEY, 1812, succeeded=True)
    found = explanations.of(*KEY)
    assert found
    assert found["text"].endswith("would have taken 0.61 s). It took 0.25 s.")


def test_calls_are_their_tenants_and_the_latest_are_remembered() -> None:
    explanations = Explanations(str, Clock())
    explanations.submitted(KEY, a_task())
    assert explanations.of("another", KEY[1]) is None
    for number in range(MAX_CALLS):
        explanations.submitted(("tenant", f"other_{number}"), a_task())
    assert len(explanations) == MAX_CALLS
    assert explanations.of(*KEY) is None
    # What is forgotten is passed over.
    explanations.placed(KEY, "e2", reasons("load"))
    explanations.ended(KEY, 0, succeeded=True)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ms"), (0.0312, "31 ms"), (0.52, "0.52 s"), (12.4, "12 s")]
)
def test_times_as_people_say_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


# -- through a gateway ----------------------------------------------------------------------


async def explanations_of(service: Service, session: str) -> list[str]:
    """Return the explanations of all calls of a session, in their order."""
    async with aiohttp.ClientSession(service.root) as http:
        graph = json.loads(await (await http.get(f"/v1/sessions/{session}/graph")).read())
    return [call["explanation"] for call in graph["calls"]]


async def test_a_session_that_stays_on_its_engine_is_said() -> None:
    policy = SchedulerSettings(policy=STAYS)
    async with serving(small_engine(), small_engine(), scheduler=policy) as service:
        await service.complete(prompt=SYSTEM, max_tokens=4, parrot={"session": "s"})
        await service.complete(prompt=SYSTEM + "Again.", max_tokens=4, parrot={"session": "s"})
        first, second = await explanations_of(service, "s")
    assert "its session" not in first
    assert " at once: its session runs there, " in second


async def test_a_group_that_is_kept_together_is_said() -> None:
    engines = [small_engine(automatic=False), small_engine(automatic=False)]

    def running() -> int:
        return sum(map(fills, engines))

    policy = SchedulerSettings(policy=STAYS)
    async with serving(*engines, scheduler=policy) as service:
        calls = []
        for number in range(3):
            call = service.complete(
                prompt=f"{number}", max_tokens=4, parrot={"session": "s", "group": "g"}
            )
            calls.append(asyncio.create_task(call))
            await until(lambda expected=number + 1: running() == expected)
        for engine in engines:
            engine.automatic = True
            engine.step()
        await asyncio.gather(*calls)
        *_, last = await explanations_of(service, "s")
    assert "its task group of 3 is kept together there" in last
