"""A simulated engine: continuous batching over a block cache, in macro-steps.

An engine works in steps, as vLLM does: every running sequence decodes one token, and the rest of
the step's token budget fills prompts, first come first served by priority; those that can wait get
a part of it only while something more urgent decodes, if the profile limits them. As long as the
batch stays the same the time of many steps is a sum with a closed form, so there is one event for
all of them: when a sequence finishes, memory runs out, a prompt is filled, or a sequence arrives,
which is taken in at the next step's beginning. Blocks can be found by others as soon as the step
that computes them is planned, as in vLLM. When memory runs out, the sequence that came last is
preempted and computed again later.

Partly filled blocks count by their tokens: half a block per sequence less than real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.task import EngineId

from parrot_bench.simulator.engines.batch import (
    BackgroundBudget,
    DecodeBatch,
    MacroStep,
    StepBudget,
)
from parrot_bench.simulator.engines.cache import Cache
from parrot_bench.simulator.engines.sequences import EngineSequence, KvAllocations
from parrot_bench.simulator.metrics import EngineUse
from parrot_bench.simulator.profiles import EngineProfile


class Listener(Protocol):
    """Receives an engine's events, when they happen."""

    def wake_engine(self, engine: SimulatedEngine, time: float, version: int) -> None:
        """Call `engine.wake(time, version)` then."""
        ...

    def filled(self, sequence: EngineSequence) -> None:
        """More of its prompt is filled: `sequence.computed`."""
        ...

    def ended(self, sequence: EngineSequence) -> None:
        """It is done, or `failed`."""
        ...

    def stepped(self, engine: SimulatedEngine) -> None:
        """The engine has planned its next steps: its counts and block events are current."""
        ...


