"""Measures, at the start, when loading blocks is faster than computing them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from parrot_engine.batch import BatchRow, StepBatch
from parrot_engine.kv_cache.host_copies import BlockCopies, make_copies
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

_log = logging.getLogger(__name__)

#: Maximum tokens of the timed step; larger steps take the same time per token.
_PREFILL_TOKENS = 2048
#: Seconds between polls of a copy, and before it is given up.
_LOOK_S = 0.00002
_TIMEOUT_S = 30.0


class Rates(NamedTuple):
    """Costs of loading and computing, in seconds."""

    #: Latency of a fetch: a step passes, and a transfer has to start.
    start_s: float
    #: Cost of each further block.
    block_s: float
    #: Cost of computing one more token of a prompt.
    token_s: float


def load_copies(
    runner: ModelRunner, settings: BuiltinSettings
) -> tuple[BlockCopies | None, BuiltinSettings]:
    """Return a runner's copies for a host tier, and settings with the break-even length.

    The copies are None if there is no host tier, or if it would never be faster than computing.

    Raises:
        SettingsError: the host has no memory for it.
    """
    if not settings.has_host_tier:
        return None, settings
    copies = make_copies(runner.kv_cache, settings.host_slots(runner.kv_bytes_per_block))
    if settings.host_min_tokens is not None:
        return copies, settings
    rates = measure(runner, copies, settings.max_batch_tokens)
    least = least_blocks(rates, settings.block_size)
    figures = (
        f"a block comes in {1e6 * rates.block_s:.0f} µs after {1e3 * rates.start_s:.2f} ms, "
        f"a token is computed in {1e6 * rates.token_s:.1f} µs"
    )
    if least is None:
        _log.warning("no host tier: computing is faster (%s)", figures)
        copies.close()
        return None, settings
    tokens = least * settings.block_size
    _log.info(
        "host tier of %d blocks, for %d tokens or more (%s)", copies.num_slots, tokens, figures
    )
    return copies, replace(settings, host_min_tokens=tokens)


def least_blocks(rates: Rates, block_size: int) -> int | None:
    """Return the shortest run of blocks that loads faster than it computes; None if there is none.

    The keys that a computed token attends to are not counted, which favours computing.
    """
    gain_s = block_size * rates.token_s - rates.block_s
    if gain_s <= 0:
        return None
    return max(1, math.ceil(rates.start_s / gain_s))


def measure(runner: ModelRunner, copies: BlockCopies, max_batch_tokens: int) -> Rates:
    """Measure both on a runner with an unused cache; takes a few steps."""
    size = runner.block_size
    tokens = min(_PREFILL_TOKENS, max_batch_tokens, runner.max_position, runner.num_blocks * size)
    step_s = _second_s(lambda: _compute(runner, 1))
    prefill_s = _second_s(lambda: _compute(runner, tokens))
    count = min(copies.chunk, copies.num_slots, runner.num_blocks)
    one_s = _second_s(lambda: _load(copies, 1))
    all_s = _second_s(lambda: _load(copies, count))
    block_s = (all_s - one_s) / (count - 1) if count > 1 else one_s
    return Rates(
        start_s=step_s + max(0.0, one_s - block_s),
        block_s=max(0.0, block_s),
        token_s=max(0.0, prefill_s - step_s) / max(1, tokens - 1),
    )


def _second_s(work: Callable[[], None]) -> float:
    """Return the seconds of the second run of some work."""
    work()
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _compute(runner: ModelRunner, tokens: int) -> None:
    table = list(range(-(-tokens // runner.block_size)))
    runner.launch(StepBatch([BatchRow([0] * tokens, 0, table)], [], [None], [None])).outcome()


def _load(copies: BlockCopies, count: int) -> None:
    copy = copies.load(list(range(count)), list(range(count)), after=0, behind=[])
    deadline = time.monotonic() + _TIMEOUT_S
    while not copy.is_done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a copy of {count} blocks to the device did not end")
        time.sleep(_LOOK_S)
