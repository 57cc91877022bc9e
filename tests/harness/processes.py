"""Real gateway and engine processes: started, waited for, watched, ended.

Each runs in a process group of its own, with its output in files that a failed test shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import pytest

from harness.forks import ForkedProcess
from harness.raw_http import RawConnection, Response, chat_body

#: See `closed_port`.
_HELD = socket.socket()
#: See `free_port`.
_HELD_FREE: list[socket.socket] = []

#: The interpreter with the server in it; the client's may be another one.
SERVER_PYTHON = os.environ.get("PARROT_SERVER_PYTHON", sys.executable)
READY = re.compile(r"is ready at (http://\S+)/v1")
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 60.0
#: Longest wait for a condition, and longest pause between two looks at it.
DEADLINE_S = 60.0
LONGEST_PAUSE_S = 0.05

DEMO_MODEL = "parrot-demo"
#: What clients of a gateway with a key send.
API_KEY = "test-key-of-the-demo-gateway"

#: Processes that run now, for reports of failures.
running: list[ServerProcess] = []


def wait_until(condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> Any:
    """Poll until `condition` gives something true, and return that.

    Ever less often: asking takes time from the process that is waited for.
    """
    ends = time.monotonic() + deadline_s
    pause_s = 0.01
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < ends, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what would change the program under test."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("PARROT_", "OPENAI_")) and not name.lower().endswith("_proxy")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(extra or {})}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@cache
def closed_port() -> int:
    """Return a port at which nobody answers as long as this process lives."""
    # Bound and not listening: the system refuses connections.
    _HELD.bind(("127.0.0.1", 0))
    return int(_HELD.getsockname()[1])


def free_port() -> int:
    """Return a port for one who listens: nobody else is given it as long as this process lives."""
    # Bound and not listening: the system gives it to those alone who ask for it by number.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _HELD_FREE.append(held)
    return int(held.getsockname()[1])


def _start(
    arguments: Sequence[str], environment: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes] | ForkedProcess:
    """A process in a session of its own; the gateway's command without the time of its imports."""
    python, *program = arguments
    if program[:2] == ["-m", "parrot_gateway"]:
        return ForkedProcess(python, program[2:], environment, stdout, stderr)
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


