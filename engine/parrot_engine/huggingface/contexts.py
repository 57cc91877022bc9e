"""Contexts of the huggingface engine: tokens, past key values, and the work queued on them.

State only; what is done with it is `parrot_engine.huggingface.engine`, what is computed from it
`parrot_engine.huggingface.forward`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor
from transformers import DynamicCache

from parrot_engine.engine.contexts import PendingFill, PendingGenerate


@dataclass(slots=True, eq=False)
class Fork:
    """The point in a parent's queue at which a child begins."""

    child: Context


Work: TypeAlias = PendingFill | PendingGenerate | Fork


@dataclass(slots=True, eq=False)
class Context:
    id: int
    token_ids: list[int] = field(default_factory=list)
    #: Past key values of the first `computed` tokens.
    cache: DynamicCache | None = None
    computed: int = 0
    #: What the model says behind the last computed token, float32 `[vocab_size]`.
    logits: Tensor | None = None
    queue: deque[Work] = field(default_factory=deque)
    #: Waits in its parent's queue.
    pending_fork: bool = False
    #: Freed by the caller, but it may still compute what a waiting fork depends on.
    freed: bool = False
    #: Freed or failed for good: nothing shall be computed or kept for it any more.
    gone: bool = False

    @property
    def generating(self) -> PendingGenerate | None:
        """The Generate at the head of the queue."""
        head = self.queue[0] if self.queue else None
        return head if isinstance(head, PendingGenerate) else None

    @property
    def forks(self) -> list[Context]:
        """The children that wait in the queue and are still needed."""
        children = [work.child for work in self.queue if isinstance(work, Fork)]
        return [child for child in children if not child.gone]
