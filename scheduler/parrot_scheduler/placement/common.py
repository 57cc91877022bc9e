"""What placement policies have in common: candidates, cached tokens, and the answer's form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from parrot_scheduler.entry import Entry
from parrot_scheduler.policy import Application, Choice
from parrot_scheduler.pool import Pool
from parrot_scheduler.prefix_index import Match, chain_of
from parrot_scheduler.table import Column

Mask = npt.NDArray[np.bool_]


def candidates(entry: Entry, pool: Pool) -> Mask:
    """Rows that take work and could hold the task if they were empty.

    Where none could, all that take work: it is not for a policy to refuse a task.
    """
    table = pool.table
    large_enough = table.accepts & (
        table.capacity >= entry.task.prompt_tokens + entry.expected_output
    )
    return large_enough if large_enough.any() else table.accepts


def cached_tokens(entry: Entry, application: Application, pool: Pool) -> Column:
    """Prompt tokens that each row holds or is about to hold; at least one stays to be computed."""
    task, table = entry.task, pool.table
    tokens = np.zeros(len(table.accepts))
    rows, blocks = pool.prefixes.match(task.prefix)
    tokens[rows] = blocks * table.block_tokens[rows]
    rows, blocks = _match_hidden(entry, pool)
    if len(rows):
        tokens[rows] = np.where(
            blocks == _hidden_blocks(entry),
            max(application.context_tokens, task.template_tokens),
            task.template_tokens,
        )
    return np.minimum(tokens, max(task.prompt_tokens - 1, 0))


def cached_on(entry: Entry, application: Application, pool: Pool, row: int) -> int:
    """The same for one row."""
    task = entry.task
    block_tokens = int(pool.table.block_tokens[row])
    blocks = pool.prefixes.blocks_on(row, chain_of(task, block_tokens))
    if block_tokens:
        tokens = blocks * block_tokens
    elif blocks == _hidden_blocks(entry):
        tokens = max(application.context_tokens, task.template_tokens)
    else:
        tokens = task.template_tokens if blocks else 0
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


def _match_hidden(entry: Entry, pool: Pool) -> Match:
    return pool.prefixes.match(chain_of(entry.task, 0))


def _hidden_blocks(entry: Entry) -> int:
    return 2 if entry.task.template else 1
