"""The pure core of one call: which primitives it needs, and what an engine's events mean for it.

A prompt with one candidate is filled and continued on one context; with several it is filled once,
and each candidate forks it. Prompts are begun in portions, so that one call of thousands neither
fills an engine's waiting line nor keeps everybody else out of it. A call that loses its engine
resumes on fresh contexts: prompts and what was generated are filled, and nothing is given out
twice. No waiting, no HTTP.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from parrot_engine.protocol import (
    Event,
    Failed,
    FailureCode,
    Fill,
    Filled,
    FinishReason,
    FreeContext,
    Generate,
    Generated,
    GenerateEnd,
    Primitive,
    SamplingParams,
    TokenLogprobs,
)
from parrot_engine.text import OutputText, Tokenizer

from parrot_gateway.calls.generation_request import (
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    TextToken,
    Update,
    choice_seed,
)
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import (
    ContextLengthError,
    EngineLostError,
    GatewayError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
)

#: Contexts that one call has on an engine at once: several batches full, and a fraction of what an
#: engine lets wait. A prompt whose candidates are more than this still begins, alone.
MAX_OPEN_CONTEXTS = 256


class TextDelta(NamedTuple):
    """Text and tokens that a push made visible."""

    text: str
    #: Tokens of which some text is visible now, each given out once.
    tokens: list[TextToken]
    #: How many of the pushed ids belong to the candidate; fewer than pushed after a stop string.
    num_tokens: int
    finish_reason: FinishReason | None
    #: The one that ended the candidate, if a stop string did.
    stop_string: str | None = None


class ChoiceText:
    """One candidate's text, with the tokens that become visible with it."""

    __slots__ = ("_output", "_pending", "token_ids")

    def __init__(self, output: OutputText) -> None:
        self._output = output
        #: All that was pushed: what another engine needs to go on.
        self.token_ids = array("I")
        #: Tokens whose text is not visible yet.
        self._pending: list[TextToken] = []

    @property
    def finished(self) -> bool:
        """Return whether it has ended."""
        return self._output.finished

    def push(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        finish_reason: GenerateEnd | None = None,
    ) -> TextDelta:
        """Take the tokens of one engine step.

        With `finish_reason` "stop" or "closed" the last id ended the text and is no part of it.
        """
        self.token_ids.extend(token_ids)
        if logprobs is None:
            delta = self._output.push(token_ids, finish_reason)
            return TextDelta(
                delta.text, [], delta.num_tokens, delta.finish_reason, delta.stop_string
            )
        offsets: list[int] = []
        delta = self._output.push(token_ids, finish_reason, offsets=offsets)
        visible = len(token_ids) - (finish_reason in ("stop", "closed"))
        self._pending += [
            TextToken(logprobs[position], offset, is_end=position >= visible)
            for position, offset in enumerate(offsets)
        ]
        tokens = self._pending
        if delta.finish_reason is None or delta.stop_string is not None:
            # Tokens that lie wholly in held text stay behind; after a stop string, for good.
            shown = 0
            while shown < len(tokens) and tokens[shown].offset < self._output.num_shown:
                shown += 1
            tokens = tokens[:shown]
        self._pending = self._pending[len(tokens) :]
        return TextDelta(
            delta.text, tokens, delta.num_tokens, delta.finish_reason, delta.stop_string
        )


class _Place(NamedTuple):
    """Whose context an id is; candidate -1 is the prompt that the candidates fork."""

    prompt: int
    choice: int


class _OpenPrompt:
    """A prompt that was begun and has candidates that have not ended."""

    __slots__ = ("choices", "context_ids", "is_filled", "running")

    def __init__(self, choices: list[ChoiceText]) -> None:
        #: Contexts not freed yet.
        self.context_ids: set[int] = set()
        self.choices = choices
        self.running = len(choices)
        #: Its `PromptFilled` was given out.
        self.is_filled = False


class Progress(NamedTuple):
    """The effects of one event."""

    update: Update | None
    #: To be sent to the engine.
    primitives: list[Primitive]


