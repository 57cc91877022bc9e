"""`/v1/responses` on the wire, and named contexts in front of an upstream."""

from __future__ import annotations

import json
from typing import Any

from harness.processes import DEMO_MODEL, GatewayProcess
from harness.raw_http import RawConnection, Response, check_error
from harness.scripted_upstream import ScriptedUpstream, chat_document, chat_events, document, error
from harness.scripted_upstream import event_stream as scripted_stream

RESPONSES = "/v1/responses"


def events_of(response: Response) -> list[dict[str, Any]]:
    """Each an `event:` line, a `data:` line and a blank line; nothing else but comments."""
    text = response.body.decode()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        event: dict[str, Any] = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_order_of_events(demo: GatewayProcess) -> None:
    body = {"model": DEMO_MODEL, "input": "Hello!", "stream": True, "max_output_tokens": 20,
            "temperature": 0, "ignore_eos": True}  # fmt: skip
    response = demo.ask("POST", RESPONSES, body)
    assert response.status == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    ids = {event["response"]["id"] for event in events if "response" in event}
    assert len(ids) == 1
    # The last event comes with the end of the stream, so that a connection can be used again.
    assert response.segments[-1].endswith(b"0\r\n\r\n")
    assert b"response.incomplete" in response.segments[-1]
    again = demo.ask("GET", f"{RESPONSES}/{ids.pop()}?stream=true")
    assert again.body == response.body


def test_one_connection_for_everything(demo: GatewayProcess) -> None:
    with RawConnection(demo.port, api_key=demo.api_key) as connection:
        body = {"model": DEMO_MODEL, "input": "Hello!", "max_output_tokens": 8}
        made = connection.ask("POST", RESPONSES, body)
        assert made.status == 200
        path = f"{RESPONSES}/{made.json['id']}"
        assert connection.ask("GET", path).body == made.body
        assert connection.ask("GET", f"{path}/input_items?order=asc").json["data"][0]["role"]
        assert connection.ask("DELETE", path).json["deleted"] is True
        check_error(connection.ask("GET", path), 404, "response_not_found")
        check_error(connection.ask("POST", RESPONSES, b"{"), 400)
        check_error(connection.ask("GET", RESPONSES), 404)
        check_error(connection.ask("POST", RESPONSES, {"model": "nobody", "input": "x"}), 404)
        made = connection.ask("POST", "/v1/conversations")
        assert made.json["object"] == "conversation"
        conversation = f"/v1/conversations/{made.json['id']}"
        check_error(connection.ask("POST", f"{conversation}/items", {"items": 5}), 400)
        check_error(connection.ask("PUT", conversation), 405)
        check_error(connection.ask("GET", f"{conversation}/items/x"), 404, "item_not_found")


def test_a_key_is_needed(demo: GatewayProcess) -> None:
    with RawConnection(demo.port) as connection:
        for method, path in (("POST", RESPONSES), ("GET", f"{RESPONSES}/x"),
                             ("POST", "/v1/conversations")):  # fmt: skip
            check_error(connection.ask(method, path, {}), 401)


def test_contexts_before_an_upstream(relay: GatewayProcess, upstream: ScriptedUpstream) -> None:
    """The upstream sees all messages; a call that fails adds none."""
    model = upstream.script(
        document(chat_document("One.")),
        error(400),
        scripted_stream(*chat_events(["Two", "."])),
        document(chat_document("Three.")),
    )

    def say(text: str, **extra: Any) -> Response:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "parrot": {"session": f"app-{model}", "context": "chat"},
            **extra,
        }
        return relay.ask("POST", "/v1/chat/completions", body)

    assert say("a").json["choices"][0]["message"]["content"] == "One."
    assert say("b").status == 400
    assert say("c", stream=True).status == 200
    assert say("d").status == 200
    calls = [call.json for call in upstream.calls(model)]
    assert all("parrot" not in call for call in calls)
    shown = [[message["content"] for message in call["messages"]] for call in calls]
    assert shown == [["a"], ["a", "One.", "b"], ["a", "One.", "c"], ["a", "One.", "c", "Two.", "d"]]


def test_deep_json_is_a_bad_request(demo: GatewayProcess, relay: GatewayProcess) -> None:
    deep = b'{"a":' * 50_000 + b"1" + b"}" * 50_000
    for path in ("/v1/conversations", RESPONSES, "/v1/embeddings"):
        check_error(relay.ask("POST", path, deep), 400)
    check_error(demo.ask("POST", "/v1/conversations", deep), 400)
