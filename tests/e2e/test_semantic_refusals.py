"""Semantic calls that are refused leave nothing that runs or waits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.processes import GatewayProcess, upstream_settings, wait_until
from harness.scripted_upstream import ScriptedUpstream, document

ANSWER = document({"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}]})


@pytest.fixture(scope="module")
def gateway(upstream: ScriptedUpstream) -> Iterator[GatewayProcess]:
    """A gateway with an upstream, and a model of its own that cannot be loaded."""
    with GatewayProcess(
        config={
            "upstreams": [upstream_settings("scripted", upstream.base_url)],
            "models": [{"model": "/nowhere/at/all", "name": "broken"}],
        }
    ) as process:
        yield process


def check_nothing_left(gateway: GatewayProcess, submitted: int) -> None:
    semantic = gateway.health()["semantic"]
    assert semantic["calls"]["submitted"] == submitted
    assert semantic["sessions"]["unfinished_calls"] == 0
    assert semantic["sessions"]["variables"] == 0
    assert semantic["calls"]["held_bytes"] == 0


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.parametrize(
    ("field", "value"),
    [("stream", "yes"), ("stream", 1), ("stream_options", 5),
     ("stream_options", {"include_usage": "x"})],
)  # fmt: skip
def test_a_wrong_type(
    gateway: GatewayProcess, upstream: ScriptedUpstream, field: str, value: Any, defer: bool
) -> None:
    model = upstream.script(ANSWER)
    submitted = gateway.health()["semantic"]["calls"]["submitted"]
    body = {"model": model, "prompt": "x", field: value, "parrot": {"session": "s", "defer": defer}}
    status, _, answer = gateway.post("/v1/completions", body)
    assert status == 400
    assert answer["error"]["param"].startswith(field)
    check_nothing_left(gateway, submitted)
    assert gateway.get("/v1/sessions/s")["error"]["code"] == "session_not_found"
    assert upstream.calls(model) == []


def test_tokens_of_a_model_that_is_not_there(gateway: GatewayProcess) -> None:
    wait_until(
        lambda: gateway.health()["engine_processes"][0]["state"] == "failed", "it is given up"
    )
    submitted = gateway.health()["semantic"]["calls"]["submitted"]
    parrot = {"session": "t", "output": "o", "transform": "truncate(tokens=3)"}
    body = {"model": "broken", "prompt": "x", "parrot": parrot}
    status, _, answer = gateway.post("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (503, "engine_failed")
    # What is wrong on the server is for its operator.
    assert "/nowhere" not in answer["error"]["message"]
    assert "/nowhere" in gateway.health()["engine_processes"][0]["reason"]
    check_nothing_left(gateway, submitted)
