"""The linking process as it is started."""

from __future__ import annotations

import asyncio
import os
import signal

from parrot_gateway.linking.process.worker_process import end, spawn
from parrot_gateway.settings.model import LinkingSettings


async def test_what_a_process_that_does_not_run_is_sent_waits_in_the_system() -> None:
    process = await spawn(LinkingSettings())
    assert process.stdin is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        # More than Linux holds unasked.
        process.stdin.write(b"\0" * 600_000)
        async with asyncio.timeout(60):
            await process.stdin.drain()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await end(process)
