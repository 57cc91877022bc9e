"""A pool of engines for tests of policies, kept by the scheduler's own bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.policies import policies_of, preset_of
from parrot_scheduler.policy import EngineChoice, PlacementPolicy
from parrot_scheduler.task import THROUGHPUT, EngineDescription, GroupRef, Objective, Task
from parrot_scheduler.task_state import Application, TaskState

BLOCK = 16
CONFIG = SchedulerConfig()


def chain(name: int, blocks: int) -> tuple[int, ...]:
    """Block hashes of a prompt that shares nothing with one of another name."""
    return tuple(name * 1_000_000 + i for i in range(blocks))


class Engines:
    """Engines `e0`, `e1`, … on rows of the same number, and one policy that places on them."""

    def __init__(
        self,
        policy: str | PlacementPolicy,
        num: int,
        *,
        capacity: int = 100_000,
        max_batch: int = 64,
        block_tokens: int = BLOCK,
        reports: bool = True,
    ) -> None:
        self.pool = EnginePool("m")
        self.rows = [
            self.pool.join(
                EngineDescription(
                    f"e{i}", "m", capacity, max_batch, 2048, block_tokens, reports_blocks=reports
                )
            )
            for i in range(num)
        ]
        if isinstance(policy, str):
            config = preset_of(policy)
            policy = policies_of(config).placement(config, random.Random(0))
        self.policy = policy
        self.applications: dict[str, Application] = {}
        self._ids = count()

    def state(
        self,
        prompt: int,
        output: int,
        prefix: Sequence[int] = (),
        *,
        objective: Objective = THROUGHPUT,
        groups: tuple[GroupRef, ...] = (),
        application: str | None = None,
        num_sequences: int = 1,
        prefers: str | None = None,
        at: float = 0.0,
        template: str = "",
        template_tokens: int = 0,
        returns: float = 0.0,
        common_tokens: int | None = None,
    ) -> TaskState:
        """A submitted task."""
        number = next(self._ids)
        task = Task(
            id=number,
            model="m",
            tenant="t",
            application=application or f"app-{number}",
            prompt_tokens=prompt,
            max_tokens=output,
            prefix=tuple(prefix),
            template=template,
            template_tokens=template_tokens,
            objective=objective,
            groups=groups,
            num_sequences=num_sequences,
            prefers=prefers,
            returns=returns,
            common_tokens=common_tokens,
        )
        deadline = at + (objective.seconds or 0.0) if objective.kind == "deadline" else None
        return TaskState(
            task=task,
            sequence=number,
            submitted_at=at,
            expected_output=output * num_sequences,
            objective=objective,
            groups=groups,
            priority=0,
            successors=0,
            deadline=deadline,
        )

    def application(self, state: TaskState) -> Application:
        """The task's application."""
        name = state.task.application
        return self.applications.setdefault(name, Application(name, "t", state.submitted_at))

    def ask(self, state: TaskState, now: float = 0.0) -> EngineChoice | None:
        """Return the policy's choice."""
        return self.policy.place(state, self.application(state), self.pool, now)

    def choose(self, state: TaskState, now: float = 0.0) -> EngineChoice | None:
        """Where the policy would put it."""
        choice = self.ask(state, now)
        return choice if isinstance(choice, EngineChoice) else None

    def place(self, state: TaskState, now: float = 0.0) -> EngineChoice | None:
        """Put it there, if anywhere."""
        choice = self.choose(state, now)
        if choice is not None:
            self.put(state, choice, now)
        return choice

    def put(self, state: TaskState, choice: EngineChoice, now: float = 0.0) -> None:
        """Put it where a choice says."""
        self.pool.place(state, choice.row, choice.expected_cached_tokens, now)
        self.policy.placed(state, choice, self.pool, now)
        self.application(state).last_engine = state.engine_id

    def put_on(self, row: int, state: TaskState) -> TaskState:
        """Put it on a row, whatever the policy thinks."""
        self.put(state, EngineChoice(row, "test", 0, 1, 0.0))
        return state

    def fill(self, state: TaskState) -> None:
        """Its prompt has been computed, and an engine that reports has told so."""
        self.pool.progress(state, state.task.prompt_tokens, state.expected_cached, 0)
        if state.task.prefix:
            self.pool.prefixes.stored(state.engine_row, state.task.prefix)

    def end(self, state: TaskState) -> None:
        """It has ended."""
        self.pool.computed(state)
        self.pool.release(state)
        self.policy.ended(state, self.pool, 0.0)

    def load(self, row: int, num: int, *, prompt: int = 500, output: int = 200) -> list[TaskState]:
        """Unrelated tasks that decode on a row."""
        states = [self.put_on(row, self.state(prompt, output)) for _ in range(num)]
        for state in states:
            self.fill(state)
        return states
