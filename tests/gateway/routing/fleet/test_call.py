"""Calls to an upstream of several servers, through the whole gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import openai
import pytest
from harness.gateway.fleets import MODEL, fleet, user
from harness.gateway.relaying import started
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import Answer, Received, ScriptedUpstream, chat_document, document
from harness.waiting import until

from parrot_gateway.semantic.graph.node import CallNode
from parrot_gateway.settings.model import UpstreamSettings


async def test_calls_go_where_they_began_and_to_idle_servers(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, count=3) as served:
        first: dict[int, str] = {}
        for session in range(6):
            messages = [user(f"Session {session}. " + f"word{session} " * 400)]
            first[session], _ = await served.chat(messages)
            for turn in range(3):
                messages += [{"role": "assistant", "content": "Yes."}, user(f"Go on, {turn}.")]
                again, _ = await served.chat(messages)
                assert again == first[session]
        assert set(first.values()) == {"vllm-1", "vllm-2", "vllm-3"}


async def test_calls_at_once_spread(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, count=3) as served:
        chats = [
            served.chat([user(f"Question {number}: " + f"w{number} " * 300)], stream=True)
            for number in range(9)
        ]
        answers = await asyncio.gather(*chats)
        assert sorted(served.counts()) == [3, 3, 3]
        assert {name for name, _ in answers} == {"vllm-1", "vllm-2", "vllm-3"}
        assert served.placed() == [0, 0, 0]


async def test_bytes_pass_unchanged(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine) as served:
        body = b'{ "model":"fake",  "messages":[{"role":"user","content":"x"}], "odd": 1.0e0}'
        status, headers, answer = await served.service.post("/v1/chat/completions", body)
        (record,) = served.received()
        assert (status, record.body) == (200, body)
        assert b'"temperature": 1.0e0' in answer
        assert headers[b"x-parrot-engine"] in (b"vllm-1", b"vllm-2")


async def test_other_routes_are_placed(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine) as served:
        for number in range(2):
            status, headers, _ = await served.service.post(
                "/v1/embeddings", {"model": MODEL, "input": f"text {number}"}
            )
            assert status == 200
            assert headers[b"x-parrot-engine"].startswith(b"vllm-")
        status, _, answer = await served.service.post(
            "/v1/messages", {"model": MODEL, "max_tokens": 5, "messages": [user("Hello")]}
        )
        assert status == 200, answer
        assert sum(served.counts()) == 3
        assert served.placed() == [0, 0]


async def test_a_limit_holds_calls_in_the_order_of_priority(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_concurrency=1) as served:
        gates = [fake.gate() for fake in served.fakes]
        (held,) = {
            fake.script(document(chat_document(), before=gate))
            for fake, gate in zip(served.fakes, gates, strict=True)
        }

        async def call(label: str, model: str = MODEL, **parrot: Any) -> None:
            body = {"model": model, "messages": [user(label)], "parrot": parrot}
            await served.service.answer("/v1/chat/completions", body)

        both = [asyncio.create_task(call(f"slow {n}", f"vllm/{held}")) for n in range(2)]
        await until(lambda: served.placed() == [1, 1])
        late = [asyncio.create_task(call("later"))]
        await until(lambda: served.upstream.waiting == 1)
        late.append(asyncio.create_task(call("urgent", priority=5, session="s")))
        await until(lambda: served.upstream.waiting == 2)
        # The other server stays busy, so that both wait for the same one.
        gates[0].open()
        await asyncio.gather(*late)
        gates[1].open()
        await asyncio.gather(*both)
        order = [
            msgspec.json.decode(each.body)["messages"][0]["content"]
            for each in sorted(served.received(), key=lambda call: call.started_at)
        ]
        assert order.index("urgent") < order.index("later")
        assert served.placed() == [0, 0]


async def test_too_many_wait(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_concurrency=1, max_waiting=0) as served:
        body = {"model": MODEL, "messages": [user("x")]}
        _, held = await served.service.send("/v1/chat/completions", stalled())
        _, held_too = await served.service.send("/v1/chat/completions", stalled())
        await until(lambda: served.placed() == [1, 1])
        status, _, answer = await served.service.post("/v1/chat/completions", body)
        assert (status, msgspec.json.decode(answer)["error"]["code"]) == (503, "engine_overloaded")
        held.close()
        held_too.close()
        await until(lambda: served.placed() == [0, 0])


def stalled() -> bytes:
    """A call that is never answered."""
    model = "fake:fault=stall"
    return msgspec.json.encode({"model": f"vllm/{model}", "messages": [user("x")]})


@pytest.mark.parametrize(
    ("script", "stream"), [("fault=stall", False), ("fault=stall", True), ("first_ms=60000", True)]
)
async def test_a_client_that_leaves_frees_its_place(
    engine: ScriptedRemoteEngine, script: str, stream: bool
) -> None:
    async with fleet(engine) as served:
        model = f"vllm/fake:{script},key=a"
        body = {"model": model, "messages": [user("x")], "stream": stream}
        _, writer = await served.service.send("/v1/chat/completions", msgspec.json.encode(body))
        await until(lambda: any(fake.calls("a") for fake in served.fakes))
        assert sum(served.placed()) == 1
        if script.startswith("first_ms"):
            assert sum(served.pending_tokens()) > 0
        writer.close()
        await until(lambda: sum(served.placed()) == 0)
        assert served.pending_tokens() == [0, 0]
        tasks = [asyncio.create_task(f.wait_for("a", ended="aborted")) for f in served.fakes]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        for task in pending:
            task.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", ["fault=reset", "status=500", "fault=eof,after=1"])
async def test_a_call_that_fails_leaves_no_tokens_to_compute(
    engine: ScriptedRemoteEngine, script: str, stream: bool
) -> None:
    async with fleet(engine, max_retries=0) as served:
        for number in range(4):
            messages = [user(f"{number} " * 50)]
            body = {"model": f"vllm/fake:{script}", "messages": messages, "stream": stream}
            await served.service.post("/v1/chat/completions", body)
        assert (served.placed(), served.pending_tokens()) == ([0, 0], [0, 0])


class KeepingServer(ScriptedUpstream):
    """Keeps responses and files, and knows no others."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.kept: dict[str, dict[str, Any]] = {}

    def unscripted(self, call: Received) -> Answer:
        status, answer = self.answer(call.method, call.target.partition("?")[0], call.body)
        return document(answer, status)

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if method == "POST" and path in (
            "/v1/responses",
            "/v1/vector_stores",
            "/v1/chat/completions",
        ):
            given = msgspec.json.decode(body)
            previous = given.get("previous_response_id") or given.get("input_file_id")
            if previous is not None and previous not in self.kept:
                return 404, {"error": {"message": "not found", "code": "not_found"}}
            id_ = f"{path.split('/')[2][:4]}_{self.name}{len(self.kept)}"
            made = {"id": id_, "status": "completed", "previous_response_id": previous}
            self.kept[id_] = made
            return 200, made
        found = self.kept.get(path.rpartition("/")[2])
        if path in ("/v1/files", "/v1/batches") and method == "GET":
            return 200, {"object": "list", "data": [{"id": id_} for id_ in self.kept]}
        if path == "/v1/batches":
            known = msgspec.json.decode(body)["input_file_id"] in self.kept
            return (200, {"id": f"batch_{self.name}"}) if known else (404, {"error": {}})
        return (200, found) if found else (404, {"error": {"message": "not found"}})


