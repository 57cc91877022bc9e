"""`serve` as a process: its first line, its last breath, and what lies between, with upstreams."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import (
    CURL,
    DEMO_MODEL,
    GatewayProcess,
    run_cli,
    run_printed_curl,
    upstream_settings,
    wait_until,
)
from harness.raw_http import RawConnection, check_error
from harness.scripted_upstream import (
    LISTED_MODEL,
    Gate,
    ScriptedUpstream,
    chat_document,
    chat_events,
    completion_document,
    document,
    event_stream,
)

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}


def test_flags_alone_serve_an_upstream(upstream: ScriptedUpstream) -> None:
    model = upstream.script_listed(document(completion_document("from upstream")))
    with GatewayProcess(
        "--upstream", f"up={upstream.base_url}", "--alias", f"gpt-4o={model}",
        "--alias", "typo=scripted-lsited", "--api-key", "env:SOME_KEY", "--log-level", "warning",
        environment={"SOME_KEY": "from the environment", "UP_API_KEY": "sk-upstream"},
    ) as gateway:  # fmt: skip
        gateway.api_key = "from the environment"
        shown = gateway.stdout()
        assert f"{LISTED_MODEL}  (upstream up)" in shown
        assert "gpt-4o -> scripted-listed\n" in shown
        assert "typo -> scripted-lsited  (not served so far)" in shown
        assert f"OPENAI_BASE_URL={gateway.base_url}" in shown
        assert 'OPENAI_API_KEY="$SOME_KEY"' in shown
        # What `serve` alone would have run is not there, and not silently.
        assert f"({DEMO_MODEL} is not run beside upstreams: --model {DEMO_MODEL} adds it)" in shown
        assert "from the environment" not in shown + gateway.stderr()
        assert "sk-upstream" not in shown + gateway.stderr()
        listed = {item["id"] for item in gateway.get("/v1/models")["data"]}
        assert listed == {LISTED_MODEL, "gpt-4o", "typo"}
        status, _, answer = gateway.post("/v1/completions", {"model": "gpt-4o", "prompt": "x"})
        assert status == 200
        assert answer["choices"][0]["text"] == "from upstream"
        call = upstream.calls(model)[-1]
        assert call.json == {"model": LISTED_MODEL, "prompt": "x"}
        assert call.headers["authorization"] == "Bearer sk-upstream"
        with RawConnection(gateway.port) as stranger:
            check_error(stranger.ask("GET", "/v1/models"), 401, "invalid_api_key")
        printed = run_printed_curl(gateway, SOME_KEY="from the environment")
        assert '"from upstream"' in printed.stdout, printed


def test_a_model_that_failed_is_not_listed_as_served() -> None:
    with GatewayProcess("--model", "./no/such/folder", "--model", DEMO_MODEL) as gateway:
        wait_until(lambda: CURL.search(gateway.stdout()), "the line to paste")
        served, failed = gateway.stdout().partition("models:\n")[2].split("\nnot served:\n")
        assert served == f"  {DEMO_MODEL}\n"
        assert failed.startswith("  ./no/such/folder: There is no folder")
        # Told once, and the log ended before the block was printed.
        assert "no folder" not in gateway.stderr()
        assert gateway.stderr().splitlines()[-1].endswith(f"joined with {DEMO_MODEL}")
        # What is printed to be pasted works.
        assert run_printed_curl(gateway).returncode == 0
        assert f'"model": "{DEMO_MODEL}"' in failed


def test_a_model_that_alone_fails_is_told_of_once(tmp_path: Path) -> None:
    file = tmp_path / "model.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    done = run_cli("serve", "--port", "0", "--model", str(file))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("is a GGUF file") == 1
    assert "--upstream llama=http://127.0.0.1:8080/v1" in done.stderr
    assert done.stderr.endswith("Nothing can be served; stopping.\n")


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO|WARNING|ERROR) +[\w.]+: .+")


def test_the_log_has_one_format_and_names_engines() -> None:
    with GatewayProcess("--model", DEMO_MODEL, config={"server": {"access_log": True}}) as gateway:
        body = {"model": DEMO_MODEL, "prompt": "x", "max_tokens": 1}
        _, headers, _ = gateway.post("/v1/completions", body)
        gateway.get("/v1/models")
        message = {"model": DEMO_MODEL, "max_tokens": 1, "messages": CHAT["messages"]}
        gateway.post("/v1/messages", message)
        engine = gateway.health()["engine_processes"][0]["name"]
        assert gateway.stdout().rstrip().endswith('"max_tokens": 60}\'')
        wait_until(lambda: gateway.stderr().count(".calls: ") == 2, "all calls in the log")
        lines = gateway.stderr().splitlines()
    assert [line for line in lines if not LOG_LINE.fullmatch(line)] == []
    assert any(f" parrot_engine: {engine}: loading {DEMO_MODEL}" in line for line in lines)
    (joined,) = (n for n, line in enumerate(lines) if f"engine {engine} joined" in line)
    said = [line.split(" ", 3)[3].lstrip().partition(": ") for line in lines[joined + 1 :]]
    # No other line comes after the start: what it prints in the end stays in sight.
    assert {logger for logger, _, _ in said} == {"parrot_gateway.calls", "parrot_gateway.access"}
    calls = [text for logger, _, text in said if logger == "parrot_gateway.calls"]
    first = dict(pair.split("=") for pair in calls[0].split()[1:])
    assert (first["path"], first["status"]) == ("/v1/completions", "200")
    assert (first["model"], first["engine"]) == (DEMO_MODEL, engine)
    assert (first["prompt_tokens"], first["output_tokens"]) == ("1", "1")
    assert first["request_id"] == headers["x-request-id"]
    assert "path=/v1/messages" in calls[1]
    access = [text for logger, _, text in said if logger == "parrot_gateway.access"]
    assert re.fullmatch(r"GET /v1/models 200 [\d.]+ ms req_\w+", access[0])


def test_a_gateway_that_waits_for_engines_says_where_they_join() -> None:
    with GatewayProcess(
        config={"engines": {"join_key": "env:PARROT_JOIN_KEY"}},
        environment={"PARROT_JOIN_KEY": "key"},
    ) as gateway:
        url = gateway.base_url.replace("http://", "ws://") + "/engines/join"
        assert f"models:\n  (none before an engine joins at {url})\n" in gateway.stdout()


class Draining:
    """A gateway of its own with one call in work, held at a gate."""

    def __init__(self, upstream: ScriptedUpstream, stream: bool, drain_timeout_s: float) -> None:
        self.gate: Gate = upstream.gate()
        if stream:
            events = chat_events(["One", " two"])
            model = upstream.script(event_stream(*events[:2], self.gate, *events[2:]))
        else:
            model = upstream.script(document(chat_document("Done."), before=self.gate))
        self.gateway = GatewayProcess(
            config={
                "upstreams": [upstream_settings("scripted", upstream.base_url)],
                "server": {"drain_timeout_s": drain_timeout_s},
            }
        )
        self.call = RawConnection(self.gateway.port)
        self.idle = RawConnection(self.gateway.port)
        assert self.idle.ask("GET", "/version").status == 200
        #: A page that follows everything: a stream without an end of its own.
        self.page = RawConnection(self.gateway.port)
        self.page.send(self.page.request("GET", "/ui/api/events"))
        self.page.read_until(b"event: overview")
        self.call.send(
            self.call.request(
                "POST", "/v1/chat/completions", CHAT | {"model": model, "stream": stream}
            )
        )
        [self.received] = upstream.wait_for_calls(model)
        if stream:
            self.call.read_until(b"One")

    def wait_draining(self) -> None:
        wait_until(lambda: self.gateway.health()["status"] == "draining", "draining")

    def close(self) -> None:
        self.gate.open()
        self.call.close()
        self.idle.close()
        self.page.close()
        self.gateway.close()


@pytest.fixture(params=[True, False], ids=["stream", "document"])
def draining(request: pytest.FixtureRequest, upstream: ScriptedUpstream) -> Iterator[Draining]:
    state = Draining(upstream, request.param, drain_timeout_s=30)
    yield state
    state.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains(draining: Draining, number: int) -> None:
    gateway = draining.gateway
    gateway.signal(number)
    draining.wait_draining()
    # On a connection that was there, and on a new one.
    with RawConnection(gateway.port) as new:
        for connection in (draining.idle, new):
            response = connection.ask("POST", "/v1/chat/completions", CHAT | {"model": "x"})
            check_error(response, 503, "shutting_down")
            assert float(response.headers["retry-after"]) > 0
            assert connection.ask("GET", "/health/readiness").status == 503
            assert connection.ask("GET", "/health/liveness").status == 200
    assert gateway.process.poll() is None
    draining.gate.open()
    response = draining.call.read_response()
    assert response.status == 200
    assert response.body.endswith(b"data: [DONE]\n\n") or b"Done." in response.body
    draining.page.read_until(b"event: closed")
    assert gateway.wait() == 0


def test_a_second_signal_ends_at_once(upstream: ScriptedUpstream) -> None:
    draining = Draining(upstream, True, drain_timeout_s=300)
    try:
        draining.gateway.signal(signal.SIGINT)
        draining.wait_draining()
        draining.gateway.signal(signal.SIGINT)
        draining.gateway.wait(10)
        assert "Traceback" not in draining.gateway.stderr()
        assert draining.received.aborted.wait(10)
        with pytest.raises(ConnectionError):
            draining.call.read_response()
    finally:
        draining.close()


@pytest.mark.parametrize("stream", [True, False])
def test_the_drain_has_an_end(upstream: ScriptedUpstream, stream: bool) -> None:
    draining = Draining(upstream, stream, drain_timeout_s=0.3)
    try:
        draining.gateway.signal(signal.SIGINT)
        response = draining.call.read_response()
        if stream:
            # A stream that just ended in good order would pass for a whole answer.
            assert b"One" in response.body
            assert response.events[-1] == "[DONE]"
            assert response.chunks[-1]["error"]["code"] == "shutting_down"
        else:
            check_error(response, 503, "shutting_down")
            assert float(response.headers["retry-after"]) > 0
        assert draining.gateway.wait(10) == 0
        assert draining.received.aborted.wait(10)
        log = draining.gateway.stderr()
        assert "1 calls were cut off" in log
        assert "Traceback" not in log
        # Nothing was left to uvicorn's own, ruder way.
        assert "graceful shutdown exceeded" not in log
    finally:
        draining.close()


def test_a_drain_that_waits_for_deferred_calls_alone_says_so(upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    model = upstream.script(document(chat_document("Done."), before=gate))
    with GatewayProcess(
        config={"upstreams": [upstream_settings("scripted", upstream.base_url)]}
    ) as gateway:
        body = CHAT | {"model": model, "parrot": {"defer": True}}
        assert gateway.post("/v1/chat/completions", body)[0] == 200
        upstream.wait_for_calls(model)
        gateway.signal(signal.SIGINT)
        said = "0 running calls and 1 deferred ones; a second signal (Ctrl-C) ends at once"
        wait_until(lambda: said in gateway.stderr(), said)
        gate.open()
        assert gateway.wait() == 0


def test_an_idle_gateway_ends_at_once(upstream: ScriptedUpstream) -> None:
    with GatewayProcess(
        # Longer than anything here waits.
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "server": {"drain_timeout_s": 600},
        }
    ) as gateway:
        with RawConnection(gateway.port) as idle:
            assert idle.ask("GET", "/version").status == 200
            gateway.signal(signal.SIGINT, group=True)
            assert gateway.wait() == 0
        assert "Traceback" not in gateway.stderr()


def test_a_signal_before_it_is_ready() -> None:
    # An upstream that never answers keeps it from being ready.
    with GatewayProcess("--upstream", "x=http://127.0.0.1:1/v1", wait=False) as gateway:
        wait_until(lambda: "Trying on" in gateway.stderr(), "the gateway asks its upstream")
        gateway.signal(signal.SIGINT)
        gateway.wait(10)
        assert "Traceback" not in gateway.stderr()


def test_calls_beyond_the_limit_are_refused(upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    model = upstream.script(document(chat_document(), before=gate))
    body = CHAT | {"model": model}
    settings = {
        "upstreams": [upstream_settings("scripted", upstream.base_url)],
        "server": {"max_running_calls": 1},
    }
    with (
        GatewayProcess(config=settings) as gateway,
        RawConnection(gateway.port) as first,
        RawConnection(gateway.port) as second,
    ):
        first.send(first.request("POST", "/v1/chat/completions", body))
        upstream.wait_for_calls(model)
        response = second.ask("POST", "/v1/chat/completions", body)
        check_error(response, 503, "engine_overloaded")
        assert float(response.headers["retry-after"]) > 0
        gate.open()
        assert first.read_response().status == 200
        assert second.ask("POST", "/v1/chat/completions", body).status == 200


def test_a_call_that_takes_too_long_is_ended(upstream: ScriptedUpstream) -> None:
    gate = upstream.gate()
    silent = upstream.script(document(chat_document(), before=gate))
    stalled = upstream.script(event_stream(*chat_events(["One"])[:2], gate))
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "server": {"call_timeout_s": 0.3},
        }
    ) as gateway, RawConnection(gateway.port) as connection:  # fmt: skip
        response = connection.ask("POST", "/v1/chat/completions", CHAT | {"model": silent})
        check_error(response, 504, "timeout")
        assert response.headers["x-should-retry"] == "false"
        response = connection.ask(
            "POST", "/v1/chat/completions", CHAT | {"model": stalled, "stream": True}
        )
        assert '"code":"timeout"' in response.events[-2]
        assert response.events[-1] == "[DONE]"
        for model in (silent, stalled):
            assert upstream.calls(model)[0].aborted.wait(10)
    gate.open()