class ServerProcess:
    """One process; a context manager that leaves nothing behind.

    Args:
        arguments: after the interpreter.
        environment: added to a clean one.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None):
        self.arguments = [SERVER_PYTHON, *arguments]
        self._folder = tempfile.TemporaryDirectory(prefix="parrot-test-")
        self._stdout = Path(self._folder.name, "stdout")
        self._stderr = Path(self._folder.name, "stderr")
        # Files and batches of the user stay as they are, and two gateways share no folder.
        data = {"XDG_DATA_HOME": str(Path(self._folder.name, "data"))}
        variables = clean_environment(data | dict(environment or {}))
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self.process = _start(self.arguments, variables, out, err)
        running.append(self)

    @property
    def pid(self) -> int:
        """Process id, which also names its group."""
        return self.process.pid

    def stdout(self) -> str:
        """Return what it has printed."""
        return self._stdout.read_text(encoding="utf-8", errors="replace")

    def stderr(self) -> str:
        """Return what it has logged."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")

    def wait_for_output(self, pattern: re.Pattern[str], deadline_s: float) -> re.Match[str]:
        """Wait for a line on stdout; fails at once when the process ends."""

        def found() -> re.Match[str] | None:
            match = pattern.search(self.stdout())
            if match is None and self.process.poll() is not None:
                match = pattern.search(self.stdout())
                assert match is not None, (
                    f"{self.arguments} ended with {self.process.returncode}:\n{self.tail()}"
                )
            return match

        what = f"{pattern.pattern!r} in the output of {self.arguments}:\n{self.tail()}"
        match: re.Match[str] = wait_until(found, what, deadline_s)
        return match

    def wait(self, deadline_s: float = STOP_DEADLINE_S) -> int:
        """Wait for the end; the exit status."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{self.arguments} did not end within {deadline_s:g} s:\n{self.tail()}"
            ) from None

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or (as Ctrl-C does) to its whole group."""
        if group:
            os.killpg(self.pid, number)
        else:
            self.process.send_signal(number)

    def tail(self, characters: int = 6000) -> str:
        """The ends of both outputs."""
        return (
            f"--- stdout\n{self.stdout()[-characters:]}\n--- stderr\n{self.stderr()[-characters:]}"
        )

    def close(self) -> None:
        """End it, gently if it listens, and whatever it started."""
        if self in running:
            running.remove(self)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(5.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(5.0)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._folder.cleanup()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GatewayProcess(ServerProcess):
    """`python -m parrot_gateway serve`, ready to answer.

    Args:
        options: of `serve`.
        config: settings for a file; a free port and quick retries unless they say otherwise.
        api_key: what clients must send.
        environment: added to a clean one.
        wait: return when it is ready; else at once.
        program: the interpreter's arguments before `serve`.
    """

    def __init__(
        self,
        *options: str,
        config: dict[str, Any] | None = None,
        api_key: str | None = None,
        environment: Mapping[str, str] | None = None,
        wait: bool = True,
        program: Sequence[str] = ("-m", "parrot_gateway"),
    ) -> None:
        self.api_key = api_key
        variables = dict(environment or {})
        if api_key is not None:
            variables["PARROT_API_KEY"] = api_key
        settings = {**(config or {})}
        settings["server"] = {"port": 0, **settings.get("server", {})}
        self._settings_folder = tempfile.TemporaryDirectory(prefix="parrot-settings-")
        # JSON is YAML.
        path = self.config_path = Path(self._settings_folder.name, "parrot.yaml")
        path.write_text(json.dumps(settings), encoding="utf-8")
        super().__init__([*program, "serve", "--config", str(path), *options], variables)
        self.root = ""
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise

    def wait_ready(self) -> None:
        """Wait for the ready line and learn the address."""
        self.root = self.wait_for_output(READY, START_DEADLINE_S)[1]

    @property
    def base_url(self) -> str:
        """Value for `OPENAI_BASE_URL`."""
        return f"{self.root}/v1"

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.root.rpartition(":")[2])

    def headers(self) -> dict[str, str]:
        """Headers that every request needs."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Response:
        """The answer to a request with the gateway's key, on a connection of its own."""
        with RawConnection(self.port, api_key=self.api_key) as connection:
            return connection.ask(method, path, body, headers)

    def chat(self, model: str, text: str = "Hello.", **fields: Any) -> Response:
        """The answer to a chat of one message, whatever the status."""
        return self.ask("POST", "/v1/chat/completions", chat_body(model, text, **fields))

    def get(self, path: str) -> Any:
        """A JSON document of a path, whatever the status."""
        return self.ask("GET", path).json

    def post(self, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
        """POST a JSON body: status, headers in lower case, JSON answer."""
        answer = self.ask("POST", path, body)
        return answer.status, answer.headers, answer.json

    def health(self) -> Any:
        """The state of all parts."""
        return self.get("/health")

    def engine_pids(self) -> list[int]:
        """The processes of its engines."""
        return [int(each["pid"]) for each in self.health()["engine_processes"]]

    def engine_pid(self) -> int:
        """The process of its first engine."""
        return self.engine_pids()[0]

    @contextmanager
    def frozen_engines(self) -> Iterator[None]:
        """Its engines do nothing; for less than three heartbeats, or they count as lost.

        They may be killed meanwhile, and the gateway may have noticed.
        """
        pids = self.engine_pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def wait_running(self, calls: int) -> None:
        """Wait until exactly `calls` calls are in work."""
        wait_until(lambda: self.health()["calls"]["running"] == calls, f"{calls} calls in work")

    def engine_stats(self) -> dict[str, Any]:
        """The counters of its first engine, taken after this was called."""
        called = time.monotonic()

        def fresh() -> dict[str, Any] | None:
            asked = time.monotonic()
            engines = self.health()["engines"]
            # The age is told in whole milliseconds.
            is_fresh = engines and asked - engines[0]["stats_age_s"] > called + 0.001
            return engines[0]["stats"] if is_fresh else None

        found: dict[str, Any] = wait_until(fresh, "a heartbeat of the engine")
        return found

    def wait_idle(self) -> dict[str, Any]:
        """Wait until no call is in work and no engine holds a context; the engine's counters."""
        self.wait_running(0)

        def idle() -> dict[str, Any] | None:
            stats = self.engine_stats()
            return None if stats["contexts"] + stats["running"] + stats["waiting"] else stats

        found: dict[str, Any] = wait_until(idle, "no contexts on the engine")
        return found

    def close(self) -> None:
        """See `ServerProcess.close`."""
        super().close()
        self._settings_folder.cleanup()


def run_cli(
    *arguments: str, environment: Mapping[str, str] | None = None, deadline_s: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """`python -m parrot_gateway …` to its end."""
    command = [SERVER_PYTHON, "-m", "parrot_gateway", *arguments]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = _start(command, clean_environment(environment), out, err)
        try:
            status = process.wait(deadline_s)
        finally:
            process.kill()
        for output in (out, err):
            output.seek(0)
        return subprocess.CompletedProcess(
            command, status, out.read().decode(), err.read().decode()
        )


def upstream_settings(name: str, url: str, **settings: Any) -> dict[str, Any]:
    """An entry of `upstreams` that takes any model, waits little and never opens its breaker."""
    return {
        "name": name,
        "url": url,
        "models": "*",
        "backoff_s": 0.01,
        "breaker_failures": 100_000,
        **settings,
    }


#: The line to paste into a shell, as `serve` prints it.
CURL = re.compile(r"^ *(curl .*)$", re.MULTILINE)


def run_printed_curl(gateway: GatewayProcess, **variables: str) -> subprocess.CompletedProcess[str]:
    """Paste the line that `serve` printed."""
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on this machine")
    match = wait_until(lambda: CURL.search(gateway.stdout()), "the line to paste")
    return subprocess.run(
        ["sh", "-c", f"{match[1]} --silent --show-error --noproxy '*' --max-time 20"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": shlex.quote(curl).rpartition("/")[0] + ":/usr/bin:/bin", **variables},
    )
