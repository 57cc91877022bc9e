"""One of several servers of an upstream, and what the gateway has sent there.

Knows how many calls run there, the tokens of their prompts, and how long they took; of those the
scheduler learns how fast the server is.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from parrot_scheduler.task import DEFAULT_STEP_MODEL, StepModel

from parrot_gateway.backends.upstreams.client import Upstream
from parrot_gateway.routing.step_times import Scale, StepTimes

#: Seconds between two looks at what a server's calls took.
TIMES_S = 1.0
#: A stream that takes so many times as long to begin as was expected is late.
_OVERDUE = 2.0


class BegunStream(NamedTuple):
    """A stream whose answer has not begun."""

    placed_at: float
    #: Prompt tokens to be computed before, those of others included.
    ahead_tokens: int


class FleetServer:
    """One server, and what the gateway has sent there.

    Args:
        upstream: the server.
        scale: of the times of all servers.
    """

    def __init__(self, upstream: Upstream, scale: Scale) -> None:
        self.upstream = upstream
        #: The scheduler knows it, and places calls on it unless the operator has drained it.
        self.is_joined = False
        self.drained = False
        #: Its breaker has opened.
        self.failed = asyncio.Event()
        #: A single call finds out if it has recovered.
        self.probing = False
        #: Calls placed there, the tokens of their contexts, and of these to be computed.
        self.running = 0
        self.context_tokens = 0
        self.pending_tokens = 0
        #: Prompt tokens that were not expected in its cache, so far.
        self.computed_tokens = 0
        #: Streams that have not begun yet, oldest first.
        self.unanswered: dict[object, BegunStream] = {}
        self.step_model: StepModel = DEFAULT_STEP_MODEL
        self._fit = StepTimes(DEFAULT_STEP_MODEL, scale=scale)
        self._steps = 0
        self._filled = self._used = self._busy_s = 0.0

    @property
    def takes_calls(self) -> bool:
        """True if new calls may be placed on it."""
        return self.is_joined and not self.drained and not self.probing

    def note_times(self, steps: int, filled: float, used: float, busy_s: float) -> None:
        """A call's own view: steps, tokens filled before the first one, tokens in contexts."""
        self._steps += steps
        self._filled += filled
        self._used += used * steps
        self._busy_s += busy_s

    def fit(self, now: float) -> bool:
        """Learn from the answers so far; return true if there is a new step model.

        A stream that should have begun long ago counts as beginning now, so that a server that
        answers nothing any more does not pass for a fast one.
        """
        oldest = next(iter(self.unanswered.values()), None)
        if oldest is not None:
            waited_s, known = now - oldest.placed_at, self.step_model
            due_s = known.weights_s + oldest.ahead_tokens * known.prefill_token_s
            if waited_s > max(TIMES_S, _OVERDUE * due_s):
                self.note_times(1, oldest.ahead_tokens, self.context_tokens, waited_s)
        if self._steps == 0:
            return False
        mean_used = self._used / self._steps
        model = self._fit.add(self._steps, self._filled, mean_used, self._busy_s)
        self._steps = 0
        self._filled = self._used = self._busy_s = 0.0
        if model is not None:
            self.step_model = model
        return model is not None
