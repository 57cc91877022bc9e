"""Server processes of one upstream that are killed under a gateway process."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from harness.processes import DEADLINE_S, GatewayProcess, ServerProcess, wait_until

ADDRESS = re.compile(r"^(http://\S+/v1)$", re.MULTILINE)
FALLBACKS = re.compile(
    r'parrot_upstream_fallbacks_total{upstream="vllm-1",reason="connection"} (\S+)'
)
MODEL = "fake:chunks=4;size=8"
CALLS = 12


class Servers:
    """A gateway before server processes."""

    def __init__(self, stack: ExitStack, count: int) -> None:
        command = ["-m", "parrot_bench.upstream", MODEL]
        self.processes = [stack.enter_context(ServerProcess(command)) for _ in range(count)]
        urls = [each.wait_for_output(ADDRESS, DEADLINE_S)[1] for each in self.processes]
        settings = {"name": "vllm", "urls": urls, "max_retries": 0, "breaker_failures": 3}
        self.gateway = stack.enter_context(GatewayProcess(config={"upstreams": [settings]}))
        wait_until(lambda: all(each["takes_calls"] for each in self.described()), "all servers")

    def described(self) -> list[dict[str, Any]]:
        servers: list[dict[str, Any]] = self.gateway.health()["upstreams"][0]["servers"]
        return servers

    def fallbacks(self) -> float:
        """Return how many calls left the first server because of its connection."""
        with build_opener(ProxyHandler({})).open(f"{self.gateway.root}/metrics") as page:
            found = FALLBACKS.search(page.read().decode())
        return float(found[1]) if found else 0.0

    def ask(self, number: int) -> tuple[int, dict[str, str], Any]:
        message = {"role": "user", "content": f"Question {number}. " * 40}
        body = {"model": MODEL, "messages": [message]}
        return self.gateway.post("/v1/chat/completions", body)

    def ask_at_once(self, first: int) -> list[tuple[int, dict[str, str], Any]]:
        with ThreadPoolExecutor(CALLS) as threads:
            return list(threads.map(self.ask, range(first, first + CALLS)))


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack, 2)


def test_calls_at_once_after_a_server_was_killed(servers: Servers) -> None:
    answers = servers.ask_at_once(0)
    assert {headers["x-parrot-engine"] for _, headers, _ in answers} == {"vllm-1", "vllm-2"}
    servers.processes[0].signal(signal.SIGKILL)
    servers.processes[0].wait()
    for first in range(100, 400, 100):
        answers = servers.ask_at_once(first)
        assert [status for status, _, _ in answers] == [200] * CALLS
        assert {headers["x-parrot-engine"] for _, headers, _ in answers} == {"vllm-2"}
    states = {each["name"]: each["breaker"] for each in servers.described()}
    assert (states["vllm-1"] != "closed", states["vllm-2"]) == (True, "closed")
    tried = sum("x-parrot-tried" in headers for _, headers, _ in answers)
    assert servers.fallbacks() >= max(3, tried)


def test_all_killed(servers: Servers) -> None:
    for process in servers.processes:
        process.signal(signal.SIGKILL)
        process.wait()
    status, headers, body = servers.ask(0)
    assert (status, body["error"]["code"]) == (502, "upstream_error")
    assert headers["x-parrot-tried"].count("=connection") == 2
