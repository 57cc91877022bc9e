"""Contexts that want a single token in a step, told apart without planning their row.

Most rows of most steps are of the same kind, a generation that goes on with the token sampled last,
into a block that it has: `plain_decode` says so in a few comparisons.
"""

from __future__ import annotations

from parrot_engine.engine.contexts import Context, PendingGenerate
from parrot_engine.kv_cache.block_pool import BlockPool


def plain_decode(context: Context, pool: BlockPool) -> PendingGenerate | None:
    """The Generate that goes on with the one known token of a running context; None if that is not
    so, or takes more than a row: a block, a copy, or a look at a step in flight.

    A Generate at the head of a running context is neither held nor out of room, and one token alone
    is neither looked for among cached blocks nor brought back from the host.
    """
    head, start = context.pending[0], context.num_computed
    if (
        not isinstance(head, PendingGenerate)
        or context.in_flight is not None
        or len(context.token_ids) - start != 1
    ):
        return None
    ids, tail = context.block_table.ids, start // context.block_size
    return head if tail < len(ids) and pool.is_private(ids[tail]) else None


def wants_one(context: Context) -> bool:
    """Whether a running context that was not planned yet wants a single token."""
    flight = context.in_flight
    if flight is None:
        return context.num_remaining == 1
    if flight.generate is not None:
        return context.goes_on_unseen(flight.generate)
    return len(context.token_ids) - flight.end == 1
