"""Observers of answers: the variable that a call fills; later metrics, traces, a store.

Answers of own engines and of upstreams come as the same deltas. The client's encoder is not one of
them: it pulls, so that a slow client holds its generation back. An observer can neither delay an
answer nor fail it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from parrot_gateway.engines.usage import Usage
from parrot_gateway.exceptions import AnswerError, GatewayError
from parrot_gateway.generation.request import ChoiceDelta
from parrot_gateway.generation.tools.parsing import ContentPiece

logger = logging.getLogger(__name__)


class GenerationObserver:
    """Observes one answer; each method does nothing unless overridden.

    Called in the event loop's thread, in the order of the methods here; must not block. An observer
    that raises is logged and dropped.
    """

    #: Whether it reads deltas, for which an upstream's answer has to be parsed.
    reads_text: bool = True

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        """An engine or an upstream takes the call.

        Args:
            engine: its name.
            queued_s: seconds that the call waited for a placement.
            reason: why it is this engine, in a few words; empty for upstreams.
        """

    def delta(self, delta: ChoiceDelta) -> None:
        """A piece of the answer. Echoed prompts come as pieces too; of a call that chooses the best
        of several candidates, the chosen ones come whole, at the end."""

    def ended(self, usage: Usage | None) -> None:
        """The answer is complete.

        Args:
            usage: None when an upstream reported none.
        """

    def failed(self, error: BaseException) -> None:
        """The call ends without a complete answer; a cancellation is a `CancelledError`."""


class Observers(GenerationObserver):
    """Notifies several observers; their failures never reach whoever runs the call."""

    def __init__(self, observers: Iterable[GenerationObserver] = ()) -> None:
        self._observers = list(observers)
        self.reads_text = bool(self._observers) and any(each.reads_text for each in self._observers)

    def __bool__(self) -> bool:
        return bool(self._observers)

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        if self._observers:
            self._notify(lambda each: each.started(engine, queued_s, reason))

    def delta(self, delta: ChoiceDelta) -> None:
        if self._observers:
            self._notify(lambda each: each.delta(delta))

    def ended(self, usage: Usage | None) -> None:
        if self._observers:
            self._notify(lambda each: each.ended(usage))

    def failed(self, error: BaseException) -> None:
        if self._observers:
            self._notify(lambda each: each.failed(error))

    def _notify(self, notify: Callable[[GenerationObserver], None]) -> None:
        for observer in list(self._observers):
            try:
                notify(observer)
            except Exception:
                logger.exception("observer %s failed and is dropped", type(observer).__name__)
                self._observers.remove(observer)


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

    def ended(self, usage: Usage | None) -> None:
        self.usage = usage

    def failed(self, error: BaseException) -> None:
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
