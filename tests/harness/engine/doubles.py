"""A runner without a model, and what its outputs have to be.

`ScriptedRunner` derives what it writes into a slot, and the logits, from all slots that a token
sees *through the block table*: a wrong block, a missing copy, a slot that somebody else wrote
into, or a block of another prefix changes the outputs. `reference_*` say what comes out when the
tokens are simply known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TypeVar

import torch
from parrot_engine.batch import (
    UNKNOWN_TOKEN,
    RowOutcome,
    Runner,
    SampledToken,
    SamplingRow,
    StepBatch,
)
from parrot_engine.engine.batcher import Batcher
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.kv_cache.host_copies import BlockCopies
from parrot_engine.protocol import (
    Event,
    Failed,
    Filled,
    FinishReason,
    Generated,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.runner.sampler import prompt_logprobs, sample
from parrot_engine.settings import BuiltinSettings
from torch import Tensor

#: How engines run, see `run_both_ways`.
_overlap = "auto"

E = TypeVar("E", Filled, Generated, Failed)

VOCAB_SIZE = 24
EOS = 0
#: The content of a slot that was never written, and of one that turned out not a number.
EMPTY, NAN = b"empty", b"not a number"
#: A context that contains this token gets logits of NaN.
POISON = VOCAB_SIZE - 1


def prompt(length: int, start: int = 1) -> list[int]:
    """Tokens in which no two positions look alike for long."""
    return [1 + (start + position * position) % 20 for position in range(length)]


def fake_kv(before: Sequence[bytes], token: int) -> bytes:
    """Return what a token leaves in its slot: like real KV it depends on all slots that it sees."""
    if token == POISON or NAN in before:
        return NAN
    return blake2b(b"".join(before) + token.to_bytes(2, "little"), digest_size=8).digest()


def fake_logits(kv: bytes) -> list[float]:
    """The logits of the token that left `kv`."""
    if kv == NAN:
        return [float("nan")] * VOCAB_SIZE
    source = random.Random(kv)
    logits = [source.gauss(0, 3) for _ in range(VOCAB_SIZE)]
    # No model draws the token that stands for a numerical failure.
    logits[POISON] = -50.0
    return logits


@lru_cache(maxsize=4096)
def reference_kv(tokens: tuple[int, ...]) -> tuple[bytes, ...]:
    """The KV of tokens that were computed one after the other, without any paging."""
    kv: tuple[bytes, ...] = ()
    if len(tokens) > 1:
        kv = reference_kv(tokens[:-1])
    return (*kv, fake_kv(kv, tokens[-1]))


def reference_logits(tokens: Sequence[int]) -> Tensor:
    """Logits behind the last of these tokens, `[1, VOCAB_SIZE]`."""
    return torch.tensor([fake_logits(reference_kv(tuple(tokens))[-1])])


def _ahead(sampling: SamplingRow, count: int) -> SamplingRow:
    """The same for the token behind `count` more."""
    return replace(sampling, num_pending=sampling.num_pending + count)


class ScriptedRunner(Runner):
    """A runner without a model, with `fake_logits`."""

    def __init__(
        self, *, num_blocks: int = 64, block_size: int = 4, max_position: int = 256
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.eos_token_ids = [EOS]
        self.max_position = max_position
        self.architecture = "ScriptedForCausalLM"
        self.dtype = "float32"
        self.device = "cpu"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.default_sampling: dict[str, float] = {"temperature": 0.5}
        self.slots = [[EMPTY] * block_size for _ in range(num_blocks)]
        #: Every batch so far.
        self.batches: list[StepBatch] = []
        #: Raised by the next `launch`, the next `sample` of one, and the `outcome` of the next one
        #: launched.
        self.error: Exception | None = None
        self.draw_error: Exception | None = None
        self.late_error: Exception | None = None
        self._sampled: list[int] = []
        #: Draws in the step launched last, while that is still to be done.
        self._unsampled: Callable[[], None] | None = None
        #: What the launches say when asked whether they are over.
        self.is_ready = True
        #: ("launch", "sample", "outcome", or "ready", number of the step) in order; "sample" only
        #: where that was not part of the launch.
        self.log: list[tuple[str, int]] = []

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return sum(batch.num_tokens for batch in self.batches)

    def launch(self, batch: StepBatch) -> ScriptedLaunch:
        """Copy, write, read; refuses batches that break the contract."""
        self.batches.append(batch)
        self.log.append(("launch", len(self.batches)))
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        late_error, self.late_error = self.late_error, None
        assert self._unsampled is None, "launched behind a step that was not sampled"
        launch = ScriptedLaunch(self, len(self.batches), late_error)
        self._unsampled = partial(self._sample, launch, batch, self._compute(batch))
        if not batch.awaits_tokens:
            self._unsampled()
            self._unsampled = None
        return launch

    def sample(self) -> None:
        """Draw in the step launched last."""
        draw, self._unsampled = self._unsampled, None
        assert draw is not None, "sampled twice"
        error, self.draw_error = self.draw_error, None
        if error is not None:
            raise error
        draw()

    def _sample(self, launch: ScriptedLaunch, batch: StepBatch, logits: list[Tensor]) -> None:
        outcomes = self._outcomes(batch, logits)
        self._sampled = [0 if o.token is None else o.token.token_id or 0 for o in outcomes]
        launch.outcomes = outcomes

    def _compute(self, batch: StepBatch) -> list[Tensor]:
        """The logits of each row."""
        sources = {copy.source for copy in batch.copies}
        targets = [copy.target for copy in batch.copies]
        assert len(set(targets)) == len(targets), "two copies into one block"
        assert not sources & set(targets), "the outcome depends on the order of the copies"
        for copy in batch.copies:
            self.slots[copy.target] = list(self.slots[copy.source])
        written: set[tuple[int, int]] = set()
        all_logits = []
        for row in batch.rows:
            assert len(row.token_ids) > 0, "an empty row"
            token_ids = list(row.token_ids)
            if row.pending is not None:
                assert token_ids[0] == UNKNOWN_TOKEN, "a pending token is known"
                assert len(token_ids) == 1 + row.num_drafts, "known tokens behind a pending one"
                token_ids[0] = self._sampled[row.pending]
            end = row.start + len(token_ids)
            first = {"none": end, "last": end - 1, "all": row.start}[row.logits]
            table = [int(block) for block in row.block_table]
            seen = [kv for block in table for kv in self.slots[block]][: row.start]
            logits = []
            for position, token in enumerate(token_ids, row.start):
                slot = (table[position // self.block_size], position % self.block_size)
                assert slot not in written, "two rows write into one slot"
                written.add(slot)
                seen.append(fake_kv(seen, token))
                self.slots[slot[0]][slot[1]] = seen[-1]
                if position >= first:
                    logits.append(fake_logits(seen[-1]))
            all_logits.append(torch.tensor(logits, dtype=torch.float32).reshape(-1, VOCAB_SIZE))
        return all_logits

    def _outcomes(self, batch: StepBatch, logits: list[Tensor]) -> list[RowOutcome]:
        outcomes = []
        for row, part, sampling, scoring in zip(
            batch.rows, logits, batch.sampling, batch.scoring, strict=True
        ):
            tokens: list[SampledToken] = []
            if sampling is not None:
                count = row.num_drafts + 1
                assert count == 1 or count == len(part) == len(row.token_ids)
                tokens = sample(part[-count:], [_ahead(sampling, n) for n in range(count)])
            scores: list[TokenLogprobs] = []
            if scoring is not None:
                targets = scoring.target_token_ids
                scores = prompt_logprobs(part[: len(targets)], targets, scoring.num_top)
            sound = all(score.logprob == score.logprob for score in scores)
            outcomes.append(RowOutcome(tokens[0] if tokens else None, scores, sound, tokens[1:]))
        return outcomes


class ScriptedLaunch:
    """Implements `Launch`; what it holds is not looked at before `outcome` is called."""

    def __init__(self, runner: ScriptedRunner, number: int, error: Exception | None) -> None:
        self._runner = runner
        self._number = number
        self._error = error
        #: Once they were drawn, and until they were asked for.
        self.outcomes: list[RowOutcome] | None = None

    def sample(self) -> None:
        """Draw; only for the step launched last."""
        self._runner.log.append(("sample", self._number))
        assert self._number == len(self._runner.batches)
        self._runner.sample()

    def ready(self) -> bool:
        """Return the runner's answer."""
        self._runner.log.append(("ready", self._number))
        return self._runner.is_ready

    def outcome(self) -> list[RowOutcome]:
        """The outcomes, once."""
        self._runner.log.append(("outcome", self._number))
        outcomes, self.outcomes = self.outcomes, None
        assert outcomes is not None, "asked twice"
        if self._error is not None:
            raise self._error
        return outcomes


