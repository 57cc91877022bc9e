"""Starts and ends the linking process."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import sys
from contextlib import suppress
from typing import TypeAlias

import msgspec

from parrot_gateway.backends.own import child_process
from parrot_gateway.linking.tenants import LinkerLimits
from parrot_gateway.settings.model import LinkingSettings

Process: TypeAlias = asyncio.subprocess.Process

_CLOSE_TIMEOUT_S = 2.0
#: Requested buffer between both processes; the system may give less, or twice as much.
_HELD_BYTES = 1024 * 1024
# NOTE: the process reads strangers' text. Its environment has only what finds Python and its
# libraries, and no keys of the gateway or operator.
_VARIABLES = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"})
_VARIABLE_PREFIXES = ("LC_", "LD_", "MALLOC_", "PYTHON")


def limits_of(settings: LinkingSettings) -> LinkerLimits:
    """Return the linker's limits from the settings."""
    return LinkerLimits(
        settings.max_calls,
        settings.max_text,
        settings.max_fingerprints,
        settings.max_prompt_text,
        settings.horizon_s,
    )


async def spawn(settings: LinkingSettings) -> Process:
    """Start the process, which serves on its standard input and output.

    Raises:
        OSError: it cannot be started.
    """
    file = settings.profiles_file
    path = None if file is None else str(file.expanduser().absolute())
    arguments = msgspec.json.encode(
        (limits_of(settings), settings.max_tenants, settings.max_templates, path)
    ).decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "parrot_gateway.linking.process.worker",
        arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=_environment(),
        # Ctrl-C in the terminal goes to the gateway only, which drains first. The process stays in
        # the gateway's session: Linux may group processes by session, and niceness then counts
        # within a session.
        preexec_fn=os.setpgrp,
    )
    assert process.stdin is not None
    _widen(process.stdin.transport)
    return process


def _widen(transport: asyncio.WriteTransport) -> None:
    """Enlarge the pipe's or socket's buffer: a process with little share of a busy processor reads
    seldom, and at most a buffer at a time.
    """
    held = transport.get_extra_info("socket") or transport.get_extra_info("pipe")
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(held.fileno()).st_mode):
            with socket.socket(fileno=os.dup(held.fileno())) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _HELD_BYTES)
        elif hasattr(fcntl, "F_SETPIPE_SZ"):
            fcntl.fcntl(held.fileno(), fcntl.F_SETPIPE_SZ, _HELD_BYTES)


def _environment() -> dict[str, str]:
    """Return the environment variables for the linking process."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if name in _VARIABLES or name.startswith(_VARIABLE_PREFIXES)
    }
    # It multiplies no matrices, so threads for that would only cost memory.
    return kept | {"OPENBLAS_NUM_THREADS": "1"}


async def end(process: Process) -> None:
    """Close the process's input, which ends it; kill it if it stays."""
    assert process.stdin is not None
    await child_process.end(process, _CLOSE_TIMEOUT_S, ask=process.stdin.close)
