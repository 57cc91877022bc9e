"""A spare engine process, which has imported torch before anybody needs it.

Half of an engine's start is the import of torch (entry 50 of bench/results/engine-log.md). A model
that is started again, after a crash or because a call came for an idle one, takes the spare
process and is ready in half the time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence

from parrot_gateway.backends.own.child_process import end, engine_environment, start

logger = logging.getLogger(__name__)

_COMMAND = (sys.executable, "-m", "parrot_engine.server.standby")
_STOP_TIMEOUT_S = 10.0


class Standby:
    """At most one spare process; a new one is made when asked for."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._making: asyncio.Task[None] | None = None

    def make(self) -> None:
        """Begin to start a spare process, unless there is one."""
        if self._child is None and self._making is None:
            self._making = asyncio.create_task(self._make(), name="standby")

    async def take(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process | None:
        """Have the spare process run an engine; None if there is none.

        Args:
            arguments: of `python -m parrot_engine`.
            environment: variables beside those that every engine gets.
        """
        child, self._child = self._child, None
        if child is None:
            return None
        if child.returncode is not None:
            await end(child, _STOP_TIMEOUT_S)
            return None
        assert child.stdin is not None
        order = {"arguments": list(arguments), "environment": dict(environment)}
        child.stdin.write(json.dumps(order).encode() + b"\n")
        return child

    async def close(self) -> None:
        """End the spare process."""
        if self._making is not None:
            self._making.cancel()
            await asyncio.gather(self._making, return_exceptions=True)
        child, self._child = self._child, None
        if child is not None:
            await end(child, _STOP_TIMEOUT_S)

    async def _make(self) -> None:
        try:
            self._child = await start(_COMMAND, engine_environment())
        except OSError as error:
            logger.warning("no spare engine process could be started: %s", error)
        finally:
            self._making = None
