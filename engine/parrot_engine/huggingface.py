"""The huggingface engine: any causal language model that transformers can load.

A context keeps its past key values in transformers' own cache; a fork copies them. Each forward
pass is of one context, so the result never depends on what else runs; sampling is done for all at
once. It is there for models that the builtin engine does not know, and is slow beside it: no
paging, no shared prefixes, no batching of forward passes.

Contexts that are idle give up their cache, least recently used first, when there are too many;
their tokens stay and are computed again when needed.
"""

from __future__ import annotations

import copy
import json
import logging
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from parrot_engine.builtin.batch import SampledToken, SamplingRow
from parrot_engine.builtin.sampler import prompt_logprobs, sample
from parrot_engine.builtin.validation import check_fill, check_generate
from parrot_engine.exceptions import CheckpointError, PrimitiveError, SettingsError
from parrot_engine.models.generation_defaults import GenerationDefaults, read_generation_defaults
from parrot_engine.models.loader import resolve_device, resolve_dtype
from parrot_engine.protocol import (
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    Fill,
    Filled,
    FinishReason,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    StepResult,
    TokenLogprobs,
)

_log = logging.getLogger(__name__)

#: Failed ids that are remembered.
_MAX_FAILURES = 4096

#: Taken when neither settings nor configuration name a length.
_FALLBACK_CONTEXT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class HuggingFaceSettings:
    """How the huggingface engine runs."""

    device: str = "auto"
    dtype: str = "auto"
    #: Longest context; None: what the model's configuration says.
    max_context_tokens: int | None = None
    #: Contexts that advance in one step.
    max_batch_size: int = 8
    #: Tokens of one forward pass while a prompt is filled.
    max_batch_tokens: int = 512
    #: Contexts that keep their past key values.
    max_cached_contexts: int = 64
    #: Contexts at most; further ones fail as `overloaded`.
    max_contexts: int = 4096
    #: CPU threads.
    num_threads: int = 1
    #: Run Python code that comes with the checkpoint.
    trust_remote_code: bool = False
    #: Seeds generations that give no seed of their own; None: from the system.
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises `SettingsError` for a number below one."""
        for name in ("max_batch_size", "max_batch_tokens", "max_cached_contexts", "max_contexts",
                     "num_threads", "max_context_tokens"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SettingsError(name, f"must be at least 1, not {value}")


@dataclass(slots=True, eq=False)
class _Filling:
    fill: Fill
    #: Where its tokens begin; None before they are part of the context.
    start: int | None = None
    scores: list[TokenLogprobs | None] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Generating:
    generate: Generate
    seed: int
    end_token_ids: frozenset[int]
    row: SamplingRow | None = None


@dataclass(slots=True, eq=False)
class _Fork:
    child: _Context


_Work: TypeAlias = _Filling | _Generating | _Fork


@dataclass(slots=True, eq=False)
class _Context:
    id: int
    token_ids: list[int] = field(default_factory=list)
    #: Past key values of the first `computed` tokens.
    cache: DynamicCache | None = None
    computed: int = 0
    #: What the model says behind the last computed token, float32 `[vocab_size]`.
    logits: Tensor | None = None
    queue: deque[_Work] = field(default_factory=deque)
    #: Waits in its parent's queue.
    unborn: bool = False
    freed: bool = False

    def drop_cache(self) -> None:
        self.cache, self.computed, self.logits = None, 0, None


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
        self._model: PreTrainedModel | None = model
        self._settings = settings
        self._random = random.Random(settings.seed)  # noqa: S311 -- sampling, not secrets
        self._eos = frozenset(defaults.eos_token_ids)
        self._inbox: deque[Primitive] = deque()
        self._contexts: dict[int, _Context] = {}
        #: Every context with work, in the order of its turn.
        self._busy: OrderedDict[_Context, None] = OrderedDict()
        #: Every context with past key values, least recently used first.
        self._cached: OrderedDict[_Context, None] = OrderedDict()
        self._failures: OrderedDict[int, Failed] = OrderedDict()
        self._events: list[Event] = []
        self._steps = self._filled_tokens = self._generated_tokens = self._recomputations = 0
        config = model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None) or _FALLBACK_CONTEXT_TOKENS
        if settings.max_context_tokens is not None:
            longest = min(longest, settings.max_context_tokens)
        self._device = model.device
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
        device = resolve_device(settings.device)
        if device.type == "cpu":
            torch.set_num_threads(settings.num_threads)
        config = _read_json(folder / "config.json") or {}
        stored = str(config.get("dtype") or config.get("torch_dtype") or "float32")
        try:
            loaded = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=resolve_dtype(settings.dtype, stored, device),
                trust_remote_code=settings.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
            )
        except Exception as error:
            # transformers raises nearly everything here: OSError, ValueError, KeyError, …
            raise CheckpointError(f"transformers cannot load {folder}: {error}") from error
        defaults = read_generation_defaults(config, _read_json(folder / "generation_config.json"))
        return cls(loaded.to(device).eval(), defaults, settings, name=model)

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
        self._shrink()
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
        self._model = None
        for store in (self._contexts, self._busy, self._cached, self._inbox):
            store.clear()

    # Submission

    def _take(self, primitive: Primitive) -> None:
        context_id = primitive.context_id
        if isinstance(primitive, FreeContext):
            self._failures.pop(context_id, None)
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
                self._remember(Failed(context_id, error.code, error.message))

    def _queue(self, primitive: Fill | Generate) -> None:
        work: _Work
        if isinstance(primitive, Fill):
            check_fill(primitive, self.info.vocab_size)
            context = self._open(primitive)
            work = _Filling(primitive)
        else:
            check_generate(primitive, self.info.vocab_size)
            context = self._open(primitive)
            ends = frozenset(primitive.sampling.stop_token_ids)
            if not primitive.sampling.ignore_eos:
                ends |= self._eos
            given = primitive.sampling.seed
            work = _Generating(
                primitive, self._random.getrandbits(63) if given is None else given, ends
            )
        context.queue.append(work)
        if not context.unborn:
            self._busy[context] = None

    def _open(self, primitive: Fill | Generate) -> _Context:
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
        context = self._contexts[context_id] = _Context(context_id, unborn=parent is not None)
        if parent is not None:
            parent.queue.append(_Fork(context))
            if not parent.unborn:
                self._busy[parent] = None
        return context

    # Progress

    def _advance(self, context: _Context) -> bool:
        """Do one piece of a context's work; whether it waits for a token to be sampled now."""
        try:
            while context.queue:
                head = context.queue[0]
                if isinstance(head, _Fork):
                    self._bear(context, head.child)
                elif isinstance(head, _Filling):
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

    def _bear(self, parent: _Context, child: _Context) -> None:
        parent.queue.popleft()
        child.token_ids = list(parent.token_ids)
        child.unborn = False
        if parent.cache is not None and parent.computed:
            child.cache = copy.deepcopy(parent.cache)
            child.computed, child.logits = parent.computed, parent.logits
            self._touch(child)
        if child.queue:
            self._busy[child] = None

    def _fill(self, context: _Context, work: _Filling) -> bool:
        """One chunk of a Fill; whether it is done."""
        fill = work.fill
        if work.start is None:
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
                self._score(context, work, context.logits, fill.token_ids[:1])
            elif fill.prompt_logprobs is not None and fill.token_ids:
                work.scores.append(None)
            work.start = len(context.token_ids)
            context.token_ids += fill.token_ids
        if fill.token_ids and not self._compute(context, work):
            return False
        context.queue.popleft()
        self._filled_tokens += len(fill.token_ids)
        scores = work.scores if fill.prompt_logprobs is not None else None
        self._emit(context, Filled(context.id, len(fill.token_ids), 0, scores))
        return True

    def _begin_generate(self, context: _Context, work: _Generating) -> bool:
        """Whether a Generate is over before it begins; then it is off the queue."""
        if not context.token_ids:
            raise PrimitiveError(
                "invalid_request", "the context is empty; there is nothing to extend"
            )
        generated = 0 if work.row is None else len(work.row.generated_token_ids)
        limit = min(
            work.generate.sampling.max_tokens,
            self.info.max_context_tokens - len(context.token_ids) + generated,
        )
        if generated < limit:
            return False
        context.queue.popleft()
        logprobs: list[TokenLogprobs] | None = None
        if work.generate.sampling.logprobs is not None:
            logprobs = []
        self._emit(context, Generated(context.id, [], logprobs, "length"))
        return True

    def _compute(self, context: _Context, scored: _Filling | None = None) -> bool:
        """One forward pass over tokens that have no KV; whether none is left without."""
        if context.computed == len(context.token_ids) and context.logits is not None:
            return True
        if self._model is None:
            raise RuntimeError("step after close")
        if context.cache is None:
            context.cache = DynamicCache(config=self._model.config)
        start = context.computed
        chunk = context.token_ids[start : start + self._settings.max_batch_tokens]
        wants = scored is not None and scored.fill.prompt_logprobs is not None
        output = self._model(
            input_ids=torch.tensor([chunk], device=self._device),
            past_key_values=context.cache,
            use_cache=True,
            logits_to_keep=0 if wants else 1,
        )
        logits = output.logits[0].float()
        context.cache = output.past_key_values
        context.computed = start + len(chunk)
        context.logits = logits[-1].clone()
        self._touch(context)
        if wants and scored is not None and scored.start is not None:
            # Rows predict the next token; those of tokens before this Fill are not asked for.
            first = max(start, scored.start)
            targets = context.token_ids[first + 1 : context.computed + 1]
            self._score(context, scored, logits[first - start :], targets)
        return context.computed == len(context.token_ids)

    def _score(
        self, context: _Context, work: _Filling, logits: Tensor | None, targets: list[int]
    ) -> None:
        count = work.fill.prompt_logprobs
        if logits is None or count is None or not targets:
            return
        rows = logits.reshape(-1, logits.shape[-1])[: len(targets)]
        scores = prompt_logprobs(rows, targets, count)
        if any(score.logprob != score.logprob for score in scores):
            raise PrimitiveError(
                "numerical_error", "the model's logits are not finite for this context"
            )
        work.scores.extend(scores)

    def _sample(self, contexts: Sequence[_Context]) -> None:
        waiting = list(_generations(contexts))
        rows = []
        for context, work in waiting:
            if work.row is None:
                work.row = SamplingRow(
                    work.generate.sampling,
                    list(context.token_ids),
                    [],
                    work.seed,
                    work.end_token_ids,
                )
            rows.append(work.row)
        logits = torch.stack([c.logits for c, _ in waiting if c.logits is not None])
        for (context, work), token in zip(waiting, sample(logits, rows), strict=True):
            self._append(context, work, token)

    def _append(self, context: _Context, work: _Generating, token: SampledToken) -> None:
        if token.token_id is None or work.row is None:
            message = "the model's logits are not finite for this context"
            self._fail(context, PrimitiveError("numerical_error", message))
            return
        context.token_ids.append(token.token_id)
        work.row.generated_token_ids.append(token.token_id)
        self._generated_tokens += 1
        finish: FinishReason | None = None
        if token.token_id in work.end_token_ids:
            finish = "stop"
        elif (
            len(work.row.generated_token_ids) >= work.generate.sampling.max_tokens
            or len(context.token_ids) >= self.info.max_context_tokens
        ):
            finish = "length"
        logprobs: list[TokenLogprobs] | None = None
        if work.generate.sampling.logprobs is not None:
            logprobs = [token.logprobs] if token.logprobs is not None else []
        self._emit(context, Generated(context.id, [token.token_id], logprobs, finish))
        if finish is not None:
            context.queue.popleft()
            self._settle(context)

    # The end

    def _settle(self, context: _Context) -> None:
        if context.queue:
            return
        self._busy.pop(context, None)
        if context.freed:
            self._forget(context)

    def _trim(self, context: _Context) -> None:
        """Drop the work of a freed context that no fork waits for."""
        while context.queue and not isinstance(context.queue[-1], _Fork):
            context.queue.pop()
        while context.queue and all(
            isinstance(work, _Fork) and work.child.freed and not work.child.queue
            for work in context.queue
        ):
            context.queue.pop()
        if not context.queue:
            self._forget(context)

    def _fail(self, context: _Context, error: PrimitiveError) -> None:
        """Give a context up, and the forks that wait for it."""
        todo = [(context, error.message)]
        while todo:
            current, message = todo.pop()
            todo += [
                (work.child, f"parent context {current.id} failed: {message}")
                for work in current.queue
                if isinstance(work, _Fork)
            ]
            current.queue.clear()
            if not current.freed:
                self._contexts.pop(current.id, None)
                self._remember(Failed(current.id, error.code, message))
            self._forget(current)

    def _remember(self, failure: Failed) -> None:
        """Report a failure; what is on its way to this id is answered with it too, until freed."""
        self._events.append(failure)
        self._failures[failure.context_id] = failure
        if len(self._failures) > _MAX_FAILURES:
            self._failures.popitem(last=False)

    def _forget(self, context: _Context) -> None:
        context.drop_cache()
        self._busy.pop(context, None)
        self._cached.pop(context, None)

    def _emit(self, context: _Context, event: Event) -> None:
        if not context.freed:
            self._events.append(event)

    def _touch(self, context: _Context) -> None:
        self._cached[context] = None
        self._cached.move_to_end(context)

    def _shrink(self) -> None:
        """Drop the caches of the contexts that were used longest ago."""
        for idle_only in (True, False):
            for context in list(self._cached):
                if len(self._cached) <= self._settings.max_cached_contexts:
                    return
                if not idle_only or context not in self._busy:
                    context.drop_cache()
                    del self._cached[context]
                    self._recomputations += 1


def _generations(contexts: Sequence[_Context]) -> Iterator[tuple[_Context, _Generating]]:
    for context in contexts:
        head = context.queue[0] if context.queue else None
        if isinstance(head, _Generating):
            yield context, head


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else None
