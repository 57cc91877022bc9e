"""Calls that have reached the server: as tasks for the scheduler, as sequences for engines."""

from __future__ import annotations

from parrot_scheduler.task import LATENCY, BlockHash, GroupRef, Task, TaskId

from parrot_simulator.clients import RunningCall
from parrot_simulator.engines.prompts import HashedPrompt, PromptMaker, stable_hash
from parrot_simulator.engines.sequences import EngineSequence
from parrot_simulator.plan import ClientMode, Segment

#: Beginnings of prompts whose names are remembered.
MAX_BEGINNINGS = 10_000


class TaskMaker:
    """Makes tasks of calls, as much as the server of a mode can know, and sequences.

    Args:
        mode: what the server knows of applications.
        block_tokens: of the engines' caches; None without any.
        share_tenants: whether prompts of different tenants have prefixes in common.
    """

    def __init__(self, mode: ClientMode, *, block_tokens: int | None, share_tenants: bool) -> None:
        self._mode: ClientMode = mode
        self._hashed = block_tokens is not None
        self._prompts = PromptMaker(block_tokens or 16)
        self._share_tenants = share_tenants
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

    def _task(self, task_id: TaskId, call: RunningCall, prompt: HashedPrompt) -> Task:
        application, plan = call.run.plan, call.plan
        prefix: tuple[BlockHash, ...] = prompt.hashes() if self._hashed else ()
        first: Segment = plan.prompt[0]
        if self._mode != "graph":
            name = application.id
            return Task(
                id=task_id,
                model=application.model,
                tenant=application.tenant,
                application=name if self._mode == "session" else f"{name}/{plan.index}",
                prompt_tokens=prompt.tokens,
                max_tokens=plan.max_tokens,
                prefix=prefix,
                template=self._beginning(first),
                template_tokens=first.tokens,
                objective=LATENCY,
            )
        return Task(
            id=task_id,
            model=application.model,
            tenant=application.tenant,
            application=application.id,
            prompt_tokens=prompt.tokens,
            max_tokens=plan.max_tokens,
            prefix=prefix,
            template=plan.template or self._beginning(first),
            template_tokens=first.tokens,
            objective=plan.objective,
            groups=tuple(
                GroupRef(f"{application.id}/{group.id}", group.size, group.objective)
                for group in plan.groups
            ),
            successors=plan.successors,
        )

    def _beginning(self, first: Segment) -> str:
        """A template name for prompts of unnamed templates: how they begin."""
        name = self._beginnings.get(first)
        if name is None:
            if len(self._beginnings) >= MAX_BEGINNINGS:
                self._beginnings.clear()
            name = self._beginnings[first] = f"{stable_hash(repr(first)):016x}"
        return name
