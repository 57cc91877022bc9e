"""One call on one engine: from prompts to the text of its candidates. No HTTP.

`GenerationState` is the pure core: which primitives a call needs, and what an engine's events mean
for it. `Generation` is the thin shell that waits. A prompt with one candidate is filled and
continued on one context; with several it is filled once, and each candidate forks it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Protocol

from parrot_engine.protocol import (
    EngineInfo,
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Primitive,
    TokenLogprobs,
)
from parrot_engine.text import Tokenizer

from parrot_gateway.core.choice import ChoiceText
from parrot_gateway.core.request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    Update,
    Usage,
    choice_seed,
)
from parrot_gateway.exceptions import (
    ContextLengthError,
    DeadlineError,
    GatewayError,
    InvalidRequestError,
    OverloadedError,
)


class Channel(Protocol):
    """Contexts of one call on an engine. Leaving it frees them, and cancels what still runs."""

    @property
    def context_ids(self) -> list[int]:
        """Fresh ids, as many as were asked for."""
        ...

    def __enter__(self) -> Channel: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def submit(self, *primitives: Primitive) -> None:
        """Send primitives, in order; never blocks."""
        ...

    async def next(self) -> Event:
        """The next event of these contexts. A cancelled wait loses none.

        Raises:
            EngineLostError: the engine went away.
        """
        ...


class GenerationEngine(Protocol):
    """What a call needs of an engine: `RemoteEngine`, or a double of it."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    def open(self, count: int, *, salt: str = "") -> Channel:
        """A channel with `count` fresh contexts.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do.
        """
        ...


class _Place(NamedTuple):
    """Whose context an id is; candidate -1 is the prompt that the candidates fork."""

    prompt: int
    choice: int


class Progress(NamedTuple):
    """What an event brought about."""

    update: Update | None
    #: To be sent to the engine.
    primitives: list[Primitive]


