"""A gateway in front of a gateway: nothing changes but the name of who asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, Response, check_error

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {
    "model": DEMO_MODEL,
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def front(demo: GatewayProcess) -> Iterator[GatewayProcess]:
    """A gateway whose only upstream is the one with the demo model."""
    with GatewayProcess(
        "--upstream", f"back={demo.base_url}", environment={"BACK_API_KEY": API_KEY}
    ) as gateway:  # fmt: skip
        yield gateway


def plain(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from call to call."""
    usage = dict(answer.get("usage") or {})
    usage.pop("prompt_tokens_details", None)
    return {**answer, "id": None, "created": None, "usage": usage}


def test_its_models_are_those_of_the_other(front: GatewayProcess, demo: GatewayProcess) -> None:
    behind = {model["id"] for model in demo.get("/v1/models")["data"]}
    assert {model["id"] for model in front.get("/v1/models")["data"]} == behind
    assert "(upstream back)" in front.stdout()


def test_documents(front: GatewayProcess, demo: GatewayProcess) -> None:
    direct, through = demo.ask("POST", PATH, CHAT), front.ask("POST", PATH, CHAT)
    assert through.status == 200
    assert plain(through.json) == plain(direct.json)
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert through.headers["x-upstream-request-id"].startswith("req_")
    assert through.headers["x-request-id"] != through.headers["x-upstream-request-id"]
    assert through.headers["x-parrot-engine"] == "back"


@pytest.mark.parametrize("usage", [True, False])
def test_streams(front: GatewayProcess, demo: GatewayProcess, usage: bool) -> None:
    body = CHAT | {"stream": True, "n": 2, "seed": 1, "stream_options": {"include_usage": usage}}
    direct, through = demo.ask("POST", PATH, body), front.ask("POST", PATH, body)
    for name in ("content-type", "cache-control", "x-accel-buffering"):
        assert through.headers[name] == direct.headers[name]

    def told(response: Response) -> dict[int, str]:
        texts = {0: "", 1: ""}
        for chunk in response.chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
        return texts

    assert told(through) == told(direct)
    assert plain(through.chunks[-1]) == plain(direct.chunks[-1])


def test_completions_with_everything(front: GatewayProcess, demo: GatewayProcess) -> None:
    body = {
        "model": "gpt-4o", "prompt": ["Once", "Twice"], "echo": True, "logprobs": 2,
        "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    direct, through = (gateway.ask("POST", "/v1/completions", body) for gateway in (demo, front))
    assert plain(through.json) == plain(direct.json)


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"temperature": 9},
        CHAT | {"max_completion_tokens": 10**6},
        CHAT | {"messages": []},
        CHAT | {"tools": [{"type": "function", "function": {"name": "no name"}}]},
        CHAT | {"messages": "x", "stream": True},
    ],
)
def test_errors_are_byte_identical(
    front: GatewayProcess, demo: GatewayProcess, body: dict[str, Any]
) -> None:
    direct, through = demo.ask("POST", PATH, body), front.ask("POST", PATH, body)
    check_error(through, 400)
    assert through.body == direct.body


def test_an_unknown_model_is_unknown_here(front: GatewayProcess) -> None:
    check_error(front.ask("POST", PATH, CHAT | {"model": "nothing"}), 404, "model_not_found")


def test_other_routes_are_asked_behind(front: GatewayProcess, demo: GatewayProcess) -> None:
    body = {"model": DEMO_MODEL, "input": "x"}
    check_error(front.ask("POST", "/v1/moderations", body), 404)
    direct, through = (gateway.ask("POST", "/v1/embeddings", body) for gateway in (demo, front))
    assert through.status == 200
    assert through.json == direct.json


def test_a_client_that_leaves_is_gone_behind_too(
    front: GatewayProcess, demo: GatewayProcess
) -> None:
    before = demo.wait_idle()["generated_tokens"]
    with RawConnection(front.port) as connection:
        body = CHAT | {"stream": True, "n": 4, "max_completion_tokens": 1000}
        connection.send(connection.request("POST", "/v1/chat/completions", body))
        connection.read_until(b'"content":"')
    front.wait_running(0)
    assert demo.wait_idle()["generated_tokens"] - before < 3000
