"""What placement policies have in common: candidates, cached tokens, and the answer's form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parrot_scheduler.engines.pool import Pool
from parrot_scheduler.engines.prefix_index import chain_of
from parrot_scheduler.engines.table import Column
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.task_state import Entry

Mask = npt.NDArray[np.bool_]


def any_of(mask: Mask) -> bool:
    """Whether any row is set; faster than `mask.any()` for tables of engines."""
    return bool(mask.item(mask.argmax())) if len(mask) else False


def candidates(entry: Entry, pool: Pool) -> Mask:
    """Rows that take work and could hold the task if they were empty.

    Where none could, all that take work: it is not for a policy to refuse a task.
    """
    table = pool.table
    large_enough = table.accepts & (
        table.capacity >= entry.task.prompt_tokens + entry.expected_output
    )
    return large_enough if any_of(large_enough) else table.accepts


def cached_tokens(entry: Entry, application: Application, pool: Pool) -> Column:
    """Prompt tokens that each row holds or is about to hold; at least one stays to be computed.

    0 for rows that take no work.
    """
    task, table, num_rows = entry.task, pool.table, len(pool.table.accepts)
    tokens: Column | None = None
    blocks = pool.prefixes.depths(task.prefix, num_rows)
    if blocks is not None:
        tokens = blocks * table.block_tokens
    hidden = pool.prefixes.depths(chain_of(task, 0), num_rows)
    if hidden is not None:
        whole, beginning = _hidden_tokens(entry, application)
        seen = np.where(hidden == _hidden_blocks(entry), whole, beginning) * (hidden > 0)
        tokens = seen if tokens is None else np.maximum(tokens, seen)
    if tokens is None:
        return np.zeros(num_rows)
    capped: Column = np.minimum(tokens, max(task.prompt_tokens - 1, 0)) * table.accepts
    return capped


def cached_on(entry: Entry, application: Application, pool: Pool, row: int) -> int:
    """The same for one row."""
    task = entry.task
    block_tokens = int(pool.table.block_tokens[row])
    blocks = pool.prefixes.blocks_on(row, chain_of(task, block_tokens))
    if block_tokens:
        tokens = blocks * block_tokens
    else:
        whole, beginning = _hidden_tokens(entry, application)
        tokens = (whole if blocks == _hidden_blocks(entry) else beginning) if blocks else 0
    return min(tokens, max(task.prompt_tokens - 1, 0))


def choice(
    entry: Entry,
    application: Application,
    pool: Pool,
    row: int,
    decided_by: str,
    *,
    candidates: Mask,
    cost: float,
) -> Choice:
    """An answer that says what is cached there, for policies that did not ask."""
    return Choice(
        row=row,
        decided_by=decided_by,
        expected_cached_tokens=cached_on(entry, application, pool, row),
        candidates=int(np.count_nonzero(candidates)),
        cost=cost,
    )


def _hidden_blocks(entry: Entry) -> int:
    return 2 if entry.task.template else 1


def _hidden_tokens(entry: Entry, application: Application) -> tuple[int, int]:
    """Tokens behind both keys of a hidden chain, and behind its first."""
    beginning = entry.task.template_tokens
    return max(application.context_tokens, beginning), beginning
