"""Servers that a benchmark starts: the fake upstream, the gateway, peers; a process each.

Started on free ports, stopped together; their processor time and memory are read from outside.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec

#: Time for a server to begin to answer.
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
#: A question that takes longer may have been given up.
_PATIENCE_S = 5.0
#: The line in which a gateway, or the bare proxy, gives its base URL.
_READY = r"ready at (http://\S+/v1)"


class BenchmarkError(Exception):
    """The benchmark cannot be run; the message names the reason and the remedy."""


class Server:
    """One running server process.

    Attributes:
        name: for messages.
        url: base URL, ending in `/v1`.
        start_s: seconds from the start of the process to its readiness.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, url: str, start_s: float):
        self.name = name
        self.url = url
        self.start_s = start_s
        self._process = process
        self._drain: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        ready: str,
        env: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> Server:
        """Start `command` and wait for a line of output that matches `ready`.

        Args:
            name: for messages.
            command: program and arguments.
            ready: pattern whose first group is the base URL.
            env: environment of the process.
            timeout_s: longest wait.

        Raises:
            BenchmarkError: it ended or did not get ready; with its last output.
        """
        started = time.perf_counter()
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, env=clean_environment(env)
        )
        output: list[str] = []
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                while line := (await process.stdout.readline()).decode("utf-8", "replace"):
                    output.append(line.rstrip())
                    match = re.search(ready, line)
                    if match is not None:
                        server = cls(name, process, match[1], time.perf_counter() - started)
                        server._drain = asyncio.create_task(_read_away(process.stdout))
                        return server
        except TimeoutError:
            output.append(f"not ready after {timeout_s:g} s")
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if process.returncode is None:
            process.kill()
        await process.wait()
        raise BenchmarkError(f"{name} did not start: " + "\n".join(output[-5:]))

    async def stop(self) -> None:
        """End the process; by force when it does not go."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._drain is not None:
            self._drain.cancel()

    def rss_mb(self) -> float:
        return rss_mb(self._process.pid)

    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    def linking(self) -> dict[str, Any]:
        """The linking process in a gateway's `/health`, once it has worked off all messages.

        It answers questions in their turn.
        """
        while True:
            asked = time.monotonic()
            with suppress(HTTPError), urlopen(f"{self.url}/calls/none", timeout=60):
                pass
            if time.monotonic() - asked < _PATIENCE_S:
                break
        with urlopen(f"{self.url.removesuffix('/v1')}/health", timeout=60) as answer:
            health: dict[str, Any] = msgspec.json.decode(answer.read())
        linking: dict[str, Any] = health["linking"]
        return linking


def rss_mb(pid: int) -> float:
    """Resident memory of a process; 0 where it cannot be read."""
    output = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return int(output) / 1024 if output else 0.0


def cpu_s(pid: int) -> float:
    """Processor time of a process so far; 0 where it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _read_away(stream: asyncio.StreamReader) -> None:
    while await stream.read(65536):
        pass


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without settings of a gateway."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PARROT_")}
    return {**kept, "PYTHONUNBUFFERED": "1", **(extra or {})}


def loop_runner() -> asyncio.Runner:
    """A runner with uvloop where that is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


async def start_fake_upstream(models: Sequence[str]) -> Server:
    """The scripted upstream, which serves (and is scripted by) these model names."""
    command = [sys.executable, "-m", "parrot_bench.upstream", *models]
    return await Server.start("the fake upstream", command, r"(http://\S+/v1)")


async def start_gateway(
    *arguments: str,
    name: str = "the gateway",
    env: Mapping[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Server:
    """A gateway; `arguments` are those of `serve`, besides its port."""
    command = [sys.executable, "-m", "parrot_gateway", "serve", "--port", "0", *arguments]
    return await Server.start(name, command, _READY, env, timeout_s)


async def start_bare_proxy(upstream_url: str) -> Server:
    """The least proxy in front of the upstream; see `bare_proxy`."""
    command = [sys.executable, "-m", "parrot_bench.bare_proxy", upstream_url]
    return await Server.start("the bare proxy", command, _READY)


async def start_litellm(python: Path, upstream_url: str, models: Sequence[str]) -> Server:
    """The LiteLLM proxy of another environment: one worker, no database.

    Raises:
        BenchmarkError: it is not installed there.
    """
    program = python.parent / "litellm"
    if not program.exists():
        raise BenchmarkError(
            f"There is no LiteLLM next to {python}. Install it in an environment of its own "
            "(python -m venv ENV && ENV/bin/pip install 'litellm[proxy]') and pass "
            "--peer-python ENV/bin/python."
        )
    entries: list[dict[str, Any]] = [
        {
            "model_name": model,
            "litellm_params": {
                "model": f"openai/{model}",
                "api_base": upstream_url,
                "api_key": "none",
            },
        }
        for model in models
    ]
    folder = Path(tempfile.mkdtemp(prefix="bench-litellm-"))
    config = folder / "config.yaml"
    # JSON is YAML too.
    config.write_bytes(msgspec.json.encode({"model_list": entries}))
    port = free_port()
    command = [str(program), "--config", str(config), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1"]
    env = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_TELEMETRY": "False",
        # It listens on loopback for the time of the benchmark; ours checks no key either.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    server = await Server.start("LiteLLM", command, r"running on (http://[^\s/]+)", env)
    server.url = f"http://127.0.0.1:{port}/v1"
    await asyncio.to_thread(_wait_for, f"http://127.0.0.1:{port}/health/liveliness")
    return server


async def start_vllm(model: str, arguments: Sequence[str], timeout_s: float) -> Server:
    """vLLM's OpenAI server on the GPU that the gateway has given back.

    Args:
        model: a folder or hub id.
        arguments: more of its options.
        timeout_s: to load the model and compile.

    Raises:
        BenchmarkError: it is not installed here, or did not start.
    """
    if find_spec("vllm") is None:
        raise BenchmarkError("vLLM is not installed in this environment.")
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
    ready = r"(Application startup complete)"
    server = await Server.start("vLLM", command, ready, timeout_s=timeout_s)
    server.url = f"http://127.0.0.1:{port}/v1"
    return server


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise BenchmarkError(f"{url} does not answer.")
