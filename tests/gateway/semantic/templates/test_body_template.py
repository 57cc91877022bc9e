"""Large bodies are read for references where nobody else has to wait for it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import COMPLETIONS, Http, body_of, http_of

from parrot_gateway.calls.requests.call import CallRequest
from parrot_gateway.semantic.templates.body_template import INLINE_BYTES, BodyTemplate

LONG = 4 * INLINE_BYTES


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Sizes of the bodies that were read, and whether that was in the event loop's thread."""
    seen: list[tuple[int, bool]] = []

    def watched(name: str) -> None:
        original = getattr(BodyTemplate, name)

        def read(body: bytes | CallRequest, *args: Any, **options: Any) -> BodyTemplate:
            size = body.size if isinstance(body, CallRequest) else len(body)
            seen.append((size, threading.current_thread() is threading.main_thread()))
            return original(body, *args, **options)  # type: ignore[no-any-return]

        monkeypatch.setattr(BodyTemplate, name, read)

    watched("of")
    watched("everywhere")
    return seen


async def reference(http: Http) -> str:
    answer = await http.post("/v1/variables", json={"session": "s", "value": "v"})
    return str(answer.json()["reference"])


@pytest.mark.parametrize("fields", [{}, {"session": "s"}, {"session": "s", "defer": True}])
async def test_calls(
    engine: ScriptedRemoteEngine, read: list[tuple[int, bool]], fields: dict[str, Any]
) -> None:
    async with http_of(engine) as http:
        text = "[1" * (LONG // 2) + await reference(http)
        for prompt, large in ((text[-200:], False), (text, True)):
            read.clear()
            parrot = {"parrot": fields} if fields else {}
            await http.call(COMPLETIONS, prompt, **parrot)
            assert read
            assert all(in_loop != large for _, in_loop in read), read


async def test_texts_that_are_resolved(
    engine: ScriptedRemoteEngine, read: list[tuple[int, bool]]
) -> None:
    async with http_of(engine) as http:
        text = "x" * LONG + await reference(http)
        answer = await http.post("/v1/resolve", json={"text": text})
        assert answer.json() == {"text": "x" * LONG + "v"}
        assert [in_loop for _, in_loop in read] == [False]


async def test_a_session_that_is_closed_meanwhile(
    engine: ScriptedRemoteEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    original = BodyTemplate.of_call

    def slow(*args: Any, **options: Any) -> BodyTemplate:
        reading.set()
        assert go_on.wait(10)
        return original(*args, **options)

    async with http_of(engine) as http:
        await http.post("/v1/variables", json={"session": "s"})
        monkeypatch.setattr(BodyTemplate, "of_call", slow)
        body = body_of(COMPLETIONS, "x" * LONG, parrot={"session": "s", "output": "o"})
        call = asyncio.create_task(http.post(COMPLETIONS, content=json.dumps(body)))
        assert await asyncio.to_thread(reading.wait, 10)
        assert (await http.delete("/v1/sessions/s")).status_code == 200
        go_on.set()
        answer = await call
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "session_not_found"


@pytest.mark.parametrize(("length", "large"), [(100, False), (LONG, True)])
async def test_calls_of_parrots_own_api(
    engine: ScriptedRemoteEngine, read: list[tuple[int, bool]], length: int, large: bool
) -> None:
    async with http_of(engine) as http:
        session = (await http.post("/v1/session", json={})).json()
        outputs = [{"name": name, "is_output": True} for name in "ab"]
        body = {**session, "template": "x" * length + "{{a}} {{b}}", "parameters": outputs}
        answer = await http.post("/v1/semantic_call", json=body | {"models": ["m"]})
        assert answer.status_code == 200, answer.text
        assert [in_loop for _, in_loop in read] == [not large] * 2
        await http.request("DELETE", f"/v1/session/{session['session_id']}", json=session)
