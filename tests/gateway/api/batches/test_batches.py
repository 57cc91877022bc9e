"""`/v1/batches` with the real client, on scripted engines and upstreams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, linked, serving
from harness.scripted_upstream import ScriptedUpstream, chat_document, document, error
from harness.waiting import until
from parrot_engine.protocol import Generate

from parrot_gateway.batches import runner
from parrot_gateway.batches.lines import validate
from parrot_gateway.settings.model import BatchSettings, UpstreamSettings
from parrot_gateway.telemetry.call_record import CallRecord

CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        message = {"role": "user", "content": custom_id}
        body = {"messages": [message], "max_tokens": 20, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}


def jsonl(lines: Iterable[Any]) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


async def begin(
    client: openai.AsyncOpenAI, lines: Iterable[Any], endpoint: Any = CHAT, **more: Any
) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.01)


async def answers(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = (await client.files.content(file_id)).read()
    found = [json.loads(each) for each in content.splitlines()]
    by_id = {each["custom_id"]: each for each in found}
    assert len(by_id) == len(found), "a line has two answers"
    return by_id


@pytest.fixture
def batches(tmp_path: Path) -> BatchSettings:
    return BatchSettings(folder=tmp_path, max_lines=200, max_line_bytes=5_000, max_batches=3)


@pytest_asyncio.fixture
async def kept(engine: ScriptedRemoteEngine, batches: BatchSettings) -> AsyncIterator[Service]:
    async with serving(engine, batches=batches) as service:
        yield service


@pytest_asyncio.fixture
async def client(kept: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with kept.client() as client:
        yield client


async def test_a_batch_of_chats(kept: Service, client: openai.AsyncOpenAI) -> None:
    lines = [line(f"id {n}", temperature=0) for n in range(100)]
    records: list[CallRecord] = []
    kept.gateway.call_records.sinks.append(records.append)
    batch = await begin(client, lines, metadata={"run": "7"})
    assert (batch.object, batch.status) == ("batch", "validating")
    assert batch.expires_at == batch.created_at + 86_400
    done = await ended(client, batch.id)
    assert (done.status, done.errors, done.error_file_id) == ("completed", None, None)
    assert done.request_counts.to_dict() == {"total": 100, "completed": 100, "failed": 0}
    assert (done.metadata, done.model, done.endpoint) == ({"run": "7"}, "m", CHAT)
    assert done.usage.output_tokens == 100 * 3
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    stamps = (done.created_at, done.in_progress_at, done.finalizing_at, done.completed_at)
    assert list(stamps) == sorted(stamps)
    found = await answers(client, done.output_file_id)
    assert set(found) == {each["custom_id"] for each in lines}
    for each in found.values():
        assert (each["error"], each["response"]["status_code"]) == (None, 200)
        assert each["response"]["request_id"].startswith("req_")
        assert each["id"].startswith("batch_req_")
        answer = openai.types.chat.ChatCompletion.model_validate(each["response"]["body"])
        assert answer.choices[0].message.content == "Hello world"
    # Each line is a call like any other.
    assert {(each.batch, each.path, each.status) for each in records} == {(batch.id, CHAT, 200)}
    ids = {each["response"]["request_id"] for each in found.values()}
    assert {each.request_id for each in records} == ids
    output = await client.files.retrieve(str(done.output_file_id))
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert [each.id async for each in await client.batches.list()] == [batch.id]
    folder = kept.gateway.batches.settings.data_folder / "batches"
    # The journal goes once the end is on the disk.
    await until(lambda: [each.name for each in folder.iterdir()] == [f"{batch.id}.json"])


async def test_calls_are_the_least_urgent(
    kept: Service, client: openai.AsyncOpenAI, engine: ScriptedRemoteEngine
) -> None:
    """They are throughput tasks of one application, behind all others, and bounded in number."""
    engine.automatic = False
    batch = await begin(client, [line(f"{n}") for n in range(60)])
    await engine.wait_for(lambda: len(engine.contexts) >= 32)
    assert kept.gateway.batches.describe()["running_lines"] == 32
    chat = asyncio.create_task(
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
    )
    await engine.wait_for(lambda: len(engine.contexts) >= 33)
    engine.automatic = True
    engine.step()
    await chat
    assert (await ended(client, batch.id)).status == "completed"
    assert engine.most_contexts <= 33
    generated = [each for each in engine.submitted if isinstance(each, Generate)]
    priorities = [each.priority for each in generated]
    assert len(set(priorities[:32])) == 1
    assert priorities[32] < min(priorities[:32]) - 400


async def test_half_of_an_engine_stays_free(engine: ScriptedRemoteEngine, tmp_path: Path) -> None:
    settings = BatchSettings(folder=tmp_path, max_running_lines=1000)
    half = 4
    engine.info = replace(engine.info, max_batch_size=2 * half)
    async with serving(engine, batches=settings) as service, service.client() as client:
        engine.automatic = False
        batch = await begin(client, [line(f"{n}") for n in range(half + 1)])
        await engine.wait_for(lambda: len(engine.contexts) >= half)
        assert service.gateway.batches.describe()["running_lines"] == half
        engine.automatic = True
        engine.step()
        assert (await ended(client, batch.id)).status == "completed"
    assert engine.most_contexts == half


async def test_completions_and_responses(client: openai.AsyncOpenAI) -> None:
    for url, body in (
        ("/v1/completions", {"prompt": "Once"}),
        ("/v1/responses", {"input": "Once", "store": False}),
    ):
        batch = await begin(client, [line("a", url, **body)], url)
        done = await ended(client, batch.id)
        assert done.status == "completed", done
        answer = (await answers(client, done.output_file_id))["a"]["response"]["body"]
        assert "Hello world" in json.dumps(answer)
        assert done.usage.output_tokens == 3


async def test_faults_of_a_request_go_to_the_error_file(client: openai.AsyncOpenAI) -> None:
    lines = [line("good"), line("hot", temperature=99), line("wrong", messages="no")]
    done = await ended(client, (await begin(client, lines)).id)
    assert done.status == "completed"
    assert done.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert set(await answers(client, done.output_file_id)) == {"good"}
    errors = await answers(client, done.error_file_id)
    assert errors["hot"]["response"]["status_code"] == 400
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["wrong"]["response"]["body"]["error"]["param"] == "messages"


BAD = {
    "invalid_json_line": ["{"],
    "missing_required_parameter": [{"custom_id": "b"}],
    "invalid_custom_id": [{**line("b"), "custom_id": 5}],
    "invalid_method": [{**line("b"), "method": "GET"}],
    "mismatched_url": [line("b", "/v1/completions", prompt="x")],
    "invalid_request": [line("b", stream=True)],
    "duplicate_custom_id": [line("a")],
    "line_too_long": [line("b", user="x" * 6_000)],
    "too_many_requests": [line(f"b{n}") for n in range(200)],
}


@pytest.mark.parametrize("code", BAD)
async def test_a_bad_line_fails_the_batch(client: openai.AsyncOpenAI, code: str) -> None:
    done = await ended(client, (await begin(client, [line("a"), "", *BAD[code]])).id)
    assert (done.status, done.output_file_id) == ("failed", None)
    assert done.failed_at is not None
    fault = done.errors.data[0]
    assert (fault.code, fault.line) == (code, 202 if code == "too_many_requests" else 3)
    assert fault.message


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
async def test_empty_files_fail(client: openai.AsyncOpenAI, content: bytes) -> None:
    file = await client.files.create(file=("e", content), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h"
    )
    done = await ended(client, batch.id)
    assert (done.status, done.errors.data[0].code) == ("failed", "empty_file")


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", 400),
        ({"endpoint": None}, "endpoint", 400),
        ({"endpoint": 5}, "endpoint", 400),
        ({"completion_window": "1h"}, "completion_window", 400),
        ({"input_file_id": None}, "input_file_id", 400),
        ({"input_file_id": "file-parrot-none"}, "input_file_id", 404),
        ({"metadata": {"a": 1}}, "metadata", 400),
        ({"metadata": {"a" * 65: "x"}}, "metadata", 400),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}},
         "output_expires_after.seconds", 400),
    ],
)  # fmt: skip
async def test_refusals_name_the_field(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str, status: int
) -> None:
    file = await client.files.create(file=b"{}", purpose="batch")
    whole = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **body}
    with pytest.raises(openai.APIStatusError) as caught:
        await client.batches.create(**whole)
    assert caught.value.status_code == status
    assert str(caught.value.param if status == 400 else param).startswith(param)


async def test_cancelling_in_the_middle(
    kept: Service, client: openai.AsyncOpenAI, engine: ScriptedRemoteEngine
) -> None:
    engine.automatic = False
    batch = await begin(client, [line(f"{n}") for n in range(80)])
    await engine.wait_for(lambda: len(engine.contexts) == 32)
    with pytest.raises(openai.ConflictError) as caught:
        await client.files.delete(batch.input_file_id)
    assert batch.id in caught.value.message
    assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
    done = await ended(client, batch.id)
    await engine.settle()
    assert done.status == "cancelled"
    assert done.cancelled_at >= done.cancelling_at >= done.in_progress_at
    assert done.request_counts.to_dict() == {"total": 80, "completed": 0, "failed": 80}
    errors = await answers(client, done.error_file_id)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)
    await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize("cancelled_while", ["it waits", "its file is read"])
async def test_cancelling_before_the_file_was_read(
    kept: Service, monkeypatch: pytest.MonkeyPatch, cancelled_while: str
) -> None:
    """Nothing is known of its lines then: none has an answer, none an error."""
    service, reading, go_on = kept.gateway.batches, threading.Event(), threading.Event()

    def read(*arguments: Any, **limits: Any) -> Any:
        reading.set()
        assert go_on.wait(20)
        return validate(*arguments, **limits)

    monkeypatch.setattr(runner, "validate", read)
    async with kept.client() as client:
        content = jsonl([line("a"), line("b")])
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        stored = (await service.open()).find("default", file.id)
        batch = await service.create(stored, CHAT, metadata=None, output_lifetime_s=None)
        if cancelled_while == "its file is read":
            assert await asyncio.to_thread(reading.wait, 20)
        await service.cancel(batch)
        go_on.set()
        done = await ended(client, batch.id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("cancelled", None, None)
    assert done.request_counts.to_dict() == {"total": 0, "completed": 0, "failed": 0}


async def test_old_batches_and_the_oldest_of_too_many_are_forgotten(
    kept: Service, engine: ScriptedRemoteEngine, batches: BatchSettings
) -> None:
    async with kept.client() as client:
        made = [(await begin(client, [line("a")])).id for _ in range(3)]
        for batch_id in made:
            assert (await ended(client, batch_id)).status == "completed"
    folder = batches.data_folder / "batches"
    # Their journals go once the end is on the disk.
    await until(lambda: len(list(folder.iterdir())) == 3)
    await kept.gateway.batches.close()
    for number, batch_id in enumerate(made):
        path = folder / f"{batch_id}.json"
        state = json.loads(path.read_bytes())
        state["created_at"] += number
        path.write_text(json.dumps(state))
    async with serving(ScriptedRemoteEngine(), batches=batches) as service, service.client() as all:
        assert [each.id async for each in await all.batches.list()] == made[::-1]
    state["reached"]["completed"] -= int(batches.file_ttl_s)
    path.write_text(json.dumps(state))
    few = batches.model_copy(update={"max_files": 2})
    async with serving(ScriptedRemoteEngine(), batches=few) as service:
        # The oldest goes first, the one past its time last.
        await until(lambda: not (folder / f"{made[2]}.json").exists())
        assert [each.id for each in service.gateway.batches.newest_first("default")] == [made[1]]
        assert [each.name for each in folder.iterdir()] == [f"{made[1]}.json"]


async def test_unknown_batches_and_too_many(
    client: openai.AsyncOpenAI, engine: ScriptedRemoteEngine
) -> None:
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask("batch_parrot_none")
    engine.automatic = False
    running = [await begin(client, [line("a")]) for _ in range(3)]
    with pytest.raises(openai.APIStatusError) as caught:
        await begin(client, [line("a")])
    assert (caught.value.status_code, caught.value.code) == (503, "too_many_batches")
    assert [each.id async for each in await client.batches.list(limit=2)] == [
        each.id for each in reversed(running)
    ]
    engine.automatic = True
    await engine.wait_for(lambda: len(engine.contexts) == 3)
    engine.step()
    for each in running:
        assert (await ended(client, each.id)).status == "completed"
    # Those that have ended count no more.
    assert (await ended(client, (await begin(client, [line("a")])).id)).status == "completed"


async def test_a_restart_goes_on_and_answers_nothing_twice(
    engine: ScriptedRemoteEngine, batches: BatchSettings
) -> None:
    """A gateway that stops in the middle; then half a line, as a killed process leaves."""
    engine.automatic = False
    async with serving(engine, batches=batches) as service, service.client() as client:
        batch = await begin(client, [line(f"{n}") for n in range(50)])
        await engine.wait_for(lambda: len(engine.contexts) == 32)
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 20:
            # Those after the first 32 are not to end, however long the answers take to be written.
            if sum(isinstance(each, Generate) for each in engine.submitted) <= 32:
                engine.step()
            await asyncio.sleep(0)
    folder = batches.data_folder
    output = folder / "batches" / f"{batch.id}.output"
    before = output.read_bytes()
    assert 20 <= len(before.splitlines()) < 50
    output.write_bytes(before + b'{"id": "batch_req_')
    again = ScriptedRemoteEngine("Again")
    async with serving(again, batches=batches) as service, service.client() as client:
        done = await ended(client, batch.id)
        assert done.request_counts.to_dict() == {"total": 50, "completed": 50, "failed": 0}
        content = (await client.files.content(str(done.output_file_id))).read()
    assert content.startswith(before)
    assert len(ids_of(content)) == 50
    ran = [each for each in again.submitted if isinstance(each, Generate)]
    assert len(ran) == 50 - len(before.splitlines())


def ids_of(content: bytes) -> set[str]:
    return {json.loads(each)["custom_id"] for each in content.splitlines()}


async def test_an_end_that_was_cut_short_makes_its_files_once(batches: BatchSettings) -> None:
    """A gateway that stopped with both files made, and the batch not completed."""
    folder = batches.data_folder / "batches"
    async with serving(ScriptedRemoteEngine(), batches=batches) as service, service.client() as all:
        batch = await begin(all, [line("a"), line("hot", temperature=99)])
        first = await ended(all, batch.id)
        file_ids = [first.output_file_id, first.error_file_id]
        contents = [(await all.files.content(file_id)).read() for file_id in file_ids]
        await until(lambda: len(list(folder.iterdir())) == 1)
    path = folder / f"{batch.id}.json"
    state = json.loads(path.read_bytes())
    del state["reached"]["completed"]
    path.write_text(json.dumps(state | {"status": "finalizing"}))
    for suffix, content in zip((".output", ".errors"), contents, strict=True):
        path.with_suffix(suffix).write_bytes(content)
    async with serving(ScriptedRemoteEngine(), batches=batches) as service, service.client() as all:
        done = await ended(all, batch.id)
        assert done.status == "completed"
        assert [done.output_file_id, done.error_file_id] == file_ids
        made = await all.files.list(purpose="batch_output")
        assert sorted([each.id async for each in made]) == sorted(file_ids)
        assert [(await all.files.content(file_id)).read() for file_id in file_ids] == contents


@pytest.mark.parametrize("status", ["in_progress", "finalizing"])
async def test_a_late_batch_expires(
    engine: ScriptedRemoteEngine, batches: BatchSettings, status: str
) -> None:
    """Found after its window by a restarted gateway: what was answered stays, the rest is not."""
    engine.automatic = False
    async with serving(engine, batches=batches) as service, service.client() as client:
        batch = await begin(client, [line("a"), line("b")])
        await engine.wait_for(lambda: len(engine.contexts) == 2)
    path = batches.data_folder / "batches" / f"{batch.id}.json"
    state = json.loads(path.read_bytes())
    state["expires_at"] -= 100_000
    if status == "finalizing":
        state |= {"status": status, "is_late": True}
    path.write_text(json.dumps(state))
    again = ScriptedRemoteEngine()
    async with serving(again, batches=batches) as service, service.client() as client:
        done = await ended(client, batch.id)
        assert (done.status, done.output_file_id) == ("expired", None)
        errors = await answers(client, done.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}


async def test_lines_go_to_upstreams_and_busy_ones_wait(
    engine: ScriptedRemoteEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot_gateway.batches.runner._FIRST_PAUSE_S", 0.01)
    with ScriptedUpstream() as upstream:
        pretty = json.dumps(chat_document(), indent=2).encode()
        good = upstream.script(document(pretty))
        busy = upstream.script(error(429), error(503), error(429), error(429), document(pretty))
        broken = upstream.script(error(502))
        odd = upstream.script(document(b"<html>"))
        entry = UpstreamSettings(
            name="up", url=upstream.base_url, models="*", max_retries=0, breaker_failures=100
        )
        settings = BatchSettings(folder=tmp_path, upstream_batches="run")
        async with (
            serving(engine, batches=settings, upstreams=[entry]) as service,
            service.client() as client,
        ):
            models = (good, busy, broken, odd, "m")
            batch = await begin(client, [line(name, model=name) for name in models])
            done = await ended(client, batch.id)
            assert done.request_counts.to_dict() == {"total": 5, "completed": 3, "failed": 2}
            found = await answers(client, done.output_file_id)
            assert set(found) == {good, busy, "m"}
            assert found[good]["response"]["body"] == chat_document()
            errors = await answers(client, done.error_file_id)
            assert {each["response"]["status_code"] for each in errors.values()} == {502}
        assert len(upstream.calls(broken)) == 3
        assert len(upstream.calls(busy)) == 5


async def test_batches_of_an_upstream_pass_through(
    engine: ScriptedRemoteEngine, tmp_path: Path
) -> None:
    with ScriptedUpstream() as upstream:
        upstream._scripts[""] = upstream._scripts["None"] = [document({"id": "batch_x"})]
        entry = UpstreamSettings(name="up", url=upstream.base_url, models=["theirs"])
        settings = BatchSettings(folder=tmp_path)
        async with (
            serving(engine, batches=settings, upstreams=[entry]) as service,
            service.client() as client,
        ):
            given = {"endpoint": CHAT, "completion_window": "24h"}
            theirs = await client.batches.create(input_file_id="file-x", **given)  # type: ignore[arg-type]
            assert theirs.id == "batch_x"
            await client.batches.cancel("batch_x")
            ours = await begin(client, [line("a")])
            assert (await ended(client, ours.id)).status == "completed"
        seen = [call.target for call in upstream.received]
        assert seen == ["/v1/batches", "/v1/batches/batch_x/cancel"]


async def test_batches_belong_to_a_tenant(kept: Service, client: openai.AsyncOpenAI) -> None:
    batch = await begin(client, [line("a")])
    service = kept.gateway.batches
    assert service.newest_first("another") == []
    with pytest.raises(Exception, match="No batch found"):
        service.find("another", batch.id)
    await until(lambda: not service.describe()["running_batches"])


async def test_a_disk_that_takes_no_more_fails_the_batch(
    kept: Service, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> bool:
        raise OSError("No space left on device")

    monkeypatch.setattr("parrot_gateway.batches.journal.Journal.add", full)
    done = await ended(client, (await begin(client, [line("a"), line("b")])).id)
    assert (done.status, done.errors.data[0].code) == ("failed", "internal_error")
    assert "No space" not in done.errors.data[0].message
    assert done.failed_at is not None
    await until(lambda: not kept.gateway.batches.describe()["running_batches"])
    await client.files.delete(done.input_file_id)


async def test_an_engine_that_leaves_is_waited_for(
    engine: ScriptedRemoteEngine, batches: BatchSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines that an engine took with it run again once there is one."""
    monkeypatch.setattr("parrot_gateway.batches.runner._FIRST_PAUSE_S", 0.01)
    engine.automatic = False
    async with serving(engine, batches=batches) as service, service.client() as client:
        batch = await begin(client, [line(f"{n}") for n in range(4)])
        await engine.wait_for(lambda: len(engine.contexts) == 4)
        service.gateway.registry.remove(service.remote.id, "gone")
        engine.contexts.clear()
        again = ScriptedRemoteEngine()
        async with linked(again, service.gateway):
            done = await ended(client, batch.id)
            assert done.request_counts.to_dict() == {"total": 4, "completed": 4, "failed": 0}
            await again.settle()