class GenerationState:
    """The pure core of one call.

    Args:
        request: what is asked.
        tokenizer: the model's.
        context_ids: `contexts_needed(request)` ids.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, context_ids: list[int]
    ) -> None:
        self._request = request
        self._generates = request.sampling.max_tokens > 0
        self._places: dict[int, _Place] = {}
        self._contexts: list[list[int]] = []
        per_prompt = _contexts_per_prompt(request)
        for prompt in range(len(request.prompts)):
            own = context_ids[prompt * per_prompt : (prompt + 1) * per_prompt]
            self._contexts.append(own)
            first = 0 if per_prompt == 1 else -1
            for offset, context_id in enumerate(own):
                self._places[context_id] = _Place(prompt, first + offset)
        self._choices = [
            [
                ChoiceText(
                    tokenizer,
                    prompt.token_ids,
                    request.sampling.stop,
                    skip_special_tokens=request.skip_special_tokens,
                )
                for _ in range(request.best_of)
            ]
            for prompt in request.prompts
        ]
        self._unfilled = len(request.prompts)
        self._running = len(request.prompts) * request.best_of
        self._generated = 0
        self._cached = 0
        #: Sum and number of the log-probabilities of each candidate, for ranking.
        self._scores = [[(0.0, 0)] * request.best_of for _ in request.prompts]

    @property
    def done(self) -> bool:
        """Whether every candidate has ended."""
        return self._running == 0 and self._unfilled == 0

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        prompts = sum(len(prompt.token_ids) for prompt in self._request.prompts)
        return Usage(prompts, self._generated, min(self._cached, prompts))

    def primitives(self) -> list[Primitive]:
        """All that the engine has to be told to begin with."""
        request, sampling = self._request, self._request.sampling
        if request.best_of > request.n and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        out: list[Primitive] = []
        for prompt, contexts in zip(request.prompts, self._contexts, strict=True):
            out.append(
                Fill(
                    contexts[0],
                    prompt.token_ids,
                    salt=request.salt,
                    prompt_logprobs=request.prompt_logprobs,
                    priority=request.priority,
                )
            )
            if not self._generates:
                continue
            forks = contexts[1:] or contexts
            for choice, context_id in enumerate(forks):
                seeded = sampling
                if sampling.seed is not None:
                    seeded = replace(sampling, seed=choice_seed(sampling.seed, choice))
                out.append(
                    Generate(
                        context_id,
                        seeded,
                        parent_context_id=None if context_id == contexts[0] else contexts[0],
                        priority=request.priority,
                    )
                )
        return out

    def apply(self, event: Event) -> Progress:
        """Take one event.

        Raises:
            GatewayError: the engine gave the call up; see `failure_of`.
        """
        place = self._places.get(event.context_id)
        if place is None:
            return Progress(None, [])
        if isinstance(event, Failed):
            raise failure_of(event.code, event.message)
        if isinstance(event, Filled):
            return self._filled(place, event)
        return self._generated_tokens(place, event)

    def ranking(self, prompt: int) -> list[int]:
        """The `n` candidates to answer, best first: highest mean log-probability per token."""
        if self._request.best_of == self._request.n:
            return list(range(self._request.n))
        scores = self._scores[prompt]

        def mean(choice: int) -> float:
            total, count = scores[choice]
            return total / count if count else 0.0

        ranked = sorted(range(self._request.best_of), key=mean, reverse=True)
        return ranked[: self._request.n]

    def _filled(self, place: _Place, event: Filled) -> Progress:
        self._cached += event.cached_tokens
        self._unfilled -= 1
        if not self._generates:
            self._running -= self._request.best_of
        update = PromptFilled(place.prompt, event.cached_tokens, event.prompt_logprobs)
        return Progress(update, [])

    def _generated_tokens(self, place: _Place, event: Generated) -> Progress:
        choice = self._choices[place.prompt][place.choice]
        if choice.finished:
            # Generated before the engine heard of the stop string.
            return Progress(None, [])
        wanted = self._request.sampling.logprobs is not None
        delta = choice.push(
            event.token_ids, event.logprobs if wanted else None, event.finish_reason
        )
        self._generated += delta.num_tokens
        if self._request.best_of > self._request.n and event.logprobs:
            self._add_score(place, event.logprobs[: delta.num_tokens])
        free: list[Primitive] = []
        if choice.finished:
            self._running -= 1
            # NOTE: without this a candidate cut short would go on to its token limit, and a
            # finished one would hold its blocks until the slowest of the call is done.
            free.append(FreeContext(event.context_id))
        token_ids = event.token_ids[: delta.num_tokens]
        update = ChoiceDelta(
            place.prompt, place.choice, delta.text, delta.tokens, token_ids, delta.finish_reason
        )
        return Progress(update, free)

    def _add_score(self, place: _Place, logprobs: list[TokenLogprobs]) -> None:
        total, count = self._scores[place.prompt][place.choice]
        total += sum(entry.logprob for entry in logprobs)
        self._scores[place.prompt][place.choice] = (total, count + len(logprobs))


class Generation:
    """Runs one call; a context manager, whose exit frees all that it has on the engine.

    Cancelling a wait and leaving the `with` block is all it takes to cancel the call.

    Args:
        engine: where it runs.
        request: what is asked.
        deadline: `time.perf_counter()` at which the call is given up; None never.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        request: GenerationRequest,
        deadline: float | None = None,
    ) -> None:
        self._engine = engine
        self._request = request
        self._deadline = deadline
        self._channel: Channel
        #: From entering on.
        self.state: GenerationState

    def __enter__(self) -> Generation:
        """Send the call to the engine.

        Raises:
            EngineLostError: the engine went away.
            OverloadedError: it has too much to do.
        """
        request = self._request
        self._channel = self._engine.open(contexts_needed(request), salt=request.salt)
        self._channel.__enter__()
        try:
            context_ids = list(self._channel.context_ids)
            self.state = GenerationState(request, self._engine.tokenizer, context_ids)
            self._channel.submit(*self.state.primitives())
        except BaseException:
            self._channel.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.__exit__(kind, error, trace)

    async def next(self, until: float | None = None) -> Update | None:
        """The next update; None when there was none `until` this `time.perf_counter()`.

        Raises:
            DeadlineError: the call took too long.
            EngineLostError: the engine went away.
            GatewayError: the engine gave the call up.
        """
        while True:
            limit = _earlier(until, self._deadline)
            try:
                if limit is None:
                    event = await self._channel.next()
                else:
                    async with asyncio.timeout(limit - time.perf_counter()):
                        event = await self._channel.next()
            except TimeoutError:
                if self._deadline is not None and limit == self._deadline:
                    raise DeadlineError(
                        "The call took longer than this gateway allows "
                        "(setting server.call_timeout_s) and was cancelled."
                    ) from None
                return None
            progress = self.state.apply(event)
            if progress.primitives and not self.state.done:
                self._channel.submit(*progress.primitives)
            if progress.update is not None:
                return progress.update


def contexts_needed(request: GenerationRequest) -> int:
    """How many contexts a call takes on its engine."""
    return len(request.prompts) * _contexts_per_prompt(request)


def _contexts_per_prompt(request: GenerationRequest) -> int:
    if request.best_of == 1 or request.sampling.max_tokens == 0:
        return 1
    return 1 + request.best_of


def _earlier(first: float | None, second: float | None) -> float | None:
    if first is None or second is None:
        return second if first is None else first
    return min(first, second)


def failure_of(code: FailureCode, message: str) -> GatewayError:
    """The error of the API for a failure on an engine."""
    if code == "context_too_long":
        return ContextLengthError(message)
    if code == "invalid_request":
        return InvalidRequestError(message)
    if code == "overloaded":
        return OverloadedError(message)
    if code == "numerical_error":
        return GatewayError(
            "The model produced a result that is not a number, so this answer was given up.",
            code="numerical_error",
        )
    return GatewayError(
        "The engine could not finish this call. The operator's log has the details.",
        code="engine_error",
    )