def scripted_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_position: int = 256,
    batcher: type[Batcher] = Batcher,
    device: str = "cpu",
    copies: Callable[[ScriptedRunner], BlockCopies] | None = None,
    **settings: int | bool | str | None,
) -> tuple[BuiltinEngine, ScriptedRunner]:
    """An engine on a scripted runner; `overlap` is what `run_both_ways` says.

    With `copies` it has a host tier, of what that makes for the runner.
    """
    runner = ScriptedRunner(num_blocks=num_blocks, block_size=block_size, max_position=max_position)
    runner.device = device

    values = BuiltinSettings(block_size=block_size, **{"overlap": _overlap, **settings})  # type: ignore[arg-type]
    made = None if copies is None else copies(runner)
    engine = BuiltinEngine(runner, values, model="scripted", copies=made, make_batcher=batcher)
    return engine, runner


def run_both_ways(overlap: str) -> Iterator[str]:
    """For fixtures: scripted engines overlap their steps, or do not, as long as this lasts."""
    global _overlap
    before, _overlap = _overlap, overlap
    yield overlap
    _overlap = before


class Trace:
    """Drives an engine and collects what it says, by context."""

    def __init__(self, engine: BuiltinEngine) -> None:
        self.engine = engine
        self.events: list[Event] = []

    def submit(self, *primitives: Primitive) -> Trace:
        """Queue primitives."""
        self.engine.submit(primitives)
        return self

    def step(self) -> list[Event]:
        """One step, with all invariants checked after it."""
        result = self.engine.step()
        self.engine.check_integrity()
        self.events.extend(result.events)
        return result.events

    def run(self, max_steps: int = 5000) -> Trace:
        """Step until there is no work left."""
        for _ in range(max_steps):
            result = self.engine.step()
            self.engine.check_integrity()
            self.events.extend(result.events)
            if not result.has_work:
                return self
        raise AssertionError(f"still working after {max_steps} steps: {self.engine.stats()}")

    def tokens(self, context_id: int) -> list[int]:
        """All tokens generated on a context."""
        return [token for event in self.of(context_id, Generated) for token in event.token_ids]

    def finish(self, context_id: int) -> list[FinishReason | None]:
        """How the generations of a context ended, in order."""
        return [
            event.finish_reason
            for event in self.of(context_id, Generated)
            if event.finish_reason is not None
        ]

    def filled(self, context_id: int) -> list[Filled]:
        """The completed fills of a context."""
        return self.of(context_id, Filled)

    def failure(self, context_id: int) -> Failed | None:
        """Why a context failed."""
        return next(iter(self.of(context_id, Failed)), None)

    def of(self, context_id: int, kind: type[E]) -> list[E]:
        """The events of one kind of one context."""
        return [
            event
            for event in self.events
            if isinstance(event, kind) and event.context_id == context_id
        ]


def reference_generate(
    tokens: Sequence[int], params: SamplingParams, *, max_context: int = 256
) -> tuple[list[int], FinishReason]:
    """Return what a Generate yields on a context of these tokens; greedy, or with a seed."""
    assert params.temperature == 0 or params.seed is not None
    generated: list[int] = []
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {EOS})
    row = SamplingRow(params, list(tokens), generated, params.seed or 0, ends)
    while len(generated) < params.max_tokens and len(tokens) + len(generated) < max_context:
        token = sample(reference_logits([*tokens, *generated]), [row])[0].token_id
        assert token is not None
        generated.append(token)
        if token in ends:
            return generated, "stop"
    return generated, "length"


def reference_logprobs(
    tokens: Sequence[int], start: int, num_top: int
) -> list[TokenLogprobs | None]:
    """The log-probabilities of the tokens from `start` on."""
    scores: list[TokenLogprobs | None] = [None] if start == 0 and tokens else []
    for position in range(max(start, 1), len(tokens)):
        logits = reference_logits(tokens[:position])
        scores.extend(prompt_logprobs(logits, [tokens[position]], num_top))
    return scores
