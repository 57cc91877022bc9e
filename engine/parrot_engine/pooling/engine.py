"""The engine of vectors and scores: a queue of sequences, computed in packed batches.

Sequences of all calls share forward passes, without padding or a cache. A step takes the most
urgent sequences, oldest first, up to its token limit, and orders them by length.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

from parrot_engine.exceptions import PrimitiveError
from parrot_engine.pooling.loader import LoadedPooling
from parrot_engine.protocol import (
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    FreeContext,
    Pool,
    Pooled,
    PoolingInfo,
    Primitive,
    StepResult,
)
from parrot_engine.settings import BuiltinSettings

#: Maximum waiting tokens, in steps of full size.
_MAX_WAITING_STEPS = 256


class PoolingEngine:
    """Implements `parrot_engine.protocol.Engine` for `Pool`.

    Args:
        loaded: the model.
        settings: limits on tokens and sequences of a step, and on waiting sequences.
        model: its served name.
    """

    def __init__(self, loaded: LoadedPooling, settings: BuiltinSettings, *, model: str) -> None:
        self._model = loaded.model
        self._pooling: PoolingInfo = loaded.info
        self._max_batch_tokens = settings.max_batch_tokens
        self._max_batch_size = settings.max_batch_size
        self._max_waiting = settings.max_contexts
        self._max_waiting_tokens = max(
            _MAX_WAITING_STEPS * settings.max_batch_tokens, loaded.info.max_tokens
        )
        self._info = EngineInfo(
            model=model,
            kind="builtin",
            architecture=loaded.architecture,
            device=str(loaded.device),
            dtype=str(loaded.dtype).removeprefix("torch."),
            max_context_tokens=loaded.info.max_tokens,
            vocab_size=loaded.vocab_size,
            eos_token_ids=[],
            max_batch_size=settings.max_batch_size,
            max_batch_tokens=settings.max_batch_tokens,
            generates=False,
            pooling=loaded.info,
            weight_bytes=loaded.weight_bytes,
        )
        self._numbers = count()
        #: By priority, then age; includes freed sequences.
        self._queue: list[tuple[int, int, Pool]] = []
        self._waiting: dict[int, Pool] = {}
        self._waiting_tokens = 0
        self._events: list[Event] = []
        self._stats = EngineStats()

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, primitives: Sequence[Primitive]) -> None:
        for primitive in primitives:
            if isinstance(primitive, FreeContext):
                self._forget(primitive.context_id)
                continue
            try:
                self._take(primitive)
            except PrimitiveError as error:
                self._forget(primitive.context_id)
                self._events.append(Failed(primitive.context_id, error.code, error.message))

    def step(self, max_tokens: int | None = None) -> StepResult:
        """Compute one batch.

        Args:
            max_tokens: limit for this step, if lower than the settings'. It always takes at
                least one sequence.
        """
        batch = self._next_batch(min(max_tokens or self._max_batch_tokens, self._max_batch_tokens))
        events, self._events = self._events, []
        if batch:
            for item, values in zip(batch, self._model.run(batch), strict=True):
                if values is None:
                    message = "the vector or score of this text is not finite"
                    events.append(Failed(item.context_id, "numerical_error", message))
                else:
                    events.append(Pooled(item.context_id, len(item.token_ids), values))
            tokens = sum(len(item.token_ids) for item in batch)
            self._stats = replace(
                self._stats,
                steps=self._stats.steps + 1,
                filled_tokens=self._stats.filled_tokens + tokens,
            )
        return StepResult(events, bool(self._waiting))

    def stats(self) -> EngineStats:
        return replace(self._stats, waiting=len(self._waiting), contexts=len(self._waiting))

    def close(self) -> None:
        self._queue.clear()
        self._waiting.clear()
        self._waiting_tokens = 0

    def _take(self, primitive: Primitive) -> None:
        if not isinstance(primitive, Pool):
            raise PrimitiveError(
                "invalid_request", "this model makes vectors or scores and generates no text"
            )
        self._check(primitive)
        length = len(primitive.token_ids)
        if (
            len(self._waiting) >= self._max_waiting
            or self._waiting_tokens + length > self._max_waiting_tokens
        ):
            raise PrimitiveError("overloaded", f"{self._waiting_tokens} tokens of texts wait here")
        self._waiting[primitive.context_id] = primitive
        self._waiting_tokens += length
        heapq.heappush(self._queue, (primitive.priority, next(self._numbers), primitive))

    def _check(self, primitive: Pool) -> None:
        length, vocab_size = len(primitive.token_ids), self._info.vocab_size
        if primitive.context_id in self._waiting:
            raise PrimitiveError("invalid_request", "this context is in use")
        if not length:
            raise PrimitiveError("invalid_request", "token_ids: at least one is needed")
        if length > self._pooling.max_tokens:
            raise PrimitiveError(
                "context_too_long",
                f"{length} tokens are more than the {self._pooling.max_tokens} of this model",
            )
        if min(primitive.token_ids) < 0 or max(primitive.token_ids) >= vocab_size:
            raise PrimitiveError("invalid_request", f"token_ids: the vocabulary has {vocab_size}")
        if primitive.second_from is not None and not 0 < primitive.second_from < length:
            raise PrimitiveError("invalid_request", "second_from: not within the sequence")
        size = primitive.dimensions
        if size is not None and not 0 < size <= self._pooling.dimensions:
            raise PrimitiveError(
                "invalid_request", f"dimensions: a vector has {self._pooling.dimensions}"
            )

    def _forget(self, context_id: int) -> None:
        gone = self._waiting.pop(context_id, None)
        if gone is not None:
            self._waiting_tokens -= len(gone.token_ids)

    def _next_batch(self, max_tokens: int) -> list[Pool]:
        """Return the next sequences, shortest first."""
        batch: list[Pool] = []
        tokens = 0
        while self._queue and len(batch) < self._max_batch_size:
            item = self._queue[0][2]
            if self._waiting.get(item.context_id) is item:
                if batch and tokens + len(item.token_ids) > max_tokens:
                    break
                batch.append(item)
                tokens += len(item.token_ids)
                self._forget(item.context_id)
            heapq.heappop(self._queue)
        batch.sort(key=lambda item: len(item.token_ids))
        return batch
