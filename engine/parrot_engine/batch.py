"""The contents of one engine step: the contract between the batcher and the runner.

Plain values, made on the CPU by the batcher, read by the runner and by attention back ends. No
"is prefill" flag: a decode is a row of one token, a chunk of prefill a row of many, and both may
stand in one batch.

A step is *launched* and its outcome waited for later; the next one may be launched in between. It
can then use a token that only the device has, see `BatchRow.pending`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from parrot_engine.protocol import SamplingParams, TokenLogprobs

#: Of which tokens of a row the logits are needed.
LogitsNeed: TypeAlias = Literal["none", "last", "all"]

#: Stands in `BatchRow.token_ids` for a token that is not known on the host yet.
UNKNOWN_TOKEN = 0


class BlockCopy(NamedTuple):
    """Copy the KV of a whole block, in every layer, before the step writes anything."""

    source: int
    target: int


class BatchRow(NamedTuple):
    """Consecutive tokens of one context, computed in this step."""

    #: The tokens to compute; at least one. With `pending` the first is `UNKNOWN_TOKEN`.
    token_ids: list[int]
    #: Position of the first of them; KV of positions 0 … start-1 is already in the blocks, or
    #: written by the step launched before.
    start: int
    #: Physical block ids covering positions 0 … start + len(token_ids) - 1. The batcher gives a
    #: view of its own table, which may change once `launch` has returned.
    block_table: list[int] | npt.NDArray[np.int32]
    logits: LogitsNeed = "none"
    #: The row's first token is the one sampled for the row of this index in the step launched just
    #: before; only draft tokens may follow it.
    pending: int | None = None
    #: So many of the tokens, all but the first, are draft tokens: a token is sampled behind each
    #: token of the row. Needs `logits == "all"`.
    num_drafts: int = 0


class BatchRows(Sequence[BatchRow]):
    """The rows of a step, a list for each of their fields.

    A step has hundreds of rows, and whoever reads them wants one field of all: no object is made
    for a row unless one is looked at.
    """

    __slots__ = ("block_tables", "logits", "num_drafts", "pending", "starts", "token_ids")

    def __init__(self, rows: Iterable[BatchRow] = ()) -> None:
        self.token_ids: list[list[int]] = []
        self.starts: list[int] = []
        self.block_tables: list[list[int] | npt.NDArray[np.int32]] = []
        self.logits: list[LogitsNeed] = []
        self.pending: list[int | None] = []
        self.num_drafts: list[int] = []
        for row in rows:
            self.append(row)

    @staticmethod
    def of(rows: Sequence[BatchRow]) -> BatchRows:
        """The same rows; these themselves where they are of this kind."""
        return rows if isinstance(rows, BatchRows) else BatchRows(rows)

    def append(self, row: BatchRow) -> None:
        """Add a row."""
        for column, value in zip(self._columns(), row, strict=True):
            column.append(value)

    def _columns(self) -> tuple[list[Any], ...]:
        """Return the columns, in the order of the fields of `BatchRow`."""
        return (
            self.token_ids,
            self.starts,
            self.block_tables,
            self.logits,
            self.pending,
            self.num_drafts,
        )

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[BatchRow]:
        return map(BatchRow, *self._columns())

    @overload
    def __getitem__(self, index: int) -> BatchRow: ...
    @overload
    def __getitem__(self, index: slice) -> BatchRows: ...
    def __getitem__(self, index: int | slice) -> BatchRow | BatchRows:
        if isinstance(index, slice):
            return BatchRows(map(BatchRow, *(column[index] for column in self._columns())))
        return BatchRow(*(column[index] for column in self._columns()))


@dataclass(frozen=True, slots=True)
class ScoringRow:
    """Log-probabilities of given tokens that a row's leading logits predict."""

    #: Token i follows the row's token i; at most as many as the row has.
    target_token_ids: list[int]
    #: Likeliest tokens to report with each.
    num_top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything that the runner computes in one step."""

    rows: Sequence[BatchRow]
    copies: list[BlockCopy] = field(default_factory=list)
    #: By row: how its token is drawn from its last logits; None draws none. Empty: no row draws.
    sampling: list[SamplingRow | None] = field(default_factory=list)
    #: By row: what its leading logits score; needs `logits == "all"`. Empty: no row does.
    scoring: list[ScoringRow | None] = field(default_factory=list)
    #: A row with a pending token has a draw that depends on which token that is: `Launch.sample`
    #: is called once the outcome of the step before was applied.
    awaits_tokens: bool = False
    #: By row: id of the adapter that it is computed with, empty for none. Empty: no row has one.
    adapters: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, BatchRows.of(self.rows).token_ids))


@dataclass(slots=True)
class SamplingRow:
    """The sampler's input for one sequence, besides its logits.

    One for a whole generation: read when a step is launched, it then grows with what comes out.
    """

    params: SamplingParams
    #: Tokens of the context when the Generate began (for the repetition penalty).
    prompt_token_ids: list[int]
    #: Tokens generated since (for the other penalties).
    generated_token_ids: list[int]
    #: Resolved seed of the random stream: `params.seed`, or drawn once for this Generate.
    seed: int
    #: Ids that `min_tokens` bans while too few tokens are there: end-of-text and stop ids.
    end_token_ids: frozenset[int]
    #: Tokens behind `generated_token_ids` that were launched but are not known yet.
    num_pending: int = 0
    #: Of the grammar that the generation has to follow.
    matcher: Matcher | None = None
    #: Only the largest logit is needed.
    is_plain: bool = field(init=False)
    #: What is drawn depends on the ids generated before, not on their number alone.
    needs_history: bool = field(init=False)
    #: Logits are changed before the draw, by more than a grammar's mask.
    edits_logits: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        penalizes = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.needs_history = penalizes or self.matcher is not None
        self.edits_logits = penalizes or bool(params.logit_bias) or params.min_tokens > 0
        self.is_plain = (
            params.temperature == 0
            and params.logprobs is None
            and not self.edits_logits
            and not self.needs_history
        )

    @property
    def index(self) -> int:
        """The number of tokens generated before the one to draw."""
        return len(self.generated_token_ids) + self.num_pending


class SampledToken(NamedTuple):
    """The outcome for one row. `token_id` is None when its logits held a NaN or only -inf."""

    token_id: int | None
    logprobs: TokenLogprobs | None


class RowOutcome(NamedTuple):
    """The outcome of one row of a step."""

    #: For a row that samples.
    token: SampledToken | None = None
    #: For a row that scores, one entry a target.
    scores: Sequence[TokenLogprobs] = ()
    #: Whether the scored logits were finite.
    is_sound: bool = True
    #: For a row with draft tokens: what was sampled behind each of them, right or wrong.
    following: Sequence[SampledToken] = ()


class TokenOutcomes(Sequence[RowOutcome]):
    """The outcome of a step that does nothing but sample, a token at most for each row."""

    __slots__ = ("token_ids",)

    def __init__(self, token_ids: list[int | None]) -> None:
        #: By row: None where none is sampled, -1 where the logits were not finite.
        self.token_ids = token_ids

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> RowOutcome: ...
    @overload
    def __getitem__(self, index: slice) -> TokenOutcomes: ...
    def __getitem__(self, index: int | slice) -> RowOutcome | TokenOutcomes:
        if isinstance(index, slice):
            return TokenOutcomes(self.token_ids[index])
        token_id = self.token_ids[index]
        if token_id is None:
            return RowOutcome()
        return RowOutcome(SampledToken(token_id if token_id >= 0 else None, None))


class Matcher(Protocol):
    """Follows one generation through its grammar."""

    #: Why no token can be allowed any more, once that is so.
    problem: str | None

    @property
    def is_closing(self) -> bool:
        """Return True if it leads the text to its end, since there is no room for more."""
        ...

    def fill_mask(self, generated_token_ids: Sequence[int], mask: npt.NDArray[np.int32]) -> None:
        """Write which tokens may follow: bit i of the mask is token i.

        Args:
            generated_token_ids: of the generation so far; those of the last call and maybe more.
            mask: zeros, a bit for each token of the vocabulary; stays as it is with a `problem`.
        """
        ...


class Launch(Protocol):
    """A step that the device computes, or has computed."""

    def sample(self) -> None:
        """Start the draws of a batch that `awaits_tokens`; those of others start with the step.

        Called before any other method of this launch or of the runner.
        """
        ...

    def ready(self) -> bool:
        """Return True if `outcome` would not have to wait."""
        ...

    def outcome(self) -> Sequence[RowOutcome]:
        """Wait for the step; one entry for each of its rows. May be called once.

        Raises:
            Exception: whatever went wrong on the device.
        """
        ...


class Adapter(Protocol):
    """An adapter in host memory."""

    @property
    def id(self) -> str:
        """The name that rows use; equal adapters have equal ids."""
        ...

    @property
    def rank(self) -> int: ...


class AdapterMemory(Protocol):
    """The adapters of a runner: `adapters.slots.AdapterSlots`, or a double in tests."""

    #: Different adapters that a step may have.
    count: int

    def read(self, folder: Path) -> Any:
        """The `Adapter` in a folder, for `add`. From any thread.

        Raises:
            AdapterError: it cannot be used with this model.
        """
        ...

    def add(self, adapter: Any) -> None:
        """From now on rows may name this adapter."""
        ...

    def remove(self, adapter_id: str) -> None:
        """No row to be launched names this adapter any more."""
        ...


class Runner(ABC):
    """Executes steps: `runner.model_runner.ModelRunner`, or a double in tests.

    By default nothing else takes part: there is nothing to end, and nothing to lose.
    """

    vocab_size: int
    eos_token_ids: list[int]
    #: Longest context in tokens.
    max_position: int
    architecture: str
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    default_sampling: dict[str, float]
    #: None: rows have no adapters.
    adapters: AdapterMemory | None = None
    #: Memory of the weights and of one block; 0 where it is not known.
    weight_bytes: int = 0
    kv_bytes_per_block: int = 0

    @property
    def read_once_tokens(self) -> int:
        """See `AttentionBackend.read_once_tokens`; 0 of one that shares no reads."""
        return 0

    @abstractmethod
    def launch(self, batch: StepBatch) -> Launch:
        """Start a step; it runs after all that were launched before, and sees what they wrote.

        Raises:
            ShardError: a process that takes part was lost; nothing can be launched any more.
        """

    def close(self) -> None:
        """End what else takes part; called once nothing is launched any more."""
        return

    def check(self) -> None:
        """Raise `ShardError` when a process that takes part was lost."""
        return

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Call this, from any thread, when one is."""
        return

    def prepare(self) -> bool:
        """See `protocol.Preparing`."""
        return False

    def share_prefixes(self, enabled: bool) -> bool:
        """See `protocol.PrefixSharing`."""
        del enabled
        return False
