"""The builtin engine: continuous batching, primitives in and events out.

Brings the parts together: the store knows the contexts, the batcher chooses what runs, the runner
computes and samples. A step is: take what was submitted, plan, launch, wait for the outcome, apply
it.

On a device that computes by itself the outcome waited for is that of the step before (`overlap`):
while a step is computed the host plans and launches the next, and applies the one before. At most
two steps are launched and not applied, and between calls of `step` at most one. What this asks of
planning stands in `parrot_engine.engine.step_planner`.

No tokenizer, no text, no network. Only grammars know the text of tokens
(`parrot_engine.engine.grammar`), which are compiled in threads of their own: a generation whose
grammar is not ready waits, and the others go on.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parrot_engine.batch import Launch, RowOutcome, Runner, SampledToken, TokenOutcomes
from parrot_engine.distributed.leader import load_leader_runner
from parrot_engine.engine.batcher import Batcher
from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, PendingGenerate, PlannedRow
from parrot_engine.engine.grammar import GrammarCompiler
from parrot_engine.engine.pending_grammars import PendingGrammars
from parrot_engine.engine.served_adapters import ReadAdapter, ServedAdapters
from parrot_engine.engine.step_planner import StepPlan
from parrot_engine.engine.validation import check_fill, check_generate
from parrot_engine.exceptions import (
    AdapterError,
    EngineStateError,
    PrimitiveError,
    SettingsError,
    ShardError,
)
from parrot_engine.kv_cache.block_pool import BlockPool
from parrot_engine.kv_cache.host_copies import BlockCopies
from parrot_engine.kv_cache.host_rates import load_copies
from parrot_engine.kv_cache.host_tier import HostTier
from parrot_engine.protocol import (
    AdapterInfo,
    BlockChanges,
    EngineInfo,
    EngineStats,
    Fill,
    FreeContext,
    Generate,
    Generated,
    Pool,
    Primitive,
    StepResult,
)
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings

_log = logging.getLogger(__name__)

#: In place of a token behind scores that are not finite.
_UNSOUND = SampledToken(None, None)
_FAILED = "the engine failed while computing this context; its log has the details"


class _InFlight(NamedTuple):
    """A step that was launched and whose outcome was not applied yet."""

    plan: StepPlan
    launch: Launch


class _FailedLaunch:
    """Stands for a step that could not be launched; implements `Launch`."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def sample(self) -> None:
        """There is nothing to draw from."""

    def ready(self) -> bool:
        """There is nothing to wait for."""
        return True

    def outcome(self) -> Sequence[RowOutcome]:
        raise self._error


