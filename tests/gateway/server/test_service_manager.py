"""A gateway under systemd, whose socket a test reads."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import DEADLINE_S, GatewayProcess

from parrot_gateway.server.service_manager import keep_alive, notify

CONFIG = {"upstreams": [{"name": "up", "url": "http://127.0.0.1:1/v1", "models": ["m"]}]}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Listen in the place of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(DEADLINE_S)
        yield receiver


def told(manager: socket.socket) -> list[str]:
    """The next message, but for those that only say that it is alive."""
    while (states := manager.recv(4096).decode().splitlines()) == ["WATCHDOG=1"]:
        pass
    return states


def test_the_start_is_told_life_and_the_end(manager: socket.socket) -> None:
    environment = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "20000"}
    with GatewayProcess(config=CONFIG, environment=environment) as gateway:
        assert told(manager)[0] == "READY=1"
        assert told(manager) == [f"STATUS=ready at {gateway.base_url}"]
        assert manager.recv(4096) == manager.recv(4096) == b"WATCHDOG=1"
        gateway.signal(signal.SIGTERM)
        assert told(manager)[0] == "STOPPING=1"
        assert gateway.wait() == 0


async def test_nothing_is_told_to_nobody(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for address in ("", "nonsense", "/nowhere/at/all", "@no-such-abstract-socket"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
    assert caplog.text.count("systemd was not notified of READY=1") == 2
    monkeypatch.setenv("NOTIFY_SOCKET", manager.getsockname())
    for period, process in (("", ""), ("often", "1"), ("1", "1"), ("0", "")):
        monkeypatch.setenv("WATCHDOG_USEC", period)
        monkeypatch.setenv("WATCHDOG_PID", process)
        if not process:
            monkeypatch.delenv("WATCHDOG_PID")
        async with asyncio.timeout(60):
            await keep_alive()
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)
