"""Streams of Anthropic's Messages API, read and checked as its clients do."""

from __future__ import annotations

import json
from typing import Any

#: By the type of a block: that of its deltas, and the field of them that adds to it.
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, without comments."""
    text = raw.decode()
    assert text.endswith("\n\n"), f"the last event is not closed: {text[-200:]!r}"
    events = []
    for block in text.split("\n\n"):
        if block and not block.startswith(":"):
            name, data = block.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events of a whole stream build up; asserts their order."""
    first, *rest = events
    assert first["type"] == "message_start"
    message: dict[str, Any] = first["message"]
    assert message["content"] == []
    assert (message["stop_reason"], message["stop_sequence"]) == (None, None)
    texts: list[str] | None = None
    for event in rest[:-2]:
        kind = event["type"]
        if kind == "ping":
            continue
        if kind == "content_block_start":
            assert texts is None
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            texts = []
            continue
        assert texts is not None
        assert event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        if kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                assert (block["type"], block["signature"]) == ("thinking", "")
                block["signature"] = delta["signature"]
                continue
            assert not block.get("signature"), "the signature is the last of a block"
            kind, field = DELTAS[block["type"]]
            assert delta["type"] == kind
            texts.append(delta[field])
        else:
            assert kind == "content_block_stop"
            if block["type"] in ("text", "thinking"):
                block[block["type"]] += "".join(texts)
                assert block.get("signature") != ""
            elif texts:
                block["input"] = json.loads("".join(texts))
            texts = None
    assert texts is None
    delta, stop = rest[-2:]
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    return {**message, **delta["delta"], "usage": {**message["usage"], **delta["usage"]}}
