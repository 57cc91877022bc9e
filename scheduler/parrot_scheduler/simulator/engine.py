"""A simulated engine: continuous batching over a block cache, in macro-steps.

An engine works in steps, as vLLM does: every running sequence decodes one token, and the rest of
the step's token budget fills prompts, first come first served by priority; those that can wait
get a part of it only while something more urgent decodes, if the profile says so. As long as the
batch stays the same the time of many steps is a sum with a closed form, so there is one event for
all of them: when somebody finishes, memory runs out, a prompt is filled, or somebody arrives, who
is taken in at the next step's beginning. Blocks can be found by others as soon as the step that
computes them is planned, as in vLLM. When memory runs out, the sequence that came last is
preempted and computed again later.

Partly filled blocks count by their tokens: half a block per sequence less than real.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from parrot_scheduler.simulator.cache import Cache
from parrot_scheduler.simulator.macro_step import MacroStep
from parrot_scheduler.simulator.profiles import EngineProfile
from parrot_scheduler.simulator.sequence import Sequence
from parrot_scheduler.task import EngineId


class Listener(Protocol):
    """What is told of an engine's doings, at the time when they happen."""

    def wake_engine(self, engine: SimulatedEngine, time: float, version: int) -> None:
        """Call `engine.wake(time, version)` then."""
        ...

    def loaded(self, engine: SimulatedEngine, sequence: Sequence, time: float) -> None:
        """Call `engine.finish_loading(time, sequence)` then."""
        ...

    def filled(self, engine: SimulatedEngine, sequence: Sequence, now: float) -> None:
        """Some more of its prompt is there: `sequence.computed`."""
        ...

    def ended(self, engine: SimulatedEngine, sequence: Sequence, now: float) -> None:
        """It is done, or `failed`."""
        ...

    def stepped(self, engine: SimulatedEngine, now: float) -> None:
        """The engine has planned anew: a good time to look at its counts and block events."""
        ...


class Recorder(Protocol):
    """Where an engine's course is recorded."""

    def add(self, start: float, end: float, batch: int, kv_tokens: int, filled: int) -> None:
        """Between two times: sequences in work, KV tokens in use, tokens filled."""
        ...


class EngineCounts(NamedTuple):
    """What happened so far."""

    busy_s: float
    steps: int
    prefilled_tokens: int
    generated_tokens: int
    preemptions: int
    reloaded_tokens: int
    #: Integrals over busy time, per second: of sequences and of tokens in use.
    batch_seconds: float
    kv_seconds: float


