"""Contexts: token sequences, the blocks that hold their KV, and the work queued on them.

Single contexts and what follows from their content: what has to be computed next, from which
position on logits are needed, when a generation ends. Which contexts exist, and how they are forked
and freed, and which of them wait, run or idle, is `parrot_engine.engine.context_store`; what runs
when is `parrot_engine.engine.step_planner`.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from operator import is_not
from typing import Literal, NamedTuple, TypeAlias

from parrot_engine.batch import Matcher, SamplingRow, ScoringRow
from parrot_engine.engine.ngrams import NgramProposer
from parrot_engine.exceptions import PrimitiveError
from parrot_engine.kv_cache.block_hash import block_hash, root_hash
from parrot_engine.kv_cache.block_pool import BlockTable
from parrot_engine.protocol import Failed, GenerateEnd, Retention, SamplingParams, TokenLogprobs

#: `pending_fork` waits for its parent to reach the fork; `waiting` has work but no place in the
#: batch; `running` has one; `pending_grammar` has work, but its grammar is being compiled; `idle`
#: has no work; `gone` was freed or failed.
ContextState: TypeAlias = Literal[
    "pending_fork", "waiting", "running", "pending_grammar", "idle", "gone"
]

#: Stale entries that are tolerated even when the queue is short.
_STALE_ENTRIES = 64

#: Failed ids that are remembered.
MAX_FAILURES = 4096

#: Sorts work: (priority, number of the submission), smaller first.
Rank: TypeAlias = tuple[int, int]


@dataclass(slots=True, eq=False)
class PendingFill:
    """A Fill in a context's queue."""

    number: int
    token_ids: list[int]
    priority: int
    prompt_logprobs: int | None
    #: Position of its first token; None until it is at the head of the queue.
    start: int | None = None
    #: Tokens before this position have been computed or found at least once.
    reached: int = 0
    #: Tokens that were found in the prefix cache.
    cached_tokens: int = 0
    #: With `prompt_logprobs`: one entry per token scored so far.
    scores: list[TokenLogprobs | None] = field(default_factory=list)

    @property
    def needs_scores(self) -> bool:
        return self.prompt_logprobs is not None and len(self.scores) < len(self.token_ids)


@dataclass(slots=True, eq=False)
class PendingGenerate:
    """A Generate in a context's queue."""

    number: int
    sampling: SamplingParams
    priority: int
    #: Of the random stream; drawn at submission, so that it does not depend on the batch.
    seed: int
    end_token_ids: frozenset[int]
    #: The last tokens of its context that it has generated on another engine.
    num_before: int = 0
    #: Made when its first token is about to be sampled; its lists grow with the generation.
    row: SamplingRow | None = None
    #: Its grammar is being compiled: no token can be drawn yet.
    awaits_grammar: bool = False
    #: Makes what keeps it to its grammar, if it has one and that is compiled.
    new_matcher: Callable[[], Matcher] | None = None
    #: Proposes its next tokens; None until first used.
    proposer: NgramProposer | None = None

    def begin(self, token_ids: list[int]) -> SamplingRow:
        """The one sampling row, made if there is none: the next token follows these."""
        if self.row is None:
            begin = len(token_ids) - self.num_before
            self.row = SamplingRow(
                self.sampling,
                token_ids[:begin],
                token_ids[begin:],
                self.seed,
                self.end_token_ids,
                matcher=None if self.new_matcher is None else self.new_matcher(),
            )
        return self.row

    @property
    def num_generated(self) -> int:
        return self.num_before if self.row is None else len(self.row.generated_token_ids)

    def append(
        self, token_ids: list[int], token_id: int, max_context_tokens: int
    ) -> GenerateEnd | None:
        """Append a sampled token to those of its context; why the generation ends, if it does."""
        row = self.row
        assert row is not None
        row.generated_token_ids.append(token_id)
        token_ids.append(token_id)
        if token_id in row.end_token_ids:
            return "closed" if row.matcher is not None and row.matcher.is_closing else "stop"
        if (
            len(row.generated_token_ids) < row.params.max_tokens
            and len(token_ids) < max_context_tokens
        ):
            return None
        return "length"

    def no_logprobs(self) -> list[TokenLogprobs] | None:
        """The log-probabilities of no tokens: a list if the sampling parameters ask for some."""
        return [] if self.sampling.logprobs is not None else None


