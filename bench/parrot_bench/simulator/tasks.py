"""Calls that have reached the server: as tasks for the scheduler, as sequences for engines."""

from __future__ import annotations

from typing import Any

from parrot_scheduler.task import LATENCY, BlockHash, GroupRef, Task, TaskId

from parrot_bench.simulator.clients import RunningCall
from parrot_bench.simulator.engines.prompts import HashedPrompt, PromptMaker, stable_hash
from parrot_bench.simulator.engines.sequences import EngineSequence
from parrot_bench.simulator.knowledge import Informant
from parrot_bench.simulator.options import SimulationOptions
from parrot_bench.simulator.plan import ClientMode, Segment

#: Beginnings of prompts whose names are remembered.
MAX_BEGINNINGS = 10_000


class TaskMaker:
    """Makes tasks of calls, as much as the server of a mode can know, and sequences."""

    def __init__(self, options: SimulationOptions) -> None:
        self._mode: ClientMode = options.mode
        self._informant: Informant | None = None
        if options.knowledge is not None:
            self._informant = Informant(options.knowledge, options.seed)
        self._share_tenants = options.share_tenants
        #: Tokens of a block of the engines' caches; None without any.
        block_tokens = next(iter(options.block_sizes), None)
        self._hashed = block_tokens is not None
        self._prompts = PromptMaker(block_tokens or 16)
        self._beginnings: dict[Segment, str] = {}

    def make(self, task_id: TaskId, call: RunningCall) -> tuple[Task, EngineSequence]:
        application, plan = call.run.plan, call.plan
        salt = "" if self._share_tenants else application.tenant
        prompt = self._prompts.make(salt, plan.prompt)
        task = self._task(task_id, call, prompt)
        output = None
        if plan.output_tokens and self._hashed:
            content = ("output", application.id, plan.index)
            output = self._prompts.behind(prompt, Segment(content, plan.output_tokens))
        sequence = EngineSequence(
            task_id,
            prompt,
            plan.output_tokens,
            max_tokens=plan.max_tokens,
            output_part=output,
            application=task.application,
        )
        return task, sequence

    def ended(self, call: RunningCall, now: float) -> None:
        """A call has all of its output."""
        if self._informant is not None:
            self._informant.ended(call, now)

    def _task(self, task_id: TaskId, call: RunningCall, prompt: HashedPrompt) -> Task:
        application, plan = call.run.plan, call.plan
        prefix: tuple[BlockHash, ...] = prompt.hashes() if self._hashed else ()
        first: Segment = plan.prompt[0]
        name = application.id
        if self._informant is None and self._mode == "graph":
            groups = tuple(
                GroupRef(f"{name}/{each.id}", each.size, each.objective) for each in plan.groups
            )
            return Task(
                task_id,
                application.model,
                application.tenant,
                name,
                prompt.tokens,
                plan.max_tokens,
                prefix,
                plan.template or self._beginning(first),
                first.tokens,
                plan.objective,
                groups,
                successors=plan.successors,
            )
        known: dict[str, Any] = {
            "application": name,
            "objective": LATENCY,
            "template": self._beginning(first),
        }
        if self._informant is not None:
            known = self._informant.of(call, prefix, known["template"])
        elif self._mode == "plain":
            known["application"] = f"{name}/{plan.index}"
        return Task(
            id=task_id,
            model=application.model,
            tenant=application.tenant,
            prompt_tokens=prompt.tokens,
            max_tokens=plan.max_tokens,
            prefix=prefix,
            template_tokens=first.tokens,
            **known,
        )

    def _beginning(self, first: Segment) -> str:
        """A template name for prompts of unnamed templates: how they begin."""
        name = self._beginnings.get(first)
        if name is None:
            if len(self._beginnings) >= MAX_BEGINNINGS:
                self._beginnings.clear()
            name = self._beginnings[first] = f"{stable_hash(repr(first)):016x}"
        return name
