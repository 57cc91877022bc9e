"""The architecture page names the files that a chat call enters, at default settings."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from harness.gateway import traced_gateway
from harness.processes import DEADLINE_S, DEMO_MODEL, GatewayProcess, wait_until

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
SAID = re.compile(
    r"chat call to an own model enters (\d+) files of the gateway and (\d+) of the scheduler"
)
BODY = {"model": DEMO_MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
TRACING = re.compile(r"^tracing$", re.MULTILINE)
ENTERED = re.compile(r"^entered (.*)$", re.MULTILINE)
#: Calls of which each may share its time with a heartbeat; what all of them enter is theirs.
CALLS = 5

#: File and function.
Entered = set[tuple[str, str]]


@pytest.fixture(scope="module")
def traced() -> Iterator[GatewayProcess]:
    with GatewayProcess(program=[traced_gateway.__file__]) as process:
        yield process


def entered(gateway: GatewayProcess, act: Callable[[], object]) -> Entered:
    """List the files that the gateway's event loop enters while `act` runs."""

    def next_of(pattern: re.Pattern[str], number: int) -> str:
        known = len(pattern.findall(gateway.stdout()))
        gateway.signal(number)
        found = wait_until(
            lambda: pattern.findall(gateway.stdout())[known:],
            f"{pattern.pattern}\n{gateway.tail()}",
        )
        return str(found[0])

    next_of(TRACING, signal.SIGUSR1)
    act()
    files = json.loads(next_of(ENTERED, signal.SIGUSR2))
    return {(file, name) for file, names in files.items() for name in names}


def background(gateway: GatewayProcess) -> Entered:
    """List what is entered without a call: the server looks now and then whether it shall leave."""
    found: Entered = set()

    def has_ticked() -> bool:
        found.update(entered(gateway, lambda: None))
        return ("parrot_gateway/server/serve.py", "serve") in found

    wait_until(has_ticked, "the server's own loop", DEADLINE_S)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_files_that_a_chat_call_enters(traced: GatewayProcess, stream: bool) -> None:
    said = SAID.search(" ".join(ARCHITECTURE.read_text().split()))
    assert said is not None

    def call() -> None:
        body = json.dumps({**BODY, "stream": stream}).encode()
        request = Request(f"{traced.base_url}/chat/completions", body, traced.headers())
        with build_opener(ProxyHandler({})).open(request, timeout=DEADLINE_S) as answer:
            assert b'"finish_reason"' in answer.read()

    # What is made or remembered on first use is there for the second.
    call()
    calls = [entered(traced, call) for _ in range(CALLS)]
    files = {file for file, _ in set.intersection(*calls) - background(traced)}
    counts = [
        sum(file.startswith(package[1:]) for file in files) for package in traced_gateway.PACKAGES
    ]
    assert counts == [int(said[1]), int(said[2])], sorted(files)
