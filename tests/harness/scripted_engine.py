"""An engine without a model, which follows the protocol.

For tests of whatever drives engines: its tokens come from a function, and a step costs nothing.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from parrot_engine import protocol

#: The next token after these.
Script: TypeAlias = Callable[[Sequence[int]], int]


def hashed_script(vocab_size: int) -> Script:
    """A "model" whose next token depends on every token before it."""

    def script(token_ids: Sequence[int]) -> int:
        return zlib.crc32(",".join(map(str, token_ids)).encode()) % vocab_size

    return script


def fixed_script(continuation: Sequence[int], end: int) -> Script:
    """Generates `continuation` after any prompt whose tokens it does not hold, then `end`."""

    def script(token_ids: Sequence[int]) -> int:
        length = 0
        while length < len(continuation) and token_ids[-length - 1] in continuation:
            length += 1
        return continuation[length] if length < len(continuation) else end

    return script


@dataclass(slots=True)
class _Context:
    token_ids: list[int] = field(default_factory=list)
    queue: deque[protocol.Fill | protocol.Generate] = field(default_factory=deque)
    generated: int = 0


class ScriptedEngine:
    """An engine whose tokens come from a function. One token per context and step.

    Args:
        script: the next token; by default one that depends on the whole context.
        info: its identity and limits.
        before_step: called at the beginning of each step; may block, or raise to break the step.
    """

    def __init__(
        self,
        script: Script | None = None,
        *,
        info: protocol.EngineInfo | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.info = info or protocol.EngineInfo(
            model="scripted",
            kind="scripted",
            architecture="Scripted",
            device="cpu",
            dtype="none",
            max_context_tokens=512,
            vocab_size=256,
            eos_token_ids=[],
            max_batch_size=64,
        )
        self._script = script or hashed_script(self.info.vocab_size)
        self._before_step = before_step
        self._inbox: deque[protocol.Primitive] = deque()
        self._contexts: dict[int, _Context] = {}
        #: Failed ids, until they are freed.
        self._failures: dict[int, protocol.Failed] = {}
        self._steps = self._filled = self._generated = 0
        self.closed = False

    def submit(self, primitives: Sequence[protocol.Primitive]) -> None:
        self._inbox.extend(primitives)

    def step(self) -> protocol.StepResult:
        if self._before_step is not None:
            self._before_step()
        events: list[protocol.Event] = []
        while self._inbox:
            self._accept(self._inbox.popleft(), events)
        for context_id, context in list(self._contexts.items()):
            if context.queue:
                self._advance(context_id, context, events)
        self._steps += 1
        return protocol.StepResult(
            events, any(context.queue for context in self._contexts.values())
        )

    def stats(self) -> protocol.EngineStats:
        return protocol.EngineStats(
            running=sum(bool(context.queue) for context in self._contexts.values()),
            contexts=len(self._contexts),
            steps=self._steps,
            filled_tokens=self._filled,
            generated_tokens=self._generated,
        )

    def close(self) -> None:
        self._contexts.clear()
        self.closed = True

    def _accept(self, primitive: protocol.Primitive, events: list[protocol.Event]) -> None:
        context_id = primitive.context_id
        if isinstance(primitive, protocol.FreeContext):
            self._contexts.pop(context_id, None)
            self._failures.pop(context_id, None)
            return
        if context_id in self._failures:
            # What was on its way when the context failed is answered the same.
            events.append(self._failures[context_id])
            return
        context = self._contexts.get(context_id)
        parent_id = primitive.parent_context_id
        if parent_id is not None:
            parent = self._contexts.get(parent_id)
            if context is not None:
                self._fail(context_id, "invalid_request", "the context exists", events)
                return
            if parent is None:
                self._fail(context_id, "unknown_context", f"no context {parent_id}", events)
                return
            # The fork happens after everything that was submitted to the parent before it.
            while parent.queue:
                self._advance(parent_id, parent, events)
            if parent_id not in self._contexts:
                self._fail(context_id, "unknown_context", f"no context {parent_id}", events)
                return
            context = self._contexts[context_id] = _Context(list(parent.token_ids))
        if context is None:
            if isinstance(primitive, protocol.Generate):
                self._fail(context_id, "unknown_context", f"no context {context_id}", events)
                return
            context = self._contexts[context_id] = _Context()
        context.queue.append(primitive)

    def _advance(self, context_id: int, context: _Context, events: list[protocol.Event]) -> None:
        primitive = context.queue[0]
        if isinstance(primitive, protocol.Fill):
            self._fill(context_id, context, primitive, events)
        else:
            self._generate(context_id, context, primitive, events)

    def _fill(
        self, context_id: int, context: _Context, fill: protocol.Fill, events: list[protocol.Event]
    ) -> None:
        if not all(0 <= token_id < self.info.vocab_size for token_id in fill.token_ids):
            self._fail(context_id, "invalid_request", "a token outside the vocabulary", events)
            return
        if len(context.token_ids) + len(fill.token_ids) > self.info.max_context_tokens:
            self._fail(context_id, "context_too_long", "too many tokens", events)
            return
        logprobs: list[protocol.TokenLogprobs | None] | None = None
        if fill.prompt_logprobs is not None:
            logprobs = [self._logprobs(token, fill.prompt_logprobs) for token in fill.token_ids]
            if not context.token_ids:
                logprobs[:1] = [None]
        context.token_ids += fill.token_ids
        context.queue.popleft()
        self._filled += len(fill.token_ids)
        events.append(protocol.Filled(context_id, len(fill.token_ids), 0, logprobs))

    def _generate(
        self,
        context_id: int,
        context: _Context,
        generate: protocol.Generate,
        events: list[protocol.Event],
    ) -> None:
        sampling = generate.sampling
        if generate.generated >= len(context.token_ids) - context.generated:
            self._fail(context_id, "invalid_request", "generated: more than the context", events)
            return
        full = len(context.token_ids) >= self.info.max_context_tokens
        if generate.generated + context.generated >= sampling.max_tokens or full:
            self._finish(context)
            events.append(protocol.Generated(context_id, [], None, "length"))
            return
        token_id = self._script(context.token_ids)
        context.token_ids.append(token_id)
        context.generated += 1
        self._generated += 1
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(self.info.eos_token_ids)
        finish = "stop" if token_id in ends else None
        if finish is None and generate.generated + context.generated == sampling.max_tokens:
            finish = "length"
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = [self._logprobs(token_id, sampling.logprobs)]
        if finish is not None:
            self._finish(context)
        events.append(protocol.Generated(context_id, [token_id], logprobs, finish))  # type: ignore[arg-type]

    @staticmethod
    def _finish(context: _Context) -> None:
        context.queue.popleft()
        context.generated = 0

    def _fail(self, context_id: int, code: str, message: str, events: list[protocol.Event]) -> None:
        self._contexts.pop(context_id, None)
        failure = protocol.Failed(context_id, code, message)  # type: ignore[arg-type]
        self._failures[context_id] = failure
        events.append(failure)

    @staticmethod
    def _logprobs(token_id: int, count: int) -> protocol.TokenLogprobs:
        top = [(token_id if index == 0 else index, -0.5 - index) for index in range(count)]
        return protocol.TokenLogprobs(token_id, -0.5, top)
