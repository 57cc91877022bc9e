"""The contents of one engine step: the contract between the batcher and the runner.

Plain values, made on the CPU by the batcher, and read by the runner and by attention back ends.
Rows have no "is prefill" flag: a decode is a row of one token, a chunk of prefill a row of many,
and a batch may have both.

A step is *launched*, and its outcome is fetched later; the next step may be launched in between.
That step can use a token that only the device knows, see `BatchRow.pending`.
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

#: Tokens of a row whose logits are needed.
LogitsNeed: TypeAlias = Literal["none", "last", "all"]

#: Placeholder in `BatchRow.token_ids` for a token that the host does not know yet.
UNKNOWN_TOKEN = 0


class BlockCopy(NamedTuple):
    """A copy of a whole block's KV in every layer, made before the step writes anything."""

    source: int
    target: int


class BatchRow(NamedTuple):
    """Consecutive tokens of one context, computed in this step."""

    #: The tokens to compute; at least one. With `pending` the first is `UNKNOWN_TOKEN`.
    token_ids: list[int]
    #: Position of the first token. The blocks contain the KV of positions 0 … start-1 already, or
    #: the previously launched step writes it.
    start: int
    #: Physical block ids covering positions 0 … start + len(token_ids) - 1. A view of the batcher's
    #: own table, which may change once `launch` has returned.
    block_table: list[int] | npt.NDArray[np.int32]
    logits: LogitsNeed = "none"
    #: Index of the row in the previously launched step whose sampled token is this row's first
    #: token; only draft tokens may follow it.
    pending: int | None = None
    #: Number of draft tokens: all tokens but the first, or 0. A token is sampled after each token
    #: of the row. Needs `logits == "all"`.
    num_drafts: int = 0


