"""Notifies systemd that the gateway answers, is alive, and stops.

See `man sd_notify`. Does nothing without systemd (`NOTIFY_SOCKET`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

logger = logging.getLogger(__name__)

_SOCKET = "NOTIFY_SOCKET"
_MICROSECONDS = 1e6


def notify(*states: str) -> None:
    """Send assignments such as `READY=1`; a failure is logged and has no other effect."""
    address = os.environ.get(_SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(states).encode(), address)
    except OSError as error:
        logger.warning("systemd was not notified of %s: %s", states[0], error)


async def keep_alive() -> None:
    """Report periodically that the event loop runs, if the unit has a `WatchdogSec`."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    with contextlib.suppress(ValueError):
        period_s = int(os.environ.get("WATCHDOG_USEC", "")) / _MICROSECONDS
        while period_s > 0:
            notify("WATCHDOG=1")
            await asyncio.sleep(period_s / 2)