@dataclass(slots=True, eq=False)
class PendingFork:
    """The point in a parent's queue at which a child begins."""

    parent: Context
    child: Context
    #: Of the child's most urgent work.
    priority: int


Pending: TypeAlias = PendingFill | PendingGenerate | PendingFork


class PlannedRow(NamedTuple):
    """One row of a planned step, and what its outcome is for."""

    context: Context
    #: The Generate that gets a token from the row's last logits.
    generate: PendingGenerate | None
    #: The following tokens of a Fill that the row's first logits score.
    scoring: ScoringRow | None
    #: Position of the row's first token, and the one behind its last.
    start: int
    end: int
    #: The index of the row in its step.
    number: int
    #: The context's epoch when it was planned.
    epoch: int
    #: The row's draft tokens, which are its last.
    drafts: Sequence[int] = ()


@dataclass(slots=True, eq=False)
class Context:
    """One context. Positions 0 … num_computed-1 have KV in the blocks of `block_table`."""

    id: int
    salt: str
    #: Id of its adapter; empty for none.
    adapter: str
    block_size: int
    #: Tokens that it may hold at most.
    max_tokens: int
    #: Its place in its parent's queue, while the fork is pending.
    fork: PendingFork | None = None
    state: ContextState = "idle"
    #: Keep the KV as long as there is anything else to evict.
    pin: bool = False
    #: Freed by the caller, but still computing what a waiting fork depends on.
    freed: bool = False
    #: Of its blocks, once it is gone.
    retention: Retention = "normal"
    token_ids: list[int] = field(default_factory=list)
    block_table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    #: The row launched last, until its outcome has been applied; None also for one whose outcome
    #: does not matter any more.
    in_flight: PlannedRow | None = None
    #: Grows whenever a row in flight must not count as computed: KV dropped, generation over.
    epoch: int = 0
    pending: deque[Pending] = field(default_factory=deque)
    #: Hashes of the first full blocks of `token_ids`, computed on demand.
    hashes: list[bytes] = field(default_factory=list)
    #: The rank under which it stands in the queue of waiting contexts.
    queued_rank: Rank | None = None
    #: How it came to its state, for `ContextStateError`.
    story: deque[str] = field(default_factory=lambda: deque(maxlen=32))

    @property
    def num_remaining(self) -> int:
        """Tokens that are known but have no KV yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def rank(self) -> Rank:
        """The rank of the primitive at the head of the queue, which must not be a fork."""
        head = self.pending[0]
        assert not isinstance(head, PendingFork)
        return (head.priority, head.number)

    @property
    def fill(self) -> PendingFill | None:
        """The Fill at the head of the queue."""
        head = self.pending[0] if self.pending else None
        return head if isinstance(head, PendingFill) else None

    @property
    def generate(self) -> PendingGenerate | None:
        """The Generate that samples from the logits of the last known token, if any.

        Either at the head, or right behind the Fill at the head: then no step of its own is
        needed for the first token. Forks in between do not matter: they take no step.
        """
        for pending in self.pending:
            if isinstance(pending, PendingGenerate):
                return (
                    pending if self.has_room_for(pending) and not pending.awaits_grammar else None
                )
            if isinstance(pending, PendingFill) and pending is not self.pending[0]:
                return None
        return None

    @property
    def wants_one_token(self) -> bool:
        """Return True if a running context, not planned yet, takes a single token in a step."""
        in_flight = self.in_flight
        if in_flight is None:
            return self.num_remaining == 1
        if in_flight.generate is not None:
            return self.continues_in_flight(in_flight.generate)
        return len(self.token_ids) - in_flight.end == 1

    @property
    def awaits_grammar(self) -> bool:
        """Return True if what comes next is a Generate whose grammar is being compiled."""
        head = self.pending[0] if self.pending else None
        return isinstance(head, PendingGenerate) and head.awaits_grammar

    def is_at(self, generate: PendingGenerate | None) -> bool:
        return bool(self.pending) and self.pending[0] is generate

    def has_room_for(self, generate: PendingGenerate) -> bool:
        """Return True if a Generate that begins now yields any token."""
        return (
            generate.num_before < len(self.token_ids) < self.max_tokens
            and generate.sampling.max_tokens > generate.num_before
        )

    def continues_in_flight(self, generate: PendingGenerate) -> bool:
        """Return True if a Generate draws another token after the one in flight, if it goes on.

        Known by counting. False as well when a fork stands in front: what it shares should not grow
        meanwhile.
        """
        pending, row = self.pending, generate.row
        if row is None:
            return False
        if pending[0] is not generate and (len(pending) < 2 or pending[1] is not generate):
            return False
        return (
            len(row.generated_token_ids) + 1 < row.params.max_tokens
            and len(self.token_ids) + 1 < self.max_tokens
        )

    @property
    def speculative_generate(self) -> PendingGenerate | None:
        """The Generate that takes one token in the next step, if drafts may make that more."""
        head, in_flight = self.pending[0] if self.pending else None, self.in_flight
        if not isinstance(head, PendingGenerate) or head.row is None or head.row.needs_history:
            return None
        if in_flight is None:
            return head if self.num_remaining == 1 else None
        return head if in_flight.generate is head and self.continues_in_flight(head) else None

    def discard_in_flight(self) -> None:
        """The row in flight must not count any more: its generation is over."""
        if self.in_flight is not None:
            self.in_flight = None
            self.epoch += 1

    def fork_from(self, parent: Context) -> None:
        """Carry out the pending fork: take over all of the parent. The caller retains blocks."""
        self.fork = None
        self.token_ids = list(parent.token_ids)
        self.hashes = list(parent.hashes)
        self.block_table = BlockTable(parent.block_table.ids)
        self.num_computed = parent.num_computed

    def raise_priority(self, priority: int) -> Context | None:
        """Give all queued work at least the priority of new work that will wait for it.

        A pending fork waits for its parent up to the fork, and so on. So priority numbers never
        fall along a queue, that of a fork being its child's, and the walk back ends at the first
        that is small enough.

        Returns:
            The context with no pending fork up to whose head the walk came, so that its rank may
            have changed; None if it ended before.
        """
        context = self
        queue: Iterable[Pending] = reversed(context.pending)
        while True:
            for pending in queue:
                if pending.priority <= priority:
                    return None
                pending.priority = priority
            fork = context.fork
            if fork is None:
                return context
            context = fork.parent
            queue = dropwhile(partial(is_not, fork), reversed(context.pending))

    def begin_fill(self, fill: PendingFill) -> None:
        """Append the tokens of the Fill that came to the head of the queue.

        Raises:
            PrimitiveError: they do not fit.
        """
        total = len(self.token_ids) + len(fill.token_ids)
        if total > self.max_tokens:
            raise PrimitiveError(
                "context_too_long",
                f"the context would hold {total} tokens; at most {self.max_tokens} fit",
            )
        fill.start = fill.reached = len(self.token_ids)
        self.token_ids.extend(fill.token_ids)
        if fill.token_ids and fill.prompt_logprobs is not None:
            if fill.start == 0:
                fill.scores.append(None)
            else:
                self.step_back(fill.start - 1)

    def first_needed(self) -> int:
        """The first position that must be computed, even if its KV could be found: its logits
        are needed. The number of tokens when none are.
        """
        fill = self.fill
        if fill is not None and fill.needs_scores:
            assert fill.start is not None
            return max(0, fill.start + len(fill.scores) - 1)
        return len(self.token_ids) - (1 if self.generate is not None else 0)

    def digest(self, index: int) -> bytes:
        """The hash of the full block number `index` of this context."""
        size = self.block_size
        while len(self.hashes) <= index:
            number = len(self.hashes)
            parent = self.hashes[-1] if self.hashes else root_hash(self.salt, self.adapter)
            tokens = self.token_ids[number * size : (number + 1) * size]
            self.hashes.append(block_hash(parent, tokens))
        return self.hashes[index]

    def reusable_digests(self) -> Iterator[bytes]:
        """The hashes of its next blocks, as long as finding them saves computing.

        A block is of use if it is full, and something in it need not be computed.
        """
        size = self.block_size
        index = self.num_computed // size
        last = min(self.first_needed(), len(self.token_ids))
        while (index + 1) * size <= len(self.token_ids) and index * size < last:
            yield self.digest(index)
            index += 1

    def step_back(self, position: int) -> None:
        """Have the token at `position` computed again, if it was: its logits are needed."""
        self.num_computed = min(self.num_computed, position)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that its known tokens need beyond those that it holds."""
        return max(0, self.blocks_for(len(self.token_ids)) - len(self.block_table))

    def note_found(self, start: int, end: int) -> None:
        """Positions start … end-1 were found in the prefix cache."""
        fill = self.fill
        if fill is not None:
            fill.cached_tokens += max(0, end - max(start, fill.reached))
            fill.reached = max(fill.reached, end)


