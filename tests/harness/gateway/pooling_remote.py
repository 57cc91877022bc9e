"""Engines of small embedders and rerankers, joined in the test's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.protocol import FreeContext, Pool, Primitive
from parrot_engine.text import Tokenizer

from harness.gateway.scripted_remote import ScriptedRemoteEngine


class PoolingRemote(ScriptedRemoteEngine):
    """The engine of a checkpoint; a step of it is made when the test calls `step`, or by itself."""

    def __init__(self, folder: Path, name: str, *, automatic: bool = True) -> None:
        super().__init__(automatic=automatic)
        options = EngineOptions(str(folder), name=name, device="cpu", dtype="float32")
        self._engine, text = load_engine(options)
        self.info = self._engine.info
        self.tokenizer = Tokenizer(text)

    def submit(self, primitives: Sequence[Primitive]) -> None:
        self.submitted += primitives
        self._engine.submit(primitives)
        for primitive in primitives:
            if isinstance(primitive, Pool):
                self.contexts[primitive.context_id] = primitive.token_ids
            elif isinstance(primitive, FreeContext):
                self.contexts.pop(primitive.context_id, None)
        self.changed.set()
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.step)

    def step(self) -> None:
        events, has_work = self._engine.step()
        for event in events:
            self.contexts.pop(event.context_id, None)
        if events:
            self.deliver(events)
        self.changed.set()
        if has_work and self.automatic:
            asyncio.get_running_loop().call_soon(self.step)
