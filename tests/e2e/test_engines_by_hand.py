"""Engines started by hand: one that joins a gateway without models, one that serves on its own."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, ServerProcess, free_port, wait_until
from harness.raw_http import RawConnection, check_error

ENGINE = ["-m", "parrot_gateway", "engine", "--model", DEMO_MODEL, "--num-blocks", "256"]
SHORT: dict[str, Any] = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
JOIN_KEY = {"PARROT_JOIN_KEY": "the key of the engines"}


# -- joining --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hub() -> Iterator[GatewayProcess]:
    """A gateway that runs nothing itself."""
    with GatewayProcess(
        config={"engines": {"join_key": "env:PARROT_JOIN_KEY", "heartbeat_s": 0.5}},
        environment=JOIN_KEY,
    ) as gateway:
        yield gateway


def join(hub: GatewayProcess, name: str, key: dict[str, str]) -> ServerProcess:
    url = hub.root.replace("http://", "ws://") + "/v1/engines/join"
    return ServerProcess([*ENGINE, "--join", url, "--name", name], key)


def test_a_gateway_without_models_says_so(hub: GatewayProcess) -> None:
    with RawConnection(hub.port) as connection:
        response = connection.ask("POST", "/v1/completions", SHORT | {"model": DEMO_MODEL})
        check_error(response, 404, "model_not_found")
        assert connection.ask("GET", "/v1/models").json == {"object": "list", "data": []}
        assert connection.ask("GET", "/health/readiness").status == 503


def test_a_wrong_join_key_is_final(hub: GatewayProcess) -> None:
    with join(hub, "stranger", {"PARROT_JOIN_KEY": "wrong"}) as engine:
        assert engine.wait(30) != 0
        assert "join key" in engine.stderr()
        assert "Traceback" not in engine.stderr()
        assert "wrong" not in engine.stderr().replace("wrong address", "")
    log = hub.stderr()
    assert "an engine at 127.0.0.1 was refused: no join key, or a wrong one" in log
    assert "ERROR" not in log
    assert hub.health()["engines"] == []


def test_without_a_key_nobody_joins(hub: GatewayProcess) -> None:
    upgrade = {
        "connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }  # fmt: skip
    for key in ({}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"}):
        with RawConnection(hub.port) as connection:
            response = connection.ask("GET", "/v1/engines/join", headers=upgrade | key)
            assert response.status == 401
            assert response.json["error"]["code"] == "invalid_api_key"
    with RawConnection(hub.port) as connection:
        # No WebSocket at all.
        check_error(connection.ask("GET", "/v1/engines/join"), 404)


def test_an_engine_joins_serves_and_leaves(hub: GatewayProcess) -> None:
    with join(hub, "by-hand", JOIN_KEY) as engine:
        wait_until(lambda: hub.health()["engines"], "the engine has joined", 60)
        assert hub.health()["status"] == "ok"
        assert [model["id"] for model in hub.get("/v1/models")["data"]] == ["by-hand"]
        status, _, answer = hub.post("/v1/completions", SHORT | {"model": "by-hand"})
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 5
        with RawConnection(hub.port) as connection:
            body = SHORT | {"model": "by-hand", "max_tokens": 300, "stream": True}
            connection.send(connection.request("POST", "/v1/completions", body))
            connection.read_until(b"data: ")
            # It says goodbye, finishes what it has, and takes nothing new.
            engine.signal(signal.SIGTERM)
            response = connection.read_response()
            assert response.events[-1] == "[DONE]"
            assert response.chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert engine.wait() == 0
        assert "Traceback" not in engine.stderr()
    wait_until(lambda: not hub.health()["engines"], "the gateway noticed")
    status, _, answer = hub.post("/v1/completions", SHORT | {"model": "by-hand"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_an_engine_waits_for_its_gateway() -> None:
    port = free_port()
    url = f"ws://127.0.0.1:{port}/v1/engines/join"
    with ServerProcess([*ENGINE, "--join", url, "--name", "early"], JOIN_KEY) as engine:
        wait_until(lambda: "no link to" in engine.stderr(), "the engine has tried", 60)
        with GatewayProcess(
            config={"engines": {"join_key": "env:PARROT_JOIN_KEY"}, "server": {"port": port}},
            environment=JOIN_KEY,
        ) as gateway:
            wait_until(lambda: gateway.health()["engines"], "the engine has joined", 30)
            status, _, _ = gateway.post("/v1/completions", SHORT | {"model": "early"})
            assert status == 200
            logged = len(engine.stderr())
        # The gateway has ended in good order; the engine tries again, without complaints.
        wait_until(lambda: "has shut down" in engine.stderr(), "the engine noticed")
        assert engine.process.poll() is None
        assert "no link to" not in engine.stderr()[logged:]
        engine.signal(signal.SIGINT)
        assert engine.wait() == 0


# -- on its own -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone() -> Iterator[RawConnection]:
    port = free_port()
    with ServerProcess([*ENGINE, "--listen", f"127.0.0.1:{port}"]) as engine:

        def connect() -> RawConnection | None:
            assert engine.process.poll() is None, engine.tail()
            try:
                return RawConnection(port)
            except ConnectionError:
                return None

        connection: RawConnection = wait_until(connect, "the engine listens", 60)
        assert f"listening on http://127.0.0.1:{port}\n" in engine.stderr()
        yield connection
        connection.close()
        engine.signal(signal.SIGINT)
        assert engine.wait() == 0


def ask(alone: RawConnection, path: str, **body: Any) -> Any:
    response = alone.ask("POST", path, body)
    assert response.status == 200, response.body
    return response.json


def test_fill_generate_free(alone: RawConnection) -> None:
    filled = ask(alone, "/fill", context_id=1, text="Once upon a time")
    assert filled["num_tokens"] > 0
    # A fork, and the context itself, go on alike.
    forked = ask(alone, "/generate", context_id=2, parent_context_id=1, max_tokens=8, temperature=0)
    own = ask(alone, "/generate", context_id=1, max_tokens=8, temperature=0)
    assert forked == own
    assert len(own["token_ids"]) == 8
    assert own["finish_reason"] == "length"
    assert alone.ask("GET", "/health").json["stats"]["contexts"] == 2
    for context_id in (1, 2):
        ask(alone, "/free_context", context_id=context_id)
    wait_until(lambda: alone.ask("GET", "/health").json["stats"]["contexts"] == 0, "no contexts")


def test_a_stream_of_an_engine(alone: RawConnection) -> None:
    ask(alone, "/fill", context_id=5, text="Once upon a time")
    whole = ask(alone, "/generate", context_id=6, parent_context_id=5, max_tokens=8, temperature=0)
    response = alone.ask(
        "POST", "/generate", {"context_id": 5, "max_tokens": 8, "temperature": 0, "stream": True}
    )
    pieces = [json.loads(event) for event in response.events[:-1]]
    assert response.events[-1] == "[DONE]"
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == "length"
    for context_id in (5, 6):
        ask(alone, "/free_context", context_id=context_id)


def test_a_client_of_an_engine_leaves(alone: RawConnection) -> None:
    with RawConnection(alone.socket.getpeername()[1]) as leaver:
        filled = leaver.ask("POST", "/fill", {"context_id": 7, "text": "Once"})
        assert filled.status == 200
        body = {"context_id": 7, "max_tokens": 1500, "ignore_eos": True}
        leaver.send(leaver.request("POST", "/generate", body))
        wait_until(lambda: alone.ask("GET", "/health").json["stats"]["running"] == 1, "it runs")
    wait_until(lambda: alone.ask("GET", "/health").json["stats"]["contexts"] == 0, "no contexts", 2)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/generate", {"context_id": 99}, 404),
        ("/generate", {"context_id": 98, "parent_context_id": 99}, 404),
        ("/fill", {"context_id": 1}, 400),
        ("/fill", {"context_id": -1, "text": "x"}, 400),
        ("/fill", {"context_id": "x", "text": "x"}, 400),
        ("/fill", {"context_id": 1, "token_ids": [10**9]}, 400),
        ("/fill", {"context_id": 1, "text": "x", "prompt_logprobs": -1}, 400),
        ("/generate", {"context_id": 99, "surplus": 1}, 400),
        ("/free_context", {}, 400),
    ],
)
def test_errors_of_an_engine(
    alone: RawConnection, path: str, body: dict[str, Any], status: int
) -> None:
    response = alone.ask("POST", path, body)
    assert response.status == status, response.body
    assert set(response.json["error"]) == {"message", "type", "param", "code"}
    assert not re.search("Traceback", response.json["error"]["message"])
