"""Vectors and scores of one call, from one engine, or from the next if that is lost. No HTTP.

A call of many texts sends them in portions, so that those of several calls share the engine's
steps and none waits for all of another's. What is not there when an engine is lost is sent to
another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from parrot_engine.protocol import Failed, Pool, Pooled, SamplingParams
from parrot_engine.text.tokenizer import PoolingTokens

from parrot_gateway.backends.own.losses import EngineLosses, is_loss, kind_of
from parrot_gateway.backends.own.placement import Placement, Placer
from parrot_gateway.backends.own.remote import EngineChannel
from parrot_gateway.backends.own.state import MAX_OPEN_CONTEXTS, failure_of
from parrot_gateway.calls.generation_request import GenerationRequest, TokenizedPrompt
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import DeadlineError, OverloadedError

#: Texts of a call that are at its engine, in tokens of steps of full size.
_STEPS_AHEAD = 2


async def pool(
    placer: Placer,
    sequences: Sequence[PoolingTokens],
    *,
    deadline: float,
    dimensions: int | None = None,
    observer: GenerationObserver,
) -> list[bytes]:
    """`Pooled.values` of each sequence, in order.

    A cancelled wait gives all of them up.

    Args:
        placer: the engines of the model, which knows `Pool`.
        sequences: at least one, each within the model's limit.
        deadline: `time.perf_counter()` at which the call is given up.
        dimensions: see `Pool`.
        observer: is notified of all but deltas; there are none.

    Raises:
        DeadlineError: the call took too long.
        EngineLostError: its engine was lost, and there will be no other.
        PoisonedCallError: it has lost too many engines.
        OverloadedError: there is too much to do.
        GatewayError: the engine gave a text up.
    """
    request = GenerationRequest(
        [TokenizedPrompt(item.token_ids) for item in sequences],
        SamplingParams(max_tokens=0),
        is_cached=False,
    )
    observer.submitted()
    values: list[bytes | None] = [None] * len(sequences)
    losses, lost, paused_at = EngineLosses(), None, 0.0
    size = _STEPS_AHEAD * max(1, placer.info.max_batch_tokens)
    try:
        async with asyncio.timeout(deadline - time.perf_counter()):
            while True:
                if lost is not None:
                    await placer.engine_coming(lost)
                left, began = values.count(None), False
                placement = placer.place(request, losses.engines)
                try:
                    engine = await placement.engine()
                    if not losses.engines:
                        reason = placement.reason
                        observer.started(placement.engine_name, placement.queued_s, reason)
                    with engine.open(1) as channel:
                        began = True
                        run = _Run(channel, placement, sequences, dimensions, size, values)
                        done = await run.results()
                    if losses.engines:
                        pause_s = time.perf_counter() - paused_at
                        observer.resumed(placement.engine_name, pause_s, 0)
                    observer.ended(Usage(sum(len(item.token_ids) for item in sequences), 0, 0))
                    return done
                except OverloadedError as error:
                    if not is_loss(error):
                        raise
                    lost = error
                finally:
                    placement.close()
                if began:
                    paused_at = paused_at or time.perf_counter()
                    observer.lost(placement.engine_name, kind_of(lost))
                    has_progress = values.count(None) < left
                    losses.add(placement.engine_name, kind_of(lost), has_progress=has_progress)
    except TimeoutError:
        raise DeadlineError(
            "The call took longer than this gateway allows (setting server.call_timeout_s) and "
            "was cancelled."
        ) from None


class _Run:
    """The sequences of one call that are not there yet, in portions of about `max_tokens`."""

    def __init__(
        self,
        channel: EngineChannel,
        placement: Placement,
        sequences: Sequence[PoolingTokens],
        dimensions: int | None,
        max_tokens: int,
        values: list[bytes | None],
    ) -> None:
        self._channel = channel
        self._placement = placement
        self._sequences = sequences
        self._dimensions = dimensions
        self._max_tokens = max_tokens
        self._free_ids = list(channel.context_ids)
        #: By context, which sequence it is.
        self._running: dict[int, int] = {}
        self._running_tokens = 0
        self._values = values
        #: Those to be sent, the next one last.
        self._left = [index for index, value in enumerate(values) if value is None][::-1]

    async def results(self) -> list[bytes]:
        """Compute all that is missing; returns all."""
        filled = 0
        while True:
            self._send()
            if not self._running:
                break
            event = await self._channel.next()
            if isinstance(event, Failed):
                raise failure_of(event.code, event.message)
            assert isinstance(event, Pooled), event
            self._values[self._running.pop(event.context_id)] = event.values
            self._running_tokens -= event.num_tokens
            filled += event.num_tokens
            self._placement.progress(filled=filled, cached=0, generated=0)
        self._placement.succeed()
        return [value for value in self._values if value is not None]

    def _send(self) -> None:
        """Send as many as there is room for, at least one."""
        portion: list[int] = []
        while self._left and self._has_room(len(portion)):
            self._running_tokens += len(self._sequences[self._left[-1]].token_ids)
            portion.append(self._left.pop())
        if not portion:
            return
        if len(portion) > len(self._free_ids):
            self._free_ids += self._channel.extend(len(portion) - len(self._free_ids))
        pools = []
        for index in portion:
            context_id = self._free_ids.pop()
            self._running[context_id] = index
            token_ids, second_from = self._sequences[index]
            pools.append(
                Pool(context_id, token_ids, second_from, self._dimensions, self._placement.priority)
            )
        self._channel.submit(*pools)

    def _has_room(self, chosen: int) -> bool:
        if not self._running and not chosen:
            return True
        size = len(self._sequences[self._left[-1]].token_ids)
        return (
            self._running_tokens + size <= self._max_tokens
            and len(self._running) + chosen < MAX_OPEN_CONTEXTS
        )
