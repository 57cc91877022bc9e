"""A pool of engines for tests of policies, kept by the scheduler's own bookkeeping."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import count

from parrot_scheduler.config import SchedulerConfig
from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.placement import POLICIES
from parrot_scheduler.policy import Application, Choice, PlacePolicy, Wait
from parrot_scheduler.task import THROUGHPUT, EngineDescription, GroupRef, Objective, Task
from parrot_scheduler.task_state import Entry

BLOCK = 16
CONFIG = SchedulerConfig()


def chain(name: int, blocks: int) -> tuple[int, ...]:
    """Block hashes of a prompt that shares nothing with one of another name."""
    return tuple(name * 1_000_000 + i for i in range(blocks))


class Engines:
    """Engines `e0`, `e1`, … on rows of the same number, and one policy that places on them."""

    def __init__(
        self,
        policy: str | PlacePolicy,
        num: int,
        *,
        capacity: int = 100_000,
        max_batch: int = 64,
        block_tokens: int = BLOCK,
        reports: bool = True,
    ) -> None:
        self.pool = Pool("m")
        self.rows = [
            self.pool.join(
                EngineDescription(
                    f"e{i}", "m", capacity, max_batch, 2048, block_tokens, reports_blocks=reports
                )
            )
            for i in range(num)
        ]
        self.policy = (
            POLICIES[policy](CONFIG, random.Random(0)) if isinstance(policy, str) else policy
        )
        self.applications: dict[str, Application] = {}
        self._ids = count()

    def entry(
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
    ) -> Entry:
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
        )
        deadline = at + (objective.seconds or 0.0) if objective.kind == "deadline" else None
        return Entry(
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

    def application(self, entry: Entry) -> Application:
        """The task's application."""
        name = entry.task.application
        return self.applications.setdefault(name, Application(name, "t", entry.submitted_at))

    def ask(self, entry: Entry, now: float = 0.0) -> Choice | Wait | None:
        """What the policy says."""
        return self.policy.place(entry, self.application(entry), self.pool, now)

    def choose(self, entry: Entry, now: float = 0.0) -> Choice | None:
        """Where the policy would put it."""
        choice = self.ask(entry, now)
        return choice if isinstance(choice, Choice) else None

    def place(self, entry: Entry, now: float = 0.0) -> Choice | None:
        """Put it there, if anywhere."""
        choice = self.choose(entry, now)
        if choice is not None:
            self.put(entry, choice, now)
        return choice

    def put(self, entry: Entry, choice: Choice, now: float = 0.0) -> None:
        """Put it where a choice says."""
        self.pool.place(entry, choice.row, choice.expected_cached_tokens, now)
        self.policy.placed(entry, choice, self.pool, now)
        self.application(entry).last_engine = entry.engine_id

    def put_on(self, row: int, entry: Entry) -> Entry:
        """Put it on a row, whatever the policy thinks."""
        self.put(entry, Choice(row, "test", 0, 1, 0.0))
        return entry

    def fill(self, entry: Entry) -> None:
        """Its prompt has been computed, and an engine that reports has told so."""
        self.pool.progress(entry, entry.task.prompt_tokens, entry.expected_cached, 0)
        if entry.task.prefix:
            self.pool.prefixes.stored(entry.engine_row, entry.task.prefix)

    def end(self, entry: Entry) -> None:
        """It has ended."""
        self.pool.computed(entry)
        self.pool.release(entry)
        self.policy.ended(entry, self.pool, 0.0)

    def load(self, row: int, num: int, *, prompt: int = 500, output: int = 200) -> list[Entry]:
        """Unrelated tasks that decode on a row."""
        entries = [self.put_on(row, self.entry(prompt, output)) for _ in range(num)]
        for entry in entries:
            self.fill(entry)
        return entries
