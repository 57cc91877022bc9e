"""Seats on one given engine, without a scheduler."""

from __future__ import annotations

from parrot_engine.protocol import EngineInfo, Retention
from parrot_engine.text import Tokenizer

from parrot_gateway.generation.generate import GenerationEngine
from parrot_gateway.generation.request import GenerationRequest


class DirectSeat:
    """A place that is always free; see `parrot_gateway.generation.placing.Seat`."""

    def __init__(self, engine: GenerationEngine) -> None:
        self.priority = 0
        self.retention: Retention = "normal"
        self._engine = engine

    async def taken(self) -> GenerationEngine:
        """See `Seat`."""
        return self._engine

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """See `Seat`; nobody is told."""

    def succeed(self) -> None:
        """See `Seat`; nobody is told."""

    def close(self) -> None:
        """See `Seat`."""


class DirectSeats:
    """One engine; see `parrot_gateway.generation.placing.ModelSeats`."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        """See `ModelSeats`."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """See `ModelSeats`."""
        return self._engine.tokenizer

    def seat(self, request: GenerationRequest) -> DirectSeat:
        """See `ModelSeats`."""
        return DirectSeat(self._engine)