class BatchRows(Sequence[BatchRow]):
    """The rows of a step, stored as one list per field.

    A step has hundreds of rows, and readers need one field of all of them. So row objects are made
    only when accessed.
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
        """Return the same rows as `BatchRows`, unchanged if they are."""
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
    """A request for log-probabilities of given tokens, from a row's leading logits."""

    #: Token i follows the row's token i; at most as many as the row has tokens.
    target_token_ids: list[int]
    #: Number of likeliest tokens to report with each.
    num_top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All work of the runner in one step."""

    rows: Sequence[BatchRow]
    copies: list[BlockCopy] = field(default_factory=list)
    #: By row: how its token is sampled from its last logits; None samples none. Empty: no row
    #: samples.
    sampling: list[SamplingRow | None] = field(default_factory=list)
    #: By row: the tokens that its leading logits score; needs `logits == "all"`. Empty: no row
    #: scores.
    scoring: list[ScoringRow | None] = field(default_factory=list)
    #: True if the sampling of a row depends on its pending token: `Launch.sample` is then called
    #: after the outcome of the previous step was applied.
    awaits_tokens: bool = False
    #: By row: id of its adapter, empty for none. Empty: no row has one.
    adapters: Sequence[str] = ()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, BatchRows.of(self.rows).token_ids))


@dataclass(slots=True)
class SamplingRow:
    """The sampler's input for one sequence, besides its logits.

    One object for a whole generation. It is read when a step is launched, and grows with the
    generated tokens.
    """

    params: SamplingParams
    #: Tokens of the context before the `Generate` (for the repetition penalty).
    prompt_token_ids: list[int]
    #: Tokens generated since then (for the other penalties).
    generated_token_ids: list[int]
    #: Seed of the random stream: `params.seed`, or one drawn for this `Generate`.
    seed: int
    #: Ids banned while there are fewer than `min_tokens`: end-of-text and stop ids.
    end_token_ids: frozenset[int]
    #: Number of launched but unknown tokens after `generated_token_ids`.
    num_pending: int = 0
    #: Matcher of the grammar that the generation must follow.
    matcher: Matcher | None = None
    #: True if only the largest logit is needed.
    is_plain: bool = field(init=False)
    #: True if the sampled token depends on earlier ids, not only on their number.
    needs_history: bool = field(init=False)
    #: True if logits are changed before sampling, apart from a grammar's mask.
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
        """Return the number of tokens generated before the next one."""
        return len(self.generated_token_ids) + self.num_pending


class SampledToken(NamedTuple):
    """The sampled token of one row. `token_id` is None if its logits had a NaN or only -inf."""

    token_id: int | None
    logprobs: TokenLogprobs | None


class RowOutcome(NamedTuple):
    """The outcome of one row of a step."""

    #: For a row that samples.
    token: SampledToken | None = None
    #: For a row that scores: one entry per target.
    scores: Sequence[TokenLogprobs] = ()
    #: True if the scored logits were finite.
    is_sound: bool = True
    #: For a row with draft tokens: the token sampled after each of them, whether the draft was
    #: right or wrong.
    following: Sequence[SampledToken] = ()


class TokenOutcomes(Sequence[RowOutcome]):
    """The outcome of a step that only samples, with at most one token per row."""

    __slots__ = ("token_ids",)

    def __init__(self, token_ids: list[int | None]) -> None:
        #: By row: None if none was sampled, -1 if the logits were not finite.
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

    #: The reason once no token can be allowed.
    problem: str | None

    @property
    def is_closing(self) -> bool:
        """Return true if it now leads the text to its end, because few tokens are left."""
        ...

    def fill_mask(self, generated_token_ids: Sequence[int], mask: npt.NDArray[np.int32]) -> None:
        """Write the mask of allowed next tokens: bit i stands for token i.

        Args:
            generated_token_ids: all tokens so far; those of the previous call, and perhaps more.
            mask: zeros, one bit per token of the vocabulary; unchanged if there is a `problem`.
        """
        ...


class Launch(Protocol):
    """A launched step, running or finished."""

    def sample(self) -> None:
        """Sample the tokens of a batch that `awaits_tokens`; other batches sample by themselves.

        Called before any other method of this launch or of the runner.
        """
        ...

    def ready(self) -> bool:
        """Return true if `outcome` would not wait."""
        ...

    def outcome(self) -> Sequence[RowOutcome]:
        """Wait for the step, and return one entry per row. May be called once.

        Raises:
            Exception: an error of the device.
        """
        ...


class Adapter(Protocol):
    """An adapter in host memory."""

    @property
    def id(self) -> str:
        """Return the id that rows use; equal adapters have equal ids."""
        ...

    @property
    def rank(self) -> int: ...


class AdapterMemory(Protocol):
    """The adapters of a runner: `adapters.slots.AdapterSlots`, or a test double."""

    #: Maximum number of different adapters in a step.
    count: int

    def read(self, folder: Path) -> Any:
        """Read the `Adapter` in a folder for `add`; from any thread.

        Raises:
            AdapterError: it cannot be used with this model.
        """
        ...

    def add(self, adapter: Any) -> None:
        """Add an adapter that rows may name from now on."""
        ...

    def remove(self, adapter_id: str) -> None:
        """Remove an adapter that rows to be launched no longer name."""
        ...


class Runner(ABC):
    """Executes steps: `runner.model_runner.ModelRunner`, or a test double.

    The defaults are for a runner in one process, which has no other processes to end or to lose.
    """

    vocab_size: int
    eos_token_ids: list[int]
    #: Maximum tokens of a context.
    max_position: int
    architecture: str
    dtype: str
    device: str
    num_blocks: int
    block_size: int
    default_sampling: dict[str, float]
    #: None if rows cannot have adapters.
    adapters: AdapterMemory | None = None
    #: Memory of the weights and of one block; 0 if unknown.
    weight_bytes: int = 0
    kv_bytes_per_block: int = 0

    @property
    def read_once_tokens(self) -> int:
        """Return `AttentionBackend.read_once_tokens`; 0 if its attention shares no reads."""
        return 0

    @abstractmethod
    def launch(self, batch: StepBatch) -> Launch:
        """Start a step. It runs after all earlier steps, and sees their writes.

        Raises:
            ShardError: a process of the engine was lost; nothing can be launched any more.
        """

    def close(self) -> None:
        """End the other processes; called after the last launch."""
        return

    def check(self) -> None:
        """Raise `ShardError` if a process of the engine was lost."""
        return

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Register a callback for a lost process; it is called from any thread."""
        return

    def prepare(self) -> bool:
        """See `protocol.Preparing`."""
        return False

    def share_prefixes(self, enabled: bool) -> bool:
        """See `protocol.PrefixSharing`."""
        del enabled
        return False
