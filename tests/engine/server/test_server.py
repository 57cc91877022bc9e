"""An engine on its own, over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient
from harness.engine.tokenizer_kinds import write_kind
from harness.scripted_engine import ScriptedEngine, fixed_script, hashed_script
from parrot_engine.protocol import EngineInfo, FreeContext, Primitive
from parrot_engine.server.app import create_app
from parrot_engine.server.command import EXIT_CONFIG, main
from parrot_engine.server.service import Tails
from parrot_engine.text import TextAssets, Tokenizer
from parrot_engine.text.loading import load_text_assets


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextAssets:
    return load_text_assets(write_kind("byte_level", tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def tokenizer(text: TextAssets) -> Tokenizer:
    return Tokenizer(text)


def info(tokenizer: Tokenizer) -> EngineInfo:
    return EngineInfo(
        "scripted", "scripted", "Scripted", "cpu", "none", 512, tokenizer.vocab_size,
        [tokenizer.eos_token_id or 0],
    )  # fmt: skip


Serve = Callable[..., TestClient]


@pytest.fixture
def serve(text: TextAssets, tokenizer: Tokenizer) -> Iterator[Serve]:
    clients: list[TestClient] = []

    def start(says: str | None = None, before_step: Callable[[], None] | None = None) -> TestClient:
        script = hashed_script(tokenizer.vocab_size)
        if says is not None:
            script = fixed_script(tokenizer.encode(says), tokenizer.eos_token_id or 0)
        engine = ScriptedEngine(script, info=info(tokenizer), before_step=before_step)
        client = TestClient(create_app(engine, text))
        client.__enter__()
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__(None, None, None)


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **body: Any) -> list[Any]:
    with client.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


SAYS = " Grüße 🐙 w"


def test_fill_generate_free(serve: Serve, tokenizer: Tokenizer) -> None:
    client = serve(SAYS)
    filled = post(client, "/fill", context_id=1, text="0123")
    count = len(tokenizer.encode("0123"))
    assert filled == {"context_id": 1, "num_tokens": count, "cached_tokens": 0}
    answer = post(client, "/generate", context_id=1, max_tokens=50)
    assert (answer["text"], answer["finish_reason"]) == (SAYS, "stop")
    assert client.get("/health").json()["stats"]["contexts"] == 1
    post(client, "/free_context", context_id=1)
    post(client, "/free_context", context_id=1)
    failed = client.post("/generate", json={"context_id": 1})
    assert failed.status_code == 404
    assert failed.json()["error"]["code"] == "unknown_context"


def test_token_ids_and_forks(serve: Serve) -> None:
    client = serve()
    post(client, "/fill", context_id=1, token_ids=[5, 6, 7])
    answers = [
        post(client, "/generate", context_id=n, parent_context_id=1, max_tokens=6) for n in (2, 3)
    ]
    assert answers[0] == answers[1]
    assert len(answers[0]["token_ids"]) == 6
    assert answers[0]["finish_reason"] == "length"


def test_streams_whole_characters(serve: Serve) -> None:
    client = serve(SAYS)
    post(client, "/fill", context_id=1, text="0123")
    pieces = stream(client, context_id=1, max_tokens=50)
    assert "".join(piece["text"] for piece in pieces) == SAYS
    assert "\ufffd" not in "".join(piece["text"] for piece in pieces)
    assert [piece["finish_reason"] for piece in pieces][-1] == "stop"
    assert len(pieces) > 3


def test_text_goes_on_over_generations(serve: Serve) -> None:
    """A character that one generation leaves unfinished is completed by the next."""
    client = serve(SAYS)
    post(client, "/fill", context_id=1, text="0123")
    parts = []
    while not parts or parts[-1]["finish_reason"] == "length":
        parts.append(post(client, "/generate", context_id=1, max_tokens=1))
    joined = "".join(part["text"] for part in parts)
    assert joined.replace("\ufffd", "") == SAYS


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_strings(serve: Serve, streaming: bool) -> None:
    client = serve(SAYS)
    post(client, "/fill", context_id=1, text="0123")
    body: dict[str, Any] = {"context_id": 1, "max_tokens": 50, "stop": ["e 🐙", "zzz"]}
    if streaming:
        pieces = stream(client, **body)
        text, reason = "".join(p["text"] for p in pieces), pieces[-1]["finish_reason"]
    else:
        answer = post(client, "/generate", **body)
        text, reason = answer["text"], answer["finish_reason"]
    assert (text, reason) == (" Grüß", "stop")


def test_logprobs(serve: Serve) -> None:
    client = serve()
    filled = post(client, "/fill", context_id=1, token_ids=[5, 6], prompt_logprobs=1)
    assert filled["prompt_logprobs"][0] is None
    assert filled["prompt_logprobs"][1]["token_id"] == 6
    answer = post(client, "/generate", context_id=1, max_tokens=3, logprobs=2)
    assert [item["token_id"] for item in answer["logprobs"]] == answer["token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/fill", {"context_id": 1}, 400, "token_ids"),
        ("/fill", {"context_id": 1, "text": "a", "token_ids": [1]}, 400, "token_ids"),
        ("/fill", {"context_id": "x", "text": "a"}, 400, "context_id"),
        ("/fill", {"context_id": -1, "text": "a"}, 400, "context_id"),
        ("/fill", {"context_id": 1, "token_ids": [10**6]}, 400, None),
        ("/fill", {"context_id": 1, "token_ids": [1] * 600}, 400, None),
        ("/fill", {"context_id": 1, "text": "a", "parent_context_id": 9}, 404, None),
        ("/generate", {"context_id": 1, "max_tokens": "4"}, 400, "max_tokens"),
        ("/generate", {"context_id": 1, "no_such_field": 1}, 400, None),
        ("/generate", {"context_id": 1, "stream": True}, 404, None),
    ],
)
def test_errors_have_openais_shape(
    serve: Serve, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    client = serve()
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    # The failure is over: the same id can be used.
    post(client, "/fill", context_id=1, token_ids=[1])


def test_a_context_works_for_one_request_at_a_time(serve: Serve) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()

    def before_step() -> None:
        entered.release()
        assert go_on.wait(10)

    client = serve(before_step=before_step)
    answers: list[Any] = []
    first = threading.Thread(
        target=lambda: answers.append(post(client, "/fill", context_id=1, token_ids=[1]))
    )
    first.start()
    assert entered.acquire(timeout=60)
    busy = client.post("/generate", json={"context_id": 1})
    assert busy.status_code == 409
    assert busy.json()["error"]["code"] == "context_busy"
    go_on.set()
    first.join(10)
    assert answers[0]["num_tokens"] == 1


class Leaver:
    """A client at the ASGI interface, which can go away."""

    def __init__(self, app: Any, path: str, body: dict[str, Any]) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._messages.put_nowait(
            {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        )
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
            "http_version": "1.1", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "headers": [],
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message: Any) -> None:
        return None

    async def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        async with asyncio.timeout(60):
            await self.task


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/fill", {"token_ids": [1]}),
        ("/generate", {"max_tokens": 400}),
        ("/generate", {"max_tokens": 400, "stream": True}),
    ],
)
async def test_a_client_that_leaves_cancels(
    text: TextAssets, tokenizer: Tokenizer, path: str, fields: dict[str, Any]
) -> None:
    """Even while the engine is in the middle of a step."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    def before_step() -> None:
        entered.release()
        assert go_on.wait(20)

    engine = ScriptedEngine(
        hashed_script(tokenizer.vocab_size), info=info(tokenizer), before_step=before_step
    )
    freed: list[FreeContext] = []
    submit = engine.submit

    def noting_submit(primitives: Sequence[Primitive]) -> None:
        freed.extend(item for item in primitives if isinstance(item, FreeContext))
        submit(primitives)

    engine.submit = noting_submit  # type: ignore[method-assign]
    app = create_app(engine, text)
    async with app.router.lifespan_context(app):
        go_on.set()
        filled = Leaver(app, "/fill", {"context_id": 1, "token_ids": [1]})
        await filled.task
        while entered.acquire(blocking=False):
            pass
        go_on.clear()
        client = Leaver(app, path, {"context_id": 1, **fields})
        assert await asyncio.to_thread(entered.acquire, timeout=60)
        # The step has not ended, so there is nothing that could have ended the call but this.
        await client.leave()
        go_on.set()
        async with asyncio.timeout(60):
            while not freed:  # noqa: ASYNC110  the engine's thread takes it with its next step
                await asyncio.sleep(0.005)
    assert freed == [FreeContext(1)]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "unknown_route"),
        ("POST", "/v1/completions", 404, "unknown_route"),
        ("GET", "/generate", 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
def test_unknown_routes_and_methods(
    serve: Serve, method: str, path: str, status: int, code: str
) -> None:
    answer = serve().request(method, path)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert path in error["message"]


def test_tails_are_bounded() -> None:
    tails = Tails(limit=3)
    tails.append(1, None, range(20))
    assert list(tails.get(1)) == list(range(12, 20))
    tails.append(2, 1, [20])
    assert list(tails.get(2)) == [*range(13, 20), 20]
    tails.append(3, None, [3])
    tails.append(1, None, [20])
    tails.append(4, None, [4])
    assert len(tails) == 3
    # The one unused for longest has gone.
    assert list(tails.get(2)) == []
    assert list(tails.get(1)) == [*range(13, 20), 20]
    tails.forget(1)
    tails.forget(1)
    assert len(tails) == 2


def test_a_broken_engine_answers_errors(serve: Serve) -> None:
    broken = threading.Event()

    def before_step() -> None:
        if broken.is_set():
            raise RuntimeError("secret detail")

    client = serve(before_step=before_step)
    post(client, "/fill", context_id=1, token_ids=[1])
    assert client.get("/health").status_code == 200
    broken.set()
    for _ in range(2):
        answer = client.post("/generate", json={"context_id": 1})
        assert answer.status_code in (500, 503)
        assert "secret" not in answer.text
    assert client.get("/health").status_code == 503


def test_a_key_is_asked_for_everywhere(text: TextAssets, tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine(hashed_script(tokenizer.vocab_size), info=info(tokenizer))
    with TestClient(create_app(engine, text, key="secret")) as client:
        for method, path in (("get", "/health"), ("post", "/fill"), ("post", "/generate"),
                             ("post", "/free_context")):  # fmt: skip
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                answer = client.request(method, path, headers=headers)
                assert answer.status_code == 401
                assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret"}
        assert client.get("/health", headers=right).status_code == 200


def test_an_address_of_the_network_needs_a_key() -> None:
    command = [sys.executable, "-m", "parrot_engine", "--model", "parrot-demo", "--listen"]
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PARROT_")}
    ran = subprocess.run(
        [*command, "0.0.0.0:0"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 78
    assert "PARROT_ENGINE_KEY" in ran.stderr


def test_addresses_are_checked_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARROT_ENGINE_KEY", raising=False)
    assert main(["--model", "parrot-demo", "--listen", "127.0.0.1:70000"]) == EXIT_CONFIG
    assert "HOST:PORT" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", "parrot-demo", "--listen", f"localhost:{port}"]) == EXIT_CONFIG
    # No key is needed on this machine's own address.
    assert "cannot listen on localhost" in capsys.readouterr().err
