"""What goes wrong on the way to an upstream, in words for the client. Names no address."""

from __future__ import annotations

import logging
import os

import aiohttp

from parrot_gateway.exceptions import UpstreamError, UpstreamTimeoutError
from parrot_gateway.settings.model import UpstreamSettings

logger = logging.getLogger(__name__)


class Broken(Exception):
    """One try failed before anything was passed on."""

    def __init__(self, error: UpstreamError, *, retry: bool, at_once: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry = retry
        #: The connection may just have been an idle one that the upstream had closed.
        self.at_once = at_once


def explain(settings: UpstreamSettings, cause: BaseException, otherwise: str) -> Broken:
    """What a failure of the connection means to the client. Names no address."""
    upstream = f"The upstream '{settings.name}'"
    logger.debug("%s: %r", settings.name, cause)
    if isinstance(cause, aiohttp.ConnectionTimeoutError):
        seconds = settings.connect_timeout_s
        return Broken(
            UpstreamTimeoutError(f"{upstream} did not accept a connection in {seconds:g} s."),
            retry=True,
        )
    if isinstance(cause, TimeoutError):
        seconds = settings.read_timeout_s
        # NOTE: not retried: the first try may still be at work after all this time.
        return Broken(
            UpstreamTimeoutError(f"{upstream} was silent for {seconds:g} s."), retry=False
        )
    if isinstance(cause, aiohttp.ClientConnectorError):
        number = cause.os_error.errno
        reason = os.strerror(number) if number and number > 0 else "no connection"
        if isinstance(cause, aiohttp.ClientConnectorDNSError):
            reason = "its name cannot be resolved"
        return Broken(
            UpstreamError(
                f"{upstream} cannot be reached ({reason}). Check that it is running and its "
                "address in the gateway's settings."
            ),
            retry=True,
        )
    if isinstance(cause, (aiohttp.ClientResponseError, aiohttp.InvalidURL, ValueError)):
        return Broken(
            UpstreamError(f"{upstream} did not answer in HTTP that can be understood."), retry=False
        )
    return Broken(UpstreamError(f"{upstream} {otherwise}."), retry=True, at_once=True)