class SimulatedEngine:
    """One engine of a profile. Times are handed in; the listener says when to come back."""

    def __init__(self, engine_id: EngineId, profile: EngineProfile, listener: Listener) -> None:
        self.id = engine_id
        self.profile = profile
        self.cache = Cache(
            profile.capacity_tokens,
            profile.block_tokens,
            host_tokens=profile.host_tokens if profile.prefix_caching else 0,
            records=profile.prefix_caching,
        )
        self._listener = listener
        self._serial = 0
        self._version = 0
        #: By (priority, arrival).
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._num_waiting = 0
        self._loading: dict[Sequence, None] = {}
        self._filling: dict[Sequence, None] = {}
        #: Decoding, by the decode step at whose end they are done.
        self._ends: list[tuple[int, tuple[int, int], Sequence]] = []
        #: How many of them have which priority.
        self._urgencies: dict[int, int] = {}
        #: Keys that the decodes of a step read.
        self._context = 0
        #: Tokens that running sequences may need, as `token_cap` counts.
        self._claimed_tokens = 0
        self._steps = 0
        self._decode_steps = 0
        self._link_free_at = 0.0

        # The macro-step in work; what its steps fill, and whether they decode.
        self._working = False
        self._wake_pending = False
        self._macro = MacroStep()
        self._chunks: list[tuple[Sequence, int]] = []
        self._advances = False
        self._is_open = True

        self._busy_s = 0.0
        self._prefilled = 0
        self._generated = 0
        self._preemptions = 0
        self._reloaded = 0
        self._batch_seconds = 0.0
        self._kv_seconds = 0.0
        #: Set this to have its course recorded.
        self.timeline: Recorder | None = None

    # What it looks like

    @property
    def running(self) -> int:
        """Sequences in its batch."""
        return len(self._ends) + len(self._filling) + len(self._loading)

    @property
    def waiting(self) -> int:
        """Sequences in its queue."""
        return self._num_waiting

    @property
    def used_tokens(self) -> int:
        """KV of running sequences."""
        return self.cache.pinned_tokens + self.cache.private_tokens

    @property
    def counts(self) -> EngineCounts:
        """What happened so far, macro-steps in work not included."""
        return EngineCounts(
            self._busy_s,
            self._steps,
            self._prefilled,
            self._generated,
            self._preemptions,
            self._reloaded,
            self._batch_seconds,
            self._kv_seconds,
        )

    # What can be asked of it

    def submit(self, now: float, sequence: Sequence) -> None:
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
        self._num_waiting += 1
        heappush(self._waiting, (sequence.key, sequence))
        self._stir(now)

    def cancel(self, now: float, sequence: Sequence) -> None:
        """Stop a sequence; nothing is told of its end."""
        if sequence.state == "waiting":
            # Its entry in the queue is passed over later.
            self._num_waiting -= 1
            sequence.state = "ended"
        elif sequence.state != "ended":
            if self._working:
                self._settle(now)
            if sequence.state != "ended":
                self._leave(sequence, now)
                sequence.state = "ended"
            self._plan(now)

    def forget(self, application: str) -> None:
        """What only this application left here goes first from now on."""
        self.cache.forget(application)

    def stop(self, now: float) -> list[Sequence]:
        """The engine is gone with all that it had; its sequences, in order of arrival."""
        if self._working:
            self._settle(now)
        self._version += 1
        self._working = False
        lost = [
            *self._filling,
            *self._loading,
            *(s for _, _, s in self._ends),
            *(s for _, s in self._waiting if s.state == "waiting"),
        ]
        for sequence in lost:
            sequence.state = "ended"
        return sorted(lost, key=lambda s: s.key[1])

    def wake(self, now: float, version: int) -> None:
        """A wish of `wake_engine` came due."""
        if version != self._version:
            return
        self._wake_pending = False
        if self._working:
            self._settle(now)
        self._plan(now)

    def finish_loading(self, now: float, sequence: Sequence) -> None:
        """A sequence's KV came back from the host."""
        if sequence.state == "loading":
            del self._loading[sequence]
            self._filling[sequence] = None
            sequence.state = "filling"
            self._stir(now, at_once=True)

    # Macro-steps

    def _stir(self, now: float, *, at_once: bool = False) -> None:
        """Somebody came: plan anew at the end of the step in work, if there could be room."""
        if not self._working:
            if not self._wake_pending:
                # Not at once: others may come at this very moment.
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
        macro = self._macro
        elapsed = now - macro.since
        steps = macro.planned
        if macro.time_of(steps) > elapsed + 1e-9:
            # Cut in the middle of a step: by a cancellation, or the engine's end.
            steps = macro.steps_until(elapsed) - 1
        cache = self.cache
        decodes = len(self._ends)
        chunks, self._chunks = self._chunks, []
        grown = decodes * steps if self._advances else 0
        filled = steps * sum(tokens for _, tokens in chunks)
        kv = cache.pinned_tokens + cache.private_tokens
        self._busy_s += elapsed
        self._batch_seconds += elapsed * (decodes + len(chunks))
        self._kv_seconds += elapsed * (kv + grown / 2)
        if self.timeline is not None:
            self.timeline.add(macro.since, now, decodes + len(chunks), kv, filled)
        self._steps += steps
        self._prefilled += filled
        for sequence, tokens in chunks:
            sequence.computed += tokens * steps
            sequence.prefilled += tokens * steps
            if steps > 1:
                self._publish(sequence, sequence.computed)
        if grown:
            self._context += grown
            self._generated += grown
            self._decode_steps += steps
            cache.private_tokens += grown
            cache.make_room(0)
            ends = self._ends
            while ends and ends[0][0] <= self._decode_steps:
                self._finish(ends[0][2], now)
        for sequence, _ in chunks:
            if steps and sequence.state == "filling":
                if sequence.computed >= sequence.target:
                    self._finish_prompt(sequence, now)
                else:
                    self._listener.filled(self, sequence, now)

    def _plan(self, now: float) -> None:
        """Decide on the next macro-step, and wish to be woken at its end."""
        profile = self.profile
        self._version += 1
        blocked = False
        while self._ends and self.cache.free_tokens < len(self._ends):
            self._preempt(now)
            blocked = True
        budget = profile.max_batch_tokens
        if profile.chunked_prefill:
            budget -= len(self._ends)
        chunks: list[tuple[Sequence, int]] = []
        urgent, background = min(self._urgencies, default=None), profile.max_background_tokens
        limits = background is not None and urgent is not None
        left = background if background is not None and limits else budget
        filling = sorted(self._filling, key=_rank) if limits else self._filling
        for sequence in filling:
            if budget <= 0:
                break
            waits = limits and urgent is not None and sequence.key[0] > urgent
            tokens = min(budget, left) if waits else budget
            if tokens <= 0:
                continue
            tokens = self._take_chunk(sequence, tokens, chunks)
            budget -= tokens
            left -= tokens if waits else 0
        while budget > 0 and self._num_waiting and not blocked:
            sequence = self._waiting[0][1]
            waits = limits and urgent is not None and sequence.key[0] > urgent
            if sequence.state != "waiting":
                heappop(self._waiting)
            elif waits and left <= 0:
                # The next one in line, and all behind it, can wait.
                break
            elif self._may_enter(sequence, budget, bool(chunks)) and self._admit(sequence, now):
                heappop(self._waiting)
                self._num_waiting -= 1
                if sequence.state == "filling":
                    tokens = min(budget, left) if waits else budget
                    tokens = self._take_chunk(sequence, tokens, chunks)
                    budget -= tokens
                    left -= tokens if waits else 0
            else:
                blocked = True
        self._chunks = chunks
        self._is_open = budget > 0 and not blocked and self.running < profile.max_batch
        self._begin(now)
        self._listener.stepped(self, now)

    def _begin(self, now: float) -> None:
        """Begin the macro-step of the chunks and decodes at hand."""
        model = self.profile.step_model
        chunked = self.profile.chunked_prefill
        chunks = self._chunks
        decodes = len(self._ends)
        if not chunks and not decodes:
            return
        tokens = sum(n for _, n in chunks)
        self._advances = decodes > 0 and (chunked or not chunks)
        context = self._context if self._advances else 0
        macro = self._macro
        macro.compute_s = tokens * model.prefill_token_s + model.overhead_s
        macro.memory_s = model.weights_s + context * model.context_token_s + model.overhead_s
        macro.growth_s = decodes * model.context_token_s if self._advances else 0.0
        steps = 1
        if not chunks:
            steps = self._ends[0][0] - self._decode_steps
        elif chunked and len(chunks) == 1 and tokens + decodes >= self.profile.max_batch_tokens:
            # One prompt fills step after step.
            sequence = chunks[0][0]
            steps = (sequence.target - sequence.computed) // tokens
        if self._advances:
            most = self.cache.free_tokens // decodes
            steps = max(1, min(steps, self._ends[0][0] - self._decode_steps, most))
        self._working = True
        macro.since = now
        macro.planned = steps
        self._listener.wake_engine(self, now + macro.time_of(steps), self._version)

    # Sequences

    def _may_enter(self, sequence: Sequence, budget: int, others: bool) -> bool:
        """Whether limits other than memory let it in."""
        profile = self.profile
        running = self.running
        if running >= profile.max_batch:
            return False
        claim = sequence.prompt.tokens + sequence.max_tokens
        cap = profile.token_cap
        if cap is not None and running and self._claimed_tokens + claim > cap:
            return False
        # A prompt that is filled whole shares a step only if it fits.
        return profile.chunked_prefill or not others or sequence.target <= budget

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Take a sequence in, if its whole prompt finds room."""
        cache = self.cache
        size = cache.block_tokens
        match = cache.match(sequence.prompt.parts if self.profile.prefix_caching else ())
        while True:
            # The last token is always computed: its logits are wanted.
            here = min(match.device_blocks + match.host_blocks, (sequence.target - 1) // size)
            private = sequence.target - here * size
            pinned = size * sum(node.resident for node in match.nodes if not node.pins)
            need = private + match.host_blocks * size
            if need + pinned + len(self._ends) <= cache.free_tokens:
                break
            if self.running or not match.nodes:
                return False
            # Alone, and its own cached copy is in the way.
            match = cache.match(())
        for node in match.nodes:
            cache.pin(node, sequence.application)
        cache.make_room(need)
        cache.private_tokens += private
        sequence.nodes = match.nodes
        sequence.cursor = max(0, len(match.nodes) - 1)
        sequence.private = private
        sequence.computed = here * size
        self._claimed_tokens += sequence.prompt.tokens + sequence.max_tokens
        if sequence.admitted_at < 0:
            sequence.admitted_at = now
            sequence.cached = min(here * size, sequence.prompt.tokens)
        if match.host_blocks:
            cache.load(match)
            tokens = match.host_blocks * size
            self._reloaded += tokens
            self._link_free_at = max(now, self._link_free_at) + tokens * self.profile.reload_token_s
            sequence.state = "loading"
            self._loading[sequence] = None
            self._listener.loaded(self, sequence, self._link_free_at)
        else:
            sequence.state = "filling"
            self._filling[sequence] = None
        return True

    def _take_chunk(
        self, sequence: Sequence, budget: int, chunks: list[tuple[Sequence, int]]
    ) -> int:
        """Let a sequence fill some of its prompt in the next step."""
        tokens = sequence.target - sequence.computed
        if self.profile.chunked_prefill:
            tokens = min(tokens, budget)
        chunks.append((sequence, tokens))
        self._publish(sequence, sequence.computed + tokens)
        return tokens

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Let others find what a sequence has filled of its prompt."""
        if not self.profile.prefix_caching:
            return
        cache = self.cache
        parts = sequence.prompt.parts
        nodes = sequence.nodes
        end = computed // cache.block_tokens
        index = sequence.cursor
        while index < len(parts) and parts[index].first_block < end:
            part = parts[index]
            if index == len(nodes):
                parent = nodes[-1] if nodes else None
                nodes.append(cache.node_of(part, parent, sequence.application))
            blocks = min(part.blocks, end - part.first_block)
            sequence.private -= cache.store(nodes[index], blocks)
            if blocks < part.blocks:
                break
            index += 1
        sequence.cursor = index

    def _finish_prompt(self, sequence: Sequence, now: float) -> None:
        """All is filled, and its first (or next) token is there."""
        if sequence.output_tokens > 0:
            sequence.generated += 1
            self._generated += 1
            if sequence.first_token_at < 0:
                sequence.first_token_at = now
        self._listener.filled(self, sequence, now)
        if sequence.generated >= sequence.output_tokens:
            self._finish(sequence, now)
            return
        del self._filling[sequence]
        sequence.state = "decoding"
        priority = sequence.key[0]
        self._urgencies[priority] = self._urgencies.get(priority, 0) + 1
        sequence.join_step = self._decode_steps
        sequence.finish_step = self._decode_steps + sequence.output_tokens - sequence.generated
        heappush(self._ends, (sequence.finish_step, sequence.key, sequence))
        own = sequence.prompt.tokens + sequence.generated
        if self.profile.shared_attention:
            own = sequence.private + 1
            for node in sequence.nodes:
                if node.readers == 0:
                    self._context += node.resident * self.cache.block_tokens
                node.readers += 1
        sequence.own_context = own
        self._context += own

    def _finish(self, sequence: Sequence, now: float) -> None:
        """It has generated all that it wanted; its output stays to be found."""
        sequence.generated = sequence.output_tokens
        self._leave(sequence, now, done=True)
        sequence.state = "ended"
        self._listener.ended(self, sequence, now)

    def _leave(self, sequence: Sequence, now: float, *, done: bool = False) -> None:
        """Take a running sequence out of the batch, and let go of its KV."""
        cache = self.cache
        if sequence.state == "decoding":
            priority = sequence.key[0]
            self._urgencies[priority] -= 1
            if not self._urgencies[priority]:
                del self._urgencies[priority]
            grown = self._decode_steps - sequence.join_step
            sequence.private += grown
            self._context -= sequence.own_context + grown
            entry = (sequence.finish_step, sequence.key, sequence)
            if self._ends[0] == entry:
                heappop(self._ends)
            else:
                self._ends.remove(entry)
                heapify(self._ends)
            if self.profile.shared_attention:
                for node in sequence.nodes:
                    node.readers -= 1
                    if node.readers == 0:
                        self._context -= node.resident * cache.block_tokens
        elif sequence.state == "filling":
            del self._filling[sequence]
        else:
            del self._loading[sequence]
        if done:
            self._publish_output(sequence)
        self._claimed_tokens -= sequence.prompt.tokens + sequence.max_tokens
        cache.private_tokens -= sequence.private
        cache.unpin(sequence.nodes, now, sequence.retention, sequence.application)
        sequence.nodes = []
        sequence.private = 0

    def _publish_output(self, sequence: Sequence) -> None:
        """Let those who continue a finished sequence find its output."""
        part = sequence.output_part
        if part is None or not self.profile.prefix_caching:
            return
        # The last token was never fed back, so it has no KV.
        tokens = sequence.prompt.tokens + sequence.generated - 1
        blocks = tokens // self.cache.block_tokens - part.first_block
        if blocks > 0:
            nodes = sequence.nodes
            parent = nodes[-1] if nodes else None
            nodes.append(self.cache.node_of(part, parent, sequence.application))
            sequence.private -= self.cache.store(nodes[-1], blocks)

    def _preempt(self, now: float) -> None:
        """Send the running sequence that came last back to the queue; its KV is let go."""
        running = [*self._filling, *(entry[2] for entry in self._ends)]
        victim = max(running, key=lambda s: s.key)
        if victim.state == "decoding":
            victim.generated += self._decode_steps - victim.join_step
            # The tokens that it has are filled like a prompt when it comes back.
            victim.target = victim.prompt.tokens + victim.generated
        self._leave(victim, now)
        victim.state = "waiting"
        victim.computed = 0
        victim.preemptions += 1
        self._preemptions += 1
        self._num_waiting += 1
        heappush(self._waiting, (victim.key, victim))


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Smaller is filled earlier."""
    return sequence.key
