"""Prompts and answers of the latest calls in memory: of which calls, how many, and whose not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import CHAT, COMPLETIONS, Http, echo
from harness.gateway.serving import serving
from harness.waiting import until

from parrot_gateway.settings.model import BatchSettings, TelemetrySettings
from parrot_gateway.telemetry import kept_content
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.content.content import CallContent
from parrot_gateway.telemetry.kept_content import KeptContent

SESSION = {"session": "s"}


@asynccontextmanager
async def kept(engine: ScriptedRemoteEngine, **settings: Any) -> AsyncIterator[Http]:
    """A client of a gateway that keeps content."""
    echo(engine)
    batches = settings.pop("batches", None)
    telemetry = TelemetrySettings(keep_content=True, **settings)
    async with (
        serving(engine, telemetry=telemetry, batches=batches) as service,
        Http(service) as http,
    ):
        assert service.gateway.kept_content is not None
        if batches is None:
            service.gateway.kept_content.start()
        yield http
        await service.gateway.kept_content.close()


async def text(http: Http, call: str) -> dict[str, Any]:
    """Return what the page shows of a call."""
    answer = await http.get(f"/ui/api/calls/{call}/text")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def said(http: Http, call: str) -> tuple[list[str], list[str]]:
    """Texts of the prompt and of the answer, once they are kept."""
    found: dict[str, Any] = {}

    async def is_kept() -> bool:
        nonlocal found
        found = await text(http, call)
        return found["source"] == "kept"

    while not await is_kept():
        await http.get("/health")
    return (
        [part["content"] for each in found["input_messages"] for part in each["parts"]],
        [part["content"] for each in found["output_messages"] for part in each["parts"]],
    )


async def test_a_response_that_is_made_in_the_background(engine: ScriptedRemoteEngine) -> None:
    async with kept(engine) as http:
        body = {"model": "m", "input": "Hi", "background": True, "max_output_tokens": 200}
        answer = await http.post("/v1/responses", json=body)
        asked, answered = await said(http, answer.headers["x-request-id"])
        assert asked == ["Hi"]
        assert "Hi" in answered[0]


async def test_outputs_of_parrots_own_api(engine: ScriptedRemoteEngine) -> None:
    async with kept(engine) as http:
        session = (await http.post("/v1/session", json={})).json()
        body = {
            "template": "Tell {{who}}: {{one}} Then {{two}}",
            "parameters": [
                {"name": "who", "is_output": False, "value": "me"},
                {"name": "one", "is_output": True, "sampling_config": {"max_gen_length": 9}},
                {"name": "two", "is_output": True, "sampling_config": {"max_gen_length": 9}},
            ],
            "models": [],
            "model_type": "token_id",
            **{key: session[key] for key in ("session_id", "session_auth")},
        }
        answer = await http.post("/v1/semantic_call", json=body)
        assert answer.status_code == 200, answer.text
        records = http.service.gateway.feed.calls
        await until(lambda: len(list(records.all_ended())) == 2)
        first, second = records.all_ended()
        asked, answered = await said(http, first.call_id)
        assert asked == ["Tell me: "]
        assert (await said(http, second.call_id))[0] == [f"Tell me: {answered[0]} Then "]
        assert "session_auth" not in str(await text(http, first.call_id))


async def test_lines_of_batches(engine: ScriptedRemoteEngine, tmp_path: Path) -> None:
    async with kept(engine, batches=BatchSettings(folder=tmp_path)) as http:
        body = {"model": "m", "prompt": "A line", "max_tokens": 200}
        line = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": body}
        file = (
            await http.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": ("in.jsonl", json.dumps(line).encode())},
            )
        ).json()
        begun = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=begun)).status_code == 200
        records = http.service.gateway.feed.calls
        await until(lambda: len(list(records.all_ended())) == 1)
        (record,) = records.all_ended()
        assert await said(http, record.call_id) == (["A line"], ["<A line>"])


async def test_the_same_call_again_takes_the_same_text(engine: ScriptedRemoteEngine) -> None:
    async with kept(engine) as http:
        for output in ("a", "b"):
            parrot = {**SESSION, "output": output, "defer": True}
            fields: dict[str, Any] = {"temperature": 0, "parrot": parrot}
            answer = await http.call(COMPLETIONS, "Same", **fields)
            call = answer.headers["x-parrot-call"]
            assert await said(http, call) == (["Same"], ["<Same>"])


async def test_the_oldest_make_room(engine: ScriptedRemoteEngine) -> None:
    async with kept(engine, max_content_bytes=6000) as http:
        content = http.service.gateway.kept_content
        assert content is not None
        calls, size = list[str](), 0
        for number in range(8):
            answer = await http.call(CHAT, f"{number} " * 100)
            calls.append(answer.headers["x-request-id"])
            await said(http, calls[-1])
            if number == 0:
                size = content.size_bytes
        assert 2000 < content.size_bytes <= 6000
        shown = [(await text(http, call))["source"] for call in calls]
        # The latest, as many as there is room for.
        count = 6000 // size
        assert shown == [None] * (8 - count) + ["kept"] * count
        assert content.size_bytes == count * size
        gone = await text(http, calls[0])
        assert (gone["source"], gone["input_messages"]) == (None, [])
        assert "telemetry.max_content_bytes" in gone["why"]


async def test_too_much_at_once_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that wait to be read, calls that are kept, and one that cannot be read."""
    monkeypatch.setattr(kept_content, "MAX_KEPT", 3)
    monkeypatch.setattr(kept_content, "_MAX_PENDING_BYTES", 500)
    kept = KeptContent(TelemetrySettings(keep_content=True))

    def end(call: str, text: str | None = "") -> None:
        record = CallRecord("req", call, 0.0)
        if text is not None:
            record.content = CallContent()
            record.content.asked(COMPLETIONS, b'{"prompt": "%s"}' % text.encode())
        if call == "broken":
            record.content = cast(CallContent, SimpleNamespace(size_bytes=14))
        kept.ended(record)

    async def found(*calls: str) -> list[str]:
        await until(lambda: kept.find(calls[-1]))
        return [call for call in calls if kept.find(call) is not None]

    kept.start()
    end("untold", None)
    end("a", "x" * 243)
    # 257 wait; 243 more are all that may.
    end("too large", "x" * 230)
    end("broken")
    end("b", "x" * 215)
    end("too much")
    assert await found("untold", "a", "too large", "broken", "too much", "b") == ["a", "b"]
    assert caplog.messages == ["what call broken said could not be kept"]
    # There is room again; the same call takes the place of what it said before.
    size = kept.size_bytes
    end("b", "x" * 215)
    end("c", "x" * 200)
    assert await found("a", "b", "c") == ["a", "b", "c"]
    end("d", "x" * 215)
    assert await found("a", "b", "c", "d") == ["b", "c", "d"]
    assert size < kept.size_bytes < 2 * size
    await kept.close()
    end("e")
    await asyncio.sleep(0)
    assert kept.find("e") is None


