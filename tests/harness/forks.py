"""Processes of the gateway that a fork server starts."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from harness.fork_server import MAX_MESSAGE, STATUS


class ForkedProcess:
    """`python -m parrot_gateway ARGUMENTS`, with what is used of `subprocess.Popen`."""

    def __init__(
        self,
        python: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        self.args = [python, "-m", "parrot_gateway", *arguments]
        self.returncode: int | None = None
        channel = _fork_server(python)
        self._status, status = os.pipe()
        try:
            message = json.dumps([list(arguments), dict(environment)]).encode()
            assert len(message) < MAX_MESSAGE
            descriptors = [stdout.fileno(), stderr.fileno(), status]
            socket.send_fds(channel, [message], descriptors)
            self.pid = int(channel.recv(64))
        finally:
            os.close(status)

    def poll(self) -> int | None:
        """The exit status, or minus the number of a signal; None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        status = self._wait(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            packed = os.read(self._status, STATUS.size)
            os.close(self._status)
            assert packed, "the fork server has ended"
            self.returncode = os.waitstatus_to_exitcode(*STATUS.unpack(packed))
        return self.returncode


@functools.cache
def _fork_server(python: str) -> socket.socket:
    """The socket of a fork server with that interpreter, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    script = Path(__file__).with_name("fork_server.py")
    server = subprocess.Popen(
        [python, str(script), str(theirs.fileno())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours
