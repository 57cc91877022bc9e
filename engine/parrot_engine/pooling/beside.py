"""An engine that generates text and computes vectors with one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parrot_engine.batch import Runner
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.pooling.engine import PoolingEngine
from parrot_engine.protocol import EngineInfo, EngineStats, FreeContext, Pool, Primitive, StepResult
from parrot_engine.settings import BuiltinSettings


class GeneratingAndPooling(BuiltinEngine):
    """Runs a batch of vectors after each step of generation.

    While texts are generated, a batch has at most the tokens that background prompts may take in a
    step, so vectors slow generation no more than a long prompt does. A longer text is a batch of
    its own.
    """

    def __init__(
        self, runner: Runner, settings: BuiltinSettings, *, pooling: PoolingEngine, **given: Any
    ) -> None:
        """Initialise a `BuiltinEngine`; `pooling` executes its `Pool` primitives with the same
        weights.
        """
        super().__init__(runner, settings, **given)
        self._pooling = pooling
        self._background_tokens = settings.background_tokens

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, pooling=self._pooling.info.pooling)

    def submit(self, primitives: Sequence[Primitive]) -> None:
        self._pooling.submit([p for p in primitives if isinstance(p, Pool | FreeContext)])
        super().submit([p for p in primitives if not isinstance(p, Pool)])

    def step(self) -> StepResult:
        generated = super().step()
        pooled = self._pooling.step(self._background_tokens if generated.has_work else None)
        return StepResult(
            [*generated.events, *pooled.events], generated.has_work or pooled.has_work
        )

    def stats(self) -> EngineStats:
        stats, pooling = super().stats(), self._pooling.stats()
        return replace(
            stats,
            waiting=stats.waiting + pooling.waiting,
            contexts=stats.contexts + pooling.contexts,
            steps=stats.steps + pooling.steps,
            filled_tokens=stats.filled_tokens + pooling.filled_tokens,
        )

    def close(self) -> None:
        self._pooling.close()
        super().close()
