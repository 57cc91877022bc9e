"""`GET /v1/calls/{id}` knows a call as soon as its client knows the answer, on a real process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess, upstream_settings, wait_until
from harness.raw_http import chat_body
from harness.scripted_upstream import (
    Answer,
    Part,
    ScriptedUpstream,
    chat_document,
    chunk,
    completion_document,
    data,
    document,
    error,
    event_stream,
)

WORDS = (
    "heron fox duck reed pond barge quay slate barley harbour ferry lantern orchard miller bridge "
    "copper saddle thimble velvet walnut beacon candle drift ember furrow granite hollow island"
)
SESSIONS, ROUNDS = 200, 4


def story_of(seed: str) -> str:
    """A text that nobody else writes."""
    return " ".join(random.Random(seed).choices(WORDS.split(), k=30)).capitalize() + "."


@pytest.fixture(scope="module")
def client(relay: GatewayProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=relay.base_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def naming(upstream: ScriptedUpstream) -> Iterator[httpx.Client]:
    """Connect to a gateway that names calls and sessions in its answers, and sessions to upstreams.

    Words of other tenants are left out.
    """
    upstreams = [
        upstream_settings("scripted", upstream.base_url),
        upstream_settings("claude", upstream.base_url, api="anthropic"),
    ]
    linking = {
        "headers": True,
        "session_header": "X-Session-Id",
        "session_wait_s": 1.0,
        "exclude_tenants": ["another"],
    }
    config = {"upstreams": upstreams, "linking": linking}
    with (
        GatewayProcess(config=config) as gateway,
        httpx.Client(base_url=gateway.base_url, timeout=60) as client,
    ):
        yield client


def call_of(client: httpx.Client, name: str) -> dict[str, Any]:
    response = client.get(f"/calls/{name}")
    assert response.status_code == 200, response.text
    return dict(response.json())


def links_of(client: httpx.Client, name: str) -> list[tuple[str, str]]:
    return [(link["from"], link["kind"]) for link in call_of(client, name)["links"]]


def answered(text: str, id: str) -> Answer:
    return document(chat_document(text) | {"id": id})


def streamed(text: str, id: str) -> list[bytes]:
    """The events of a chat that is streamed, the last one apart."""
    return [
        data(chunk("scripted", {"role": "assistant", "content": ""}) | {"id": id}),
        data(chunk("scripted", {"content": text}) | {"id": id}),
        data(chunk("scripted", {}, "stop") | {"id": id}),
        b"data: [DONE]\n\n",
    ]


def response_document(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "msg_1", "role": "assistant", "content": content}
    output = [item] if text else []
    return {"id": id, "object": "response", "status": status, "output": output}


def message_document(id: str, text: str) -> dict[str, Any]:
    content = [{"type": "text", "text": text}]
    return {"id": id, "type": "message", "role": "assistant", "content": content}


def message_events(id: str, text: str) -> list[bytes]:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": message_document(id, "") | {"content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ]
    return [f"event: {each['type']}\n".encode() + data(each) for each in events]


def response_events(id: str, text: str) -> list[bytes]:
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response_document(id, "", "in_progress")},
        {"type": "response.output_text.delta", "delta": text},
        {"type": "response.completed", "response": response_document(id, text)},
    ]
    return [f"event: {each['type']}\n".encode() + data(each) for each in events]


#: By route, what holds a prompt, and a whole answer and a streamed one.
ROUTES: dict[str, tuple[Any, Any, Any]] = {
    "/chat/completions": (
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda id, text: chat_document(text) | {"id": id},
        lambda id, text: streamed(text, id),
    ),
    "/completions": (
        lambda text: {"prompt": text},
        lambda id, text: completion_document(text) | {"id": id},
        lambda id, text: [data(completion_document(text) | {"id": id}), b"data: [DONE]\n\n"],
    ),
    "/responses": (lambda text: {"input": text}, response_document, response_events),
    "/messages": (
        lambda text: {"max_tokens": 9, "messages": [{"role": "user", "content": text}]},
        message_document,
        message_events,
    ),
}


def read_id(answer: httpx.Response) -> str:
    """The id of a response, as a client finds it."""
    text = answer.text
    if not text.startswith("{"):
        text = next(line for line in text.splitlines() if line.startswith("data: ")).removeprefix(
            "data: "
        )
    found = json.loads(text)
    holder = found.get("response") or found.get("message") or found
    return str(holder["id"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_every_route(
    client: httpx.Client, upstream: ScriptedUpstream, route: str, stream: bool
) -> None:
    request, whole, events = ROUTES[route]
    one, two = (f"{word}{route}-{stream}".replace("/", "-") for word in ("one", "two"))
    story = story_of(one)
    if stream:
        answers = [event_stream(*events(one, story)), event_stream(*events(two, "Fine."))]
    else:
        answers = [document(whole(one, story)), document(whole(two, "Fine."))]
    model = upstream.script(*answers)
    name = f"claude/{model}" if route == "/messages" else model
    body = {"model": name, "stream": stream}
    first = client.post(route, json=body | request("Tell of a heron."))
    assert first.status_code == 200, first.text
    source = call_of(client, read_id(first))
    assert (source["response_id"], source["state"], source["links"]) == (one, "done", [])
    second = client.post(route, json=body | request(f"Check this: {story}"))
    assert read_id(second) == two
    assert links_of(client, two) == [(source["id"], "output")]
    by_request = call_of(client, second.headers["x-request-id"])
    assert by_request == call_of(client, two) == call_of(client, by_request["id"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("route", ROUTES)
def test_headers_name_call_and_session(
    naming: httpx.Client, upstream: ScriptedUpstream, route: str, stream: bool
) -> None:
    request, whole, events = ROUTES[route]
    one, two = (f"{word}{route}-named-{stream}".replace("/", "-") for word in ("one", "two"))
    story = story_of(one)
    pairs = [(one, story), (two, "Fine.")]
    if stream:
        model = upstream.script(*(event_stream(*events(*pair)) for pair in pairs))
    else:
        model = upstream.script(*(document(whole(*pair)) for pair in pairs))
    name = f"claude/{model}" if route == "/messages" else model
    sessions = []
    for id, text in [(one, "Tell of a duck."), (two, f"Check this: {story}")]:
        answer = naming.post(route, json={"model": name, "stream": stream} | request(text))
        assert call_of(naming, id)["id"] == answer.headers["x-parrot-call"]
        assert call_of(naming, id)["session"] == answer.headers["x-parrot-session"]
        sessions.append(answer.headers["x-parrot-session"])
    assert sessions[0] == sessions[1]


@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_whose_end_comes_late(
    client: httpx.Client, upstream: ScriptedUpstream, route: str
) -> None:
    """The client has the last event, and goes on before the upstream closes the stream."""
    request, _, events = ROUTES[route]
    one, two = (f"{word}{route}-late".replace("/", "-") for word in ("one", "two"))
    gate = upstream.gate()
    story = story_of(one)
    model = upstream.script(
        event_stream(*events(one, story), gate, b": end\n\n"), event_stream(*events(two, "Fine."))
    )
    name = f"claude/{model}" if route == "/messages" else model
    body = {"model": name, "stream": True}
    last = events(one, story)[-1].decode().strip().splitlines()[-1]
    try:
        with client.stream("POST", route, json=body | request("Tell of a fox.")) as stream:
            for line in stream.iter_lines():
                if line == last:
                    break
            source = call_of(client, one)
            assert source["state"] == "done"
            client.post(route, json=body | request(f"Check this: {story}"))
            assert links_of(client, two) == [(source["id"], "output")]
    finally:
        gate.open()
    assert call_of(client, one)["state"] == "done"


def test_an_answer_in_single_bytes(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    whole = b"".join(streamed(story_of("bytes"), "chatcmpl-bytes"))
    parts: list[Part] = [whole[at : at + 1] for at in range(len(whole))]
    model = upstream.script(event_stream(*parts), answered("Fine.", "chatcmpl-bytes-2"))
    client.post("/chat/completions", json=chat_body(model, "A story.", stream=True))
    source = call_of(client, "chatcmpl-bytes")
    client.post("/chat/completions", json=chat_body(model, f"Is this right? {story_of('bytes')}"))
    assert (source["id"], "output") in links_of(client, "chatcmpl-bytes-2")


def test_an_answer_that_is_compressed_unasked(
    client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    body = gzip.compress(
        json.dumps(chat_document(story_of("gzip")) | {"id": "chatcmpl-gzip"}).encode()
    )
    packed = Answer(headers=(("content-encoding", "gzip"),), parts=(body,))
    damaged = Answer(parts=(body[:40],))
    model = upstream.script(packed, damaged)
    answer = client.post("/chat/completions", json=chat_body(model, "A story."))
    assert answer.json()["id"] == "chatcmpl-gzip"
    assert call_of(client, "chatcmpl-gzip")["state"] == "done"
    answer = client.post("/chat/completions", json=chat_body(model, "A story."))
    assert call_of(client, answer.headers["x-request-id"])["response_id"] is None


def test_answers_without_ids_or_with_equal_ones(
    client: httpx.Client, upstream: ScriptedUpstream
) -> None:
    model = upstream.script(
        document({"choices": chat_document(story_of("ids"))["choices"]}),
        answered("One.", "chatcmpl-equal"),
        answered("Two.", "chatcmpl-equal"),
    )
    names = [
        client.post("/chat/completions", json=chat_body(model, text)).headers["x-request-id"]
        for text in ("A.", "B.", "C.")
    ]
    calls = [call_of(client, name) for name in names]
    assert [call["response_id"] for call in calls] == [None, "chatcmpl-equal", "chatcmpl-equal"]
    assert call_of(client, "chatcmpl-equal")["id"] == calls[2]["id"]


@pytest.mark.parametrize("status", [400, 429, 500])
def test_errors(client: httpx.Client, upstream: ScriptedUpstream, status: int) -> None:
    model = upstream.script(error(status))
    answer = client.post("/chat/completions", json=chat_body(f"once/{model}", "A story."))
    assert answer.status_code == status
    call = call_of(client, answer.headers["x-request-id"])
    assert (call["state"], call["error"], call["response_id"]) == ("failed", status, None)


def test_models_that_nobody_has(demo: GatewayProcess) -> None:
    status, headers, _ = demo.post("/v1/chat/completions", chat_body("no-such-model", "Hello."))
    assert status == 404
    call = demo.get(f"/v1/calls/{headers['x-request-id']}")
    assert (call["state"], call["error"]) == ("failed", 404)


def test_a_stream_that_fails(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    model = upstream.script(
        event_stream(*streamed(story_of("broken"), "chatcmpl-broken")[:2], cut=True)
    )
    client.post("/chat/completions", json=chat_body(f"once/{model}", "A story.", stream=True))
    assert call_of(client, "chatcmpl-broken")["state"] == "failed"


def test_clients_that_leave(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """The text they have read is known: it may stand in their next prompt."""
    gate = upstream.gate()
    model = upstream.script(
        event_stream(*streamed(story_of("left"), "chatcmpl-left")[:2], gate),
        answered("Fine.", "chatcmpl-after"),
    )
    body = chat_body(model, "A story.", stream=True)
    with client.stream("POST", "/chat/completions", json=body) as stream:
        for line in stream.iter_lines():
            if "heron" in line:
                break
    try:

        def is_cancelled() -> bool:
            response = client.get("/calls/chatcmpl-left")
            return response.status_code == 200 and response.json()["state"] == "cancelled"

        wait_until(is_cancelled, "the end of the call")
        client.post(
            "/chat/completions", json=chat_body(model, f"Go on from this: {story_of('left')}")
        )
        source = call_of(client, "chatcmpl-left")
        assert links_of(client, "chatcmpl-after") == [(source["id"], "output")]
    finally:
        gate.open()


@pytest.mark.parametrize("megabytes", [5, 20])
def test_large_prompts(client: httpx.Client, upstream: ScriptedUpstream, megabytes: int) -> None:
    """Prompts that are too long to be looked at are known all the same."""
    id = f"chatcmpl-large-{megabytes}"
    model = upstream.script(answered("Fine.", id))
    text = "".join(f"Line {number} of a long text.\n" for number in range(megabytes * 2**20 // 28))
    before = client.get("/../health").json()["linking"]
    client.post("/chat/completions", json=chat_body(model, text))
    assert call_of(client, id)["state"] == "done"
    after = client.get("/../health").json()["linking"]
    assert after["linked"] == before["linked"] + 1
    assert after["skipped"] == before["skipped"] + (megabytes > 8)


def test_more_than_the_process_can_take(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """While it has not got the large prompts yet, further ones come without their texts."""
    text = story_of("flood") * (5 * 2**20 // 200)
    ids = [f"chatcmpl-flood-{number}" for number in range(8)]
    before = client.get("/../health").json()["linking"]
    os.kill(before["pid"], signal.SIGSTOP)
    try:
        for id in ids:
            body = chat_body(upstream.script(answered("Fine.", id)), text)
            assert client.post("/chat/completions", json=body).status_code == 200
    finally:
        os.kill(before["pid"], signal.SIGCONT)
    assert [call_of(client, id)["state"] for id in ids] == ["done"] * len(ids)
    after = client.get("/../health").json()["linking"]
    assert after["linked"] == before["linked"] + len(ids)
    assert after["skipped"] > before["skipped"]


def test_responses_made_in_the_background(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    model = upstream.script(
        document(response_document("resp_bg", "", "queued")),
        document(response_document("resp_bg2", "Fine.")),
    )
    body = {"model": model, "input": "A story.", "background": True}
    client.post("/responses", json=body)
    source = call_of(client, "resp_bg")
    assert (source["state"], source["finished"]) == ("running", None)


def test_responses_made_in_the_background_by_an_own_model(demo: GatewayProcess) -> None:
    body = {
        "model": DEMO_MODEL,
        "input": "Tell me of a heron, a fox and a lake.",
        "background": True,
        "max_output_tokens": 60,
        "temperature": 1.2,
    }
    _, _, begun = demo.post("/v1/responses", body)
    assert demo.get(f"/v1/calls/{begun['id']}")["state"] in ("running", "done")

    def done() -> Any:
        response = demo.get(f"/v1/responses/{begun['id']}")
        return response if response["status"] not in ("queued", "in_progress") else None

    response = wait_until(done, "the response")
    source = demo.get(f"/v1/calls/{begun['id']}")
    assert source["state"] == "done"
    text = response["output"][-1]["content"][0]["text"]
    body = {"model": DEMO_MODEL, "prompt": f"Check this: {text}", "max_tokens": 2}
    _, _, second = demo.post("/v1/completions", body)
    links = demo.get(f"/v1/calls/{second['id']}")["links"]
    assert [(link["from"], link["kind"]) for link in links] == [(source["id"], "output")]


def test_sessions_that_clients_name(client: httpx.Client, upstream: ScriptedUpstream) -> None:
    """Their calls are linked too, and stay theirs."""
    story = story_of("names")
    model = upstream.script(
        answered(story, "chatcmpl-named-1"), answered("Fine.", "chatcmpl-named-2")
    )
    for number, (name, text) in enumerate([("mine", "A story."), ("yours", f"Check: {story}")], 1):
        answer = client.post(
            "/chat/completions", json=chat_body(model, text), headers={"X-Parrot-Session": name}
        )
        call = call_of(client, f"chatcmpl-named-{number}")
        assert call["id"] == answer.headers["x-parrot-call"]
        assert call["session"] == answer.headers["x-parrot-session"]
        assert not call["inferred"]
    assert call["links"][0]["from"] == call_of(client, "chatcmpl-named-1")["id"]
    assert call_of(client, "chatcmpl-named-1")["session"] != call["session"]


@pytest.mark.parametrize(
    ("value", "is_linked"), [("off", False), ("OFF", False), ("false", False), ("0", False),
                             ("on", True), ("", True), ("True", True)]
)  # fmt: skip
def test_the_header_that_keeps_calls_out(
    client: httpx.Client, upstream: ScriptedUpstream, value: str, is_linked: bool
) -> None:
    model = upstream.script(answered("Fine.", "chatcmpl-switch"))
    headers = {"X-Parrot-Link": value}
    answer = client.post("/chat/completions", json=chat_body(model, "Hello."), headers=headers)
    assert answer.status_code == 200
    found = client.get(f"/calls/{answer.headers['x-request-id']}")
    assert (found.status_code == 200) == is_linked


@pytest.mark.parametrize("route", ROUTES)
def test_a_switch_that_is_neither_on_nor_off(
    client: httpx.Client, upstream: ScriptedUpstream, route: str
) -> None:
    model = upstream.script(answered("Fine.", "chatcmpl-switch"))
    name = f"claude/{model}" if route == "/messages" else model
    body = {"model": name} | ROUTES[route][0]("Hello.")
    answer = client.post(route, json=body, headers={"X-Parrot-Link": "perhaps"})
    assert answer.status_code == 400, answer.text
    assert "X-Parrot-Link" in answer.text
    assert upstream.calls(model) == []


def test_tenants_that_are_left_out(naming: httpx.Client, upstream: ScriptedUpstream) -> None:
    config = {
        "upstreams": [upstream_settings("scripted", upstream.base_url)],
        "linking": {"exclude_tenants": ["default"]},
    }
    model = upstream.script(*[answered("Fine.", "chatcmpl-tenant")] * 2)
    with GatewayProcess(config=config) as gateway:
        gateway.post("/v1/chat/completions", chat_body(model, "Hello."))
        found = gateway.get("/v1/calls/chatcmpl-tenant")
        assert "message" in found["error"]
    naming.post("/chat/completions", json=chat_body(model, "Hello."))
    assert call_of(naming, "chatcmpl-tenant")["error"] is None


def test_calls_that_are_passed_on_name_their_session(
    naming: httpx.Client, upstream: ScriptedUpstream
) -> None:
    story = story_of("passed on")
    model = upstream.script(*[document(chat_document(story))] * 3)
    question = {"role": "user", "content": "Tell me of a heron and of a fox."}
    answer = {"role": "assistant", "content": story}
    turns = {"model": model, "messages": [question, answer, {"role": "user", "content": "Go on."}]}
    naming.post("/chat/completions", json={"model": model, "messages": [question]})
    naming.post("/chat/completions", json=turns)
    naming.post("/chat/completions", json=turns, headers={"X-Session-Id": "mine"})
    named = [call.headers["x-session-id"] for call in upstream.calls(model)]
    assert named[0] == named[1]
    assert named[0].startswith("sess_")
    assert named[2] == "mine"


async def test_many_sessions_that_look_after_each_answer(
    relay: GatewayProcess, upstream: ScriptedUpstream
) -> None:
    """Each session's next call names the one before, found by its response the moment it is there;
    every other session streams."""

    def told(number: int, turn: int) -> str:
        return f"In turn {turn} the traveller {number} met {number * 7 + turn} herons by the road."

    async def get(client: aiohttp.ClientSession, id: str) -> dict[str, Any]:
        async with client.get(f"calls/{id}") as found:
            assert found.status == 200, f"{id}: {await found.text()}"
            return dict(await found.json())

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        is_streamed = number % 2 == 1
        ids = [f"chatcmpl-many-{number}-{turn}" for turn in range(ROUNDS)]
        texts = [told(number, turn) for turn in range(ROUNDS)]
        make = streamed if is_streamed else answered
        answers = [make(text, id) for text, id in zip(texts, ids, strict=True)]
        model = upstream.script(
            *(each if isinstance(each, Answer) else event_stream(*each) for each in answers)
        )
        messages: list[dict[str, str]] = []
        earlier: list[str] = []
        for turn, (text, id) in enumerate(zip(texts, ids, strict=True)):
            messages.append({"role": "user", "content": f"Traveller {number}, turn {turn}?"})
            body = {"model": model, "messages": messages, "stream": is_streamed}
            async with client.post("chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            call = await get(client, id)
            assert call["state"] == "done"
            assert [(e["from"], e["kind"]) for e in call["links"]] == [
                (source, "continues") for source in earlier[-1:]
            ]
            earlier.append(call["id"])
            messages.append({"role": "assistant", "content": text})
        for id, source in zip(ids[1:], earlier, strict=False):
            assert [each["from"] for each in (await get(client, id))["links"]] == [source]

    # Of clients the one that takes least.
    async with aiohttp.ClientSession(
        f"{relay.base_url}/",
        timeout=aiohttp.ClientTimeout(60),
        connector=aiohttp.TCPConnector(limit=SESSIONS),
    ) as client:
        await asyncio.gather(*(one(client, number) for number in range(SESSIONS)))
