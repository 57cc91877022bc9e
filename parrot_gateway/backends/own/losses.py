"""The engines that one call has lost, and whether it may lose another."""

from __future__ import annotations

import logging
import math
import time

from parrot_gateway.exceptions import EngineLostError, LossKind, OverloadedError, PoisonedCallError

logger = logging.getLogger(__name__)

#: How much a loss speaks against the call that made no progress there. An engine that breaks down
#: or hangs under a call says so, or is seen to; links break, and processes are killed, for other
#: reasons as a rule.
_BLAME: dict[LossKind, int] = {"crashed": 2, "stalled": 2, "link": 1, "silent": 1, "protocol": 1}
#: At so much blame without a token or a prompt of its own done in between a call is stopped: after
#: two engines that broke down, or four that disappeared.
MAX_BLAME = 4
#: Engines that a call may lose in all.
MAX_LOSSES = 16
#: Engines that are lost within so many seconds of the first one count once: a host that goes down
#: takes them all, whatever they run. Engines that have said that they broke down count each.
INCIDENT_S = 1.0


def is_loss(error: OverloadedError) -> bool:
    """Return whether the call may be placed anew: its engine is gone, or it never had one.

    Without any engine the scheduler refuses a call; one may come later than it waits. An engine
    that has joined may get the call's adapter only now.
    """
    return isinstance(error, EngineLostError) or error.code in ("no_engine", "adapter_loading")


def kind_of(error: OverloadedError) -> LossKind:
    """Return how an engine was lost."""
    return error.kind if isinstance(error, EngineLostError) else "unplaced"


class EngineLosses:
    """The losses of one call."""

    def __init__(self) -> None:
        #: Names of the engines, in order.
        self.engines: list[str] = []
        #: Blame since the last progress.
        self.blame = 0
        #: When the first of those was lost that were lost together.
        self._incident_at = -math.inf

    def add(self, engine: str, kind: LossKind, *, has_progress: bool) -> None:
        """Count an engine.

        Args:
            engine: its name.
            kind: how it was lost.
            has_progress: the call got further there.

        Raises:
            PoisonedCallError: the call may well be the reason.
        """
        self.engines.append(engine)
        now = time.perf_counter()
        is_another = kind == "crashed" or now - self._incident_at >= INCIDENT_S
        if is_another:
            self._incident_at = now
        if has_progress:
            self.blame = 0
        elif is_another:
            self.blame += _BLAME.get(kind, 0)
        if self.blame >= MAX_BLAME or len(self.engines) >= MAX_LOSSES:
            logger.error("a call that has lost %s is stopped", ", ".join(self.engines))
            raise PoisonedCallError(len(self.engines))
