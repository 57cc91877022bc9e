"""A linker to compare with: message prefixes, any common 40 characters, tool ids.

It knows no boilerplate, no chains and no time: the newest writer of a text is the source.
"""

from __future__ import annotations

from typing import Any

import msgspec

from parrot_gateway.linking.linker.links import Link, LinkKind

SPAN, STRIDE = 40, 8


class NaiveLinker:
    def __init__(self) -> None:
        #: By tenant and the hash of a list of messages, or of a text: who has sent or written it.
        self._histories: dict[tuple[str, int], str] = {}
        self._spans: dict[tuple[str, int], str] = {}
        self._tool_ids: dict[tuple[str, str], str] = {}
        self._asked: dict[str, list[str]] = {}
        self._parent: dict[str, str] = {}

    def request(
        self, tenant: str, call: str, body: bytes, path: str, now: float, peer: str
    ) -> list[Link]:
        messages = _messages(msgspec.json.decode(body))
        texts = [_text(message) for message in messages]
        found: dict[tuple[str, LinkKind], None] = {}
        new = 0
        for end in range(len(texts), 0, -1):
            source = self._histories.get((tenant, hash(tuple(texts[:end]))))
            if source is not None:
                found[source, "continues"] = None
                new = end
                break
        for message, text in zip(messages[new:], texts[new:], strict=True):
            for at in range(max(0, len(text) - SPAN + 1)):
                source = self._spans.get((tenant, hash(text[at : at + SPAN])))
                if source is not None:
                    found[source, "output"] = None
            source = self._tool_ids.get((tenant, str(message.get("tool_call_id"))))
            if source is not None:
                found[source, "tool"] = None
        self._asked[call] = texts
        self._parent.setdefault(call, call)
        for source, _ in found:
            self._parent[self._root(source)] = self._root(call)
        return [Link(source, kind, 1.0) for source, kind in found]

    def answer(self, tenant: str, call: str, body: bytes, now: float) -> None:
        answer = msgspec.json.decode(body)
        texts = self._asked.pop(call)
        for message in _answers(answer):
            text = _text(message)
            self._histories[tenant, hash((*texts, text))] = call
            for at in range(0, max(0, len(text) - SPAN + 1), STRIDE):
                self._spans[tenant, hash(text[at : at + SPAN])] = call
            for made in message.get("tool_calls") or ():
                if made.get("id"):
                    self._tool_ids[tenant, made["id"]] = call

    def session_of(self, tenant: str, call: str) -> str:
        return self._root(call)

    def _root(self, call: str) -> str:
        while self._parent[call] != call:
            self._parent[call] = call = self._parent[self._parent[call]]
        return call


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    given = body.get("messages", body.get("input", body.get("prompt", "")))
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [{"role": "user", "content": str(given)}]
    return [
        {**item, "tool_call_id": item.get("call_id", item.get("tool_call_id"))} for item in given
    ]


def _answers(body: dict[str, Any]) -> list[dict[str, Any]]:
    if "output" in body:
        calls = [{"id": item["call_id"]} for item in body["output"] if "call_id" in item]
        return [{**item, "tool_calls": calls} for item in body["output"]]
    return [
        choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        for choice in body["choices"]
    ]


def _text(message: dict[str, Any]) -> str:
    """All that a message says."""
    content = message.get("content", message.get("output")) or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content)
    calls = message.get("tool_calls") or ()
    said = [str(call.get("function", {}).get("arguments", "")) for call in calls]
    return "".join([content, *said, str(message.get("arguments", ""))])
