"""Child processes end, and leave no transport open, whatever they do."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import pytest

from parrot_gateway.backends.own.child_process import end

#: Says that it is ready, then sleeps; what comes before is the test's.
SLEEP = "import sys, time; print('ready', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
#: More than asyncio reads of a stream that nobody reads.
LOUD = "import sys; sys.stdout.write('x' * 400_000); sys.stdout.flush(); sys.stdin.read()"


async def start(program: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )


def is_closed(child: asyncio.subprocess.Process) -> bool:
    transport: asyncio.SubprocessTransport = child._transport  # type: ignore[attr-defined]
    return transport.is_closing()


@pytest.mark.parametrize(("program", "status"), [(SLEEP, -signal.SIGTERM), (DEAF, -signal.SIGKILL)])
async def test_a_process_is_asked_and_then_killed(program: str, status: int) -> None:
    child = await start(program)
    assert child.stdout is not None
    await child.stdout.readline()
    await end(child, 1.0 if program is DEAF else 30.0)
    assert child.returncode == status
    assert is_closed(child)


async def test_output_that_nobody_reads_delays_no_end(caplog: pytest.LogCaptureFixture) -> None:
    child = await start(LOUD)
    assert child.stdin is not None
    with caplog.at_level(logging.WARNING):
        await end(child, 30.0, ask=child.stdin.close)
    assert child.returncode == 0
    assert caplog.records == []
    assert is_closed(child)


async def test_a_process_that_has_ended_is_closed() -> None:
    child = await start("pass")
    await child.wait()
    await end(child, 30.0)
    assert child.returncode == 0
    assert is_closed(child)


async def test_a_reader_gets_the_last_output() -> None:
    child = await start("print('last words'); raise SystemExit(3)")
    lines: list[bytes] = []

    async def read() -> None:
        assert child.stdout is not None
        lines.append(await child.stdout.read())

    reader = asyncio.create_task(read())
    await end(child, 30.0, ask=lambda: None, reader=reader)
    assert lines == [b"last words\n"]
    assert child.returncode == 3
    assert is_closed(child)


async def test_a_cancelled_end_closes_the_transport() -> None:
    child = await start(DEAF)
    assert child.stdout is not None
    await child.stdout.readline()
    ending = asyncio.create_task(end(child, 30.0))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert is_closed(child)
    assert await child.wait() == -signal.SIGKILL
