"""The engines of one model, the blocks they hold, and the tasks placed on them."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from parrot_scheduler.engines.table import EngineTable, rows_of, set_of
from parrot_scheduler.events import EngineReport
from parrot_scheduler.prefix_index.index import PrefixIndex, chain_of
from parrot_scheduler.task import EngineDescription, EngineId, Objective, StepModel, Task
from parrot_scheduler.task_state import EngineLoad, TaskState

#: An output that exceeds its expected length is then expected to grow by this factor.
_GROWTH = 1.5
#: Templates and applications that an engine with an invisible cache is assumed to cache.
_HIDDEN_BLOCKS = 1024
#: An engine is slow if a step takes this many times as long as on the fastest one: a step of so
#: many sequences and tokens of context, because single terms of a learned model differ by chance.
_SLOW = 4.0
_STEP_SEQUENCES, _STEP_CONTEXT = 8.0, 4000.0
#: Seconds between two tasks that a slow engine gets, so that its step times stay known.
_SLOW_TASK_S = 30.0


class EnginePool:
    """One model's engines as policies see them; only `ModelScheduler` changes them.

    An engine is a row of `table`. A set of rows is one int, bit r for row r.
    """

    def __init__(self, model: str, max_blocks: int = 2_000_000) -> None:
        self.model = model
        self.table = EngineTable()
        #: Maps an engine's id to its row; -1 if the engine is not here.
        self.row_of = self.table.row_of
        self._scalars = self.table.scalars
        #: Index of which row holds which blocks.
        self.prefixes = PrefixIndex(max_blocks)
        #: Tasks placed on each row, in order of placement.
        self.placed: dict[int, dict[int, TaskState]] = {}
        #: The last report of each engine, by row.
        self.reports: dict[int, EngineReport] = {}
        #: Engines that accept new work: their number, their total KV tokens, and the largest KV and
        #: block size among them, in tokens.
        self.num_accepting = 0
        self.capacity = 0.0
        self.largest_capacity = 0.0
        self.largest_block = 0
        #: Sums of the columns `working_set` and `retained`, in tokens.
        self.total_working_set = 0.0
        self.total_retained = 0.0
        #: Engines without placed tasks.
        self.num_idle = 0
        #: Sets of rows: engines that accept new work (a reserved one excluded), engines with a full
        #: batch, engines with a full batch or no spare KV, and engines with at least one sequence.
        self.accepting = 0
        self.batch_full = 0
        self.full = 0
        self.busy = 0
        #: Tokens of KV of the largest engine in `accepting`.
        self.largest_accepting = 0.0
        #: Tokens per block if all engines in `accepting` agree; -1 otherwise.
        self.common_block = -1
        #: Cost that a generated token and one sequence beside it cause each other, as the number of
        #: prompt tokens that take as long. Averaged over all engines in `accepting`, because the
        #: learned values of single engines differ more than the engines do.
        self.decode_work = 0.0
        #: Set of the slow engines among those in `accepting`; see `avoided`.
        self.slow = 0
        # By row of a slow engine: when it got its last task.
        self._slow_used_at: dict[int, float] = {}
        #: Sets of rows by load: the number of sequences, plus a half if prompt tokens are queued.
        self.rows_by_load: dict[float, int] = {}
        #: Placed tasks with a promised time per token.
        self.num_step_limits = 0
        #: Tokens of KV of the smallest engine in `accepting`.
        self.smallest_accepting = 0.0
        # By row: membership in `batch_full`, `full` and `busy`.
        self._member_of: dict[int, tuple[bool, bool, bool]] = {}
        # By row: its key in `rows_by_load`.
        self._load_of: dict[int, float] = {}
        self._draining: dict[int, None] = {}
        self._reserved = -1
        # By row: the promised seconds per token, and the number of tasks for each promise.
        self._step_limits: dict[int, dict[float, int]] = {}

    def takes_work(self, row: int) -> bool:
        """Return true if the engine is here and not draining; it may be reserved for a task."""
        return row >= 0 and row in self.placed and row not in self._draining

    @property
    def is_idle(self) -> bool:
        return self.num_idle == len(self.placed)

    def join(self, engine: EngineDescription) -> int:
        """Add an engine that is not here; return its row."""
        row = self.table.add(engine)
        self.placed[row] = {}
        self._step_limits[row] = {}
        self.num_idle += 1
        self._member_of[row] = (False, False, False)
        self._load_of[row] = 0.0
        self.rows_by_load[0.0] = self.rows_by_load.get(0.0, 0) | 1 << row
        self._update_sets(row)
        self._recount()
        return row

    def drain(self, row: int) -> bool:
        """Stop new work on the engine; return false if it was draining already."""
        if row in self._draining:
            return False
        self._draining[row] = None
        self._recount()
        return True

    def resume(self, row: int) -> bool:
        """Let a draining engine accept new work; return false if it was not draining."""
        if row not in self._draining:
            return False
        del self._draining[row]
        self._recount()
        return True

    def leave(self, engine_id: EngineId) -> None:
        """Remove an engine; its tasks must have been released."""
        row = self.row_of(engine_id)
        assert not self.placed[row], f"engine {engine_id} leaves with tasks on it"
        self.table.remove(engine_id)
        self.prefixes.drop_row(row)
        others = ~(1 << row)
        self.batch_full &= others
        self.full &= others
        self.busy &= others
        self.rows_by_load[self._load_of.pop(row)] &= others
        del self._member_of[row]
        del self.placed[row], self._step_limits[row]
        self.num_idle -= 1
        self.reports.pop(row, None)
        self._slow_used_at.pop(row, None)
        self._draining.pop(row, None)
        self._recount()

    @property
    def memory_needed(self) -> float:
        """Return the share of the engines' KV that placed tasks and retained contexts need; may
        exceed 1.
        """
        needed = self.total_working_set + self.total_retained
        return needed / self.capacity if self.capacity > 0 else 0.0

    def reserve(self, row: int) -> None:
        """Take a row out of `accepting` because it is drained for one task; -1 ends the
        reservation.
        """
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
        self.largest_block = int(table.block_tokens[here].max(initial=0.0))
        if self._reserved >= 0:
            here[self._reserved] = False
        table.accepts[:] = here
        self.accepting = set_of(here)
        self.largest_accepting = float(table.capacity[here].max(initial=0.0))
        self.smallest_accepting = float(table.capacity[here].min(initial=math.inf))
        blocks = table.block_tokens[here]
        same = len(blocks) > 0 and bool((blocks == blocks[0]).all())
        self.common_block = int(blocks[0]) if same else -1
        self._weigh_decodes()

    def _weigh_decodes(self) -> None:
        table = self.table
        fill_s = float(table.prefill_token_s[table.accepts].sum())
        sequence_s = float(table.sequence_s[table.accepts].sum())
        self.decode_work = 2.0 * sequence_s / fill_s if fill_s > 0.0 else 0.0
        self.slow = 0
        if self.num_accepting > 1:
            step_s = table.weights_s + table.overhead_s
            step_s = step_s + _STEP_SEQUENCES * table.sequence_s
            step_s = step_s + _STEP_CONTEXT * table.context_token_s
            fastest_s = float(step_s[table.accepts].min(initial=math.inf))
            self.slow = set_of(table.accepts & (step_s > _SLOW * fastest_s))

    def avoided(self, now: float) -> int:
        """Return the set of slow engines that get no task now, unless no other has room."""
        avoided = self.slow
        for row in rows_of(avoided):
            if now - self._slow_used_at.get(row, -math.inf) >= _SLOW_TASK_S:
                avoided ^= 1 << row
        return avoided

    def report(self, row: int, report: EngineReport) -> bool:
        """Apply an engine's report; return false if its numbers are invalid and were ignored."""
        counts = (report.running, report.waiting, report.used_tokens)
        if not all(math.isfinite(count) and count >= 0 for count in counts):
            return False
        model = report.step_model
        if model is not None:
            if not _is_sane(model):
                return False
            self.table.set_step_model(row, model)
            self._weigh_decodes()
        self.reports[row] = report
        return True

    def has_room(self, state: TaskState, row: int) -> bool:
        """Return true if an engine has room for a task now, or is idle."""
        scalars = self.table.scalars
        batch, most = scalars.batch[row], scalars.max_batch[row]
        if not batch:
            return True
        if batch + min(state.task.num_sequences, most) > most:
            return False
        missing = scalars.working_set[row] + state.working_set - scalars.capacity[row]
        block = int(scalars.block_tokens[row])
        if missing > 0 and block:
            missing -= block * self.prefixes.claimed_on(row, block_keys(state.task, block))
        return missing <= 0

    @property
    def has_open_row(self) -> bool:
        """Return true if any accepting engine is not full, or is idle."""
        return bool(self.accepting & ~(self.full & self.busy))

    def idle_row(self, state: TaskState) -> int:
        """Return an idle engine that can hold the task; -1 if there is none."""
        table = self.table
        if not self.num_idle:
            return -1
        idle = table.accepts & (table.batch == 0) & (table.capacity >= state.working_set)
        row = int(idle.argmax())
        return row if idle[row] else -1

    def emptiest_row(self, state: TaskState) -> int:
        """Return the engine with the smallest working set among those that could hold the task; -1
        if none could.
        """
        table = self.table
        could = table.accepts & (table.capacity >= state.working_set)
        row = int(np.where(could, table.working_set, np.inf).argmin())
        return row if could[row] else -1

    def place(self, state: TaskState, row: int, expected_cached: int, now: float) -> None:
        table, task, scalars = self.table, state.task, self._scalars
        prompt, sequences, objective = task.prompt_tokens, task.num_sequences, state.objective
        block = int(scalars.block_tokens[row])
        keys = block_keys(task, block)
        claim = self.prefixes.claim(row, keys)
        expected = 0 if expected_cached < 0 else min(expected_cached, prompt)
        pending = float(prompt - expected)
        private = float(prompt + state.expected_output - len(keys) * block)
        latency = sequences if objective.is_latency else 0
        limit_s = _step_limit(objective) if objective.kind == "tpot" else math.inf
        if self.slow >> row & 1:
            self._slow_used_at[row] = now
        state.status = "placed"
        state.engine_id = table.ids[row]
        state.engine_row = row
        state.placed_at = now
        state.expected_cached = expected
        state.load = EngineLoad(sequences, latency, pending, private, limit_s, claim)
        scalars.batch[row] += sequences
        if latency:
            scalars.latency_batch[row] += latency
        scalars.pending_prefill[row] += pending
        used = private + (len(keys) - claim.shared_blocks) * block
        scalars.working_set[row] += used
        self.total_working_set += used
        if limit_s != math.inf:
            self._count_step_limit(row, limit_s, 1)
        self._update_sets(row)
        here = self.placed[row]
        self.num_idle -= not here
        here[task.id] = state

    def release(self, state: TaskState) -> float:
        """Remove an ended task's share from its engine's columns.

        Returns:
            Tokens of its context that no other task there needs.
        """
        load, row = state.load, state.engine_row
        assert load is not None, f"task {state.task.id} is not placed"
        scalars = self._scalars
        freed = self.prefixes.release(load.claim) * scalars.block_tokens[row]
        here = self.placed[row]
        del here[state.task.id]
        self.num_idle += not here
        if load.step_limit_s != math.inf:
            self._count_step_limit(row, load.step_limit_s, -1)
        scalars.batch[row] -= load.sequences
        if load.latency_sequences:
            scalars.latency_batch[row] -= load.latency_sequences
        scalars.pending_prefill[row] -= load.pending_prefill
        private = load.private_tokens
        self.total_working_set += -private - freed
        scalars.working_set[row] += -private - freed
        self._update_sets(row)
        state.load = None
        state.engine_row = -1
        own = private - (state.expected_output - state.generated_tokens)
        return (own if own > 0.0 else 0.0) + freed

    def progress(self, state: TaskState, filled: int, cached: int, generated: int) -> None:
        """Apply a placed task's new totals; the caller has checked that they are valid and did not
        shrink.
        """
        load, row, task = state.load, state.engine_row, state.task
        assert load is not None, f"task {task.id} is not placed"
        scalars, expected = self._scalars, state.expected_cached
        state.filled_tokens = filled
        state.cached_tokens = cached
        state.generated_tokens = generated
        pending = float(task.prompt_tokens - (filled if filled > expected else expected))
        if pending != load.pending_prefill:
            scalars.pending_prefill[row] += pending - load.pending_prefill
            load.pending_prefill = pending
            self._update_sets(row)
        if generated > state.expected_output:
            limit = task.max_tokens * task.num_sequences
            most = max(generated, min(limit, math.ceil(generated * _GROWTH)))
            grown = most - state.expected_output
            state.expected_output = most
            load.private_tokens += grown
            scalars.working_set[row] += grown
            self.total_working_set += grown
            self._update_sets(row)

    def set_objective(self, state: TaskState, objective: Objective) -> None:
        load, row = state.load, state.engine_row
        assert load is not None, f"task {state.task.id} is not placed"
        latency = state.task.num_sequences if objective.is_latency else 0
        self.table.scalars.latency_batch[row] += latency - load.latency_sequences
        load.latency_sequences = latency
        self._count_step_limit(row, load.step_limit_s, -1)
        load.step_limit_s = _step_limit(objective)
        self._count_step_limit(row, load.step_limit_s, 1)

    def computed(self, state: TaskState) -> None:
        """Record a task's success: an engine that does not report blocks is assumed to cache its
        prompt.
        """
        row = state.engine_row
        description = self.table.descriptions[row]
        if description is not None and not description.reports_blocks:
            block = description.block_tokens
            tokens = description.assumed_tokens or description.capacity_tokens
            blocks = tokens // block if block else _HIDDEN_BLOCKS
            self.prefixes.assume(row, block_keys(state.task, block), blocks)

    def retain(self, row: int, tokens: float) -> None:
        """Add KV tokens retained for a paused application; a negative number removes them."""
        self.table.scalars.retained[row] += tokens
        self.total_retained += tokens

    def _update_sets(self, row: int) -> None:
        scalars = self._scalars
        batch = scalars.batch[row]
        # Each change copies a large int, so change it only when the row enters or leaves a set.
        load = batch + 0.5 if scalars.pending_prefill[row] else batch
        load_before = self._load_of[row]
        if load != load_before:
            self._load_of[row] = load
            bit, by_load = 1 << row, self.rows_by_load
            rest = by_load[load_before] ^ bit
            if rest:
                by_load[load_before] = rest
            else:
                del by_load[load_before]
            by_load[load] = by_load.get(load, 0) | bit
        batch_full = batch >= scalars.max_batch[row]
        is_full = batch_full or scalars.working_set[row] >= scalars.capacity[row]
        member = (batch_full, is_full, batch != 0.0)
        before = self._member_of[row]
        if member == before:
            return
        self._member_of[row] = member
        bit = 1 << row
        if member[0] != before[0]:
            self.batch_full ^= bit
        if member[1] != before[1]:
            self.full ^= bit
        if member[2] != before[2]:
            self.busy ^= bit

    def _count_step_limit(self, row: int, limit_s: float, count: int) -> None:
        if limit_s == math.inf:
            return
        self.num_step_limits += count
        limits = self._step_limits[row]
        limits[limit_s] = limits.get(limit_s, 0) + count
        if limits[limit_s] == 0:
            del limits[limit_s]
        self.table.scalars.step_limit_s[row] = min(limits, default=math.inf)


def block_keys(task: Task, block_tokens: int) -> tuple[Hashable, ...]:
    """Return the block keys of the task's prompt, at most one per full block."""
    if block_tokens <= 0:
        return chain_of(task, 0)
    keys, full = task.prefix, task.prompt_tokens // block_tokens
    return keys if len(keys) <= full else keys[:full]


def _step_limit(objective: Objective) -> float:
    if objective.kind != "tpot" or objective.seconds is None:
        return math.inf
    return objective.seconds if objective.seconds > 0 else math.inf


def _is_sane(model: StepModel) -> bool:
    terms = (
        model.weights_s,
        model.context_token_s,
        model.prefill_token_s,
        model.overhead_s,
        model.sequence_s,
    )
    return bool(np.isfinite(terms).all()) and min(terms) >= 0 and max(terms) > 0
