"""One call on one engine: from prompts to the text of its candidates. No HTTP.

Waits for a placement and for events, and notifies observers. Which primitives are sent and what
events mean is decided in `state`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from parrot_engine.protocol import Filled

from parrot_gateway.backends.own.placement import Placement, Placer
from parrot_gateway.backends.own.remote import EngineChannel
from parrot_gateway.backends.own.state import GenerationState
from parrot_gateway.calls.generation_request import (
    AnswerFinishReason,
    ChoiceDelta,
    GenerationRequest,
    PromptFilled,
    TextToken,
    Update,
)
from parrot_gateway.calls.observer import GenerationObserver, Observers
from parrot_gateway.calls.reasoning import ReasoningText
from parrot_gateway.calls.tools.parsing import (
    ArgumentsPiece,
    ContentPiece,
    ToolCallBegin,
    ToolCallText,
)
from parrot_gateway.exceptions import DeadlineError, EngineLostError, OverloadedError

#: Tokens of output between two reports to the scheduler.
PROGRESS_INTERVAL_TOKENS = 16


class Generation:
    """Runs one call; a context manager, whose exit frees all that it has on the engine.

    Cancelling a wait and leaving the `with` block is all it takes to cancel the call.

    Args:
        placer: the engines of its model, of which it gets one.
        request: the call.
        deadline: `time.perf_counter()` at which the call is given up; None never.
        observers: are notified of the answer as it comes.
    """

    def __init__(
        self,
        placer: Placer,
        request: GenerationRequest,
        deadline: float | None = None,
        observers: Sequence[GenerationObserver] = (),
    ) -> None:
        self._placer = placer
        self._request = request
        self._deadline = deadline
        self._observers = Observers(observers) if observers else None
        #: Which candidates are answered is known in the end only.
        self.ranks = request.best_of > request.n
        tools = request.tools
        #: By candidate of the only prompt, where tools may be called.
        self._tool_texts = [] if tools is None else [ToolCallText(tools) for _ in range(request.n)]
        start = request.reasoning
        self._reasoning = [] if start is None else [ReasoningText(start) for _ in range(request.n)]
        #: Whether updates concern anybody but the caller.
        self._is_watched = bool(self._tool_texts or self._reasoning) or (
            self._observers is not None and self._observers.reads_deltas
        )
        #: Until observers know of the first token.
        self._awaits_first = self._observers is not None
        #: Of the last candidate that ended.
        self._finish_reason: AnswerFinishReason | None = None
        self._placement: Placement
        #: Once there is a place for the call.
        self._channel: EngineChannel | None = None
        #: Generated tokens that the placement has heard of.
        self._reported = 0
        #: From entering on.
        self.state: GenerationState

    def __enter__(self) -> Generation:
        """Ask for an engine; `next` begins as soon as there is one."""
        self.state = GenerationState(self._request, self._placer.tokenizer)
        if self._observers is not None:
            self._observers.submitted()
        self._placement = self._placer.place(self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._channel is not None:
            self._channel.__exit__(kind, error, trace)
        if self.state.done:
            self._report_progress()
            self._placement.succeed()
        self._placement.close()
        if self._observers is None:
            return
        if error is not None:
            self._observers.failed(error, self.state.usage)
        elif self.state.done:
            self._observers.ended(self.state.usage, self._finish_reason)

    async def next(self, until: float | None = None) -> Update | None:
        """The next update; None when there was none `until` this `time.perf_counter()`.

        Raises:
            DeadlineError: the call took too long.
            EngineLostError: the engine went away.
            OverloadedError: there is too much to do.
            GatewayError: the engine gave the call up.
        """
        state, deadline = self.state, self._deadline
        limit = deadline if until is None or (deadline is not None and deadline < until) else until
        while True:
            try:
                left_s = None if limit is None else limit - time.perf_counter()
                channel = self._channel
                if channel is None:
                    async with asyncio.timeout(left_s):
                        channel = await self._begin()
                    left_s = None if limit is None else limit - time.perf_counter()
                event = await channel.next(left_s)
            except TimeoutError:
                if deadline is not None and limit == deadline:
                    raise DeadlineError(
                        "The call took longer than this gateway allows "
                        "(setting server.call_timeout_s) and was cancelled."
                    ) from None
                return None
            progress = state.apply(event)
            if progress.primitives and not state.done:
                channel.submit(*progress.primitives)
                self._begin_further(channel)
            if (
                isinstance(event, Filled)
                or self._reported + PROGRESS_INTERVAL_TOKENS <= state.generated
            ):
                self._report_progress()
            if self._awaits_first and state.generated and self._observers is not None:
                self._awaits_first = False
                self._observers.first_token()
            update = progress.update
            if update is not None:
                if self._is_watched:
                    update = self._observed(update)
                if state.done and isinstance(update, ChoiceDelta):
                    self._finish_reason = update.finish_reason
                return update

    def _observed(self, update: Update) -> Update:
        """Read tool calls and notify observers."""
        if isinstance(update, PromptFilled):
            if self._request.echoes is not None:
                echo = self._request.echoes[update.prompt]
                self.observe(
                    ChoiceDelta(update.prompt, choice, echo, [], [], None)
                    for choice in range(self._request.n)
                )
            return update
        if self._reasoning:
            update = self._split(update)
        if self._tool_texts:
            text, reason = self._tool_texts[update.choice], update.finish_reason
            pieces = text.push(update.text, ends=reason is not None)
            if reason == "stop" and text.has_calls:
                reason = "tool_calls"
            update = update._replace(pieces=pieces, finish_reason=reason)
        if not self.ranks:
            self.observe([update])
        return update

    def _split(self, update: ChoiceDelta) -> ChoiceDelta:
        """Part reasoning from the text."""
        thought = self._reasoning[update.choice]
        was_reasoning = thought.is_reasoning
        reasoning, content = thought.push(update.text, ends=update.finish_reason is not None)
        if was_reasoning or thought.is_reasoning or reasoning:
            self.state.reasoning_tokens += len(update.token_ids)
        return update._replace(text=content, reasoning=reasoning)

    def observe(self, deltas: Iterable[ChoiceDelta]) -> None:
        """Notify observers of the answer. Where candidates are ranked, each chosen one comes whole,
        numbered by its rank, in the end."""
        if self._observers is not None:
            for delta in deltas:
                self._observers.delta(delta)

    async def _begin(self) -> EngineChannel:
        """Wait for a placement and send the call to its engine."""
        placement = self._placement
        engine = await placement.engine()
        if self._observers is not None:
            self._observers.started(placement.engine_name, placement.queued_s, placement.reason)
        self.state.priority = placement.priority
        channel = engine.open(
            self.state.contexts_needed,
            salt=self._request.salt,
            adapter=placement.adapter,
            retention=placement.retention,
            application=placement.application,
        )
        channel.__enter__()
        try:
            channel.submit(*self.state.begin(list(channel.context_ids)))
        except BaseException:
            channel.__exit__(None, None, None)
            raise
        self._channel = channel
        return channel

    def _report_progress(self) -> None:
        state = self.state
        self._reported = state.generated
        self._placement.progress(
            filled=state.filled_tokens, cached=state.cached_tokens, generated=state.generated
        )

    def _begin_further(self, channel: EngineChannel) -> None:
        """Begin prompts in the place of those that have ended."""
        count = self.state.contexts_needed
        if not count:
            return
        try:
            context_ids = channel.extend(count)
        except OverloadedError as error:
            if isinstance(error, EngineLostError) or not self.state.waits:
                raise
            # The next event of what is in work brings us back here.
            return
        channel.submit(*self.state.begin(context_ids))


@dataclass(slots=True)
class CollectedToolCall:
    """One tool call."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Candidate:
    """One candidate, joined from its deltas."""

    #: Content; of a call that may use tools, without the calls.
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CollectedToolCall] = field(default_factory=list)
    tokens: list[TextToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    #: A call that generates nothing ends by its length.
    finish_reason: AnswerFinishReason = "length"
    #: See `ChoiceDelta`.
    stop_string: str | None = None
    is_closed: bool = False

    @property
    def text(self) -> str:
        """All content."""
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        """Take more of it."""
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        if delta.pieces is None:
            if delta.text:
                self.texts.append(delta.text)
        else:
            for piece in delta.pieces:
                if isinstance(piece, ContentPiece):
                    self.texts.append(piece.text)
                elif isinstance(piece, ToolCallBegin):
                    self.calls.append(CollectedToolCall(piece.id, piece.name))
                elif isinstance(piece, ArgumentsPiece):
                    self.calls[piece.call].arguments += piece.text
        self.tokens += delta.tokens
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_string, self.is_closed = delta.stop_string, delta.is_closed

    def as_delta(self, prompt: int, choice: int) -> ChoiceDelta:
        """All of it at once, under another number."""
        return ChoiceDelta(
            prompt,
            choice,
            self.text,
            self.tokens,
            self.token_ids,
            self.finish_reason,
            is_closed=self.is_closed,
        )


@dataclass(slots=True)
class CollectedPrompt:
    """The answers to one prompt."""

    #: Those that are answered, best first.
    candidates: list[Candidate]
    filled: PromptFilled | None = None


async def collect(generation: Generation, prompts: int, best_of: int) -> list[CollectedPrompt]:
    """Run an entered generation to its end; one entry a prompt.

    Raises:
        GatewayError: as `Generation.next`.
    """
    collected = [CollectedPrompt([Candidate() for _ in range(best_of)]) for _ in range(prompts)]
    while not generation.state.done:
        update = await generation.next()
        if update is None:
            continue
        if isinstance(update, PromptFilled):
            collected[update.prompt].filled = update
        else:
            collected[update.prompt].candidates[update.choice].add(update)
    if generation.ranks:
        for prompt, entry in enumerate(collected):
            entry.candidates = [
                entry.candidates[index] for index in generation.state.ranking(prompt)
            ]
            generation.observe(
                each.as_delta(prompt, rank) for rank, each in enumerate(entry.candidates)
            )
    return collected
