"""The contexts of an engine: their states and queues, from submission to freeing.

Every primitive goes into the queue of its context. A fork stands in the queue of the parent, so
that it happens after everything submitted before it and before everything after. What a queue
asks for beyond computing (forks, empty fills, generations of no tokens) is settled at once; the
rest is taken up by the batcher. Work is as urgent as whatever waits for it, behind it in the queue
or in a fork.

Freeing a context drops what is queued on it, except for what a waiting fork depends on: up to the
last such fork it goes on, still reporting its events (unless its id is in use again), and then
disappears. A failure takes along the forks that wait for it, and is remembered: primitives on the
failed id that were under way are answered with the same failure until the id is freed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator

from parrot_engine.batch import Matcher, SampledToken
from parrot_engine.engine.contexts import (
    Context,
    ContextState,
    FailureMemory,
    PendingFill,
    PendingFork,
    PendingGenerate,
    WaitingQueue,
)
from parrot_engine.exceptions import ContextStateError, PrimitiveError
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.protocol import (
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    Generate,
    Generated,
    Retention,
)

_TRANSITIONS: dict[ContextState, frozenset[ContextState]] = {
    "pending_fork": frozenset({"idle", "gone"}),
    "waiting": frozenset({"running", "pending_grammar", "idle", "gone"}),
    "running": frozenset({"waiting", "pending_grammar", "idle", "gone"}),
    "pending_grammar": frozenset({"waiting", "idle", "gone"}),
    "idle": frozenset({"waiting", "pending_grammar", "gone"}),
    "gone": frozenset(),
}

#: Primitives that may be queued on one context.
MAX_PENDING = 4096


class ContextStates:
    """All contexts of an engine, by state."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        #: Contexts with a place in the batch, in the order in which they got it.
        self.running: dict[Context, None] = {}
        #: Contexts in state `waiting`, except for those that the batcher took out to look at.
        self.waiting = WaitingQueue()
        #: Contexts that hold KV and are idle or wait for a grammar, least recently used first;
        #: pinned ones apart.
        self.idle: OrderedDict[Context, None] = OrderedDict()
        self.idle_pinned: OrderedDict[Context, None] = OrderedDict()
        #: Contexts of each adapter.
        self.adapter_uses: Counter[str] = Counter()
        self._all: dict[Context, None] = {}
        self._count: Counter[ContextState] = Counter()

    def __iter__(self) -> Iterator[Context]:
        """Every context that is not gone."""
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_waiting(self) -> int:
        """Contexts that have work but no place in the batch."""
        return self._count["waiting"] + self._count["pending_grammar"] + self._count["pending_fork"]

    @property
    def num_pending_grammar(self) -> int:
        """The number of waiting contexts whose grammar is still being compiled."""
        return self._count["pending_grammar"]

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, context: Context) -> None:
        """Take in a new context: its fork is pending, or it is idle without KV."""
        self._all[context] = None
        self._count[context.state] += 1
        if context.adapter:
            self.adapter_uses[context.adapter] += 1

    def move(self, context: Context, state: ContextState) -> None:
        """Change a context's state; to the same one: its place in the queue, or its last use.

        With `running` it has a place in the batch; back in `waiting` it keeps its KV.

        Raises:
            ContextStateError: the one does not follow the other.
        """
        old = context.state
        if old == state:
            if state in ("idle", "pending_grammar"):
                self._place_idle(context)
            elif state == "waiting" and context.queued_rank != context.rank:
                # The head of its queue changed (all of it was found in the prefix cache), or
                # became more urgent.
                self.waiting.add(context)
            return
        if state not in _TRANSITIONS[old]:
            raise self.illegal(context, f"cannot become {state}")
        self.waiting.remove(context)
        if old == "running":
            del self.running[context]
        elif old in ("idle", "pending_grammar"):
            self._displace_idle(context)
        self._count[old] -= 1
        self._count[state] += 1
        context.state = state
        context.story.append(state)
        if state == "running":
            self.running[context] = None
        elif state == "waiting":
            self.waiting.add(context)
        elif state in ("idle", "pending_grammar"):
            self._place_idle(context)

    def drop_blocks(self, context: Context, retention: Retention = "normal") -> None:
        """Give up a context's KV; its tokens stay and are computed again when needed."""
        self.pool.release_table(context.block_table.ids, retention, context.id)
        context.block_table.truncate(0)
        context.epoch += 1
        context.num_computed = 0
        self._displace_idle(context)
        context.story.append("KV dropped")

    def remove(self, context: Context) -> None:
        """Take a context out and release its blocks."""
        self.drop_blocks(context, context.retention)
        self.move(context, "gone")
        del self._all[context]
        if context.adapter:
            self.adapter_uses[context.adapter] -= 1

    def _place_idle(self, context: Context) -> None:
        self._displace_idle(context)
        if context.block_table:
            (self.idle_pinned if context.pin else self.idle)[context] = None

    def _displace_idle(self, context: Context) -> None:
        self.idle.pop(context, None)
        self.idle_pinned.pop(context, None)

    def illegal(self, context: Context, problem: str) -> ContextStateError:
        """An exception for a transition that a context does not allow; not raised."""
        return ContextStateError(
            f"context {context.id} ({context.state}, {len(context.token_ids)} tokens, "
            f"{context.num_computed} computed, {len(context.pending)} pending)",
            problem,
            list(context.story),
        )

    def check_integrity(self) -> None:
        """Check every context, and the block pool against all block tables.

        Raises:
            EngineStateError: an invariant does not hold; the message has the context's story.
        """
        self.pool.check_integrity(context.block_table.ids for context in self._all)
        counted: Counter[ContextState] = Counter(context.state for context in self._all)
        adapters = Counter(context.adapter for context in self._all if context.adapter)
        queued = set(self.waiting)
        for context in self._all:
            if not 0 <= context.num_computed <= len(context.token_ids):
                raise self.illegal(context, "computed more than it has")
            held, least = len(context.block_table), context.blocks_for(context.num_computed)
            end, flight = context.num_computed, context.in_flight
            if flight is not None and flight.epoch == context.epoch:
                end = max(end, flight.end)
            elif flight is not None and context.state == "running":
                raise self.illegal(context, "runs behind a row that does not count")
            if not least <= held <= end // context.block_size + 1:
                raise self.illegal(context, f"holds {held} blocks, needs {least}")
            if (context.state in ("running", "waiting", "pending_grammar")) != bool(
                context.pending and context.state != "pending_fork"
            ):
                raise self.illegal(context, "work and state do not match")
            if (context.state == "running") != (context in self.running):
                raise self.illegal(context, "not in the batch that it runs in")
            if (
                context.awaits_grammar != (context.state == "pending_grammar")
                and context.state != "pending_fork"
            ):
                raise self.illegal(context, "waits for no grammar, or does not wait for its own")
            if (context.state == "waiting") != (context in queued):
                raise self.illegal(context, "waits outside of the queue")
            if context in queued and context.queued_rank != context.rank:
                raise self.illegal(context, "is queued under another rank")
            if (context.state in ("idle", "pending_grammar") and held > 0) != (
                context in (self.idle_pinned if context.pin else self.idle)
            ):
                raise self.illegal(context, "its KV could not be found when blocks run out")
            if any(
                counted[state] != self._count[state]
                for state in ("waiting", "pending_grammar", "idle", "pending_fork")
            ):
                raise self.illegal(context, "contexts are miscounted")
            if len(self.waiting) != counted["waiting"]:
                raise self.illegal(context, "the queue is miscounted")
            if self.adapter_uses[context.adapter] != adapters[context.adapter]:
                raise self.illegal(context, "contexts of its adapter are miscounted")


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
        self._pool = pool
        self.block_size = block_size
        self.max_context_tokens = max_context_tokens
        self.max_waiting = max_waiting
        self.max_contexts = max_contexts
        #: Every context, also those that were freed and still serve a fork.
        self.states = ContextStates(pool)
        #: Ids of the adapters that new contexts may name.
        self.adapters: set[str] = set()
        #: What happened since `take_events`.
        self.events: list[Event] = []
        self.filled_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self._by_id: dict[int, Context] = {}
        self._failures = FailureMemory()
        self._number = 0

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
        context = self._open(primitive)
        context.pin = context.pin or primitive.pin
        self._number += 1
        tokens, count = primitive.token_ids, primitive.prompt_logprobs
        self._enqueue(context, PendingFill(self._number, tokens, primitive.priority, count))

    def submit_generate(
        self,
        primitive: Generate,
        *,
        seed: int,
        end_token_ids: frozenset[int],
        awaits_grammar: bool = False,
    ) -> tuple[Context, PendingGenerate]:
        """Queue a validated Generate; one that `awaits_grammar` waits for `release`.

        Raises:
            PrimitiveError: it cannot be queued; give the context up with `fail_id`.
        """
        context = self._open(primitive)
        self._number += 1
        sampling, priority = primitive.sampling, primitive.priority
        generate = PendingGenerate(
            self._number,
            sampling,
            priority,
            seed,
            end_token_ids,
            primitive.generated,
            awaits_grammar=awaits_grammar,
        )
        self._enqueue(context, generate)
        return context, generate

    def release(
        self, context: Context, generate: PendingGenerate, new_matcher: Callable[[], Matcher]
    ) -> None:
        """Let a Generate go on whose grammar is compiled; `new_matcher` makes its matcher."""
        generate.new_matcher = new_matcher
        generate.awaits_grammar = False
        if context.is_at(generate):
            self.settle(context)

    def free(self, context_id: int, retention: Retention = "normal") -> None:
        """Forget a context, or that it failed.

        For an unknown id `drop` drops what is still kept for it, and nothing else happens.
        """
        self._failures.forget(context_id)
        context = self._by_id.pop(context_id, None)
        if context is not None:
            context.freed = True
            context.retention = retention
            context.story.append("freed")
            self._trim(context)
        elif retention == "drop":
            self._pool.drop_kept(context_id)

    def _open(self, primitive: Fill | Generate) -> Context:
        """The context of a primitive; a new one, or a fork of its parent, if need be."""
        context_id, parent_id = primitive.context_id, primitive.parent_context_id
        failure = self._failures.get(context_id)
        if failure is not None:
            raise PrimitiveError(failure.code, failure.message)
        context = self._by_id.get(context_id)
        if context is None:
            return self._create(primitive)
        if parent_id is not None:
            raise PrimitiveError(
                "invalid_request",
                f"parent_context_id: context {context_id} exists already; only a new context forks",
            )
        self._check_identity(context, primitive)
        if len(context.pending) >= MAX_PENDING:
            raise PrimitiveError(
                "overloaded", f"{MAX_PENDING} primitives wait on context {context_id}; try later"
            )
        if context.state == "idle":
            self._check_waiting()
        return context

    def _create(self, primitive: Fill | Generate) -> Context:
        context_id, parent_id = primitive.context_id, primitive.parent_context_id
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
            self._check_identity(parent, primitive)
        elif isinstance(primitive, Generate):
            raise PrimitiveError(
                "unknown_context", f"context_id: there is no context {context_id}; fill it first"
            )
        self._check_waiting()
        if len(self.states) >= self.max_contexts:
            raise PrimitiveError(
                "overloaded", f"{self.max_contexts} contexts exist (max_contexts); free some"
            )
        adapter = _adapter_of(primitive) if parent is None else parent.adapter
        if parent is None and adapter and adapter not in self.adapters:
            raise PrimitiveError("unknown_adapter", f"adapter: {adapter} is not loaded")
        context = Context(
            context_id,
            _salt_of(primitive) if parent is None else parent.salt,
            adapter,
            self.block_size,
            self.max_context_tokens,
        )
        if parent is not None:
            self._raise_priority(parent, primitive.priority)
            context.state = "pending_fork"
            context.fork = PendingFork(parent, context, primitive.priority)
            parent.pending.append(context.fork)
        self._by_id[context_id] = context
        self.states.add(context)
        return context

    def _check_identity(self, context: Context, primitive: Fill | Generate) -> None:
        # A primitive that names no salt or adapter takes that of its context or parent.
        if _salt_of(primitive) not in ("", context.salt):
            raise PrimitiveError(
                "invalid_request", f"salt: context {context.id} was created with another one"
            )
        if _adapter_of(primitive) not in ("", context.adapter):
            raise PrimitiveError(
                "invalid_request", f"adapter: context {context.id} was created with another one"
            )

    def _check_waiting(self) -> None:
        waiting = self.states.num_waiting
        if waiting >= self.max_waiting:
            raise PrimitiveError(
                "overloaded", f"{waiting} contexts wait already (max_waiting); try later"
            )

    def _enqueue(self, context: Context, pending: PendingFill | PendingGenerate) -> None:
        self._raise_priority(context, pending.priority)
        context.pending.append(pending)
        self.settle(context if context.fork is None else context.fork.parent)

    def _raise_priority(self, context: Context, priority: int) -> None:
        """Raise what is queued on a context to the priority of work that will wait for it."""
        first = context.raise_priority(priority)
        if first is not None and first.state == "waiting":
            self.states.move(first, "waiting")

    # Progress

    def settle(self, context: Context) -> None:
        """Do everything at the head of the queue that needs no computing, forks included.

        Afterwards the context is waiting or running with computing to do, or idle, or gone.
        """
        todo = [context]
        while todo:
            current = todo.pop()
            if current.state in ("pending_fork", "gone"):
                continue
            while current.pending and self._settle_head(current, todo):
                pass
            if current.state == "gone":
                continue
            if current.pending:
                if current.awaits_grammar:
                    self.states.move(current, "pending_grammar")
                elif current.state != "running":
                    self.states.move(current, "waiting")
            elif current.freed:
                self._remove(current)
            else:
                self.states.move(current, "idle")

    def _settle_head(self, context: Context, forked: list[Context]) -> bool:
        """Settle the head of the queue; False when it needs computing, or the context failed."""
        head = context.pending[0]
        if isinstance(head, PendingFork):
            forked.append(self._fork(context))
            return True
        try:
            if isinstance(head, PendingFill):
                if head.start is None:
                    context.begin_fill(head)
                return self.complete_fill(context)
            return self._begin_generate(context, head)
        except PrimitiveError as error:
            self.fail(context, error.code, error.message)
            return False

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
        if generate.num_before >= len(context.token_ids):
            raise PrimitiveError(
                "invalid_request",
                f"generated: {generate.num_before} tokens cannot have been generated behind a "
                f"prompt; the context holds {len(context.token_ids)}",
            )
        if not context.has_room_for(generate):
            context.pending.popleft()
            self._emit(context, Generated(context.id, [], generate.no_logprobs(), "length"))
            return True
        if generate.awaits_grammar:
            return False
        context.step_back(len(context.token_ids) - 1)
        generate.begin(context.token_ids)
        return False

    def add_token(self, context: Context, generate: PendingGenerate, token: SampledToken) -> bool:
        """Append a sampled token to its context and report it; the Generate is at the head.

        Returns:
            Whether the Generate goes on; otherwise it left the queue, which must be settled.
        """
        if not context.pending or context.pending[0] is not generate or generate.row is None:
            raise self.states.illegal(context, "a token for a Generate that is not at the head")
        if token.token_id is None:
            raise self.states.illegal(context, "no token was sampled")
        finish = generate.append(context.token_ids, token.token_id, context.max_tokens)
        self.generated_tokens += 1
        logprobs = None
        if generate.sampling.logprobs is not None:
            logprobs = [] if token.logprobs is None else [token.logprobs]
        self._emit(context, Generated(context.id, [token.token_id], logprobs, finish))
        if finish is None:
            return True
        context.pending.popleft()
        return False

    def fork_pending(self, context: Context) -> None:
        """Carry out the forks at the head of the queue."""
        while context.pending and isinstance(context.pending[0], PendingFork):
            self.settle(self._fork(context))

    def _fork(self, parent: Context) -> Context:
        """Fork: the child shares every block, the partially filled one included."""
        fork = parent.pending.popleft()
        assert isinstance(fork, PendingFork)
        child = fork.child
        child.fork_from(parent)
        for block in child.block_table.ids:
            self._pool.retain(block)
        self.states.move(child, "idle")
        child.story.append(f"forked from {parent.id} at {len(parent.token_ids)} tokens")
        return child

    # The end

    def fail(
        self, context: Context, code: FailureCode, message: str, *, invalidate: bool = False
    ) -> None:
        """Give a context up, and the forks that wait for it.

        Args:
            invalidate: its KV may be wrong: its blocks must not be found again.
        """
        if invalidate:
            for block in context.block_table.ids:
                self._pool.withdraw(block)
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
                self._failures.remember(failure)
            current.pending.clear()
            fork = current.fork
            self._remove(current)
            if fork is not None:
                self._trim(fork.parent)

    def fail_id(self, context_id: int, code: FailureCode, message: str) -> None:
        """Answer a primitive that could not be queued; gives up its context, if there is one."""
        context = self._by_id.get(context_id)
        if context is not None:
            self.fail(context, code, message)
        else:
            failure = Failed(context_id, code, message)
            self.events.append(failure)
            self._failures.remember(failure)

    def _trim(self, context: Context) -> None:
        """Drop what no waiting fork depends on, of a freed context and of its freed parents."""
        current: Context | None = context
        while current is not None and current.freed and current.state != "gone":
            while current.pending and not isinstance(current.pending[-1], PendingFork):
                current.pending.pop()
            if current.pending:
                return
            fork = current.fork
            self._remove(current)
            current = None if fork is None else fork.parent

    def _remove(self, context: Context) -> None:
        fork = context.fork
        if fork is not None and fork in fork.parent.pending:
            fork.parent.pending.remove(fork)
        self.states.remove(context)

    def _emit(self, context: Context, event: Event) -> None:
        # NOTE: a freed id may be in use again; its events belong to the new context.
        if not context.freed or context.id not in self._by_id:
            self.events.append(event)

    def check_integrity(self) -> None:
        """Check every context, and the block pool against all block tables.

        Raises:
            EngineStateError: an invariant does not hold; the message has the context's story.
        """
        self.states.check_integrity()
        for context in self.states:
            if context.freed == (self._by_id.get(context.id) is context):
                raise self.states.illegal(context, "freed and known")
            if (context.state == "pending_fork") != (context.fork is not None):
                raise self.states.illegal(context, "a fork pends without a parent, or the reverse")
            priorities = [pending.priority for pending in context.pending]
            if priorities != sorted(priorities):
                raise self.states.illegal(context, "waits for work that is less urgent")


def _salt_of(primitive: Fill | Generate) -> str:
    return primitive.salt if isinstance(primitive, Fill) else ""


def _adapter_of(primitive: Fill | Generate) -> str:
    return primitive.adapter if isinstance(primitive, Fill) else ""
