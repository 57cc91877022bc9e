"""The pure core of one call: which primitives it needs, and what an engine's events mean for it.

A prompt with one candidate is filled and continued on one context; with several it is filled once,
and each candidate forks it. Prompts are begun in portions, so that one call of thousands neither
fills an engine's waiting line nor keeps everybody else out of it. No waiting, no HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    __slots__ = ("_output", "_pending")

    def __init__(self, output: OutputText) -> None:
        self._output = output
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

    __slots__ = ("choices", "context_ids", "running")

    def __init__(self, context_ids: list[int], choices: list[ChoiceText]) -> None:
        #: Contexts not freed yet.
        self.context_ids = set(context_ids)
        self.choices = choices
        self.running = len(choices)


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
    """

    def __init__(self, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        #: Of all primitives, for the engine's queue: smaller runs earlier. Set it before `begin`.
        self.priority = 0
        self._request = request
        self._tokenizer = tokenizer
        self._generates = request.sampling.max_tokens > 0
        self._per_prompt = 1 if request.best_of == 1 or not self._generates else 1 + request.best_of
        #: How many prompts have been begun; they begin in order.
        self._begun = 0
        self._open: dict[int, _OpenPrompt] = {}
        self._places: dict[int, _Place] = {}
        #: Prompts that are not in the engine's memory yet, and candidates that have not ended.
        self._unfilled = len(request.prompts)
        self._running = len(request.prompts) * request.best_of
        #: Whether every candidate has ended.
        self.done = self._running == 0
        self._prompt_tokens = sum(map(len, [prompt.token_ids for prompt in request.prompts]))
        #: Tokens of the prompts that are in the engine's memory, and those of them that it had.
        self.filled_tokens = 0
        self.cached_tokens = 0
        #: Tokens of all candidates so far.
        self.generated = 0
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
        room = (MAX_OPEN_CONTEXTS - len(self._places)) // self._per_prompt
        if not self._places:
            room = max(room, 1)
        return min(max(room, 0), len(self._request.prompts) - self._begun) * self._per_prompt

    def begin(self, context_ids: list[int]) -> list[Primitive]:
        """Begin the next prompts on fresh contexts; returns the primitives for the engine.

        Args:
            context_ids: `contexts_needed` of them.
        """
        out: list[Primitive] = []
        sampling = self._sampling()
        for start in range(0, len(context_ids), self._per_prompt):
            own = context_ids[start : start + self._per_prompt]
            out += self._begin_prompt(self._begun, own, sampling)
            self._begun += 1
        return out

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

    def _begin_prompt(
        self, number: int, context_ids: list[int], sampling: SamplingParams
    ) -> list[Primitive]:
        request = self._request
        prompt = request.prompts[number]
        first = 0 if self._per_prompt == 1 else -1
        for offset, context_id in enumerate(context_ids):
            self._places[context_id] = _Place(number, first + offset)
        outputs = (
            OutputText(
                self._tokenizer,
                prompt.token_ids,
                request.sampling.stop,
                skip_special_tokens=request.skip_special_tokens,
            )
            for _ in range(request.best_of)
        )
        self._open[number] = _OpenPrompt(context_ids, [ChoiceText(output) for output in outputs])
        out: list[Primitive] = [
            Fill(
                context_ids[0],
                prompt.token_ids,
                salt=request.salt,
                prompt_logprobs=request.prompt_logprobs,
                priority=self.priority,
            )
        ]
        if not self._generates:
            return out
        for choice, context_id in enumerate(context_ids[1:] or context_ids):
            seeded = sampling
            if sampling.seed is not None:
                seeded = replace(sampling, seed=choice_seed(sampling.seed, choice))
            out.append(
                Generate(
                    context_id,
                    seeded,
                    parent_context_id=None if context_id == context_ids[0] else context_ids[0],
                    priority=self.priority,
                )
            )
        return out

    def _filled(self, place: _Place, event: Filled) -> Progress:
        self.cached_tokens = min(self.cached_tokens + event.cached_tokens, self._prompt_tokens)
        self.filled_tokens += event.num_tokens
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
    if code == "unknown_adapter":
        return ModelNotFoundError("The adapter of this call was unloaded.", param="model")
    return GatewayError(
        "The engine could not finish this call. The operator's log has the details.",
        code="engine_error",
    )
