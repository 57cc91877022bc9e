"""`python -m parrot_gateway …`, as forks of an interpreter that has the gateway's modules.

Importing them is nine tenths of what a gateway takes to start, and tests start hundreds. Apart from
that, a fork begins as the command does: in a session of its own, with the environment, the
arguments and the outputs that are asked for, and with nothing of the tests in it.

A program: `fork_server.py SOCKET`, which reads from an inherited socket until that is closed.
Standard library, and what a gateway imports.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from importlib import import_module

MODULES = (
    "parrot_bench.apps.command",
    "parrot_bench.cli",
    "parrot_gateway.cli.bench",
    "parrot_gateway.cli.graph",
    "parrot_gateway.server.serve",
    "parrot_gateway.settings.sources",
)
#: How a process ended, as `waitpid` says it.
STATUS = struct.Struct("i")
MAX_MESSAGE = 1 << 18


def serve(channel: socket.socket) -> list[str] | None:
    """Fork for every message: `[arguments, environment]` with descriptors for both outputs and for
    the status, which is written when the fork has ended. Answered by its process id.

    Returns:
        in a fork the arguments; in the server None, at its end.
    """
    statuses: dict[int, int] = {}
    wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([channel, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            with suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    descriptor = statuses.pop(ended[0])
                    with suppress(BrokenPipeError):
                        os.write(descriptor, STATUS.pack(ended[1]))
                    os.close(descriptor)
        if channel in ready:
            message, descriptors, _, _ = socket.recv_fds(channel, MAX_MESSAGE, 3)
            if not message:
                # Whoever was killed amid its tests leaves nothing behind.
                for process in statuses:
                    with suppress(ProcessLookupError):
                        os.killpg(process, signal.SIGTERM)
                return None
            process = os.fork()
            if process:
                statuses[process] = descriptors[2]
                os.close(descriptors[0])
                os.close(descriptors[1])
                continue
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            channel.send(str(os.getpid()).encode())
            channel.close()
            os.dup2(descriptors[0], 1)
            os.dup2(descriptors[1], 2)
            for descriptor in (wake, woken, *descriptors, *statuses.values()):
                os.close(descriptor)
            arguments, environment = json.loads(message)
            os.environ.clear()
            os.environ.update(environment)
            return arguments


if __name__ == "__main__":
    channel = socket.socket(fileno=int(sys.argv[1]))
    # As `python -m` has it.
    sys.path[0] = os.getcwd()
    for module in MODULES:
        import_module(module)
    wanted = serve(channel)
    if wanted is not None:
        sys.argv = ["parrot_gateway", *wanted]
        runpy.run_module("parrot_gateway", run_name="__main__", alter_sys=True)
