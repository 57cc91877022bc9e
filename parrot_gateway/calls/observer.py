"""Observers of answers: the variable that a call fills, its node in a graph, its record.

Answers of own engines and of upstreams come as the same deltas. The client's encoder is not one of
them: it pulls, so that a slow client holds its generation back. An observer can neither delay an
answer nor fail it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from parrot_gateway.calls.generation_request import ChoiceDelta
from parrot_gateway.calls.tools.parsing import ContentPiece
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import AnswerError, GatewayError

logger = logging.getLogger(__name__)


class GenerationObserver:
    """Observes one answer; each method does nothing unless overridden.

    Called in the event loop's thread, in the order of the methods here; must not block. An observer
    that raises is logged and dropped.
    """

    #: Whether it reads deltas, for which an upstream's answer has to be parsed.
    reads_text: bool = True

    __slots__ = ()

    def submitted(self) -> None:
        """The call was read and checked, and waits for an engine or an upstream."""

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        """An engine or an upstream takes the call.

        Args:
            engine: its name.
            queued_s: seconds that the call waited for a placement.
            reason: why it is this engine, in a few words; empty for upstreams.
        """

    def lost(self, engine: str, kind: str) -> None:
        """The engine was lost; another one is looked for.

        Args:
            engine: its name.
            kind: see `LossKind`; of an upstream's server see `StreamFault`.
        """

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        """Another engine has gone on with the call.

        Args:
            engine: its name.
            pause_s: seconds from noticing the loss to the first new event.
            refilled_tokens: tokens that were computed again.
        """

    def first_token(self) -> None:
        """The first token was generated; of an upstream, the first bytes of a success came."""

    def delta(self, delta: ChoiceDelta) -> None:
        """A piece of the answer. Echoed prompts come as pieces too; of a call that chooses the best
        of several candidates, the chosen ones come whole, at the end."""

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        """The answer is complete.

        Args:
            usage: None when an upstream reported none.
            finish_reason: of the last candidate; None where an upstream's answer is not read.
        """

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        """The call ends without a complete answer.

        Args:
            error: a cancellation is a `CancelledError`.
            usage: tokens so far, where they are known.
        """


class Observers(GenerationObserver):
    """Notifies several observers; their failures never reach whoever runs the call."""

    def __init__(self, observers: Iterable[GenerationObserver] = ()) -> None:
        self._observers = list(observers)
        #: Those that override `delta`: nothing is done for each delta of the others.
        self._readers = [
            each for each in self._observers if type(each).delta is not GenerationObserver.delta
        ]
        self.reads_text = any(each.reads_text for each in self._observers)

    @property
    def reads_deltas(self) -> bool:
        """Return whether any of them does something for each delta."""
        return bool(self._readers)

    def submitted(self) -> None:
        self._notify(self._observers, lambda each: each.submitted())

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self._notify(self._observers, lambda each: each.started(engine, queued_s, reason))

    def lost(self, engine: str, kind: str) -> None:
        self._notify(self._observers, lambda each: each.lost(engine, kind))

    def resumed(self, engine: str, pause_s: float, refilled_tokens: int) -> None:
        self._notify(self._observers, lambda each: each.resumed(engine, pause_s, refilled_tokens))

    def first_token(self) -> None:
        self._notify(self._observers, lambda each: each.first_token())

    def delta(self, delta: ChoiceDelta) -> None:
        if self._readers:
            self._notify(self._readers, lambda each: each.delta(delta))

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self._notify(self._observers, lambda each: each.ended(usage, finish_reason))

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        self._notify(self._observers, lambda each: each.failed(error, usage))

    def _notify(
        self, observers: list[GenerationObserver], notify: Callable[[GenerationObserver], None]
    ) -> None:
        for observer in tuple(observers):
            try:
                notify(observer)
            except Exception:
                logger.exception("observer %s failed and is dropped", type(observer).__name__)
                self._observers.remove(observer)
                if observer in self._readers:
                    self._readers.remove(observer)


class TextObserver(GenerationObserver):
    """Writes the text of the first choice somewhere, and remembers why that could not be done.

    Args:
        write: takes each piece; a `GatewayError` ends the writing.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        #: Why there is no whole text, while the client gets its answer all the same.
        self.refusal: GatewayError | None = None
        #: Once the answer is complete, if it is known.
        self.usage: Usage | None = None
        self._write = write
        self._has_text = False
        self._called_tools = False

    def delta(self, delta: ChoiceDelta) -> None:
        if delta.prompt or delta.choice or self.refusal is not None:
            return
        if delta.pieces is not None and not self._called_tools:
            self._called_tools = any(not isinstance(p, ContentPiece) for p in delta.pieces)
        text = delta.content
        if not text:
            return
        self._has_text = True
        try:
            self._write(text)
        except GatewayError as error:
            self.refusal = error
        except Exception:
            logger.exception("the text of an answer could not be kept")
            self.refusal = GatewayError("The gateway failed to keep the text.")

    def ended(self, usage: Usage | None, finish_reason: str | None = None) -> None:
        self.usage = usage

    def failed(self, error: BaseException, usage: Usage | None = None) -> None:
        if self.refusal is None:
            unknown = GatewayError("The answer was not finished.")
            self.refusal = error if isinstance(error, GatewayError) else unknown

    def check(self) -> None:
        """Raise what keeps the text from being written, if anything does.

        Raises:
            GatewayError: there is no use in going on.
        """
        if self.refusal is not None:
            raise self.refusal

    def finish(self) -> None:
        """The answer is over.

        Raises:
            GatewayError: there is no whole text.
        """
        self.check()
        if self._called_tools and not self._has_text:
            raise AnswerError("the model called tools instead of writing text", code="no_text")
