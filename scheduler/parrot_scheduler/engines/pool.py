"""The engines of one model, what they hold, and what is placed on them."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from parrot_scheduler.engines.prefix_index import PrefixIndex, chain_of, pack, rows_of
from parrot_scheduler.engines.table import EngineTable
from parrot_scheduler.events import EngineReport
from parrot_scheduler.task import EngineDescription, EngineId, Objective, StepModel
from parrot_scheduler.task_state import Account, Entry

#: An output that outgrows what was expected is expected to grow by this factor.
_GROWTH = 1.5
#: Templates and applications that an engine without visible blocks is believed to cache.
_HIDDEN_BLOCKS = 1024
#: Up to so many rows are looked at one by one; with more of them numpy columns are faster.
FEW_ROWS = 16


class Pool:
    """What policies see of one model's engines; `Scheduler` alone changes it."""

    def __init__(self, model: str, max_blocks: int = 2_000_000) -> None:
        self.model = model
        self.table = EngineTable()
        #: Which engine holds which blocks, by row.
        self.prefixes = PrefixIndex(max_blocks)
        #: Tasks placed on each row, in order of placement.
        self.placed: dict[int, dict[int, Entry]] = {}
        #: What engines said last, by row.
        self.reports: dict[int, EngineReport] = {}
        #: Of the engines that take new work: how many, tokens of KV in all, and the largest.
        self.num_accepting = 0
        self.capacity = 0.0
        self.largest_capacity = 0.0
        self.largest_batch = 0
        self.largest_block = 0
        #: Of all engines: what the columns `working_set` and `kept` add up to.
        self.total_working_set = 0.0
        self.total_kept = 0.0
        #: Engines with nothing placed on them.
        self.num_idle = 0
        #: Sets of rows, bit r for row r: those that take new work, those whose batch is full, those
        #: with a sequence.
        self.accepting = 0
        self.full = 0
        self.busy = 0
        #: The largest engine that takes new work, a reserved one left out.
        self.largest_accepting = 0.0
        #: Tokens of a block where all engines that take work have the same; -1 otherwise.
        self.common_block = -1
        #: Sequences placed that somebody waits for.
        self.latency_sequences = 0
        #: Tasks that were promised seconds a token.
        self.num_promises = 0
        # No engine that takes work and has room in its batch has more free tokens than this.
        self._most_free = math.inf
        # Tasks have been placed since that was found out: it may be much less.
        self._is_loose = True
        # The row that had most free tokens when it was last found out.
        self._freest = 0
        self._draining: dict[int, None] = {}
        self._reserved = -1
        # By row: seconds a token that are promised to tasks there, and to how many.
        self._limits: dict[int, dict[float, int]] = {}

    def row_of(self, engine_id: EngineId | None) -> int:
        """The row of an engine that is here; -1 otherwise."""
        return self.table.row_of(engine_id)

    def takes_work(self, row: int) -> bool:
        """Whether an engine is here and not draining; it may be reserved for a task."""
        return row >= 0 and row in self.placed and row not in self._draining

    @property
    def is_idle(self) -> bool:
        """Whether no task is placed anywhere."""
        return self.num_idle == len(self.placed)

    # Engines come and go

    def join(self, engine: EngineDescription) -> int:
        """A row for an engine that is not here."""
        row = self.table.add(engine)
        self.placed[row] = {}
        self._limits[row] = {}
        self.num_idle += 1
        self._set_batch(row, 0.0)
        self._recount()
        return row

    def drain(self, row: int) -> bool:
        """The engine takes nothing new; False: it did not before either."""
        if row in self._draining:
            return False
        self._draining[row] = None
        self._recount()
        return True

    def leave(self, engine_id: EngineId) -> None:
        """The engine is gone; the tasks that were placed there have been released."""
        row = self.row_of(engine_id)
        assert not self.placed[row], f"engine {engine_id} leaves with tasks on it"
        self.table.remove(engine_id)
        self.prefixes.drop_row(row)
        del self.placed[row], self._limits[row]
        self.full &= ~(1 << row)
        self.busy &= ~(1 << row)
        self.num_idle -= 1
        self.reports.pop(row, None)
        self._draining.pop(row, None)
        self._recount()

    def reserve(self, row: int) -> None:
        """Only one task may go to this row from now on; -1: none is reserved."""
        self._reserved = row
        self._recount()

    def _recount(self) -> None:
        table = self.table
        here = np.zeros(len(table.accepts), dtype=np.bool_)
        here[list(self.placed)] = True
        here[list(self._draining)] = False
        self.num_accepting = int(np.count_nonzero(here))
        self.capacity = float(table.capacity[here].sum())
        self.largest_capacity = float(table.capacity[here].max(initial=0.0))
        self.largest_batch = int(table.max_batch[here].max(initial=0.0))
        self.largest_block = int(table.block_tokens[here].max(initial=0.0))
        self._most_free = math.inf
        self._is_loose = True
        if self._reserved >= 0:
            here[self._reserved] = False
        table.accepts[:] = here
        self.accepting = pack(here)
        self.largest_accepting = float(table.capacity[here].max(initial=0.0))
        blocks = table.block_tokens[here]
        same = len(blocks) > 0 and bool((blocks == blocks[0]).all())
        self.common_block = int(blocks[0]) if same else -1

    def report(self, row: int, report: EngineReport) -> bool:
        """What an engine says of itself; False: it cannot be true, and was not taken."""
        counts = (report.running, report.waiting, report.used_tokens)
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            return False
        model = report.step_model
        if model is not None:
            if not _is_sane(model):
                return False
            self.table.set_step_model(row, model)
        self.reports[row] = report
        return True

    # Tasks come and go

    def has_room(self, entry: Entry, row: int) -> bool:
        """Whether an engine has room for a task now, or nothing to do at all."""
        cells = self.table.cells
        if cells.batch[row] == 0:
            return True
        sequences = min(entry.task.num_sequences, cells.max_batch[row])
        block = int(cells.block_tokens[row])
        need = entry.working_set
        if block:
            need -= block * self.prefixes.claimed_on(row, _chain(entry, block))
        return (
            cells.batch[row] + sequences <= cells.max_batch[row]
            and cells.working_set[row] + need <= cells.capacity[row]
        )

    def least_need(self, entry: Entry) -> float:
        """Tokens of an engine's memory that it takes, however much of its prompt is shared."""
        task = entry.task
        shared = min(task.prompt_tokens, len(task.prefix) * self.largest_block)
        return float(entry.working_set - shared)

    def may_have_room(self, entry: Entry) -> bool:
        """False: no engine has room for it, however much of its prompt is shared."""
        need = self.least_need(entry)
        if need > self._most_free:
            return False
        if self._is_loose:
            cells, row = self.table.cells, self._freest
            # The freest row of the last search will often do: all of them need not be looked at.
            is_open = (self.accepting & ~self.full) >> row & 1
            if is_open and need <= cells.capacity[row] - cells.working_set[row]:
                return True
            self._most_free = self._find_most_free()
            self._is_loose = False
        return need <= self._most_free

    def _find_most_free(self) -> float:
        there = self.accepting & ~self.full
        if there.bit_count() <= FEW_ROWS:
            cells = self.table.cells
            free = [cells.capacity[row] - cells.working_set[row] for row in rows_of(there)]
            return max(free, default=-math.inf)
        table = self.table
        free_there = np.where(
            table.accepts & (table.batch < table.max_batch),
            table.capacity - table.working_set,
            -np.inf,
        )
        self._freest = int(free_there.argmax())
        return float(free_there.item(self._freest))

    @property
    def has_open_row(self) -> bool:
        """Whether any engine could take one more task, or has nothing to do at all."""
        return bool(self.accepting & ~(self.full & self.busy))

    def idle_row(self, entry: Entry) -> int:
        """An engine with nothing to do that can hold the task; -1: there is none."""
        table = self.table
        if not self.num_idle:
            return -1
        idle = table.accepts & (table.batch == 0) & (table.capacity >= entry.working_set)
        row = int(idle.argmax())
        return row if idle[row] else -1

    def emptiest_row(self, entry: Entry) -> int:
        """The engine with the smallest working set that could hold the task; -1: none could."""
        table = self.table
        could = table.accepts & (table.capacity >= entry.working_set)
        row = int(np.where(could, table.working_set, np.inf).argmin())
        return row if could[row] else -1

    def cached_on(self, entry: Entry, row: int) -> int:
        """Prompt tokens that an engine is believed to hold; at least one stays to be computed."""
        block = int(self.table.cells.block_tokens[row])
        if not block:
            return 0
        blocks = self.prefixes.blocks_on(row, _chain(entry, block))
        return max(0, min(blocks * block, entry.task.prompt_tokens - 1))

    def place(self, entry: Entry, row: int, expected_cached: int, now: float) -> None:
        """Account for a task that is placed on a row."""
        table, task = self.table, entry.task
        cells = table.cells
        block = int(cells.block_tokens[row])
        chain = _chain(entry, block)
        claim = self.prefixes.claim(row, chain)
        needed = (len(chain) - claim.shared_blocks) * block
        entry.state = "placed"
        entry.engine_id = table.ids[row]
        entry.engine_row = row
        entry.placed_at = now
        entry.expected_cached = max(0, min(expected_cached, task.prompt_tokens))
        account = Account(
            sequences=task.num_sequences,
            latency_sequences=task.num_sequences if entry.objective.is_latency else 0,
            pending_prefill=float(task.prompt_tokens - entry.expected_cached),
            private_tokens=float(task.prompt_tokens + entry.expected_output - len(chain) * block),
            step_limit_s=_step_limit(entry.objective),
            claim=claim,
        )
        entry.account = account
        self._is_loose = True
        self._set_batch(row, cells.batch[row] + account.sequences)
        cells.latency_batch[row] += account.latency_sequences
        self.latency_sequences += account.latency_sequences
        cells.pending_prefill[row] += account.pending_prefill
        self._use(row, account.private_tokens + needed)
        self._promise(row, account.step_limit_s, 1)
        here = self.placed[row]
        self.num_idle -= not here
        here[task.id] = entry

    def release(self, entry: Entry) -> None:
        """A placed task has ended: take away what it added."""
        account, row = entry.account, entry.engine_row
        assert account is not None, f"task {entry.task.id} is not placed"
        cells = self.table.cells
        freed = self.prefixes.release(account.claim) * cells.block_tokens[row]
        here = self.placed[row]
        del here[entry.task.id]
        self.num_idle += not here
        self._promise(row, account.step_limit_s, -1)
        self._set_batch(row, cells.batch[row] - account.sequences)
        cells.latency_batch[row] -= account.latency_sequences
        self.latency_sequences -= account.latency_sequences
        cells.pending_prefill[row] -= account.pending_prefill
        self._use(row, -account.private_tokens - freed)
        free = cells.capacity[row] - cells.working_set[row]
        if free > self._most_free:
            self._most_free = free
        entry.account = None
        entry.engine_row = -1

    def progress(self, entry: Entry, filled: int, cached: int, generated: int) -> None:
        """A placed task got on; all counts are sane, none is smaller than before."""
        account, row, task = entry.account, entry.engine_row, entry.task
        assert account is not None, f"task {task.id} is not placed"
        entry.filled_tokens = filled
        entry.cached_tokens = cached
        entry.generated_tokens = generated
        pending = float(task.prompt_tokens - max(filled, entry.expected_cached))
        self.table.cells.pending_prefill[row] += pending - account.pending_prefill
        account.pending_prefill = pending
        if generated > entry.expected_output:
            limit = task.max_tokens * task.num_sequences
            expected = max(generated, min(limit, math.ceil(generated * _GROWTH)))
            grown = expected - entry.expected_output
            entry.expected_output = expected
            account.private_tokens += grown
            self._use(row, grown)

    def set_objective(self, entry: Entry, objective: Objective) -> None:
        """What a placed task is run for has changed."""
        account, row = entry.account, entry.engine_row
        assert account is not None, f"task {entry.task.id} is not placed"
        latency = entry.task.num_sequences if objective.is_latency else 0
        self.table.cells.latency_batch[row] += latency - account.latency_sequences
        self.latency_sequences += latency - account.latency_sequences
        account.latency_sequences = latency
        self._promise(row, account.step_limit_s, -1)
        account.step_limit_s = _step_limit(objective)
        self._promise(row, account.step_limit_s, 1)

    def computed(self, entry: Entry) -> None:
        """A task ended well: an engine that does not report is believed to cache its prompt."""
        row = entry.engine_row
        description = self.table.descriptions[row]
        if description is not None and not description.reports_blocks:
            block = description.block_tokens
            blocks = description.capacity_tokens // block if block else _HIDDEN_BLOCKS
            self.prefixes.assume(row, _chain(entry, block), blocks)

    def keep(self, row: int, tokens: float) -> None:
        """A paused application leaves KV there (more, or less when negative)."""
        self.table.cells.kept[row] += tokens
        self.total_kept += tokens

    def _use(self, row: int, tokens: float) -> None:
        self.table.cells.working_set[row] += tokens
        self.total_working_set += tokens

    def _set_batch(self, row: int, sequences: float) -> None:
        cells, bit = self.table.cells, 1 << row
        cells.batch[row] = sequences
        self.full = self.full | bit if sequences >= cells.max_batch[row] else self.full & ~bit
        self.busy = self.busy | bit if sequences else self.busy & ~bit

    def _promise(self, row: int, limit_s: float, count: int) -> None:
        if limit_s == math.inf:
            return
        self.num_promises += count
        limits = self._limits[row]
        limits[limit_s] = limits.get(limit_s, 0) + count
        if limits[limit_s] == 0:
            del limits[limit_s]
        self.table.cells.step_limit_s[row] = min(limits, default=math.inf)


def _chain(entry: Entry, block_tokens: int) -> tuple[Hashable, ...]:
    """The keys of its prompt; never more than the prompt has full blocks, whatever came in."""
    chain = chain_of(entry.task, block_tokens)
    return chain[: entry.task.prompt_tokens // block_tokens] if block_tokens else chain


def _step_limit(objective: Objective) -> float:
    if objective.kind != "tpot" or objective.seconds is None:
        return math.inf
    return objective.seconds if objective.seconds > 0 else math.inf


def _is_sane(model: StepModel) -> bool:
    terms = (model.weights_s, model.context_token_s, model.prefill_token_s, model.overhead_s)
    return bool(np.isfinite(terms).all()) and min(terms) >= 0 and max(terms) > 0