class WaitingQueue:
    """Waiting contexts, the smallest rank first.

    `Context.queued_rank` is the rank under which a context stands here. An entry that does not
    agree is stale: its context left, or has another rank by now. Stale entries leave at the top, or
    all at once when they are the majority.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Rank, Context]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Context]:
        """All of them, in no order."""
        return (context for rank, context in self._entries if context.queued_rank == rank)

    def first(self) -> Context | None:
        """The context of the smallest rank; it stays."""
        while self._entries:
            rank, context = self._entries[0]
            if context.queued_rank == rank:
                return context
            heapq.heappop(self._entries)
        return None

    def pop(self) -> Context:
        """Take the context of the smallest rank out.

        Raises:
            IndexError: no context waits.
        """
        context = self.first()
        if context is None:
            raise IndexError("no context waits")
        heapq.heappop(self._entries)
        self.remove(context)
        return context

    def add(self, context: Context) -> None:
        """Queue a context by its present rank, which must not be its old one."""
        if context.queued_rank is None:
            self._length += 1
        context.queued_rank = context.rank
        heapq.heappush(self._entries, (context.rank, context))
        if len(self._entries) > 2 * self._length + _STALE_ENTRIES:
            self._entries = [
                (rank, other) for rank, other in self._entries if other.queued_rank == rank
            ]
            heapq.heapify(self._entries)

    def remove(self, context: Context) -> None:
        """Take a context out; does nothing for one that is not here."""
        if context.queued_rank is not None:
            context.queued_rank = None
            self._length -= 1


class FailureMemory:
    """The last `MAX_FAILURES` failures, one an id.

    Primitives under way to an id when its context fails are answered with the same failure, until
    the id is freed. Freeing it is optional, so only the latest failures are kept.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[int, Failed] = OrderedDict()

    def get(self, context_id: int) -> Failed | None:
        """The failure of this id; None if it did not fail, was freed, or that was long ago."""
        return self._failures.get(context_id)

    def remember(self, failure: Failed) -> None:
        """Keep a failure; the oldest goes when there are too many."""
        self._failures[failure.context_id] = failure
        self._failures.move_to_end(failure.context_id)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def forget(self, context_id: int) -> None:
        """The id was freed; does nothing for one that did not fail."""
        self._failures.pop(context_id, None)