class SimulatedEngine:
    """One engine of a profile. Times are handed in, in virtual seconds.

    Args:
        engine_id: as the scheduler knows it.
        profile: what it holds and how fast it is.
        listener: receives its events, and wakes it.
    """

    def __init__(self, engine_id: EngineId, profile: EngineProfile, listener: Listener) -> None:
        self.id = engine_id
        self.profile = profile
        self.cache = Cache(profile.capacity_tokens, profile.block_tokens)
        #: Macro-steps in work not included.
        self.counts = EngineUse()
        self._listener = listener
        self._serial = 0
        self._version = 0
        self._allocations = KvAllocations(self.cache)
        #: By (priority, arrival).
        self._waiting: LazyHeap[EngineSequence] = LazyHeap()
        self._filling: dict[EngineSequence, None] = {}
        self._decodes = DecodeBatch(profile.block_tokens)
        most, burst = profile.max_background_tokens, profile.background_burst_tokens
        self._background = None if most is None else BackgroundBudget(most, burst)

        # The macro-step in work, and the chunks that its steps fill.
        self._working = False
        self._wake_pending = False
        self._macro = MacroStep(since=0.0, planned=0, first_s=0.0)
        self._chunks: list[tuple[EngineSequence, int]] = []
        self._background_taken = 0
        self._is_open = True

    @property
    def running(self) -> int:
        return self._decodes.size + len(self._filling)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        return self.cache.pinned_tokens + self.cache.private_tokens

    def check(self) -> None:
        """Assert that counts agree with each other; for tests."""
        self.cache.check()
        if not self.running:
            assert self._decodes.context_tokens == self._decodes.repeated_tokens == 0

    # Requests

    def submit(self, now: float, sequence: EngineSequence) -> None:
        """Put a sequence into the queue; one that could never fit fails at once."""
        self._serial += 1
        sequence.key = (sequence.key[0], self._serial)
        most = sequence.prompt.tokens + max(0, sequence.output_tokens - 1)
        if most > self.cache.capacity_tokens:
            sequence.state = "ended"
            sequence.failed = True
            self._listener.ended(sequence)
            return
        self._waiting.push(sequence, sequence.key)
        self._replan(now)

    def forget(self, application: str) -> None:
        self.cache.forget(application)

    def wake(self, now: float, version: int) -> None:
        """The time passed to `wake_engine` has come; an outdated `version` does nothing."""
        if version != self._version:
            return
        self._wake_pending = False
        if self._working:
            self._settle(now)
        self._plan(now)

    # Macro-steps

    def _replan(self, now: float) -> None:
        """A sequence came: plan anew at the end of the step in work, if there could be room."""
        if not self._working:
            if not self._wake_pending:
                # Not at once: others may arrive at this very moment.
                self._wake_pending = True
                self._version += 1
                self._listener.wake_engine(self, now, self._version)
            return
        if not self._is_open:
            return
        steps = self._macro.steps_until(now - self._macro.since)
        if steps < self._macro.planned:
            self._macro.planned = steps
            self._version += 1
            end = self._macro.since + self._macro.time_of(steps)
            self._listener.wake_engine(self, end, self._version)

    def _settle(self, now: float) -> None:
        """Take in the macro-step in work, which is over."""
        self._working = False
        macro, decodes, cache, counts = self._macro, self._decodes, self.cache, self.counts
        steps = macro.planned
        chunks, self._chunks = self._chunks, []
        grown = decodes.size * steps
        counts.steps += steps
        if self._background is not None:
            self._background.passed(steps, self._background_taken * steps)
        for sequence, tokens in chunks:
            counts.prefilled_tokens += tokens * steps
            sequence.computed += tokens * steps
            sequence.prefilled += tokens * steps
            if steps > 1:
                self._allocations.publish(sequence, sequence.computed)
        if grown:
            counts.generated_tokens += grown
            decodes.advance(steps)
            cache.private_tokens += grown
            cache.make_room(0)
            while (done := decodes.done()) is not None:
                self._finish(done, now)
        for sequence, _ in chunks:
            if sequence.state == "filling":
                if sequence.computed >= sequence.target:
                    self._finish_prompt(sequence, now)
                else:
                    self._listener.filled(sequence)

    def _plan(self, now: float) -> None:
        """Decide on the next macro-step, and ask to be woken at its end."""
        profile, decodes = self.profile, self._decodes
        self._version += 1
        blocked = False
        while decodes.size and self.cache.free_tokens < decodes.size:
            self._preempt(now)
            blocked = True
        self._chunks = []
        self._background_taken = 0
        tokens = profile.max_batch_tokens - decodes.size
        if self._filling or self._waiting:
            background, most, urgent = self._background, None, None
            if background is not None:
                most, urgent = background.of_step, decodes.most_urgent
            budget = StepBudget(tokens, most, urgent)
            blocked = self._fill(now, budget, blocked)
            tokens = budget.tokens
            self._background_taken = budget.background_taken
        self._is_open = tokens > 0 and not blocked and self.running < profile.max_batch
        self._begin(now)
        self._listener.stepped(self)

    def _fill(self, now: float, budget: StepBudget, blocked: bool) -> bool:
        """Choose the prompts that the next step fills.

        Args:
            now: the time.
            budget: of the step.
            blocked: nothing may enter from the beginning on.

        Returns:
            whether nothing more may enter.
        """
        filling: Iterable[EngineSequence] = self._filling
        if budget.is_shared:
            filling = sorted(filling, key=lambda s: s.key)
        for sequence in filling:
            if budget.tokens <= 0:
                break
            if budget.left_for(sequence) > 0:
                self._take_chunk(sequence, budget)
        while budget.tokens > 0 and not blocked:
            first = self._waiting.first()
            if first is None or budget.left_for(first) <= 0:
                # Nothing waits; or the first of the queue, and all behind it, can wait.
                break
            if self.running < self.profile.max_batch and self._admit(first, now):
                self._waiting.remove(first)
                self._take_chunk(first, budget)
            else:
                blocked = True
        return blocked

    def _begin(self, now: float) -> None:
        """Begin the macro-step of the chunks and decodes at hand."""
        profile, chunks, batch = self.profile, self._chunks, self._decodes
        decodes = batch.size
        if not chunks and not decodes:
            return
        tokens = sum(each for _, each in chunks)
        if decodes:
            first_s = profile.step_s(
                prefill_tokens=tokens,
                sequences=decodes,
                context_tokens=batch.context_tokens,
                repeated_tokens=batch.repeated_tokens,
            )
            growth_s = decodes * profile.step_model.context_token_s
        else:
            first_s, growth_s = profile.step_s(prefill_tokens=tokens), 0.0
        steps = 1
        if not chunks:
            steps = batch.steps_to_next_end
        elif len(chunks) == 1 and tokens + decodes >= profile.max_batch_tokens:
            # One prompt fills step after step.
            sequence = chunks[0][0]
            steps = (sequence.target - sequence.computed) // tokens
        if decodes:
            most = self.cache.free_tokens // decodes
            steps = max(1, min(steps, batch.steps_to_next_end, most))
        self._working = True
        macro = self._macro = MacroStep(now, steps, first_s, growth_s)
        self._listener.wake_engine(self, now + macro.time_of(steps), self._version)

    # Sequences

    def _admit(self, sequence: EngineSequence, now: float) -> bool:
        if not self._allocations.take(sequence, self._decodes.size, alone=not self.running):
            return False
        if sequence.admitted_at < 0:
            sequence.admitted_at = now
            sequence.cached = min(sequence.computed, sequence.prompt.tokens)
        sequence.state = "filling"
        self._filling[sequence] = None
        return True

    def _take_chunk(self, sequence: EngineSequence, budget: StepBudget) -> None:
        tokens = min(sequence.target - sequence.computed, budget.left_for(sequence))
        budget.spend(sequence, tokens)
        self._chunks.append((sequence, tokens))
        self._allocations.publish(sequence, sequence.computed + tokens)

    def _finish_prompt(self, sequence: EngineSequence, now: float) -> None:
        """The prompt is filled, and its first (or next) token generated."""
        if sequence.output_tokens > 0:
            sequence.generated += 1
            self.counts.generated_tokens += 1
            if sequence.first_token_at < 0:
                sequence.first_token_at = now
        self._listener.filled(sequence)
        if sequence.generated >= sequence.output_tokens:
            self._finish(sequence, now)
            return
        del self._filling[sequence]
        sequence.state = "decoding"
        self._decodes.join(sequence)

    def _finish(self, sequence: EngineSequence, now: float) -> None:
        """End a sequence that has all its tokens; its output stays in the cache."""
        sequence.generated = sequence.output_tokens
        self._leave(sequence, now, done=True)
        sequence.state = "ended"
        self._listener.ended(sequence)

    def _leave(self, sequence: EngineSequence, now: float, *, done: bool = False) -> None:
        """Take a running sequence out of the batch and release its KV."""
        if sequence.state == "decoding":
            sequence.private += self._decodes.grown(sequence)
            self._decodes.leave(sequence)
        else:
            del self._filling[sequence]
        if done:
            self._allocations.publish_output(sequence)
        self._allocations.release(sequence, now)

    def _preempt(self, now: float) -> None:
        """Return the running sequence that came last to the queue and release its KV."""
        victim = max((*self._filling, *self._decodes), key=lambda s: s.key)
        if victim.state == "decoding":
            victim.generated += self._decodes.grown(victim)
            # The tokens that it has are filled like a prompt when it comes back.
            victim.target = victim.prompt.tokens + victim.generated
        self._leave(victim, now)
        victim.state = "waiting"
        victim.computed = 0
        victim.preemptions += 1
        self.counts.preemptions += 1
        self._waiting.push(victim, victim.key)