class KeepingFleet:
    """A gateway before two servers with a memory."""

    def __init__(self, service: Service, servers: list[KeepingServer]) -> None:
        self.service = service
        self.servers = servers

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
        status, headers, answer = await self.service.post(path, body)
        return status, headers.get(b"x-parrot-engine", b"").decode(), msgspec.json.decode(answer)

    def client(self) -> openai.AsyncOpenAI:
        return self.service.client()


@asynccontextmanager
async def keeping(engine: ScriptedRemoteEngine) -> AsyncIterator[KeepingFleet]:
    with KeepingServer("one") as one, KeepingServer("two") as two:
        urls = [one.base_url, two.base_url]
        entry = UpstreamSettings(name="keep", urls=urls, models=["kept"])
        async with (
            serving(engine, upstreams=[entry]) as service,
            started(service.gateway.upstreams["keep"]),
        ):
            yield KeepingFleet(service, [one, two])


async def test_what_a_server_keeps_is_found_there(engine: ScriptedRemoteEngine) -> None:
    async with keeping(engine) as fleet_:
        asked = [
            fleet_.post("/v1/responses", {"model": "kept", "input": f"Question {number} " * 100})
            for number in range(8)
        ]
        made = [(answer["id"], server) for _, server, answer in await asyncio.gather(*asked)]
        assert {server for _, server in made} == {"keep-1", "keep-2"}
        for id_, server in made:
            body = {"model": "kept", "input": "Go on", "previous_response_id": id_}
            status, again, answer = await fleet_.post("/v1/responses", body)
            assert (status, again, answer["previous_response_id"]) == (200, server, id_)
            async with fleet_.client() as client:
                found = await client.responses.with_raw_response.retrieve(id_)
                assert found.headers["x-parrot-engine"] == server


