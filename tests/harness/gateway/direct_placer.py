"""ModelPlacer on one given engine, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from parrot_engine.protocol import EngineInfo, Retention
from parrot_engine.text import Tokenizer

from parrot_gateway.backends.own.remote import RemoteEngine
from parrot_gateway.calls.generation_request import GenerationRequest
from parrot_gateway.exceptions import OverloadedError


class DirectPlacement:
    """A place that is always free; see `parrot_gateway.backends.own.placement.Placement`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.priority = 0
        self.retention: Retention = "normal"
        self.application = ""
        self.adapter = ""
        self.engine_name = "direct"
        self.queued_s = 0.0
        self.reason = ""
        self._engine = engine

    async def engine(self) -> RemoteEngine:
        """See `Placement`."""
        return self._engine

    def progress(self, *, filled: int, cached: int, generated: int) -> None:
        """See `Placement`; nobody is told."""

    def succeed(self) -> None:
        """See `Placement`; nobody is told."""

    def close(self) -> None:
        """See `Placement`."""


class DirectPlacer:
    """One engine; see `parrot_gateway.backends.own.placement.Placer`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        """See `Placer`."""
        return self._engine.info

    @property
    def tokenizer(self) -> Tokenizer:
        """See `Placer`."""
        return self._engine.tokenizer

    @property
    def parses_reasoning(self) -> bool:
        """See `Placer`."""
        return self._engine.parses_reasoning

    def place(self, request: GenerationRequest, lost: Sequence[str] = ()) -> DirectPlacement:
        """See `Placer`."""
        return DirectPlacement(self._engine)

    def draw_seed(self) -> int:
        """See `Placer`."""
        return 7

    async def engine_coming(self, lost: OverloadedError) -> None:
        """See `Placer`: there is no other engine."""
        raise lost
