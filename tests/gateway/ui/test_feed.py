"""The live page's data: a real gateway, the real client, and streams read as a browser does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving
from harness.scripted_upstream import ScriptedUpstream, chat_document, document
from harness.waiting import until

from parrot_gateway.linking.process.wire import LinksChanged
from parrot_gateway.settings.model import SessionSettings, UISettings, UpstreamSettings
from parrot_gateway.ui import session_graph
from parrot_gateway.ui.feed import MAX_WAITING_BYTES, Watcher
from parrot_gateway.ui.session_graph import SessionGraph

STORY = "Once upon a time there was a parrot that told long stories to everybody who came by."
Event = tuple[str, Any]


class Stream:
    """One stream of events."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response
        self.lines = response.aiter_lines()

    async def next(self) -> Event:
        """The next event; comments are passed over."""
        name = ""
        async with asyncio.timeout(60):
            async for line in self.lines:
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    return name, json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream has ended")

    async def until(self, name: str, is_meant: Callable[[Any], object]) -> Any:
        """The next event of a name of which something is true."""
        while True:
            found, data = await self.next()
            if found == name and is_meant(data):
                return data

    async def node(self, is_meant: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The node of a graph of which something is true, once a change tells it."""

        def meant(data: Any) -> list[dict[str, Any]]:
            return [node for node in data["nodes"] if is_meant(node)]

        return meant(await self.until("change", meant))[0]

    async def graph(self, is_meant: Callable[[Any], object]) -> Any:
        """The graph with its changes so far, once something is true of it.

        What the linking process is late with comes as a change.
        """
        graph: dict[str, Any] = {"calls": [], "links": []}
        while not is_meant(graph):
            name, data = await self.next()
            if name == "graph":
                graph = data
            elif name == "change":
                nodes = {call["id"]: call for call in (*graph["calls"], *data["nodes"])}
                graph["calls"] = list(nodes.values())
                graph["links"] += data["links"]
        return graph

    async def session(self, is_meant: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The view of a session of which something is true, once it is told."""
        views: list[dict[str, Any]] = []

        def look(data: Any) -> bool:
            views[:] = [view for view in data if is_meant(view)] if isinstance(data, list) else []
            return bool(views)

        await self.until("sessions", look)
        return views[0]


class Page:
    """Stand-in for the page: reads streams of a service."""

    def __init__(self, service: Service, http: httpx.AsyncClient) -> None:
        self.service = service
        self.feed = service.gateway.feed
        self.http = http
        self.openai = service.client()

    @asynccontextmanager
    async def stream(self, path: str = "/ui/api/events") -> AsyncIterator[Stream]:
        async with self.http.stream("GET", path) as response:
            assert response.status_code == 200, await response.aread()
            yield Stream(response)

    async def say(self, *texts: str, **options: Any) -> Any:
        """A chat whose turns are these, the client's first."""
        roles = ("user", "assistant")
        messages: Any = [
            {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
        ]
        return await self.openai.chat.completions.create(model="any", messages=messages, **options)


@asynccontextmanager
async def opened(
    engine: ScriptedRemoteEngine, *, links: bool = False, **settings: Any
) -> AsyncIterator[Page]:
    """A page of a service; with `links` the linking process runs."""
    async with (
        serving(engine, **settings) as service,
        httpx.AsyncClient(base_url=service.root, timeout=60) as http,
    ):
        if links:
            await service.gateway.linking.start()
            # It skips what has waited for long: as long as its start may take on a busy machine.
            await service.gateway.linking.ask("", "statistics", timeout_s=60)
        try:
            yield Page(service, http)
        finally:
            service.gateway.feed.close()
            await service.gateway.linking.close()


async def test_a_loop_without_headers_appears_as_a_graph_while_it_runs(
    engine: ScriptedRemoteEngine,
) -> None:
    async with opened(engine, links=True) as page:
        async with page.stream() as stream:
            name, overview = await stream.next()
            assert (name, overview["sessions"], overview["tenants"]) == ("overview", [], [])
            first = (await page.say(STORY)).choices[0].message.content
            known = await stream.session(lambda view: view["output_tokens"] == 3)
            assert (known["inferred"], known["state"], known["calls"]) == (True, "idle", 1)
            path = f"/ui/api/sessions/{known['id']}/events"
            async with page.stream(path) as graph:
                name, before = await graph.next()
                assert name == "graph"
                assert [call["state"] for call in before["calls"]] == ["done"]
                assert (before["session"]["id"], before["closed"]) == (known["id"], False)
                # The second call is held on its engine: it is seen as it runs.
                engine.automatic = False
                task = asyncio.create_task(page.say(STORY, first, "And then?"))
                running = await stream.session(
                    lambda view: (view["id"], view["state"]) == (known["id"], "running")
                )
                assert running["running"] == 1
                await graph.node(lambda node: node["state"] in ("waiting", "running"))
                engine.automatic = True
                engine.step()
                await task
                idle = await stream.session(lambda view: view["output_tokens"] == 6)
                assert (idle["calls"], idle["depth"], idle["width"]) == (2, 2, 1)
                assert idle["prompt_tokens"] > known["prompt_tokens"] > 0
                node = await graph.node(
                    lambda node: node["finished_s"] is not None and node["stage"] == 1
                )
                assert (node["engine"], node["status"], node["output_tokens"]) == (
                    "scripted", 200, 3
                )  # fmt: skip
                assert 0 < node["submitted_s"] <= node["placed_s"] <= node["first_token_s"]
                assert node["first_token_s"] <= node["finished_s"]
            # Who comes later sees the same.
            async with page.stream(path) as graph:
                after = await graph.graph(lambda graph: graph["links"])
                assert [call["stage"] for call in after["calls"]] == [0, 1]
                (link,) = after["links"]
                assert (link["from"], link["to"], link["kind"]) == (
                    before["calls"][0]["id"], node["id"], "continues"
                )  # fmt: skip
        call = (await page.http.get(f"/ui/api/calls/{node['id']}")).json()
        assert (call["session"], call["inferred"], call["state"]) == (known["id"], True, "done")
        assert call["links"][0]["from"] == link["from"]
        assert call["times"]["total_s"] >= call["times"]["first_token_s"] > 0
        again = (await page.http.get(f"/ui/api/calls/{call['request_id']}")).json()
        assert again["id"] == node["id"]
        overview = (await page.http.get("/ui/api/overview")).json()
        assert [view["id"] for view in overview["sessions"]] == [known["id"]]
        assert overview["tenants"][0] == {
            "tenant": "default", "calls": 2, "running": 0, "errors": 0, "output_tokens": 6,
            "prompt_tokens": idle["prompt_tokens"], "cached_tokens": 0,
        }  # fmt: skip
        assert sum(overview["scheduler"]["placements"].values()) == 2


def linked(call: str, submitted: float, *sources: str) -> dict[str, Any]:
    """A call of the session `sess_1`, as the linking process tells of it."""
    links = [{"from": each, "kind": "continues", "confidence": 1.0} for each in sources]
    return {
        "id": call, "session": "sess_1", "name": "chat", "state": "done", "tools": [], "model": "m",
        "submitted": submitted, "finished": submitted + 1.0, "error": None, "links": links,
    }  # fmt: skip


async def test_calls_are_numbered_by_their_age_however_late_they_are_told(
    engine: ScriptedRemoteEngine,
) -> None:
    async with opened(engine) as page:
        gateway = page.service.gateway
        graph = SessionGraph(
            *("sess_1", "default", gateway.semantic, gateway.linking, page.feed.calls),
            explanations=None,
        )
        for call in (linked("call_b", 2.0, "call_a"), linked("call_a", 1.0)):
            graph.take(LinksChanged([], [call], False, True))
        changes = graph.changes({})
    assert changes is not None
    nodes = [json.loads(bytes(node)) for node in changes["nodes"]]
    assert [(node["id"], node["name"], node["stage"]) for node in nodes] == [
        ("call_a", "chat 1", 0),
        ("call_b", "chat 2", 1),
    ]
    assert [(link["from"], link["to"]) for link in changes["links"]] == [("call_a", "call_b")]


async def test_sessions_that_turn_out_to_be_one_are_shown_as_one(
    engine: ScriptedRemoteEngine,
) -> None:
    engine.script = lambda prompt, sampling: engine.text(
        " ".join(f"word{len(prompt)}x{number}" for number in range(16))
    )
    async with opened(engine, links=True) as page, page.stream() as stream:
        await stream.next()
        questions = (STORY, "Tell me about the sea, and leave nothing out that matters.")
        said = [await page.say(text, max_tokens=200) for text in questions]
        listed: dict[str, float] = {}
        while len(listed) < 2:
            # One may be listed, and gone again, before it is known where its call belongs.
            views = await stream.until("sessions", lambda data: "gone" not in data)
            listed |= {view["id"]: view["started"] for view in views}
        later = max(listed, key=lambda each: listed[each])
        async with page.stream(f"/ui/api/sessions/{later}/events") as graph:
            await graph.next()
            answers = (str(each.choices[0].message.content) for each in said)
            await page.say("Compare: " + " --- ".join(answers))
            gone: set[str] = set()
            while not gone:
                told = await stream.until("sessions", lambda data: "gone" in data)
                # The third call may have stood for a session of its own.
                gone = listed.keys() & set(told["gone"])
            whole = await graph.until("graph", lambda data: len(data["calls"]) == 3)
            assert {link["kind"] for link in whole["links"]} == {"output"}
            (left,) = listed.keys() - gone
            assert whole["session"]["id"] == left


async def test_a_declared_session_is_told_with_its_variables_until_it_is_closed(
    engine: ScriptedRemoteEngine,
) -> None:
    async with opened(engine) as page, page.stream() as stream:
        await stream.next()
        body = {"parrot": {"session": "report", "output": "draft", "defer": True}}
        await page.say(STORY, extra_body=body)
        view = await stream.session(lambda view: view["state"] == "idle" and view["calls"])
        assert (view["name"], view["inferred"], view["models"]) == ("report", False, ["any"])
        async with page.stream(f"/ui/api/sessions/{view['id']}/events") as graph:
            _, before = await graph.next()
            assert [(v["name"], v["state"]) for v in before["variables"]] == [("draft", "ready")]
            inputs = {"draft": "draft"}
            body = {"parrot": {"session": "report", "inputs": inputs, "output": "review"}}
            await page.say("Judge: {{draft}}", extra_body=body)
            states: dict[str, str] = {}
            while states.get("review") != "ready":
                changes = await graph.until("change", lambda data: True)
                states |= {each["name"]: each["state"] for each in changes["variables"]}
            deep = await stream.session(lambda view: view["calls"] == 2)
            assert (deep["depth"], deep["width"]) == (2, 1)
            await page.http.delete("/v1/sessions/report")
            assert (await graph.until("closed", lambda data: True)) == {}
        assert await stream.until("sessions", lambda data: "gone" in data) == {"gone": [view["id"]]}
        assert (await page.http.get(f"/ui/api/sessions/{view['id']}/events")).status_code == 404


async def test_inferred_links_stand_in_named_sessions_too(engine: ScriptedRemoteEngine) -> None:
    async with opened(engine, links=True) as page, page.stream() as stream:
        texts = [STORY]
        for number in range(3):
            answer = await page.say(*texts, extra_headers={"x-parrot-session": "named"})
            texts += [answer.choices[0].message.content, f"And then, for the {number}th time?"]
        view = await stream.session(lambda view: (view["calls"], view["depth"]) == (3, 3))
        assert (view["name"], view["inferred"], view["width"]) == ("named", False, 1)
        async with page.stream(f"/ui/api/sessions/{view['id']}/events") as graph:
            whole = await graph.graph(lambda graph: len(graph["links"]) == 2)
            calls = [(call["name"], call["stage"]) for call in whole["calls"]]
            assert calls == [("chat 1", 0), ("chat 2", 1), ("chat 3", 2)]


@pytest.mark.parametrize("names_variables", [False, True])
async def test_a_watched_graph_stays_bounded(
    monkeypatch: pytest.MonkeyPatch, engine: ScriptedRemoteEngine, names_variables: bool
) -> None:
    monkeypatch.setattr(session_graph, "MAX_CALLS", 5)
    sessions = SessionSettings(max_finished_calls=8)
    async with opened(engine, sessions=sessions) as page:
        seen: dict[str, dict[str, Any]] = {}
        for number in range(3):
            await say_in_session(page, number, names_variables)
        session = page.service.gateway.semantic.sessions.find("default", "long")
        async with page.stream(f"/ui/api/sessions/{session.id}/events") as graph:
            _, whole = await graph.next()
            seen |= {call["id"]: call for call in whole["calls"]}
            for number in range(3, 12):
                await say_in_session(page, number, names_variables)
                is_done = False
                while not is_done:
                    changes = await graph.until("change", lambda data: True)
                    seen |= {node["id"]: node for node in changes["nodes"]}
                    for call in changes["gone"]:
                        del seen[call]
                    is_done = list(seen.values())[-1]["state"] == "done" and len(seen) <= 5
            names = [f"v{n}" if names_variables else f"chat {n + 1}" for n in range(7, 12)]
            assert [call["name"] for call in seen.values()] == names
            assert changes["calls_not_kept"] == 7
            (watched,) = page.feed._graphs
            sizes = {
                name: len(kept)
                for name, kept in vars(watched.graph).items()
                if isinstance(kept, dict)
            }
            assert max(sizes.values()) <= 12, sizes


async def say_in_session(page: Page, number: int, names_variables: bool) -> None:
    """A call of a session named `long`, each of which may read what the last one wrote."""
    fields: dict[str, Any] = {"session": "long"}
    text = STORY
    if names_variables:
        fields |= {"output": f"v{number}"}
        if number:
            fields, text = {**fields, "inputs": {"last": f"v{number - 1}"}}, "On from {{last}}"
    await page.say(text, extra_body={"parrot": fields})


async def test_one_who_reads_nothing_costs_nothing_and_is_told_everything_anew(
    engine: ScriptedRemoteEngine,
) -> None:
    async with opened(engine) as page:
        reader, writer = await page.service.connect()
        writer.write(b"GET /ui/api/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"event: overview")
        (watcher,) = page.feed._watchers
        # More than all buffers between the gateway and its client take.
        while not watcher.is_stale:
            for _ in range(8):
                watcher.push(b": " + b"x" * (MAX_WAITING_BYTES // 4) + b"\n\n")
            await asyncio.sleep(0)
        assert watcher._events == []
        async with asyncio.timeout(60):
            while b"event: overview" not in await reader.readline():
                pass
        writer.close()


async def test_a_call_that_waits_for_its_upstream_runs(
    engine: ScriptedRemoteEngine, upstream: ScriptedUpstream
) -> None:
    gate = upstream.gate()
    model = upstream.script(document(chat_document(), before=gate))
    settings = UpstreamSettings(name="up", url=upstream.base_url, models=[model])
    async with opened(engine, upstreams=[settings]) as page, page.stream() as stream:
        await page.service.gateway.upstreams["up"].start()
        headers = {"x-parrot-session": "far"}
        body = {"model": model, "messages": [{"role": "user", "content": STORY}]}
        asked = page.http.post("/v1/chat/completions", json=body, headers=headers)
        task = asyncio.create_task(asked)
        view = await stream.session(lambda view: view["state"] == "running")
        assert (view["name"], view["running"], view["models"]) == ("far", 1, [model])
        async with page.stream(f"/ui/api/sessions/{view['id']}/events") as graph:
            (node,) = (await graph.next())[1]["calls"]
            assert (node["state"], node["engine"]) == ("running", None)
            gate.open()
            assert (await task).status_code == 200
            done = await graph.node(lambda node: node["state"] == "done")
            assert done["engine"] == "up"
        overview = (await page.http.get("/ui/api/overview")).json()
        assert [each["kind"] for each in overview["engines"]] == ["scripted", "upstream"]
        await page.service.gateway.upstreams["up"].close()


async def test_a_call_that_failed_is_told_as_its_client_got_it(
    engine: ScriptedRemoteEngine,
) -> None:
    async with opened(engine) as page:
        with pytest.raises(openai.BadRequestError) as raised:
            await page.say("word " * 600)
        request_id = raised.value.response.headers["x-request-id"]
        call = (await page.http.get(f"/ui/api/calls/{request_id}")).json()
        assert (call["state"], call["status"]) == ("failed", 400)
        assert call["error_code"] == "context_length_exceeded"
        assert call["error_message"] == raised.value.body["message"]  # type: ignore[index]
        missing = await page.http.get("/ui/api/calls/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "call_not_found")


async def test_streams_are_bounded_and_leave_nothing_behind(engine: ScriptedRemoteEngine) -> None:
    async with opened(engine, links=True, ui=UISettings(max_streams=2)) as page:
        linking = page.service.gateway.linking
        async with page.stream(), page.stream() as last:
            refused = await page.http.get("/ui/api/events")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "too_many_streams")
            assert "ui.max_streams" in error["message"]
            assert linking._watcher is not None
            await last.response.aclose()
            await until(lambda: page.feed.num_watchers == 1)
            assert (await page.http.get("/ui/api/overview")).status_code == 200
        await until(lambda: page.feed.num_watchers == 0)
        assert linking._watcher is None
        assert page.feed._task is None
        assert page.feed._sessions.views() == []


async def test_a_shutdown_ends_the_streams(engine: ScriptedRemoteEngine) -> None:
    async with opened(engine) as page, page.stream() as stream:
        await stream.next()
        page.feed.close()
        assert await stream.until("closed", lambda data: True) == {}
        assert [line async for line in stream.lines] in ([], [""])
        late = await page.http.get("/ui/api/events")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")


async def test_a_silent_stream_has_comments(engine: ScriptedRemoteEngine) -> None:
    async with opened(engine, keep_alive_s=0.02) as page, page.stream() as stream:
        await stream.next()
        async for line in stream.lines:
            if line == ": keep-alive":
                break


async def test_a_slow_reader_is_given_everything_anew() -> None:
    watcher = Watcher()
    assert watcher.begin(lambda: b"all") == b"all"
    watcher.push(b"one ")
    watcher.push(b"two ")
    assert await watcher.read(1.0) == b"one two "
    part = b"x" * (MAX_WAITING_BYTES // 4)
    for _ in range(1000):
        watcher.push(part)
    # It keeps none of what it could not read in time.
    assert watcher.is_stale
    assert await watcher.read(1.0) == b""
    assert watcher.begin(lambda: b"all again") == b"all again"
    watcher.push(b"three")
    assert await watcher.read(1.0) == b"three"
    watcher.close()
    assert await watcher.read(1.0) == b""


@pytest.mark.parametrize(
    ("calls_key", "admin_key", "opens", "closed_code"),
    [
        (None, None, [None, "any"], None),
        ("calls", None, ["calls"], "invalid_api_key"),
        ("calls", "admin", ["admin"], "invalid_admin_key"),
        (None, "admin", ["admin"], "invalid_admin_key"),
    ],
)
async def test_keys(
    monkeypatch: pytest.MonkeyPatch,
    engine: ScriptedRemoteEngine,
    calls_key: str | None,
    admin_key: str | None,
    opens: list[str | None],
    closed_code: str | None,
) -> None:
    for name, key in (("PARROT_API_KEY", calls_key), ("PARROT_ADMIN_KEY", admin_key)):
        if key is not None:
            monkeypatch.setenv(name, key)
    async with opened(engine) as page:
        for key in (None, "any", "calls", "admin"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            answer = await page.http.get("/ui/api/overview", headers=headers)
            if key in opens or closed_code is None:
                assert answer.status_code == 200
                assert answer.headers["cache-control"] == "no-store"
                off = answer.json()["needs_admin_key_for_actions"]
                assert off == (admin_key is None)
            else:
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, closed_code)
            text = await page.http.get("/ui/api/calls/none/text", headers=headers)
            assert text.status_code == (404 if answer.status_code == 200 else 401)
        page_elsewhere = {"origin": "http://evil.example"}
        if calls_key is None:
            answer = await page.http.get("/ui/api/overview", headers=page_elsewhere)
            assert answer.json()["error"]["code"] == "origin_not_allowed"
        if calls_key is None and admin_key is None:
            # As an image of another page is loaded: without an origin.
            answer = await page.http.get("/ui/api/events", headers={"sec-fetch-site": "cross-site"})
            assert answer.json()["error"]["code"] == "origin_not_allowed"
            head = await page.http.head("/ui/api/events")
            assert head.headers["content-type"].startswith("text/event-stream")
