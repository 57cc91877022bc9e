"""A gateway and its own engine process, through the engine's death to the gateway's end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, is_alive, run_printed_curl, wait_until
from harness.raw_http import RawConnection

LONG: dict[str, Any] = {
    "model": DEMO_MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}
SHORT: dict[str, Any] = {"model": DEMO_MODEL, "prompt": "Once", "max_tokens": 3}


@pytest.fixture(scope="module")
def mortal() -> Iterator[GatewayProcess]:
    """A gateway with what `serve` runs when nothing is asked for, and an engine that may be killed.

    The tests of this file use it in their order.
    """
    with GatewayProcess(config={"server": {"keep_alive_s": 0.1}}) as gateway:
        yield gateway


def test_the_printed_line_works(mortal: GatewayProcess) -> None:
    assert f"\n  {DEMO_MODEL}\n" in mortal.stdout()
    printed = run_printed_curl(mortal)
    assert printed.returncode == 0, printed
    answer = json.loads(printed.stdout)
    assert answer["model"] == DEMO_MODEL
    assert answer["choices"][0]["text"]


def test_silence_is_filled_with_comments(mortal: GatewayProcess) -> None:
    with RawConnection(mortal.port) as connection:
        with mortal.frozen_engines():
            connection.send(connection.request("POST", "/v1/completions", SHORT | {"stream": True}))
            # Before the first token, headers and all …
            assert connection.read_until(b"\n\n").startswith(b"HTTP/1.1 200 OK\r\n")
        response = connection.read_response()
        assert response.events[-1] == "[DONE]"
        connection.send(connection.request("POST", "/v1/completions", LONG))
        connection.read_until(b"data: ")
        with mortal.frozen_engines():
            # … and in mid-stream, after what is under way has arrived.
            connection.read_until(b": keep-alive\n\n")
        assert connection.read_response().events[-1] == "[DONE]"


def kill_engine(gateway: GatewayProcess) -> int:
    pid = gateway.engine_pid()
    os.kill(pid, signal.SIGKILL)
    return pid


def wait_restarted(gateway: GatewayProcess, old: int) -> None:
    """Until the next call is answered: it waits as long as the engine is started again."""
    status, _, answer = gateway.post("/v1/completions", SHORT)
    assert status == 200, answer
    assert gateway.engine_pid() != old


def test_an_engine_killed_in_mid_stream(mortal: GatewayProcess) -> None:
    with RawConnection(mortal.port) as connection:
        connection.send(connection.request("POST", "/v1/completions", LONG))
        connection.read_until(b"data: ")
        old = kill_engine(mortal)
        # The stream waits until the engine is back, and goes on there.
        response = connection.read_response()
        assert response.events[-1] == "[DONE]"
        assert response.chunks[-1]["choices"][0]["finish_reason"] == "length"
        # The connection lives on.
        assert connection.ask("POST", "/v1/completions", SHORT).status == 200
        assert connection.ask("GET", "/health/liveness").status == 200
    wait_restarted(mortal, old)
    assert mortal.health()["engine_processes"][0]["restarts"] == 1


def test_an_engine_killed_before_the_answer(mortal: GatewayProcess) -> None:
    with RawConnection(mortal.port) as connection, RawConnection(mortal.port) as other:
        with mortal.frozen_engines():
            connection.send(connection.request("POST", "/v1/completions", LONG | {"stream": False}))
            mortal.wait_running(1)
            old = kill_engine(mortal)
        # A call that comes while there is no engine waits, too.
        other.send(other.request("POST", "/v1/completions", SHORT))
        assert mortal.health()["models"] == [DEMO_MODEL]
        response = connection.read_response()
        assert response.status == 200
        assert response.json["choices"][0]["finish_reason"] == "length"
        assert other.read_response().status == 200
    wait_restarted(mortal, old)


def test_ctrl_c_lets_the_stream_finish(mortal: GatewayProcess) -> None:
    engine = mortal.engine_pid()
    with RawConnection(mortal.port) as connection:
        connection.send(connection.request("POST", "/v1/completions", LONG))
        connection.read_until(b"data: ")
        with mortal.frozen_engines():
            # A terminal sends it to the whole group.
            mortal.signal(signal.SIGINT, group=True)
            wait_until(lambda: mortal.health()["status"] == "draining", "draining")
        response = connection.read_response()
        assert response.events[-1] == "[DONE]"
        assert response.chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert mortal.wait() == 0
    wait_until(lambda: not is_alive(engine), "the engine has ended too")
    assert "Traceback" not in mortal.stderr()


def test_the_engine_does_not_outlive_a_killed_gateway() -> None:
    with GatewayProcess(config={"models": [DEMO_MODEL]}) as gateway:
        engine = gateway.engine_pid()
        with RawConnection(gateway.port) as connection:
            connection.send(connection.request("POST", "/v1/completions", LONG))
            connection.read_until(b"data: ")
            gateway.signal(signal.SIGKILL)
            gateway.wait()
        wait_until(lambda: not is_alive(engine), "the engine has ended too", 15)


def standby_of(gateway: GatewayProcess) -> int | None:
    """Return the id of the gateway's spare engine process; None while it has none."""
    children: set[int] = set()
    for tasks in Path(f"/proc/{gateway.pid}/task").glob("*/children"):
        children.update(map(int, tasks.read_text().split()))
    children -= set(gateway.engine_pids())
    for pid in children:
        # A child may end while this looks.
        with suppress(OSError):
            if b"parrot_engine.server.standby" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_a_spare_process_takes_the_place_of_a_killed_engine() -> None:
    with GatewayProcess(config={"models": [DEMO_MODEL], "engines": {"standby": True}}) as gateway:
        wait_until(lambda: standby_of(gateway) is not None, "there is a spare process")
        spare = standby_of(gateway)
        wait_restarted(gateway, kill_engine(gateway))
        assert gateway.engine_pid() == spare
        wait_until(lambda: standby_of(gateway) is not None, "there is another one")
        another = standby_of(gateway)
        assert another is not None
        # One that has died is of no use: a new process is started.
        os.kill(another, signal.SIGKILL)
        wait_until(lambda: not is_alive(another), "it is gone")
        wait_restarted(gateway, kill_engine(gateway))
        assert gateway.engine_pid() not in (spare, another)
        wait_until(lambda: standby_of(gateway) is not None, "there is a third one")
        left = [gateway.engine_pid(), standby_of(gateway)]
        gateway.signal(signal.SIGKILL)
        gateway.wait()
        wait_until(lambda: not any(is_alive(pid) for pid in left if pid), "all have ended", 30)
