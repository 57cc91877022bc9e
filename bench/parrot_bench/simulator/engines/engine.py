"""A simulated engine: continuous batching over a block cache.

An engine works in steps, as vLLM does: every running sequence decodes one token, and the rest of
the step's token budget fills prompts, first come first served by priority; those that can wait get
a part of it only while something more urgent decodes, if the profile limits them. A sequence that
arrives is taken in at the next step's beginning. Blocks can be found by others as soon as the step
that computes them is planned, as in vLLM. When memory runs out, the sequence that came last is
preempted and computed again later.

Partly filled blocks count by their tokens: half a block per sequence less than real.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from parrot_scheduler.lazy_heap import LazyHeap
from parrot_scheduler.task import EngineId

from parrot_bench.simulator.engines.batch import BackgroundBudget, DecodeBatch, StepBudget
from parrot_bench.simulator.engines.cache import Cache
from parrot_bench.simulator.engines.sequences import EngineSequence, KvAllocations
from parrot_bench.simulator.metrics import EngineUse
from parrot_bench.simulator.profiles import EngineProfile


class Listener(Protocol):
    """Receives an engine's events, when they happen."""

    def wake_engine(self, engine: SimulatedEngine, time: float) -> None:
        """Call `engine.wake(time)` then."""
        ...

    def filled(self, sequence: EngineSequence) -> None:
        """More of its prompt is filled: `sequence.computed`."""
        ...

    def ended(self, sequence: EngineSequence) -> None:
        """It is done, or `failed`."""
        ...

    def stepped(self, engine: SimulatedEngine) -> None:
        """The engine has planned its next step: its counts and block events are current."""
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
        #: The step in work not included.
        self.counts = EngineUse()
        self._listener = listener
        self._serial = 0
        self._allocations = KvAllocations(self.cache)
        #: By (priority, arrival).
        self._waiting: LazyHeap[EngineSequence] = LazyHeap()
        self._filling: dict[EngineSequence, None] = {}
        self._decodes = DecodeBatch(profile.block_tokens)
        most, burst = profile.max_background_tokens, profile.background_burst_tokens
        self._background = None if most is None else BackgroundBudget(most, burst)

        # Whether a step is in work, or about to be planned; the chunks that it fills.
        self._working = False
        self._wake_pending = False
        self._chunks: list[tuple[EngineSequence, int]] = []
        self._background_taken = 0

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
        if not (self._working or self._wake_pending):
            # Not at once: others may arrive at this very moment.
            self._wake_pending = True
            self._listener.wake_engine(self, now)

    def forget(self, application: str) -> None:
        self.cache.forget(application)

    def wake(self, now: float) -> None:
        """The time passed to `wake_engine` has come: end the step in work, plan the next."""
        self._wake_pending = False
        if self._working:
            self._settle(now)
        self._plan(now)

    # Steps

    def _settle(self, now: float) -> None:
        """Take in the step in work, which is over."""
        self._working = False
        decodes, cache, counts = self._decodes, self.cache, self.counts
        chunks, self._chunks = self._chunks, []
        counts.steps += 1
        if self._background is not None:
            self._background.passed(self._background_taken)
        for sequence, tokens in chunks:
            counts.prefilled_tokens += tokens
            sequence.computed += tokens
            sequence.prefilled += tokens
        if decodes.size:
            counts.generated_tokens += decodes.size
            cache.private_tokens += decodes.size
            decodes.advance()
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
        """Decide on the next step, and ask to be woken at its end."""
        profile, decodes = self.profile, self._decodes
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
            self._fill(now, budget, may_enter=not blocked)
            self._background_taken = budget.background_taken
        self._begin(now)
        self._listener.stepped(self)

    def _fill(self, now: float, budget: StepBudget, *, may_enter: bool) -> None:
        """Choose the prompts that the next step fills; new ones only if they may enter."""
        filling: Iterable[EngineSequence] = self._filling
        if budget.is_shared:
            filling = sorted(filling, key=lambda s: s.key)
        for sequence in filling:
            if budget.tokens <= 0:
                break
            if budget.left_for(sequence) > 0:
                self._take_chunk(sequence, budget)
        while budget.tokens > 0 and may_enter:
            first = self._waiting.first()
            if first is None or budget.left_for(first) <= 0:
                # Nothing waits; or the first of the queue, and all behind it, can wait.
                break
            if self.running < self.profile.max_batch and self._admit(first, now):
                self._waiting.remove(first)
                self._take_chunk(first, budget)
            else:
                break

    def _begin(self, now: float) -> None:
        """Begin the step of the chunks and decodes at hand."""
        batch = self._decodes
        if self._chunks or batch.size:
            self._working = True
            step_s = self.profile.step_s(
                prefill_tokens=sum(tokens for _, tokens in self._chunks),
                sequences=batch.size,
                context_tokens=batch.context_tokens,
                repeated_tokens=batch.repeated_tokens,
            )
            self._listener.wake_engine(self, now + step_s)

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
