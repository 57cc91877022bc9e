"""The huggingface engine: any causal language model that transformers can load.

A context keeps its past key values in transformers' own cache; a fork copies them. Each forward
pass is of one context, so the result never depends on what else runs; sampling is done for all at
once. It is there for models that the builtin engine does not know, and is slow beside it: no
paging, no shared prefixes, no batching of forward passes.

Contexts that are idle give up their cache, least recently used first, when there are too many;
their tokens stay and are computed again when needed.
"""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from parrot_engine.batch import SampledToken
from parrot_engine.engine.contexts import FailureMemory, PendingFill, PendingGenerate
from parrot_engine.engine.validation import check_fill, check_generate
from parrot_engine.exceptions import PrimitiveError
from parrot_engine.huggingface.contexts import Context, Fork, Work
from parrot_engine.huggingface.forward import Forward, load_model, score
from parrot_engine.huggingface.settings import HuggingFaceSettings
from parrot_engine.models.config import GenerationDefaults
from parrot_engine.protocol import (
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    StepResult,
)
from parrot_engine.runner.sampler import sample

_log = logging.getLogger(__name__)

#: Taken when neither settings nor configuration name a length.
_FALLBACK_CONTEXT_TOKENS = 2048


class HuggingFaceEngine:
    """Contexts as past key values; implements `parrot_engine.protocol.Engine`.

    Freeing a context whose forks have not happened yet lets it go on up to the last of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        defaults: GenerationDefaults,
        settings: HuggingFaceSettings,
        *,
        name: str,
    ) -> None:
        """Take a loaded model.

        Args:
            model: in evaluation mode, on its device.
            defaults: what the checkpoint says about ending and sampling.
            settings: limits.
            name: under which the model is served.
        """
        self._forward: Forward | None = Forward(
            model,
            chunk_tokens=settings.max_batch_tokens,
            max_cached=settings.max_cached_contexts,
        )
        self._settings = settings
        self._random = random.Random(settings.seed)  # noqa: S311 -- sampling, not secrets
        self._eos = frozenset(defaults.eos_token_ids)
        self._inbox: deque[Primitive] = deque()
        self._contexts: dict[int, Context] = {}
        #: Every context with work, in the order of its turn.
        self._busy: OrderedDict[Context, None] = OrderedDict()
        self._failures = FailureMemory()
        self._events: list[Event] = []
        self._steps = self._filled_tokens = self._generated_tokens = self._recomputations = 0
        config = model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or _FALLBACK_CONTEXT_TOKENS
        if settings.max_context_tokens is not None:
            longest = min(longest, settings.max_context_tokens)
        self.info = EngineInfo(
            model=name,
            kind="huggingface",
            architecture=type(model).__name__,
            device=str(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            max_context_tokens=longest,
            vocab_size=int(config.vocab_size),
            eos_token_ids=list(defaults.eos_token_ids),
            max_batch_size=settings.max_batch_size,
            max_batch_tokens=settings.max_batch_tokens,
            default_sampling=dict(defaults.sampling),
        )

    @classmethod
    def load(cls, folder: Path, settings: HuggingFaceSettings, *, model: str) -> HuggingFaceEngine:
        """An engine for the checkpoint in `folder`; reads safetensors only.

        Raises:
            CheckpointError: transformers cannot load it.
            SettingsError: device or dtype cannot be had.
        """
        loaded = load_model(folder, settings)
        return cls(loaded.model, loaded.defaults, settings, name=model)

    def submit(self, primitives: Sequence[Primitive]) -> None:
        """Queue primitives, in order; they are looked at in the next step."""
        self._inbox.extend(primitives)

    @torch.inference_mode()
    def step(self) -> StepResult:
        """Advance up to `max_batch_size` contexts by one chunk of prompt or one token."""
        while self._inbox:
            self._take(self._inbox.popleft())
        turn = list(self._busy)[: self._settings.max_batch_size]
        for context in turn:
            # Those that waited longest come first in the next step.
            if context in self._busy:
                self._busy.move_to_end(context)
        ready = [context for context in turn if self._advance(context)]
        if turn:
            self._steps += 1
        if ready:
            self._sample(ready)
        if self._forward is not None:
            self._recomputations += self._forward.shrink(self._busy.__contains__)
        events, self._events = self._events, []
        return StepResult(events, bool(self._busy))

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment."""
        running = min(len(self._busy), self._settings.max_batch_size)
        return EngineStats(
            running=running,
            waiting=len(self._busy) - running,
            contexts=len(self._contexts),
            steps=self._steps,
            filled_tokens=self._filled_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._recomputations,
        )

    def close(self) -> None:
        """Let go of weights and caches. May be called twice."""
        self._forward = None
        for store in (self._contexts, self._busy, self._inbox):
            store.clear()

    # Submission

    def _take(self, primitive: Primitive) -> None:
        context_id = primitive.context_id
        if isinstance(primitive, FreeContext):
            self._failures.forget(context_id)
            context = self._contexts.pop(context_id, None)
            if context is not None:
                context.freed = True
                self._trim(context)
            return
        try:
            self._queue(primitive)
        except PrimitiveError as error:
            context = self._contexts.get(context_id)
            if context is not None:
                self._fail(context, error)
            else:
                failure = Failed(context_id, error.code, error.message)
                self._events.append(failure)
                self._failures.remember(failure)

    def _queue(self, primitive: Fill | Generate) -> None:
        work: Work
        if isinstance(primitive, Fill):
            check_fill(primitive, self.info.vocab_size)
            context = self._open(primitive)
            work = PendingFill(
                0, primitive.token_ids, primitive.priority, primitive.prompt_logprobs
            )
        else:
            check_generate(primitive, self.info.vocab_size)
            if primitive.sampling.grammar is not None:
                raise PrimitiveError(
                    "invalid_request", "grammar: the huggingface engine follows none"
                )
            context = self._open(primitive)
            ends = frozenset(primitive.sampling.stop_token_ids)
            if not primitive.sampling.ignore_eos:
                ends |= self._eos
            sampling = primitive.sampling
            seed = self._random.getrandbits(63) if sampling.seed is None else sampling.seed
            work = PendingGenerate(0, sampling, primitive.priority, seed, ends)
        context.queue.append(work)
        if not context.pending_fork:
            self._busy[context] = None

    def _open(self, primitive: Fill | Generate) -> Context:
        """The context of a primitive; a new one, or a fork of its parent, if need be."""
        context_id, parent_id = primitive.context_id, primitive.parent_context_id
        failure = self._failures.get(context_id) or self._failures.get(
            context_id if parent_id is None else parent_id
        )
        if failure is not None:
            raise PrimitiveError(failure.code, failure.message)
        context = self._contexts.get(context_id)
        if context is not None:
            if parent_id is not None:
                raise PrimitiveError(
                    "invalid_request",
                    f"parent_context_id: context {context_id} exists already; only a new context "
                    "forks",
                )
            return context
        parent = None if parent_id is None else self._contexts.get(parent_id)
        if parent is None and (parent_id is not None or isinstance(primitive, Generate)):
            missing = context_id if parent_id is None else parent_id
            raise PrimitiveError("unknown_context", f"there is no context {missing}; fill it first")
        if len(self._contexts) >= self._settings.max_contexts:
            raise PrimitiveError(
                "overloaded", f"{len(self._contexts)} contexts exist (max_contexts); free some"
            )
        context = self._contexts[context_id] = Context(context_id, pending_fork=parent is not None)
        if parent is not None:
            parent.queue.append(Fork(context))
            if not parent.pending_fork:
                self._busy[parent] = None
        return context

    # Progress

    def _advance(self, context: Context) -> bool:
        """Do one piece of a context's work; whether it waits for a token to be sampled now."""
        try:
            while context.queue:
                head = context.queue[0]
                if isinstance(head, Fork):
                    self._fork(context, head.child)
                elif isinstance(head, PendingFill):
                    if not self._fill(context, head):
                        return False
                elif not self._begin_generate(context, head):
                    return self._compute(context)
        except PrimitiveError as error:
            self._fail(context, error)
        except Exception:
            _log.exception("a forward pass failed")
            message = "the engine failed while computing this context; its log has the details"
            self._fail(context, PrimitiveError("engine_error", message))
        else:
            self._settle(context)
        return False

    def _fork(self, parent: Context, child: Context) -> None:
        parent.queue.popleft()
        if child.gone:
            return
        child.token_ids = list(parent.token_ids)
        child.pending_fork = False
        if self._forward is not None:
            self._forward.fork(parent, child)
        if child.queue:
            self._busy[child] = None

    def _fill(self, context: Context, fill: PendingFill) -> bool:
        """One chunk of a Fill; whether it is done."""
        if fill.start is None:
            total = len(context.token_ids) + len(fill.token_ids)
            if total > self.info.max_context_tokens:
                raise PrimitiveError(
                    "context_too_long",
                    f"the context would hold {total} tokens; at most "
                    f"{self.info.max_context_tokens} fit",
                )
            if fill.prompt_logprobs is not None and context.token_ids:
                # The first new token is scored by what comes before it.
                if not self._compute(context):
                    return False
                score(fill, context.logits, fill.token_ids[:1])
            elif fill.prompt_logprobs is not None and fill.token_ids:
                fill.scores.append(None)
            fill.start = len(context.token_ids)
            context.token_ids += fill.token_ids
        if fill.token_ids and not self._compute(context, fill):
            return False
        context.queue.popleft()
        self._filled_tokens += len(fill.token_ids)
        scores = fill.scores if fill.prompt_logprobs is not None else None
        self._emit(context, Filled(context.id, len(fill.token_ids), 0, scores))
        return True

    def _begin_generate(self, context: Context, work: PendingGenerate) -> bool:
        """Whether a Generate is over before it begins; then it is off the queue."""
        if not context.token_ids:
            raise PrimitiveError(
                "invalid_request", "the context is empty; there is nothing to extend"
            )
        if (
            work.num_generated < work.sampling.max_tokens
            and len(context.token_ids) < self.info.max_context_tokens
        ):
            return False
        context.queue.popleft()
        self._emit(context, Generated(context.id, [], work.no_logprobs(), "length"))
        return True

    def _compute(self, context: Context, scored: PendingFill | None = None) -> bool:
        """One forward pass over tokens that have no KV; whether none is left without."""
        if context.computed == len(context.token_ids) and context.logits is not None:
            return True
        if self._forward is None:
            raise RuntimeError("step after close")
        start = context.computed
        wants = scored is not None and scored.prompt_logprobs is not None
        logits = self._forward.advance(context, all_logits=wants)
        if wants and scored is not None and scored.start is not None:
            # Rows predict the next token. Scored by now are the first token, and what was computed
            # once before: the past key values may have been dropped since.
            first = max(start, scored.start + len(scored.scores) - 1)
            targets = context.token_ids[first + 1 : context.computed + 1]
            score(scored, logits[first - start :], targets)
        return context.computed == len(context.token_ids)

    def _sample(self, contexts: Sequence[Context]) -> None:
        """A token for each context, which must have a Generate at the head and its logits."""
        waiting = [
            (context, work) for context in contexts if (work := context.generating) is not None
        ]
        rows = [work.begin(context.token_ids) for context, work in waiting]
        logits = torch.stack([c.logits for c, _ in waiting if c.logits is not None])
        for (context, work), token in zip(waiting, sample(logits, rows), strict=True):
            self._append(context, work, token)

    def _append(self, context: Context, work: PendingGenerate, token: SampledToken) -> None:
        if token.token_id is None:
            message = "the model's logits are not finite for this context"
            self._fail(context, PrimitiveError("numerical_error", message))
            return
        finish = work.append(context.token_ids, token.token_id, self.info.max_context_tokens)
        self._generated_tokens += 1
        logprobs = work.no_logprobs()
        if logprobs is not None and token.logprobs is not None:
            logprobs.append(token.logprobs)
        self._emit(context, Generated(context.id, [token.token_id], logprobs, finish))
        if finish is not None:
            context.queue.popleft()
            self._settle(context)

    # The end

    def _settle(self, context: Context) -> None:
        if context.queue:
            return
        self._busy.pop(context, None)
        if context.freed:
            self._forget(context)

    def _trim(self, context: Context) -> None:
        """Drop the work of a freed context that no fork waits for."""
        while context.queue:
            last = context.queue[-1]
            if isinstance(last, Fork) and not last.child.gone:
                break
            context.queue.pop()
        if not context.queue:
            self._forget(context)

    def _fail(self, context: Context, error: PrimitiveError) -> None:
        """Give a context up, and the forks that wait for it."""
        todo = [(context, error.message)]
        while todo:
            current, message = todo.pop()
            todo += [
                (child, f"parent context {current.id} failed: {message}") for child in current.forks
            ]
            current.queue.clear()
            failure = Failed(current.id, error.code, message)
            self._emit(current, failure)
            if not current.freed:
                self._contexts.pop(current.id, None)
                self._failures.remember(failure)
            self._forget(current)

    def _forget(self, context: Context) -> None:
        """The context is no more; a fork of it that waits in a parent's queue will not happen."""
        context.gone = True
        self._busy.pop(context, None)
        if self._forward is not None:
            self._forward.drop(context)

    def _emit(self, context: Context, event: Event) -> None:
        # NOTE: a freed id may be in use again; its events belong to the new context.
        if not context.freed or context.id not in self._contexts:
            self._events.append(event)
