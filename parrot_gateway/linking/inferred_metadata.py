"""Scheduler metadata for calls that declare nothing, from forecasts and inferred sessions.

Serves calls to engines of our own and to upstreams of several servers. A wrong guess may cost time,
within the scheduler's starvation limits, and nothing else.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from parrot_scheduler.foretold import UNKNOWN_RETURNS, ForetoldGroups, expected_returns, feeds_group
from parrot_scheduler.task import THROUGHPUT

from parrot_gateway.calls.metadata import ORDINARY_CALL, CallMetadata
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.linking.process.wire import session_id_of
from parrot_gateway.linking.profiles.forecast import Forecast
from parrot_gateway.linking.profiles.templates import MAX_PREFIX
from parrot_gateway.linking.service import LinkingService, call_id_of

#: Signs in a request that earlier calls precede it.
_GOES_ON = re.compile(
    rb'"role"\s*:\s*"(?:assistant|tool)"|"(?:previous_response_id|function_call_output)"'
)
#: Bytes searched for them.
_LOOKED_AT = 256 * 1024
#: A shorter template may be common to all chats and so to other kinds of calls; it says nothing
#: about groups.
_LEAST_PREFIX_BYTES = 64
#: A share of the prompt's bytes equals a share of its tokens up to this factor.
_BYTES_ARE_TOKENS = 1.1
#: Marks of tool descriptions, which engines' templates put before the messages.
_TOOLS = (b'"tools":[', b'"tools": [')
#: Calls of one kind that arrive within this time of each other may belong together.
_GROUP_GAP_S = 1.0
#: The scheduler considers a session over after this time without a call, and retains KV of a paused
#: one no longer.
_SESSION_TIMEOUT_S = 600.0
#: Maximum sessions reported to the scheduler.
_MAX_SESSIONS = 10_000


def explained(exchange: Exchange, metadata: CallMetadata) -> CallMetadata:
    """Add the name under which the call's placement is remembered."""
    if metadata.call or metadata.explained_as is not None:
        return metadata
    return replace(metadata, explained_as=(exchange.tenant, call_id_of(exchange)))


class InferredMetadata:
    """Computes the metadata of calls that declare nothing.

    Args:
        linking: source of forecasts and inferred sessions.
        end_application: called with a session that is over.
        clock: seconds, never going backwards.
        memory_needed: share of the engines' KV that is in use; see `LinkingSettings`.
    """

    def __init__(
        self,
        linking: LinkingService,
        end_application: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        memory_needed: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._linking = linking
        self._end_application = end_application
        self._clock = clock
        self._memory_needed = memory_needed
        names = linking.settings.use
        self._groups = ForetoldGroups(_GROUP_GAP_S) if "groups" in names else None
        self._lengths, self._sessions = "lengths" in names, "sessions" in names
        self._prefixes = "prefixes" in names
        #: Last use of each session, in that order.
        self._used: OrderedDict[str, float] = OrderedDict()

    async def of(self, exchange: Exchange, body: bytes) -> CallMetadata:
        """Return a call's metadata; that of an ordinary call if no inferred facts are used.

        Waits at most `linking.session_wait_s`, for calls that visibly follow others, and only while
        memory is scarce: otherwise nothing is held and the session brings no gain.
        """
        linking = self._linking
        if not self._is_used(exchange):
            return ORDINARY_CALL
        metadata, returns = self._foretold(exchange, body)
        goes_on = _GOES_ON.search(body, 0, _LOOKED_AT) is not None
        if goes_on and self._prefixes and metadata.common_share is None:
            # All that an engine caches of it is its own, unless every engine caches it.
            metadata = replace(metadata, common_share=0.0)
        if not self._sessions:
            return metadata
        session = ""
        if goes_on:
            if self._memory_needed() >= linking.settings.session_wait_memory:
                session = await linking.session_of(exchange, linking.settings.session_wait_s)
        elif returns >= UNKNOWN_RETURNS:
            session = session_id_of(call_id_of(exchange))
        if session:
            self._use(session, self._clock())
        return replace(metadata, application=session, returns=returns)

    def at_once(self, exchange: Exchange, body: bytes) -> CallMetadata:
        """Return the metadata without waiting, and so without the session."""
        if not self._is_used(exchange):
            return ORDINARY_CALL
        metadata, returns = self._foretold(exchange, body)
        return replace(metadata, returns=returns) if self._sessions else metadata

    def _is_used(self, exchange: Exchange) -> bool:
        linking = self._linking
        return linking.is_running and bool(linking.settings.use) and linking.is_linked(exchange)

    def _foretold(self, exchange: Exchange, body: bytes) -> tuple[CallMetadata, float]:
        """Return a call's metadata by its template, and the chance that its session continues."""
        metadata, returns = ORDINARY_CALL, UNKNOWN_RETURNS
        forecast = self._linking.forecasts.of(exchange.tenant, body)
        if forecast is not None:
            if self._lengths:
                metadata = replace(metadata, template=forecast.template)
            if self._prefixes and forecast.prefix_bytes < MAX_PREFIX:
                metadata = replace(metadata, common_share=_common_share(forecast, body))
            if (
                self._groups is not None
                and not forecast.is_outer
                and forecast.prefix_bytes >= _LEAST_PREFIX_BYTES
                and feeds_group(forecast.feeds_fan_in, forecast.settled, forecast.siblings)
            ):
                kind = f"{exchange.tenant}/{forecast.template}"
                group = self._groups.join(kind, forecast.siblings, self._clock())
                metadata = replace(metadata, objective=THROUGHPUT, groups=(group,))
            returns = expected_returns(forecast.returns, forecast.settled)
        return metadata, returns

    def _use(self, session: str, now: float) -> None:
        self._used[session] = now
        self._used.move_to_end(session)
        oldest = next(iter(self._used))
        while now - self._used[oldest] > _SESSION_TIMEOUT_S or len(self._used) > _MAX_SESSIONS:
            del self._used[oldest]
            self._end_application(oldest)
            oldest = next(iter(self._used))


def _common_share(forecast: Forecast, body: bytes) -> float:
    """Return the share of a prompt that its template covers, with tools that follow it in the
    body.
    """
    tools = max(body.rfind(key, max(0, len(body) - _LOOKED_AT)) for key in _TOOLS)
    behind = len(body) - tools if tools > forecast.prefix_bytes else 0
    share = _BYTES_ARE_TOKENS * (forecast.prefix_bytes + behind) / max(1, len(body))
    return min(1.0, share)
