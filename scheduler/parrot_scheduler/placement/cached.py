"""Prompt tokens that an engine caches, or is about to cache."""

from __future__ import annotations

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.prefix_index.index import chain_of
from parrot_scheduler.task_state import Application, TaskState


def cached_on(state: TaskState, application: Application, pool: EnginePool, row: int) -> int:
    """Return the prompt tokens that an engine caches or is about to cache."""
    block = int(pool.table.scalars.block_tokens[row])
    depth = pool.prefixes.blocks_on(row, chain_of(state.task, block))
    return tokens_of(depth, block, state, application)


def tokens_of(depth: int, block: int, state: TaskState, application: Application) -> int:
    """Return the prompt tokens that leading keys stand for; at least one token remains to compute.

    Args:
        depth: number of keys.
        block: tokens per block of the engine.
        state: state of the task.
        application: whose task it is.

    If blocks are invisible (`block` 0), the first key stands for the template, and all keys for the
    application's context as well.
    """
    task = state.task
    if block:
        tokens = depth * block
    else:
        tokens = task.template_tokens if depth else 0
        if depth == (2 if task.template else 1):
            tokens = max(application.context_tokens, tokens)
    return min(tokens, max(task.prompt_tokens - 1, 0))