async def test_what_no_server_is_known_to_keep_is_looked_for(engine: ScriptedRemoteEngine) -> None:
    async with keeping(engine) as fleet_:
        first, second = fleet_.servers
        second.kept["resp_old"] = {"id": "resp_old"}
        body = {"model": "kept", "input": "Go on", "previous_response_id": "resp_old"}
        status, server, _ = await fleet_.post("/v1/responses", body)
        assert (status, server) == (200, "keep-2")
        body["previous_response_id"] = "resp_never"
        status, _, answer = await fleet_.post("/v1/responses", body)
        assert (status, answer["error"]["code"]) == (404, "not_found")
        asked = [len(each.received) for each in (first, second)]
        status, _, _ = await fleet_.post("/v1/batches/batch_never/cancel", {})
        assert status == 404
        assert [len(each.received) for each in (first, second)] == [each + 1 for each in asked]


async def test_files_and_what_names_them_stay_on_one_server(engine: ScriptedRemoteEngine) -> None:
    async with keeping(engine) as fleet_:
        ids = []
        for number in range(3):
            status, server, answer = await fleet_.post("/v1/vector_stores", {"n": number})
            assert (status, server) == (200, "keep-1")
            ids.append(answer["id"])
        content = [{"type": "file", "file": {"file_id": ids[0]}}]
        for _ in range(3):
            body = {"model": "kept", "messages": [{"role": "user", "content": content}]}
            status, server, answer = await fleet_.post("/v1/chat/completions", body)
            assert (status, server) == (200, "keep-1"), answer


async def test_a_client_that_leaves_while_its_call_waits(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine, max_concurrency=1) as served:
        held = [(await served.service.send("/v1/chat/completions", stalled()))[1] for _ in range(2)]
        await until(lambda: served.placed() == [1, 1])
        _, waiting = await served.service.send("/v1/chat/completions", stalled())
        await until(lambda: served.upstream.waiting == 1)
        waiting.close()
        await until(lambda: served.upstream.waiting == 0)
        await until(lambda: sum(served.counts()) == 2)
        for writer in held:
            writer.close()
        await until(lambda: served.placed() == [0, 0])


async def test_deferred_calls_and_what_reads_them(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine) as served:
        first = {"session": "s", "output": "a", "defer": True}
        body = {"model": MODEL, "messages": [user("Write. " * 100)], "parrot": first}
        status, _, answer = await served.service.post("/v1/chat/completions", body)
        assert status == 200
        reference = msgspec.json.decode(answer)["choices"][0]["message"]["content"]
        name, _ = await served.chat([user(f"Read this: {reference}")], parrot={"session": "s"})
        assert name in ("vllm-1", "vllm-2")
        assert sum(served.counts()) == 2
        (session,) = served.service.gateway.semantic.sessions.of_tenant("default")
        written = next(node for node in session.graph if isinstance(node, CallNode))
        assert written.engine in ("vllm-1", "vllm-2")
        assert written.placement


async def test_why_it_was_that_server(engine: ScriptedRemoteEngine) -> None:
    async with fleet(engine) as served:
        messages = [user("A long story. " * 200)]
        for _ in range(2):
            body = {"model": MODEL, "messages": messages}
            _, headers, _ = await served.service.post("/v1/chat/completions", body)
        async with served.service.client() as client:
            id_ = headers[b"x-request-id"].decode()
            found: Any = await client.get(f"/calls/{id_}", cast_to=object)
        server = headers[b"x-parrot-engine"].decode()
        explanation = found["explanation"]
        assert explanation["engine"] == server
        assert explanation["text"].startswith(f"Ran on {server} at once")
        assert "prompt tokens were cached there" in explanation["text"]
        engines = {each["engine"] for each in explanation["alternatives"]}
        assert engines == {"vllm-1", "vllm-2"}
