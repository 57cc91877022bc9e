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
from dataclasses import replace
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
from parrot_bench.simulator.metrics import EngineUse, Timeline
from parrot_bench.simulator.profiles import EngineProfile


class Listener(Protocol):
    """Receives an engine's events, at the time when they happen."""

    def wake_engine(self, engine: SimulatedEngine, time: float, version: int) -> None:
        """Call `engine.wake(time, version)` then."""
        ...

    def loaded(self, engine: SimulatedEngine, sequence: EngineSequence, time: float) -> None:
        """Call `engine.finish_loading(time, sequence)` then."""
        ...

    def filled(self, engine: SimulatedEngine, sequence: EngineSequence, now: float) -> None:
        """More of its prompt is filled: `sequence.computed`."""
        ...

    def ended(self, engine: SimulatedEngine, sequence: EngineSequence, now: float) -> None:
        """It is done, or `failed`."""
        ...

    def stepped(self, engine: SimulatedEngine, now: float) -> None:
        """The engine has planned its next steps: its counts and block events are current."""
        ...


class SimulatedEngine:
    """One engine of a profile. Times are handed in, in virtual seconds.

    Args:
        engine_id: as the scheduler knows it.
        profile: what it holds and how fast it is.
        listener: receives its events, and wakes it.
        timeline: records how it was used over time; None: nothing does.
    """

    def __init__(
        self,
        engine_id: EngineId,
        profile: EngineProfile,
        listener: Listener,
        timeline: Timeline | None = None,
    ) -> None:
        self.id = engine_id
        self.profile = profile
        self.cache = Cache(
            profile.capacity_tokens,
            profile.block_tokens,
            host_tokens=profile.host_tokens if profile.prefix_caching else 0,
            records=profile.prefix_caching,
        )
        #: Macro-steps in work not included.
        self.counts = EngineUse(engine_id, profile.capacity_tokens)
        self._timeline = timeline
        self._listener = listener
        self._serial = 0
        self._version = 0
        self._allocations = KvAllocations(self.cache, prefix_caching=profile.prefix_caching)
        #: By (priority, arrival).
        self._waiting: LazyHeap[EngineSequence] = LazyHeap()
        self._loading: dict[EngineSequence, None] = {}
        self._filling: dict[EngineSequence, None] = {}
        self._decodes = DecodeBatch(profile.block_tokens)
        self._link_free_at = 0.0
        most, burst = profile.max_background_tokens, profile.background_burst_tokens
        self._background = None if most is None else BackgroundBudget(most, burst)

        # The macro-step in work; what its steps fill, and whether they decode.
        self._working = False
        self._wake_pending = False
        self._macro = MacroStep(since=0.0, planned=0, first_s=0.0)
        self._chunks: list[tuple[EngineSequence, int]] = []
        self._background_taken = 0
        self._advances = False
        self._is_open = True

    # What it looks like

    @property
    def running(self) -> int:
        return self._decodes.size + len(self._filling) + len(self._loading)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def used_tokens(self) -> int:
        return self.cache.pinned_tokens + self.cache.private_tokens

    @property
    def use(self) -> EngineUse:
        """A copy of the counts so far."""
        return replace(self.counts, evicted_tokens=self.cache.evicted_tokens)

    def check(self) -> None:
        """Assert that counts agree with each other; for tests."""
        self.cache.check()
        if not self.running:
            assert self._decodes.context_tokens == self._decodes.repeated_tokens == 0
            assert self._allocations.claimed_tokens == 0

    # Requests

    def submit(self, now: float, sequence: EngineSequence) -> None:
        """Put a sequence into the queue; one that could never fit fails at once."""
        self._serial += 1
        sequence.key = (sequence.key[0], self._serial)
        sequence.submitted_at = now
        most = sequence.prompt.tokens + max(0, sequence.output_tokens - 1)
        if most > self.cache.capacity_tokens:
            sequence.state = "ended"
            sequence.failed = True
            self._listener.ended(self, sequence, now)
            return
        self._waiting.push(sequence, sequence.key)
        self._replan(now)

    def cancel(self, now: float, sequence: EngineSequence) -> None:
        """Stop a sequence without `Listener.ended`."""
        if sequence.state == "waiting":
            self._waiting.remove(sequence)
            sequence.state = "ended"
        elif sequence.state != "ended":
            if self._working:
                self._settle(now)
            if sequence.state != "ended":
                self._leave(sequence, now)
                sequence.state = "ended"
            self._plan(now)

    def forget(self, application: str) -> None:
        self.cache.forget(application)

    def stop(self, now: float) -> list[EngineSequence]:
        """The engine is gone with all that it had; its sequences, in order of arrival."""
        if self._working:
            self._settle(now)
        self._version += 1
        self._working = False
        lost = [*self._filling, *self._loading, *self._decodes, *self._waiting]
        for sequence in lost:
            sequence.state = "ended"
        return sorted(lost, key=lambda s: s.key[1])

    def wake(self, now: float, version: int) -> None:
        """The time passed to `wake_engine` has come; an outdated `version` does nothing."""
        if version != self._version:
            return
        self._wake_pending = False
        if self._working:
            self._settle(now)
        self._plan(now)

    def finish_loading(self, now: float, sequence: EngineSequence) -> None:
        if sequence.state == "loading":
            del self._loading[sequence]
            self._filling[sequence] = None
            sequence.state = "filling"
            self._replan(now, at_once=True)

    # Macro-steps

    def _replan(self, now: float, *, at_once: bool = False) -> None:
        """A sequence came: plan anew at the end of the step in work, if there could be room."""
        if not self._working:
            if not self._wake_pending:
                # Not at once: others may arrive at this very moment.
                self._wake_pending = True
                self._version += 1
                self._listener.wake_engine(self, now, self._version)
            return
        if not (self._is_open or at_once):
            return
        steps = self._macro.steps_until(now - self._macro.since)
        if steps < self._macro.planned:
            self._macro.planned = steps
            self._version += 1
            end = self._macro.since + self._macro.time_of(steps)
            self._listener.wake_engine(self, end, self._version)

    def _settle(self, now: float) -> None:
        """Take in what the macro-step in work has done by now."""
        self._working = False
        macro, decodes, cache, counts = self._macro, self._decodes, self.cache, self.counts
        elapsed = now - macro.since
        steps = macro.planned
        if macro.time_of(steps) > elapsed + 1e-9:
            # Cut in the middle of a step: by a cancellation, or the engine's end.
            steps = macro.steps_until(elapsed) - 1
        chunks, self._chunks = self._chunks, []
        batch = decodes.size + len(chunks)
        grown = decodes.size * steps if self._advances else 0
        filled = 0
        for _, tokens in chunks:
            filled += tokens * steps
        kv = cache.pinned_tokens + cache.private_tokens
        counts.busy_s += elapsed
        counts.batch_seconds += elapsed * batch
        counts.kv_seconds += elapsed * (kv + grown / 2)
        if self._timeline is not None:
            self._timeline.add(macro.since, now, batch, kv, filled)
        counts.steps += steps
        if self._background is not None:
            self._background.passed(steps, self._background_taken * steps)
        counts.prefilled_tokens += filled
        for sequence, tokens in chunks:
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
            if steps and sequence.state == "filling":
                if sequence.computed >= sequence.target:
                    self._finish_prompt(sequence, now)
                else:
                    self._listener.filled(self, sequence, now)

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
        tokens = profile.max_batch_tokens - (decodes.size if profile.chunked_prefill else 0)
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
        self._listener.stepped(self, now)

    def _fill(self, now: float, budget: StepBudget, blocked: bool) -> bool:
        """Choose what the next step fills; whether nothing more may enter (`blocked`: from the
        beginning on).
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
            if self._may_enter(first, budget.tokens) and self._admit(first, now):
                self._waiting.remove(first)
                if first.state == "filling":
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
        chunked = profile.chunked_prefill
        tokens = 0
        for _, each in chunks:
            tokens += each
        advances = self._advances = decodes > 0 and (chunked or not chunks)
        if advances:
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
        elif chunked and len(chunks) == 1 and tokens + decodes >= profile.max_batch_tokens:
            # One prompt fills step after step.
            sequence = chunks[0][0]
            steps = (sequence.target - sequence.computed) // tokens
        if advances:
            most = self.cache.free_tokens // decodes
            steps = max(1, min(steps, batch.steps_to_next_end, most))
        self._working = True
        macro = self._macro = MacroStep(now, steps, first_s, growth_s)
        self._listener.wake_engine(self, now + macro.time_of(steps), self._version)

    # Sequences

    def _may_enter(self, sequence: EngineSequence, budget: int) -> bool:
        """Whether limits other than memory let it in."""
        profile = self.profile
        running = self.running
        if running >= profile.max_batch:
            return False
        claimed = self._allocations.claimed_tokens + self._allocations.claim(sequence)
        if profile.token_cap is not None and running and claimed > profile.token_cap:
            return False
        # A prompt that is filled whole shares a step only if it fits.
        return profile.chunked_prefill or not self._chunks or sequence.target <= budget

    def _admit(self, sequence: EngineSequence, now: float) -> bool:
        match = self._allocations.take(sequence, self._decodes.size, alone=not self.running)
        if match is None:
            return False
        if sequence.admitted_at < 0:
            sequence.admitted_at = now
            sequence.cached = min(sequence.computed, sequence.prompt.tokens)
        if match.host_blocks:
            self.cache.load(match)
            tokens = match.host_blocks * self.cache.block_tokens
            self.counts.reloaded_tokens += tokens
            self._link_free_at = max(now, self._link_free_at) + tokens * self.profile.reload_token_s
            sequence.state = "loading"
            self._loading[sequence] = None
            self._listener.loaded(self, sequence, self._link_free_at)
        else:
            sequence.state = "filling"
            self._filling[sequence] = None
        return True

    def _take_chunk(self, sequence: EngineSequence, budget: StepBudget) -> None:
        tokens = sequence.target - sequence.computed
        if self.profile.chunked_prefill:
            tokens = min(tokens, budget.left_for(sequence))
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
        self._listener.filled(self, sequence, now)
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
        self._listener.ended(self, sequence, now)

    def _leave(self, sequence: EngineSequence, now: float, *, done: bool = False) -> None:
        """Take a running sequence out of the batch and release its KV."""
        if sequence.state == "decoding":
            sequence.private += self._decodes.grown(sequence)
            self._decodes.leave(sequence)
        elif sequence.state == "filling":
            del self._filling[sequence]
        else:
            del self._loading[sequence]
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