async def test_of_excluded_tenants_nothing_is_kept_or_shown(engine: ScriptedRemoteEngine) -> None:
    async with kept(engine, content_exclude_tenants=("default",)) as http:
        parrot = {**SESSION, "output": "a"}
        answer = await http.call(COMPLETIONS, "Secret", parrot=parrot)
        variable = answer.headers["x-parrot-variable"]
        found = await text(http, answer.headers["x-parrot-call"])
        assert "telemetry.content_exclude_tenants" in found["why"]
        assert "Secret" not in str(found)
        assert found["variables"] == []
        session = answer.headers["x-parrot-session"]
        shown = (await http.get(f"/ui/api/sessions/{session}/variables/{variable}")).json()
        assert (shown["value"], shown["characters"]) == (None, None)
        assert "telemetry.content_exclude_tenants" in shown["why"]
        response = {"model": "m", "input": "Secret"}
        made = await http.post("/v1/responses", json=response)
        assert (await text(http, made.headers["x-request-id"]))["source"] is None
        content = http.service.gateway.kept_content
        assert content is not None
        assert content.size_bytes == 0


async def test_without_the_setting_it_says_so(http: Http) -> None:
    answer = await http.call(CHAT, "Hi")
    found = await text(http, answer.headers["x-request-id"])
    assert found["source"] is None
    assert "telemetry.keep_content" in found["why"]
    (record,) = http.service.gateway.feed.calls.all_ended()
    assert record.content is None
    parrot = {**SESSION, "output": "a"}
    answer = await http.call(COMPLETIONS, "Hi", parrot=parrot)
    (variable,) = (await text(http, answer.headers["x-parrot-call"]))["variables"]
    assert (variable["direction"], variable["name"]) == ("writes", "a")
    assert variable["value"] == "<Hi>"
    made = await http.post("/v1/responses", json={"model": "m", "input": "Stored"})
    stored = await text(http, made.headers["x-request-id"])
    assert (stored["source"], stored["request"]) == ("response", None)
    assert "Stored" in str(stored["input_messages"])
    hidden = await http.post("/v1/responses", json={"model": "m", "input": "No", "store": False})
    assert (await text(http, hidden.headers["x-request-id"]))["source"] is None


@pytest.mark.parametrize("path", ["/ui/api/calls/none/text", "/ui/api/sessions/x/variables/y"])
async def test_what_is_not_known(http: Http, path: str) -> None:
    assert (await http.get(path)).status_code == 404
