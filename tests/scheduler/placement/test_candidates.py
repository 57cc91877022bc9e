"""The answers are the same if few engines are looked at or all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from harness.engine_pools import Engines, chain
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.events import EngineReport
from parrot_scheduler.placement import parrot
from parrot_scheduler.placement.candidates import Candidates, candidates
from parrot_scheduler.task import GroupRef, Objective, StepModel
from parrot_scheduler.task_state import Application, TaskState

OBJECTIVES = st.sampled_from(
    [
        Objective(),
        Objective("latency"),
        Objective("ttft", 0.05),
        Objective("tpot", 0.006),
        Objective("tpot", 1e-6),
        Objective("deadline", 2.0),
    ]
)
NEW = st.fixed_dictionaries(
    {
        "name": st.integers(0, 3),
        "blocks": st.integers(0, 40),
        "own": st.integers(0, 40),
        "output": st.integers(1, 400),
        "objective": OBJECTIVES,
        "group": st.sampled_from([None, None, "g", "h"]),
        "num_sequences": st.sampled_from([1, 1, 1, 2, 5]),
        "prefers": st.sampled_from([None, None, "e1", "e3"]),
        "application": st.sampled_from([None, "one", "other"]),
        "common_tokens": st.sampled_from([None, None, 0, 100, 300]),
        "seconds": st.sampled_from([0.0, 0.0, 0.1, 100.0]),
    }
)
STEPS = st.lists(
    st.one_of(
        NEW,
        st.tuples(st.sampled_from(["end", "fill"]), st.integers(0, 30)),
        st.tuples(st.sampled_from(["keep", "drain", "slow"]), st.integers(0, 5)),
    ),
    min_size=5,
    max_size=40,
)


def every_candidate(
    state: TaskState,
    application: Application,
    pool: EnginePool,
    _also: int,
    breaks: Callable[[int, float], int] | None,
    avoided: int,
) -> Candidates | None:
    """The engines that a task may be placed on, with all of them looked at."""
    return candidates(state, application, pool, pool.accepting, breaks, avoided)


def outcomes(num: int, steps: list[Any]) -> list[Any]:
    """Return the policy's choice for each new task."""
    engines = Engines("parrot", num, capacity=3_000, max_batch=4)
    placed: list[TaskState] = []
    said: list[Any] = []
    now = 0.0
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            what, which = step
            if what in ("end", "fill") and placed:
                state = placed[which % len(placed)]
                engines.fill(state) if what == "fill" else engines.end(state)
                if what == "end":
                    placed.remove(state)
            elif what == "keep":
                engines.pool.retain(which % num, 700.0)
            elif what == "drain" and which and which < num:
                engines.pool.drain(which)
            elif what == "slow" and which < num:
                model = StepModel(0.02, 1e-6, 1e-4)
                engines.pool.report(which, EngineReport(f"e{which}", 0, 0, 0.0, model))
            continue
        now += step["seconds"]
        state = engines.state(
            16 * (step["blocks"] + step["own"]) + 5,
            step["output"],
            chain(step["name"], step["blocks"]) + chain(100 + number, step["own"]),
            objective=step["objective"],
            groups=(GroupRef(step["group"], 3),) if step["group"] else (),
            num_sequences=step["num_sequences"],
            prefers=step["prefers"],
            application=step["application"],
            common_tokens=step["common_tokens"],
            at=now,
        )
        choice = engines.place(state, now)
        if choice is None:
            choice = engines.choose(state, now + 1000.0)
        else:
            placed.append(state)
        said.append(None if choice is None else asdict(replace(choice, compared=())))
    return said


@settings(max_examples=300, deadline=None)
@given(num=st.integers(1, 8), steps=STEPS)
def test_few_engines_or_all_of_them_the_answer_is_the_same(num: int, steps: list[Any]) -> None:
    few = outcomes(num, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parrot, "candidates", every_candidate)
        assert outcomes(num, steps) == few
