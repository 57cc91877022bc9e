"""A task on a simulated engine: what it is, and how far it got."""

from __future__ import annotations

from parrot_scheduler.actions import Retention
from parrot_scheduler.task import TaskId

from parrot_simulator.engines.cache import Node
from parrot_simulator.engines.prompt import Part, Prompt


class Sequence:
    """One task on an engine. Compared by identity."""

    __slots__ = (
        "admitted_at",
        "application",
        "cached",
        "computed",
        "cursor",
        "failed",
        "finish_step",
        "first_token_at",
        "generated",
        "join_step",
        "key",
        "max_tokens",
        "nodes",
        "output_part",
        "output_tokens",
        "own_context",
        "preemptions",
        "prefilled",
        "private",
        "prompt",
        "retention",
        "state",
        "submitted_at",
        "target",
        "task_id",
    )

    def __init__(
        self,
        task_id: TaskId,
        prompt: Prompt,
        output_tokens: int,
        *,
        max_tokens: int | None = None,
        output_part: Part | None = None,
        application: str = "",
        priority: int = 0,
        retention: Retention = "normal",
    ) -> None:
        self.task_id = task_id
        self.prompt = prompt
        #: What it really generates, and what it may.
        self.output_tokens = output_tokens
        self.max_tokens = output_tokens if max_tokens is None else max_tokens
        #: What its output adds to the prefix, for those who continue it.
        self.output_part = output_part
        self.application = application
        self.retention: Retention = retention
        #: Place in the queue; the second part is set by the engine.
        self.key = (priority, 0)
        #: `waiting`, `loading` (from the host), `filling`, `decoding`, `ended`.
        self.state = "waiting"
        self.failed = False
        self.submitted_at = 0.0
        self.admitted_at = -1.0
        self.first_token_at = -1.0
        #: Prompt tokens found in the cache at first; tokens filled, those done twice included.
        self.cached = 0
        self.prefilled = 0
        self.preemptions = 0
        #: Tokens to fill before it can decode, and those that are done.
        self.target = prompt.tokens
        self.computed = 0
        self.generated = 0
        #: While decoding: the engine's count of decode steps at its beginning and end, and the
        #: keys that it alone read at first.
        self.join_step = 0
        self.finish_step = 0
        self.own_context = 0
        #: Pinned, from the root; and which of the prompt's parts is the last of them.
        self.nodes: list[Node] = []
        self.cursor = 0
        #: Tokens of KV of its own; while decoding, at the beginning of its decode.
        self.private = 0
