"""One call on an engine, and on the next if that is lost: from prompts to text. No HTTP.

Waits for placements and for events, and notifies observers. Which primitives are sent and what
events mean is decided in `state`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from parrot_engine.protocol import Filled

from parrot_gateway.backends.own.losses import EngineLosses, is_loss, kind_of
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
        #: Generated tokens that the placement has heard of, and those of earlier engines.
        self._reported = self._generated_before = 0
        self._losses = EngineLosses()
        #: `state.progress` and `state.refilled_tokens` at the beginning on the present engine.
        self._progress_before = self._refilled_before = 0
        #: When the loss was noticed, until another engine has gone on.
        self._paused_at: float | None = None
        #: Why the last one was, until there is another.
        self._lost: OverloadedError | None = None
        #: Waits for an engine of the model, while there is none.
        self._coming: asyncio.Task[None] | None = None
        #: From entering on.
        self.state: GenerationState

    def __enter__(self) -> Generation:
        """Ask for an engine; `next` begins as soon as there is one."""
        sampling = self._request.sampling
        draws = sampling.seed is None and sampling.temperature > 0 < sampling.max_tokens
        self.state = GenerationState(
            self._request, self._placer.tokenizer, self._placer.draw_seed() if draws else None
        )
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
            self._channel.close()
        if self._coming is not None and not self._coming.cancel():
            # Raised where it was awaited, if it was; retrieved here so that asyncio logs nothing.
            self._coming.exception()
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
            EngineLostError: its engine was lost, and there will be no other.
            PoisonedCallError: it has lost too many engines.
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
                progress = state.apply(event)
            except OverloadedError as error:
                if self._lost is not None or not is_loss(error):
                    raise
                self._lose(error)
                continue
            except TimeoutError:
                if deadline is not None and limit == deadline:
                    raise DeadlineError(
                        "The call took longer than this gateway allows "
                        "(setting server.call_timeout_s) and was cancelled."
                    ) from None
                return None
            if progress.primitives and not state.done:
                # What the event has brought is given out even if the engine is lost by now; the
                # next wait finds out.
                with suppress(EngineLostError):
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
                if self._paused_at is not None:
                    self._resumed(self._paused_at)
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
        if self._lost is not None:
            await self._wait_for_engine(self._lost)
        placement = self._placement
        engine = await placement.engine()
        if self._observers is not None and not self._losses.engines:
            self._observers.started(placement.engine_name, placement.queued_s, placement.reason)
        self.state.priority = placement.priority
        # A call that got no further on its last engine gives way to nobody: it could be lost again.
        self.state.fill_priority = placement.priority - 2 * self._losses.blame
        channel = engine.open(
            self.state.contexts_needed,
            salt=self._request.salt,
            adapter=placement.adapter,
            retention=placement.retention,
            application=placement.application,
        )
        self._channel = channel
        channel.submit(*self.state.begin(list(channel.context_ids)))
        return channel

    def _lose(self, error: OverloadedError) -> None:
        """Let go of a lost engine, and ask for another place.

        Raises:
            PoisonedCallError: it has lost too many.
        """
        state, channel, placement = self.state, self._channel, self._placement
        if channel is not None:
            self._channel = None
            channel.close()
            self._report_progress()
            if self._paused_at is None:
                self._paused_at = time.perf_counter()
            if self._observers is not None:
                self._observers.lost(placement.engine_name, kind_of(error))
        placement.close()
        if channel is not None:
            has_progress = state.progress > self._progress_before
            self._losses.add(placement.engine_name, kind_of(error), has_progress=has_progress)
        self._lost = error
        self._progress_before, self._refilled_before = state.progress, state.refilled_tokens
        self._generated_before = self._reported = state.generated
        self._placement = self._placer.place(state.resume(), self._losses.engines)

    def _resumed(self, paused_at: float) -> None:
        """Another engine has gone on."""
        self._paused_at = None
        if self._observers is not None:
            pause_s = time.perf_counter() - paused_at
            refilled = self.state.refilled_tokens - self._refilled_before
            self._observers.resumed(self._placement.engine_name, pause_s, refilled)

    async def _wait_for_engine(self, lost: OverloadedError) -> None:
        """Return once the model has an engine again. A cancelled wait can be taken up again.

        Raises:
            GatewayError: it will have none, or not for long.
        """
        if self._coming is None:
            self._coming = asyncio.create_task(self._placer.engine_coming(lost), name="failover")
        await asyncio.shield(self._coming)
        self._coming = self._lost = None

    def _report_progress(self) -> None:
        state = self.state
        self._reported = state.generated
        self._placement.progress(
            filled=state.engine_filled,
            cached=state.engine_cached,
            generated=state.generated - self._generated_before,
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