class BuiltinEngine:
    """Continuous batching over paged KV; implements `parrot_engine.protocol.Engine`.

    One thread drives it. After an exception from `step` (never for a reason that lies in a
    primitive, the model's numbers, or the runner: those become `Failed` events) the engine's state
    is not to be trusted any more; close it.
    """

    def __init__(
        self,
        runner: Runner,
        settings: BuiltinSettings,
        *,
        model: str,
        grammars: GrammarCompiler | None = None,
        copies: BlockCopies | None = None,
        make_batcher: Callable[..., Batcher] = Batcher,
    ) -> None:
        """Take a loaded runner.

        Args:
            runner: with a KV cache of `num_blocks` blocks of `settings.block_size` tokens.
            settings: limits of batches, contexts and queues.
            model: name under which the model is served.
            grammars: for its vocabulary; without them generations with a grammar are refused.
            copies: between its cache and host memory; with them there is a host tier, which
                brings back runs of `settings.host_min_tokens` tokens.
            make_batcher: `Batcher`, or what makes a subclass of it from the same arguments.

        Raises:
            SettingsError: settings and runner do not match.
        """
        if runner.block_size != settings.block_size:
            raise SettingsError(
                "block_size", f"{settings.block_size}, but the runner has {runner.block_size}"
            )
        self._runner: Runner | None = runner
        #: Of plans that were made to try the runner.
        self._read_once_before = runner.read_once_tokens
        self._eos = frozenset(runner.eos_token_ids)
        self._random = random.Random(settings.seed)  # noqa: S311 -- sampling, not secrets
        self._inbox: deque[Primitive] = deque()
        self._steps = 0
        longest = min(runner.max_position, runner.num_blocks * runner.block_size)
        if settings.max_context_tokens is not None:
            longest = min(longest, settings.max_context_tokens)
        self._host: HostTier | None = None
        if copies is None:
            self._pool = BlockPool(runner.num_blocks)
        else:
            self._host = HostTier(
                runner.num_blocks,
                copies,
                reserve=settings.host_reserve,
                least_blocks=-(-(settings.host_min_tokens or 1) // settings.block_size),
            )
            self._pool = self._host.pool
        self._store = ContextStore(
            self._pool,
            block_size=settings.block_size,
            max_context_tokens=longest,
            max_waiting=settings.max_waiting,
            max_contexts=settings.max_contexts,
        )
        self._batcher = make_batcher(self._store, self._pool, settings, self._host)
        #: Whether the outcome of a step is waited for in the next one …
        self._overlaps = settings.overlap == "on"
        #: … and whether that depends on what the device has done by then.
        self._looks_first = False
        if settings.overlap == "auto":
            self._overlaps = self._looks_first = runner.device.startswith("cuda")
        self._in_flight: _InFlight | None = None
        self._grammars = None if grammars is None else PendingGrammars(self._store, grammars)
        self._adapters: ServedAdapters | None = None
        if runner.adapters is not None:
            self._adapters = ServedAdapters(self._store, runner.adapters)
        self._info = EngineInfo(
            model=model,
            kind="builtin",
            architecture=runner.architecture,
            device=runner.device,
            dtype=runner.dtype,
            max_context_tokens=longest,
            vocab_size=runner.vocab_size,
            eos_token_ids=list(runner.eos_token_ids),
            num_blocks=runner.num_blocks,
            block_size=runner.block_size,
            max_batch_size=settings.max_batch_size,
            max_batch_tokens=settings.max_batch_tokens,
            reports_blocks=settings.prefix_caching,
            default_sampling=dict(runner.default_sampling),
            supports_grammars=grammars is not None,
            host_blocks=0 if copies is None else copies.num_slots,
            max_loras=0 if runner.adapters is None else settings.max_loras,
            weight_bytes=runner.weight_bytes,
            kv_cache_bytes=runner.num_blocks * runner.kv_bytes_per_block,
            seed=settings.seed,
        )

    @classmethod
    def load(
        cls,
        folder: Path,
        settings: BuiltinSettings,
        *,
        model: str,
        progress: Callable[[int, int], None] | None = None,
        tokenizer_json: str | None = None,
    ) -> BuiltinEngine:
        """An engine for the checkpoint in `folder`.

        Args:
            folder: with `config.json` and safetensors.
            settings: limits, device, dtype.
            model: name under which the model is served.
            progress: called with (weights loaded, weights in all).
            tokenizer_json: the model's tokenizer, for outputs that follow a grammar.

        Raises:
            ModelError: the checkpoint cannot be served.
            SettingsError: the settings do not fit model and machine.
        """
        load = load_runner if settings.tensor_parallel == 1 else load_leader_runner
        return cls.of(load(folder, settings, progress), settings, model, tokenizer_json)

    @classmethod
    def of(
        cls,
        runner: ModelRunner,
        settings: BuiltinSettings,
        model: str,
        tokenizer_json: str | None,
        **given: Any,
    ) -> BuiltinEngine:
        """Make an engine of a loaded runner; `given` holds the arguments of a subclass."""
        grammars = None if tokenizer_json is None else load_grammars(tokenizer_json, runner)
        copies, settings = load_copies(runner, settings)
        return cls(runner, settings, model=model, grammars=grammars, copies=copies, **given)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Queue primitives, in order; they are looked at in the next step."""
        self._inbox.extend(primitives)

    def step(self) -> StepResult:
        """Launch one batch, and apply the outcome of the one before, or of this one.

        Returns at once with no events when there is nothing to do. While a step is in flight there
        is work: further calls bring its events.

        Raises:
            ShardError: a process of a tensor-parallel engine was lost, and the engine with it.
        """
        if self._runner is not None:
            self._runner.check()
        self._take_inbox()
        if self._grammars is not None and self._grammars.pending:
            self._grammars.release()
        before = self._in_flight
        if before is not None and (
            before.plan.has_drafts or (self._looks_first and before.launch.ready())
        ):
            # What comes next depends on the draft tokens; or the device waits for us, and a plan
            # that knows the tokens costs nothing more.
            self._apply(before)
            before = None
        if self._host is not None:
            self._host.collect()
        launched = None
        if self._store.states.has_work:
            plan = self._batcher.plan(None if before is None else before.plan)
            if plan.rows:
                launched = self._launch(plan)
        if before is not None:
            self._apply(before)
            if launched is not None and launched.plan.batch.awaits_tokens:
                launched = _sample(launched)
        elif launched is None and not self._store.events:
            self._wait()
        if launched is not None and not self._may_wait(launched):
            self._apply(launched)
            launched = None
        self._in_flight = launched
        states = self._store.states
        if self._adapters is not None:
            self._adapters.release()
        has_work = states.has_work or self._in_flight is not None
        if self._host is not None:
            idle = chain(states.idle, states.idle_pinned)
            self._host.copy_ahead(context.block_table.ids for context in idle)
            has_work = has_work or self._host.is_loading_any
        return StepResult(self._store.take_events(), has_work)

    def stats(self) -> EngineStats:
        store, speculation = self._store, self._batcher.speculation
        return EngineStats(
            running=len(store.states.running),
            waiting=store.states.num_waiting,
            contexts=len(store.states),
            free_blocks=self._pool.num_free,
            cached_blocks=self._pool.num_cached,
            steps=self._steps,
            filled_tokens=store.filled_tokens,
            cached_tokens=store.cached_tokens,
            generated_tokens=store.generated_tokens,
            preemptions=self._batcher.preemptions,
            proposed_tokens=0 if speculation is None else speculation.proposed_tokens,
            accepted_tokens=0 if speculation is None else speculation.accepted_tokens,
            host_blocks=0 if self._host is None else len(self._host.slots),
            blocks_to_host=0 if self._host is None else self._host.num_stored,
            blocks_from_host=0 if self._host is None else self._host.num_loaded,
            read_once_tokens=0
            if self._runner is None
            else self._runner.read_once_tokens - self._read_once_before,
        )

    def take_block_changes(self, *, everything: bool = False) -> BlockChanges:
        return self._pool.take_changes(everything=everything)

    @property
    def adapters(self) -> list[AdapterInfo]:
        """The adapters that new contexts may name; safe from any thread."""
        return [] if self._adapters is None else list(self._adapters.infos.values())

    def read_adapter(self, name: str, path: str) -> ReadAdapter:
        """The adapter in folder `path`, for `add_adapter`. From any thread.

        Raises:
            AdapterError: it cannot be served with this model, or the engine takes none.
        """
        if self._adapters is None:
            raise AdapterError(f"{name}: this engine has no room for adapters (max_loras)")
        try:
            adapter = self._adapters.memory.read(Path(path).expanduser())
        except AdapterError as error:
            raise AdapterError(f"{name}: {error}") from error
        return ReadAdapter(name, path, adapter)

    def add_adapter(self, adapter: ReadAdapter) -> None:
        """Serve an adapter; contexts of one that had its name go on with that."""
        assert self._adapters is not None, "it could not be read"
        self._adapters.add(adapter)

    def remove_adapter(self, name: str) -> None:
        """Serve no new contexts with an adapter; those there are go on."""
        if self._adapters is not None:
            self._adapters.remove(name)

    def close(self) -> None:
        """Let go of weights and KV; the engine is unusable afterwards. May be called twice."""
        self._in_flight = None
        if self._host is not None and self._runner is not None:
            self._host.close()
        if self._runner is not None:
            self._runner.close()
        self._runner = None
        self._inbox.clear()
        if self._grammars is not None:
            self._grammars.close()

    def prepare(self) -> bool:
        """See `Preparing`; captures one CUDA graph."""
        return self._runner is not None and self._runner.prepare()

    def on_loss(self, callback: Callable[[], None]) -> None:
        if self._runner is not None:
            self._runner.on_loss(callback)

    def share_prefixes(self, enabled: bool) -> bool:
        return self._runner is not None and self._runner.share_prefixes(enabled)

    def check_integrity(self) -> None:
        """Check all invariants of blocks and contexts; for tests, and for idle engines.

        Raises:
            EngineStateError: an invariant does not hold.
        """
        self._store.check_integrity()
        if self._host is not None:
            self._host.check_integrity()

    # A step

    def _take_inbox(self) -> None:
        while self._inbox:
            primitive = self._inbox.popleft()
            try:
                self._take(primitive)
            except PrimitiveError as error:
                self._store.fail_id(primitive.context_id, error.code, error.message)

    def _take(self, primitive: Primitive) -> None:
        if isinstance(primitive, FreeContext):
            self._store.free(primitive.context_id, primitive.retention)
        elif isinstance(primitive, Fill):
            check_fill(primitive, self._info.vocab_size)
            self._store.submit_fill(primitive)
        elif isinstance(primitive, Pool):
            raise PrimitiveError("invalid_request", "this model generates and makes no vectors")
        elif isinstance(primitive, Generate):
            check_generate(primitive, self._info.vocab_size)
            params = primitive.sampling
            # Drawn in the order of submission: batching does not change it.
            seed = self._random.getrandbits(63) if params.seed is None else params.seed
            ends = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                ends |= self._eos
            self._submit_generate(primitive, seed, ends)

    def _submit_generate(self, primitive: Generate, seed: int, ends: frozenset[int]) -> None:
        if primitive.sampling.grammar is None:
            self._store.submit_generate(primitive, seed=seed, end_token_ids=ends)
        elif self._grammars is not None:
            self._grammars.submit(primitive, seed=seed, end_token_ids=ends)
        else:
            raise PrimitiveError(
                "invalid_request", "grammar: this engine was loaded without its model's tokenizer"
            )

    def _wait(self) -> None:
        """Nothing can be launched: wait a moment for what has to come first."""
        states = self._store.states
        if self._host is not None and self._host.is_loading_any:
            self._host.wait()
        elif self._grammars is not None and states.num_pending_grammar:
            self._grammars.wait()
        elif states.has_work:
            raise EngineStateError("batcher", "there is work, but nothing was planned")

    def _launch(self, plan: StepPlan) -> _InFlight:
        if self._runner is None:
            raise EngineStateError("engine", "step after close")
        self._steps += 1
        if self._host is not None:
            self._host.before_launch()
        launch: Launch
        try:
            launch = self._runner.launch(plan.batch)
        except ShardError:
            raise
        except Exception as error:
            launch = _FailedLaunch(error)
        if self._host is not None:
            self._host.after_launch()
        self._batcher.finish(plan)
        return _InFlight(plan, launch)

    def _apply(self, step: _InFlight) -> None:
        """Wait for the outcome of a step, and apply it as far as it still matters.

        Between launch and outcome a context may have been freed or have failed, lost its KV, or
        have ended its generation. An error of the model's numbers or of the runner fails the
        contexts of the step.

        Raises:
            ShardError: a process of a tensor-parallel engine was lost.
        """
        plan = step.plan
        try:
            outcomes = step.launch.outcome()
        except ShardError:
            # The other ranks hold parts of every context.
            raise
        except torch.cuda.OutOfMemoryError:
            _log.exception("No memory for a step of %d tokens", plan.batch.num_tokens)
            self._fail_step(
                plan,
                f"the device has no memory left for a step of {plan.batch.num_tokens} tokens; "
                "a smaller max_batch_tokens or KV cache leaves more",
            )
        except Exception:
            _log.exception("A step of %d contexts failed", len(plan.rows))
            self._fail_step(plan, _FAILED)
        else:
            # NOTE: each row is let go before the next one's event is made. Python's collector
            # runs whenever so many more objects were made than freed.
            rows = deque(plan.rows)
            plan.rows.clear()
            for index, token_id in enumerate(_plain_tokens(outcomes)):
                planned = rows.popleft()
                if token_id is None or not self._apply_token(planned, token_id):
                    self._apply_outcome(planned, outcomes[index])

    def _apply_token(self, planned: PlannedRow, token_id: int) -> bool:
        """Apply the outcome of a row that merely goes on by a token; False for any other row.

        Most rows of most steps are of this kind. What it does is what `_apply_row` does.
        """
        context, generate, _, _, end, _, epoch, drafts = planned
        if (
            generate is None
            or context.state != "running"
            or context.pending[0] is not generate
            or context.epoch != epoch
            or context.freed
            or drafts
            or token_id < 0
            or generate.sampling.logprobs is not None
        ):
            return False
        if context.in_flight is planned:
            context.in_flight = None
        if end % self._batcher.settings.block_size:
            context.num_computed = end
        else:
            self._batcher.computed(planned)
        store = self._store
        finish = generate.append(context.token_ids, token_id, context.max_tokens)
        store.generated_tokens += 1
        store.events.append(Generated(context.id, [token_id], None, finish))
        if finish is not None:
            context.pending.popleft()
            self._end_generation(context)
        return True

    def _fail_step(self, plan: StepPlan, problem: str) -> None:
        """Give up what a step was to compute, except for rows that are of no use any more."""
        for planned in plan.rows:
            context = planned.context
            if context.state != "gone" and planned.epoch == context.epoch:
                self._store.fail(context, "engine_error", problem)

    def _apply_outcome(self, planned: PlannedRow, outcome: RowOutcome) -> None:
        """Apply the outcome of a row, with draft tokens or without."""
        if not planned.drafts:
            self._apply_row(planned, outcome)
            return
        if planned.context.in_flight is planned:
            planned.context.in_flight = None
        for part, found in self._batcher.verify_drafts(planned, outcome):
            token = found.token
            if (
                token is None
                or token.token_id is None
                or not self._apply_token(part, token.token_id)
            ):
                self._apply_row(part, found)

    def _apply_row(self, planned: PlannedRow, outcome: RowOutcome) -> None:
        """Apply the outcome of a row, as far as it still matters.

        Meanwhile the context may have been freed or have failed; it may have lost its KV: then only
        its token counts; and its generation may be over.
        """
        context, token, generate = planned.context, outcome.token, planned.generate
        if context.in_flight is planned:
            context.in_flight = None
        if context.state == "gone":
            return
        is_next = context.is_at(generate)
        if planned.epoch == context.epoch:
            if outcome.is_sound:
                self._batcher.computed(planned)
                if not is_next:
                    self._count_filled(planned, outcome)
                    is_next = context.is_at(generate)
            else:
                token = _UNSOUND
        elif not is_next:
            return
        if token is not None and token.token_id is None:
            problem = _grammar_problem(generate)
            if problem:
                self._store.fail(context, "invalid_request", problem)
            else:
                self._store.fail(
                    context,
                    "numerical_error",
                    "the model's logits are not finite for this context",
                    invalidate=True,
                )
            return
        if generate is None or token is None or not is_next:
            self._store.settle(context)
        elif not self._store.add_token(context, generate, token):
            self._end_generation(context)
        elif context.state != "running":
            self._store.settle(context)

    def _end_generation(self, context: Context) -> None:
        """Go on behind a Generate that has left the queue; a row in flight does not count."""
        if context.in_flight is not None:
            context.discard_in_flight()
            self._batcher.trim(context, context.num_computed)
        self._store.settle(context)

    def _count_filled(self, planned: PlannedRow, outcome: RowOutcome) -> None:
        """Count computed tokens for the fill at the head of the queue, if there is one."""
        context = planned.context
        fill = context.fill
        if fill is not None:
            fill.reached = max(fill.reached, planned.end)
            fill.scores.extend(outcome.scores)
            self._store.complete_fill(context)
            # Forks in front of a Generate are of the context without its tokens, or its failure.
            self._store.fork_pending(context)

    def _may_wait(self, step: _InFlight) -> bool:
        """Return True if the outcome of a step may be left for the next call.

        The first tokens of an idle engine may not: they come without the time of a second launch.
        """
        if not self._overlaps or isinstance(step.launch, _FailedLaunch):
            return False
        states, rows = self._store.states, step.plan.rows
        is_all_there_is = states.num_waiting == 0 and len(states.running) == len(rows)
        return not (is_all_there_is and all(map(_is_first_token, rows)))


def _grammar_problem(generate: PendingGenerate | None) -> str:
    """The reason why a generation's grammar allows no token any more; empty if it allows one."""
    row = None if generate is None else generate.row
    matcher = None if row is None else row.matcher
    return "" if matcher is None else matcher.problem or ""


def load_grammars(tokenizer_json: str, runner: Runner) -> GrammarCompiler | None:
    """Grammars for a model; None, with a warning, where its tokenizer does not lend itself."""
    try:
        return GrammarCompiler(
            tokenizer_json, vocab_size=runner.vocab_size, eos_token_ids=runner.eos_token_ids
        )
    except SettingsError as error:
        _log.warning("No structured output with this model: %s", error)
        return None


def _plain_tokens(outcomes: Sequence[RowOutcome]) -> Iterable[int | None]:
    """By row the token, where the outcome is nothing else; -1 or None for others."""
    if isinstance(outcomes, TokenOutcomes):
        return outcomes.token_ids
    return (
        outcome.token.token_id if outcome == RowOutcome(outcome.token) and outcome.token else None
        for outcome in outcomes
    )


def _sample(step: _InFlight) -> _InFlight:
    """Draw in a step that was launched before its pending tokens were known; now they are."""
    for planned in step.plan.rows:
        generate = planned.generate
        if generate is not None and generate.row is not None:
            generate.row.num_pending = 0
    try:
        step.launch.sample()
    except ShardError:
        raise
    except Exception as error:
        return _InFlight(step.plan, _FailedLaunch(error))
    return step


def _is_first_token(planned: PlannedRow) -> bool:
    generate = planned.generate
    return generate is not None and generate.row is not None and generate.row.index == 0
