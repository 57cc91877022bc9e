"""The making of responses in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from parrot_gateway.api.responses.answer import ResponseAnswer
from parrot_gateway.calls.observer import GenerationObserver
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.telemetry.call_record import CLIENT_LEFT, CallRecord

logger = logging.getLogger(__name__)


class StartObserver(GenerationObserver):
    """Calls a function once an engine takes the call."""

    reads_text = False

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def started(self, engine: str, queued_s: float, reason: str) -> None:
        self._call()


async def make(
    response_id: str,
    answer: ResponseAnswer,
    generate: Callable[[], Awaitable[dict[str, Any]]],
    end: Callable[[dict[str, Any]], None],
    record: CallRecord,
) -> None:
    """Make a response, which ends whatever happens.

    Args:
        generate: runs the call; returns the whole answer.
        end: takes the answer, also of a call that failed or was cancelled.
        record: of the call; `end` ends it.
    """
    try:
        whole = await generate()
    except asyncio.CancelledError:
        whole, _ = answer.cancel()
        record.note_failure("cancelled", "The response was cancelled.")
        record.status = CLIENT_LEFT
    except GatewayError as error:
        record.fail(error)
        record.status = error.status
        whole, _ = answer.fail(error)
    except Exception:
        logger.exception("%s: failed in the background", response_id)
        message = (
            "The gateway failed to finish this response. The operator's log has the details under "
            f"{response_id}."
        )
        unknown = GatewayError(message)
        record.fail(unknown)
        record.status = unknown.status
        whole, _ = answer.fail(unknown)
    end(whole)
