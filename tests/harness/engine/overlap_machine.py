"""Any order of anything, on an engine that overlaps its steps and on one that does not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from parrot_engine.protocol import (
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    SamplingParams,
)

from harness.engine.doubles import Trace, prompt, scripted_engine
from harness.engine.programs import engine_limits


def machine_limits(**others: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw limits like `engine_limits`, for the short contexts of a machine."""
    return engine_limits(
        max_position=st.just(40),
        block_size=st.integers(1, 4),
        max_batch_size=st.integers(1, 4),
        **others,
    )


class OverlapMachine(RuleBasedStateMachine):
    """The same primitives to an engine that overlaps and to one that does not."""

    limits = machine_limits(
        num_blocks=st.integers(8, 30), max_batch_tokens=st.sampled_from([2, 5, 300])
    )
    #: What the two engines differ in.
    engines: tuple[dict[str, Any], dict[str, Any]] = ({"overlap": "on"}, {"overlap": "off"})

    def __init__(self) -> None:
        super().__init__()
        self.traces: list[Trace] = []
        self.live: list[int] = []
        self.freed: set[int] = set()
        self.count = 0

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        limits = data.draw(self.limits)
        for options in self.engines:
            engine, _ = scripted_engine(seed=7, **limits, **options)
            self.traces.append(Trace(engine))

    def submit(self, primitive: Primitive) -> None:
        for trace in self.traces:
            trace.submit(primitive)

    def _new(self) -> int:
        self.count += 1
        self.live.append(self.count)
        return self.count

    @rule(
        length=st.integers(1, 14),
        start=st.integers(0, 2),
        scored=st.sampled_from([None, None, 1]),
        pin=st.booleans(),
        priority=st.integers(-1, 1),
    )
    def fill(self, length: int, start: int, scored: int | None, pin: bool, priority: int) -> None:
        tokens = prompt(length, start)
        self.submit(Fill(self._new(), tokens, prompt_logprobs=scored, pin=pin, priority=priority))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), length=st.integers(0, 6), fork=st.booleans())
    def extend(self, data: st.DataObject, length: int, fork: bool) -> None:
        parent = data.draw(st.sampled_from(self.live))
        tokens = prompt(length, 5)
        if fork:
            self.submit(Fill(self._new(), tokens, parent_context_id=parent))
        else:
            self.submit(Fill(parent, tokens))

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        fork=st.booleans(),
        max_tokens=st.integers(1, 9),
        temperature=st.sampled_from([0.0, 0.0, 1.0]),
        penalty=st.sampled_from([1.0, 1.0, 1.3]),
        logprobs=st.sampled_from([None, None, 1]),
        stop=st.sampled_from([(), (2, 3, 5, 7, 11)]),
        priority=st.integers(-1, 1),
    )
    def generate(
        self,
        data: st.DataObject,
        fork: bool,
        max_tokens: int,
        temperature: float,
        penalty: float,
        logprobs: int | None,
        stop: tuple[int, ...],
        priority: int,
    ) -> None:
        target = data.draw(st.sampled_from(self.live))
        sampling = SamplingParams(
            max_tokens,
            temperature=temperature,
            repetition_penalty=penalty,
            logprobs=logprobs,
            stop_token_ids=stop,
        )
        if fork:
            self.submit(Generate(self._new(), sampling, target, priority))
        else:
            self.submit(Generate(target, sampling, priority=priority))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        context_id = data.draw(st.sampled_from(self.live))
        self.live.remove(context_id)
        self.freed.add(context_id)
        self.submit(FreeContext(context_id))

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for trace in self.traces:
            for _ in range(count):
                trace.step()

    @invariant()
    def says_the_same(self) -> None:
        """One may be ahead of the other, but both say the same."""
        for context_id in range(1, self.count + 1):
            one, other = (said_of(trace, context_id) for trace in self.traces)
            shared = min(len(one), len(other))
            assert one[:shared] == other[:shared], f"context {context_id}"

    def teardown(self) -> None:
        if not self.traces:
            return
        for trace in self.traces:
            trace.run()
        for context_id in set(range(1, self.count + 1)) - self.freed:
            one, other = (said_of(trace, context_id) for trace in self.traces)
            assert one == other, f"context {context_id}"
        self.submit_all_free()
        for trace in self.traces:
            trace.run()
            stats = trace.engine.stats()
            assert (stats.contexts, stats.free_blocks) == (0, trace.engine.info.num_blocks)

    def submit_all_free(self) -> None:
        for context_id in range(1, self.count + 1):
            self.submit(FreeContext(context_id))


def said_of(trace: Trace, context_id: int) -> list[object]:
    """Return what a context said, but not how much of it was found in the cache."""
    said: list[object] = []
    for event in trace.events:
        if event.context_id != context_id:
            continue
        if isinstance(event, Filled):
            scores = [None if s is None else s.token_id for s in event.prompt_logprobs or []]
            said.append(("filled", event.num_tokens, scores))
        elif isinstance(event, Generated):
            said.append((event.token_ids, event.finish_reason, len(event.logprobs or [])))
        elif event.code not in said[-1:]:
            # What was under way on a context that has failed is told so again; how much that is
            # depends on when it failed.
            said.append(event.code)
    return said
