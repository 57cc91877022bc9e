"""Which contexts exist: submission, forks, completion, failure, freeing.

Every primitive goes into the queue of its context. A fork stands in the queue of the parent, so
that it happens after everything submitted before it and before everything after. What a queue
asks for beyond computing (forks, empty fills, generations of no tokens) is settled at once; the
rest is taken up by the batcher.

Freeing a context drops what is queued on it, except for what a waiting fork depends on: up to the
last such fork it goes on, still reporting its events (unless its id is in use again), and then
disappears. A failure takes along the forks that wait for it, and is remembered: primitives on the
failed id that were under way are answered with the same failure until the id is freed.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

from parrot_engine.builtin.batch import SampledToken, SamplingRow
from parrot_engine.builtin.blocks import BlockPool
from parrot_engine.builtin.contexts import (
    Context,
    ContextState,
    Pending,
    PendingFill,
    PendingFork,
    PendingGenerate,
    Rank,
)
from parrot_engine.exceptions import ContextStateError, PrimitiveError
from parrot_engine.protocol import (
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    FinishReason,
    Generate,
    Generated,
    TokenLogprobs,
)

#: Failed ids that are remembered.
MAX_FAILURES = 4096
#: Primitives that may be queued on one context.
MAX_PENDING = 4096

_TRANSITIONS: dict[ContextState, frozenset[ContextState]] = {
    "unborn": frozenset({"idle", "gone"}),
    "waiting": frozenset({"running", "idle", "gone"}),
    "running": frozenset({"waiting", "idle", "gone"}),
    "idle": frozenset({"waiting", "gone"}),
    "gone": frozenset(),
}


class ContextStore:
    """All contexts of an engine, and the events that they gave rise to."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_context_tokens: int,
        max_waiting: int,
        max_contexts: int,
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_context_tokens = max_context_tokens
        self.max_waiting = max_waiting
        self.max_contexts = max_contexts
        #: Contexts with a place in the batch, in the order in which they got it.
        self.running: dict[Context, None] = {}
        #: Idle contexts that hold KV, least recently used first; pinned ones apart.
        self.idle: OrderedDict[Context, None] = OrderedDict()
        self.idle_pinned: OrderedDict[Context, None] = OrderedDict()
        self.events: list[Event] = []
        self.filled_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._by_id: dict[int, Context] = {}
        self._all: dict[Context, None] = {}
        self._waiting: list[tuple[Rank, Context]] = []
        self._count: Counter[ContextState] = Counter()
        self._failures: OrderedDict[int, Failed] = OrderedDict()
        self._number = 0

    # What there is

    @property
    def num_waiting(self) -> int:
        """Contexts that have work but no place in the batch."""
        return self._count["waiting"] + self._count["unborn"]

    @property
    def num_contexts(self) -> int:
        """Contexts that exist, freed ones that still serve a fork included."""
        return len(self._all)

    @property
    def has_work(self) -> bool:
        """Whether any context waits or runs."""
        return bool(self.running) or self.num_waiting > 0

    def get(self, context_id: int) -> Context | None:
        """The context of this id; None if there is none, or it was freed or failed."""
        return self._by_id.get(context_id)

    def take_events(self) -> list[Event]:
        """The events since the last call, in order."""
        events, self.events = self.events, []
        return events

    # Submission

    def submit_fill(self, primitive: Fill) -> None:
        """Queue a validated Fill.

        Raises:
            PrimitiveError: it cannot be queued; give the context up with `fail_id`.
        """
        context = self._open(
            primitive.context_id, primitive.parent_context_id, primitive.salt, may_create=True
        )
        context.pin = context.pin or primitive.pin
        self._enqueue(
            context,
            PendingFill(
                self._next_number(),
                primitive.token_ids,
                primitive.priority,
                primitive.prompt_logprobs,
            ),
        )

    def submit_generate(
        self, primitive: Generate, *, seed: int, end_token_ids: frozenset[int]
    ) -> None:
        """Queue a validated Generate.

        Raises:
            PrimitiveError: it cannot be queued; give the context up with `fail_id`.
        """
        context = self._open(
            primitive.context_id, primitive.parent_context_id, "", may_create=False
        )
        self._enqueue(
            context,
            PendingGenerate(
                self._next_number(),
                primitive.sampling,
                primitive.priority,
                seed,
                end_token_ids,
            ),
        )

    def free(self, context_id: int) -> None:
        """Forget a context, or that it failed; does nothing for an unknown id."""
        self._failures.pop(context_id, None)
        context = self._by_id.pop(context_id, None)
        if context is not None:
            context.freed = True
            context.story.append("freed")
            self._trim(context)

    def _open(
        self, context_id: int, parent_id: int | None, salt: str, *, may_create: bool
    ) -> Context:
        failure = self._failures.get(context_id)
        if failure is not None:
            raise PrimitiveError(failure.code, failure.message)
        context = self._by_id.get(context_id)
        if context is None:
            return self._create(context_id, parent_id, salt, may_create=may_create)
        if parent_id is not None:
            raise PrimitiveError(
                "invalid_request",
                f"parent_context_id: context {context_id} exists already; only a new context forks",
            )
        self._check_salt(context, salt)
        if len(context.pending) >= MAX_PENDING:
            raise PrimitiveError(
                "overloaded", f"{MAX_PENDING} primitives wait on context {context_id}; try later"
            )
        if context.state == "idle":
            self._check_waiting()
        return context

    def _create(
        self, context_id: int, parent_id: int | None, salt: str, *, may_create: bool
    ) -> Context:
        parent = None
        if parent_id is not None:
            parent_failure = self._failures.get(parent_id)
            if parent_failure is not None:
                raise PrimitiveError(
                    parent_failure.code,
                    f"parent context {parent_id} failed: {parent_failure.message}",
                )
            parent = self._by_id.get(parent_id)
            if parent is None:
                raise PrimitiveError(
                    "unknown_context", f"parent_context_id: there is no context {parent_id}"
                )
            self._check_salt(parent, salt)
        elif not may_create:
            raise PrimitiveError(
                "unknown_context", f"context_id: there is no context {context_id}; fill it first"
            )
        self._check_waiting()
        if len(self._all) >= self.max_contexts:
            raise PrimitiveError(
                "overloaded", f"{self.max_contexts} contexts exist (max_contexts); free some"
            )
        context = Context(
            context_id,
            salt if parent is None else parent.salt,
            self.block_size,
            self.max_context_tokens,
            parent,
            "idle" if parent is None else "unborn",
        )
        self._by_id[context_id] = context
        self._all[context] = None
        self._count[context.state] += 1
        if parent is not None:
            parent.pending.append(PendingFork(context))
        return context

    def _check_salt(self, context: Context, salt: str) -> None:
        # A context without a salt of its own in the primitive keeps that of its root.
        if salt and salt != context.salt:
            raise PrimitiveError(
                "invalid_request", f"salt: context {context.id} was created with another one"
            )

    def _check_waiting(self) -> None:
        if self.num_waiting >= self.max_waiting:
            raise PrimitiveError(
                "overloaded", f"{self.num_waiting} contexts wait already (max_waiting); try later"
            )

    def _enqueue(self, context: Context, pending: Pending) -> None:
        context.pending.append(pending)
        if context.state == "unborn":
            assert context.parent is not None
            self.settle(context.parent)
        else:
            self.settle(context)

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    # Progress

    def settle(self, context: Context) -> None:
        """Do everything at the head of the queue that needs no computing, forks included.

        Afterwards the context is waiting or running with computing to do, or idle, or gone.
        """
        todo = [context]
        while todo:
            current = todo.pop()
            if current.state in ("unborn", "gone"):
                continue
            while current.pending and self._settle_head(current, todo):
                pass
            if current.state == "gone":
                continue
            if current.pending:
                if current.state != "running":
                    self._move(current, "waiting")
            elif current.freed:
                self._remove(current)
            else:
                self._move(current, "idle")

    def _settle_head(self, context: Context, born: list[Context]) -> bool:
        """Settle the head of the queue; False when it needs computing, or the context failed."""
        head = context.pending[0]
        if isinstance(head, PendingFork):
            born.append(self._bear(context))
            return True
        try:
            if isinstance(head, PendingFill):
                return self._begin_fill(context, head)
            return self._begin_generate(context, head)
        except PrimitiveError as error:
            self.fail(context, error.code, error.message)
            return False

    def _begin_fill(self, context: Context, fill: PendingFill) -> bool:
        if fill.start is None:
            total = len(context.token_ids) + len(fill.token_ids)
            if total > context.max_tokens:
                raise PrimitiveError(
                    "context_too_long",
                    f"the context would hold {total} tokens; at most {context.max_tokens} fit",
                )
            fill.start = fill.reached = len(context.token_ids)
            context.token_ids.extend(fill.token_ids)
            if fill.token_ids and fill.prompt_logprobs is not None:
                if fill.start == 0:
                    fill.scores.append(None)
                else:
                    context.step_back(fill.start - 1)
        return self.complete_fill(context)

    def complete_fill(self, context: Context) -> bool:
        """Take the Fill at the head off the queue if it is done, and report it."""
        fill = context.fill
        if fill is None or fill.needs_scores or (fill.token_ids and context.num_remaining > 0):
            return False
        context.pending.popleft()
        self.filled_tokens += len(fill.token_ids)
        self.cached_tokens += fill.cached_tokens
        self._emit(
            context,
            Filled(
                context.id,
                len(fill.token_ids),
                fill.cached_tokens,
                fill.scores if fill.prompt_logprobs is not None else None,
            ),
        )
        return True

    def _begin_generate(self, context: Context, generate: PendingGenerate) -> bool:
        if not context.token_ids:
            raise PrimitiveError(
                "invalid_request", "context_id: the context is empty; there is nothing to extend"
            )
        if not context.has_room_for(generate):
            context.pending.popleft()
            self._emit(context, Generated(context.id, [], self._no_logprobs(generate), "length"))
            return True
        context.step_back(len(context.token_ids) - 1)
        self.sampling_row(context, generate)
        return False

    def sampling_row(self, context: Context, generate: PendingGenerate) -> SamplingRow:
        """The one sampling row of a Generate, made when its first token comes up."""
        if generate.row is None:
            generate.row = SamplingRow(
                generate.sampling,
                list(context.token_ids),
                [],
                generate.seed,
                generate.end_token_ids,
            )
        return generate.row

    def add_token(self, context: Context, generate: PendingGenerate, token: SampledToken) -> bool:
        """Append a sampled token to its context and report it; the Generate is at the head.

        Returns:
            Whether the Generate goes on; otherwise it left the queue, which wants settling.
        """
        if not context.pending or context.pending[0] is not generate or generate.row is None:
            raise self._illegal(context, "a token for a Generate that is not at the head")
        if token.token_id is None:
            raise self._illegal(context, "no token was sampled")
        generated = generate.row.generated_token_ids
        generated.append(token.token_id)
        context.token_ids.append(token.token_id)
        self.generated_tokens += 1
        finish: FinishReason | None = None
        if token.token_id in generate.end_token_ids:
            finish = "stop"
        elif not (
            len(generated) < generate.sampling.max_tokens
            and len(context.token_ids) < context.max_tokens
        ):
            finish = "length"
        logprobs = self._no_logprobs(generate)
        if logprobs is not None and token.logprobs is not None:
            logprobs.append(token.logprobs)
        self._emit(context, Generated(context.id, [token.token_id], logprobs, finish))
        if finish is None:
            return True
        context.pending.popleft()
        return False

    def _no_logprobs(self, generate: PendingGenerate) -> list[TokenLogprobs] | None:
        return [] if generate.sampling.logprobs is not None else None

    def bear_forks(self, context: Context) -> None:
        """Let the forks at the head of the queue happen."""
        while context.pending and isinstance(context.pending[0], PendingFork):
            self.settle(self._bear(context))

    def _bear(self, parent: Context) -> Context:
        """Fork: the child shares every block, the partially filled one included."""
        fork = parent.pending.popleft()
        assert isinstance(fork, PendingFork)
        child = fork.child
        child.parent = None
        child.token_ids = list(parent.token_ids)
        child.hashes = list(parent.hashes)
        child.block_table = list(parent.block_table)
        child.num_computed = parent.num_computed
        for block in child.block_table:
            self.pool.retain(block)
        self._move(child, "idle")
        child.story.append(f"forked from {parent.id} at {len(parent.token_ids)} tokens")
        return child

    # The batch

    def peek_waiting(self) -> Context | None:
        """The waiting context of the smallest rank."""
        while self._waiting:
            rank, context = self._waiting[0]
            if context.queued == rank:
                return context
            heapq.heappop(self._waiting)
        return None

    def pop_waiting(self) -> Context:
        """Take the waiting context of the smallest rank; `start` or `push_waiting` it."""
        context = self.peek_waiting()
        assert context is not None
        heapq.heappop(self._waiting)
        context.queued = None
        return context

    def push_waiting(self, context: Context) -> None:
        """Put a context back that `pop_waiting` gave."""
        context.queued = context.rank
        heapq.heappush(self._waiting, (context.rank, context))
        if len(self._waiting) > 2 * self._count["waiting"] + 64:
            # Entries of contexts that were freed meanwhile only leave at the top.
            self._waiting = [(rank, other) for rank, other in self._waiting if other.queued == rank]
            heapq.heapify(self._waiting)

    def waiting_with_blocks(self, *, pinned: bool) -> Iterator[Context]:
        """Waiting contexts that hold KV, in no order."""
        return (
            context
            for _, context in self._waiting
            if context.queued is not None and context.block_table and context.pin == pinned
        )

    def start(self, context: Context) -> None:
        """Give a waiting context a place in the batch."""
        self._move(context, "running")

    def pause(self, context: Context) -> None:
        """Take the place in the batch away; the KV stays."""
        self._move(context, "waiting")

    def drop_blocks(self, context: Context) -> None:
        """Give up a context's KV; its tokens stay and are computed again when needed."""
        self.pool.release_table(context.block_table)
        context.block_table = []
        context.num_computed = 0
        self._displace_idle(context)
        context.story.append("KV dropped")

    # The end

    def fail(
        self, context: Context, code: FailureCode, message: str, *, distrust: bool = False
    ) -> None:
        """Give a context up, and the forks that wait for it.

        Args:
            distrust: its KV may be wrong: nobody shall find its blocks again.
        """
        if distrust:
            for block in context.block_table:
                self.pool.withdraw(block)
        todo = deque([(context, message)])
        while todo:
            current, reason = todo.popleft()
            todo.extend(
                (fork.child, f"parent context {current.id} failed: {reason}")
                for fork in current.pending
                if isinstance(fork, PendingFork)
            )
            failure = Failed(current.id, code, reason)
            self._emit(current, failure)
            if not current.freed:
                del self._by_id[current.id]
                self._remember(failure)
            current.pending.clear()
            parent = current.parent
            self._remove(current)
            if parent is not None:
                self._trim(parent)

    def fail_id(self, context_id: int, code: FailureCode, message: str) -> None:
        """Answer a primitive that could not be queued; gives up its context, if there is one."""
        context = self._by_id.get(context_id)
        if context is not None:
            self.fail(context, code, message)
        else:
            failure = Failed(context_id, code, message)
            self.events.append(failure)
            self._remember(failure)

    def _remember(self, failure: Failed) -> None:
        self._failures[failure.context_id] = failure
        self._failures.move_to_end(failure.context_id)
        if len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def _trim(self, context: Context) -> None:
        """Drop what no waiting fork depends on, of a freed context and of its freed parents."""
        current: Context | None = context
        while current is not None and current.freed and current.state != "gone":
            while current.pending and not isinstance(current.pending[-1], PendingFork):
                current.pending.pop()
            if current.pending:
                return
            parent = current.parent
            self._remove(current)
            current = parent

    def _remove(self, context: Context) -> None:
        """The context is no more; its blocks are released, its place in a parent's queue too."""
        self.drop_blocks(context)
        if context.parent is not None:
            siblings = context.parent.pending
            for fork in siblings:
                if isinstance(fork, PendingFork) and fork.child is context:
                    siblings.remove(fork)
                    break
        self._move(context, "gone")
        del self._all[context]

    def _emit(self, context: Context, event: Event) -> None:
        # NOTE: a freed id may be in use again; its events belong to the new context.
        if not context.freed or context.id not in self._by_id:
            self.events.append(event)

    def _move(self, context: Context, state: ContextState) -> None:
        old = context.state
        if old == state:
            if state == "idle":
                self._place_idle(context)
            elif state == "waiting" and context.queued != context.rank:
                # The head of its queue changed: all of it was found in the prefix cache.
                self.push_waiting(context)
            return
        if state not in _TRANSITIONS[old]:
            raise self._illegal(context, f"cannot become {state}")
        context.queued = None
        if old == "running":
            del self.running[context]
        elif old == "idle":
            self._displace_idle(context)
        self._count[old] -= 1
        self._count[state] += 1
        context.state = state
        context.story.append(state)
        if state == "running":
            self.running[context] = None
        elif state == "waiting":
            self.push_waiting(context)
        elif state == "idle":
            self._place_idle(context)

    def _place_idle(self, context: Context) -> None:
        self._displace_idle(context)
        if context.block_table:
            (self.idle_pinned if context.pin else self.idle)[context] = None

    def _displace_idle(self, context: Context) -> None:
        self.idle.pop(context, None)
        self.idle_pinned.pop(context, None)

    def _illegal(self, context: Context, problem: str) -> ContextStateError:
        return ContextStateError(
            f"context {context.id} ({context.state}, {len(context.token_ids)} tokens, "
            f"{context.num_computed} computed, {len(context.pending)} pending)",
            problem,
            list(context.story),
        )

    def check_integrity(self) -> None:
        """Check every context, and the block pool against all block tables.

        Raises:
            EngineStateError: something does not fit; the message tells what and its story.
        """
        self.pool.check_integrity(context.block_table for context in self._all)
        counted: Counter[ContextState] = Counter(context.state for context in self._all)
        line = {context for rank, context in self._waiting if context.queued == rank}
        for context in self._all:
            if not 0 <= context.num_computed <= len(context.token_ids):
                raise self._illegal(context, "computed more than it has")
            held, least = len(context.block_table), context.blocks_for(context.num_computed)
            if not least <= held <= context.num_computed // context.block_size + 1:
                raise self._illegal(context, f"holds {held} blocks, needs {least}")
            if (context.state in ("running", "waiting")) != bool(
                context.pending and context.state != "unborn"
            ):
                raise self._illegal(context, "work and state do not match")
            if (context.state == "running") != (context in self.running):
                raise self._illegal(context, "not in the batch that it runs in")
            if (context.state == "waiting") != (context in line):
                raise self._illegal(context, "waits without standing in the line")
            if (context.state == "idle" and held > 0) != (
                context in (self.idle_pinned if context.pin else self.idle)
            ):
                raise self._illegal(context, "its KV could not be found when blocks run out")
            if context.freed == (self._by_id.get(context.id) is context):
                raise self._illegal(context, "freed and known")
            if any(counted[state] != self._count[state] for state in ("waiting", "idle", "unborn")):
                raise self._illegal(context, "contexts are miscounted")