class GenerationState:
    """The pure core of one call.

    Args:
        request: the call.
        tokenizer: the model's.
        drawn_seed: of a request that gives no seed: its candidates go on with the same random
            numbers on another engine. None leaves it to the engine, where nothing is drawn.
    """

    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, drawn_seed: int | None = None
    ) -> None:
        #: Of Generates and of Fills, for the engine's queue: smaller runs earlier. Set them before
        #: `begin`.
        self.priority = self.fill_priority = 0
        self._request = request
        self._tokenizer = tokenizer
        self._drawn_seed = drawn_seed
        self._generates = request.sampling.max_tokens > 0
        self._per_prompt = 1 if request.best_of == 1 or not self._generates else 1 + request.best_of
        #: How many prompts have been begun; they begin in order.
        self._begun = 0
        self._open: dict[int, _OpenPrompt] = {}
        #: Open prompts that have lost their contexts.
        self._interrupted: deque[int] = deque()
        self._places: dict[int, _Place] = {}
        #: Prompts that are not in the engine's memory yet, and candidates that have not ended.
        self._unfilled = len(request.prompts)
        self._running = len(request.prompts) * request.best_of
        #: Whether every candidate has ended.
        self.done = self._running == 0
        self._prompt_tokens = sum(map(len, [prompt.token_ids for prompt in request.prompts]))
        #: Tokens of the prompts that were found in a cache when they were filled first.
        self.cached_tokens = 0
        #: Tokens that the present engine has filled for this call, and those of them that it had.
        self.engine_filled = 0
        self.engine_cached = 0
        #: Tokens that were computed again on another engine.
        self.refilled_tokens = 0
        #: Tokens of all candidates so far.
        self.generated = 0
        #: Grows with each token, and with each prompt that has ended.
        self.progress = 0
        #: Those of them that were read as reasoning.
        self.reasoning_tokens = 0
        #: Sum and number of the log-probabilities of each candidate, for ranking.
        self._scores: dict[_Place, tuple[float, int]] = {}

    @property
    def waits(self) -> bool:
        """Return whether anything of this call is on the engine, so that events are to come."""
        return bool(self._places)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage(self._prompt_tokens, self.generated, self.cached_tokens, self.reasoning_tokens)

    @property
    def contexts_needed(self) -> int:
        """The number of contexts that `begin` can use now; 0 without room or work."""
        room = MAX_OPEN_CONTEXTS - len(self._places)
        needed = 0
        for number in self._interrupted:
            count = self._contexts_of(number)
            if needed + count > room and (needed or self._places):
                return needed
            needed += count
        fresh = max(0, (room - needed) // self._per_prompt)
        if not needed and not self._places:
            fresh = max(fresh, 1)
        return needed + min(fresh, len(self._request.prompts) - self._begun) * self._per_prompt

    def begin(self, context_ids: list[int]) -> list[Primitive]:
        """Begin the next prompts on fresh contexts; returns the primitives for the engine.

        Args:
            context_ids: `contexts_needed` of them.
        """
        out: list[Primitive] = []
        sampling = self._sampling()
        ids = iter(context_ids)
        left = len(context_ids)
        while left:
            if self._interrupted:
                number = self._interrupted.popleft()
            else:
                number = self._begun
                self._open[number] = _OpenPrompt(self._new_choices(number))
                self._begun += 1
            left -= self._contexts_of(number)
            out += self._begin_prompt(number, ids, sampling)
        return out

    def resume(self) -> GenerationRequest:
        """Forget the contexts, which are lost: `begin` goes on with all that has not ended.

        Returns: what is left to do, as a request to be placed.
        """
        self._places.clear()
        self.engine_filled = self.engine_cached = 0
        for prompt in self._open.values():
            prompt.context_ids.clear()
        self._interrupted = deque(self._open)
        request = self._request
        left = [
            replace(prompt, token_ids=[*prompt.token_ids, *choice.token_ids])
            for number in self._open
            for prompt, choice in [(request.prompts[number], self._longest(number))]
        ]
        done = len(self._longest(next(iter(self._open))).token_ids) if self._open else 0
        sampling = replace(request.sampling, max_tokens=max(0, request.sampling.max_tokens - done))
        return replace(request, prompts=[*left, *request.prompts[self._begun :]], sampling=sampling)

    def apply(self, event: Event) -> Progress:
        """Take one event.

        Raises:
            GatewayError: the engine gave the call up; see `failure_of`.
        """
        place = self._places.get(event.context_id)
        if place is None:
            # Its context was freed; the engine had not heard of that yet.
            return Progress(None, [])
        if isinstance(event, Generated):
            return self._generated_tokens(place, event)
        if isinstance(event, Filled):
            return self._filled(place, event)
        assert isinstance(event, Failed), event
        error = failure_of(event.code, event.message)
        if event.code == "invalid_request" and event.message.startswith("grammar"):
            # What only the engine can know of a grammar.
            error.param = self._request.grammar_param
        raise error

    def ranking(self, prompt: int) -> list[int]:
        """The `n` candidates to answer, best first: highest mean log-probability per token."""

        def mean(choice: int) -> float:
            total, count = self._scores.get(_Place(prompt, choice), (0.0, 0))
            return total / count if count else 0.0

        ranked = sorted(range(self._request.best_of), key=mean, reverse=True)
        return ranked[: self._request.n]

    def _sampling(self) -> SamplingParams:
        sampling = self._request.sampling
        if self._request.best_of > self._request.n and sampling.logprobs is None:
            return replace(sampling, logprobs=0)
        return sampling

    def _new_choices(self, number: int) -> list[ChoiceText]:
        request = self._request
        outputs = (
            OutputText(
                self._tokenizer,
                request.prompts[number].token_ids,
                request.sampling.stop,
                skip_special_tokens=request.skip_special_tokens,
            )
            for _ in range(request.best_of)
        )
        return [ChoiceText(output) for output in outputs]

    def _contexts_of(self, number: int) -> int:
        """Contexts that a prompt begins on: one for all, or one that its candidates fork."""
        prompt = self._open.get(number)
        if self._per_prompt == 1 or prompt is None:
            return self._per_prompt
        return 1 + prompt.running

    def _longest(self, number: int) -> ChoiceText:
        """The candidate of an open prompt that has generated most, of those that go on."""
        choices = self._open[number].choices
        return max(
            (each for each in choices if not each.finished), key=lambda each: len(each.token_ids)
        )

    def _begin_prompt(
        self, number: int, context_ids: Iterator[int], sampling: SamplingParams
    ) -> list[Primitive]:
        """Fill a prompt and generate its candidates, or what is left of them."""
        request, prompt = self._request, self._open[number]
        token_ids = request.prompts[number].token_ids
        root = next(context_ids)
        is_alone = self._per_prompt == 1
        if is_alone and prompt.choices[0].token_ids:
            token_ids = [*token_ids, *prompt.choices[0].token_ids]
        out: list[Primitive] = [
            Fill(
                root,
                token_ids,
                salt=request.salt,
                prompt_logprobs=None if prompt.is_filled else request.prompt_logprobs,
                priority=self.fill_priority,
            )
        ]
        prompt.context_ids.add(root)
        self._places[root] = _Place(number, 0 if is_alone else -1)
        if not self._generates:
            return out
        for choice, text in enumerate(prompt.choices):
            if text.finished:
                continue
            context_id, parent = root, None
            if not is_alone:
                context_id, parent = next(context_ids), root
                prompt.context_ids.add(context_id)
                self._places[context_id] = _Place(number, choice)
                if text.token_ids:
                    out.append(
                        Fill(context_id, text.token_ids.tolist(), root, priority=self.fill_priority)
                    )
                    parent = None
            seed = self._seed(number, choice)
            out.append(
                Generate(
                    context_id,
                    sampling if seed == sampling.seed else replace(sampling, seed=seed),
                    parent,
                    self.priority,
                    len(text.token_ids),
                )
            )
        return out

    def _seed(self, number: int, choice: int) -> int | None:
        """The seed of a candidate. One that was drawn makes no two prompts of a call alike."""
        seed = self._request.sampling.seed
        if seed is not None:
            return choice_seed(seed, choice)
        return choice_seed(self._drawn_seed, number * self._request.best_of + choice)

    def _filled(self, place: _Place, event: Filled) -> Progress:
        self.engine_filled += event.num_tokens
        self.engine_cached += event.cached_tokens
        prompt = self._open[place.prompt]
        if prompt.is_filled:
            self.refilled_tokens += event.num_tokens - event.cached_tokens
            return Progress(None, [])
        prompt.is_filled = True
        self.cached_tokens = min(self.cached_tokens + event.cached_tokens, self._prompt_tokens)
        self._unfilled -= 1
        free: list[Primitive] = []
        if not self._generates:
            self._running -= self._request.best_of
            free = self._close(place.prompt)
        self.done = self._running == 0 and self._unfilled == 0
        update = PromptFilled(place.prompt, event.cached_tokens, event.prompt_logprobs)
        return Progress(update, free)

    def _generated_tokens(self, place: _Place, event: Generated) -> Progress:
        prompt = self._open[place.prompt]
        choice = prompt.choices[place.choice]
        requested = self._request.sampling.logprobs is not None
        delta = choice.push(
            event.token_ids, event.logprobs if requested else None, event.finish_reason
        )
        self.generated += delta.num_tokens
        self.progress += delta.num_tokens
        if self._request.best_of > self._request.n and event.logprobs:
            self._add_score(place, event.logprobs[: delta.num_tokens])
        free: list[Primitive] = []
        if delta.finish_reason is not None:
            self._running -= 1
            self.done = self._running == 0 and self._unfilled == 0
            prompt.running -= 1
            if prompt.running == 0:
                free = self._close(place.prompt)
            else:
                # NOTE: without this a candidate cut short would go on to its token limit, and a
                # finished one would hold its blocks until the slowest of the prompt is done.
                prompt.context_ids.remove(event.context_id)
                free = [self._free(event.context_id)]
        token_ids = event.token_ids[: delta.num_tokens]
        update = ChoiceDelta(
            place.prompt,
            place.choice,
            delta.text,
            delta.tokens,
            token_ids,
            delta.finish_reason,
            stop_string=delta.stop_string,
            is_closed=event.finish_reason == "closed" and delta.stop_string is None,
        )
        return Progress(update, free)

    def _close(self, number: int) -> list[Primitive]:
        """Free what is left of a prompt whose candidates have all ended."""
        self.progress += 1
        return [self._free(context_id) for context_id in sorted(self._open.pop(number).context_ids)]

    def _free(self, context_id: int) -> FreeContext:
        del self._places[context_id]
        return FreeContext(context_id)

    def _add_score(self, place: _Place, logprobs: list[TokenLogprobs]) -> None:
        total, count = self._scores.get(place, (0.0, 0))
        total += sum(entry.logprob for entry in logprobs)
        self._scores[place] = (total, count + len(logprobs))


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
    if code == "engine_lost":
        return EngineLostError("The engine that ran this call broke down.", "crashed")
    if code == "unknown_adapter":
        return ModelNotFoundError("The adapter of this call was unloaded.", param="model")
    return GatewayError(
        "The engine could not finish this call. The operator's log has the details.",
        code="engine_error",
    )
