"""The events of one response, as they are streamed.

Their order is the one that the client's accumulator demands. Each is named by its type and numbered
without a gap; there is no `[DONE]`, as at OpenAI.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from parrot_gateway.api.openai.answers import encode
from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.calls.responses.store import Cut
from parrot_gateway.exceptions import GatewayError

#: The event at the end of a response, by its status.
_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    # NOTE: there is no event for it; what readers make of this one is a response that ended early.
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
#: The field of an item that grows, and the family of its events.
_GROWING = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
#: The family of events of the one part of other items.
_PARTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
#: A `starting_after` that leaves out all events.
NO_EVENTS = sys.maxsize


def output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of a message."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def _written(item: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return all deltas of an item joined: its text, and a message's log-probabilities."""
    if item["type"] in _GROWING:
        return item[_GROWING[item["type"]][0]], []
    part = item["content"][0]
    return part["text"], part.get("logprobs", [])


class EventWriter:
    """Writes the events of one response, in order.

    Args:
        starting_after: events up to and with this number are left out.
        log: gets each event too.
    """

    __slots__ = ("_index", "_item", "_log", "_number", "_starting_after")

    def __init__(self, starting_after: int = -1, log: EventLog | None = None) -> None:
        self._starting_after = starting_after
        self._log = log
        self._number = 0
        #: The item that is open, as it was opened, and its place in the output.
        self._item: dict[str, Any] = {}
        self._index = -1

    def begin(self, answer: dict[str, Any]) -> bytes:
        """The events before the output.

        Args:
            answer: in progress, with nothing in `output`.
        """
        created = b"" if self._number else self._event("response.created", response=answer)
        return created + self._event("response.in_progress", response=answer)

    def queue(self, answer: dict[str, Any]) -> bytes:
        """The events before those of `begin`, of a response that waits.

        Args:
            answer: queued, with nothing in `output`.
        """
        created = self._event("response.created", response=answer)
        return created + self._event("response.queued", response=answer)

    def open_item(self, item: dict[str, Any]) -> bytes:
        """The next item of the output begins.

        Args:
            item: as it will be, or without its content.
        """
        self._index += 1
        if item["type"] in _GROWING:
            empty: dict[str, Any] = {_GROWING[item["type"]][0]: ""}
        else:
            empty = {"content": []}
        self._item = {**item, "status": "in_progress", **empty}
        added = self._event("response.output_item.added", output_index=self._index, item=self._item)
        if item["type"] in _PARTS:
            is_message = item["type"] == "message"
            part = output_text("", []) if is_message else {"type": "reasoning_text", "text": ""}
            added += self._event("response.content_part.added", **self._content(), part=part)
        return added

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """More text of the item that is open; of a message, with its log-probabilities."""
        kind = self._item["type"]
        if kind in _GROWING:
            return self._event(f"{_GROWING[kind][1]}.delta", **self._place(), delta=text)
        more = {"logprobs": logprobs} if kind == "message" else {}
        return self._event(f"{_PARTS[kind]}.delta", **self._content(), delta=text, **more)

    def close_item(self, item: dict[str, Any]) -> bytes:
        """The item that is open ends.

        Args:
            item: whole.
        """
        kind = item["type"]
        if kind in _GROWING:
            field, family = _GROWING[kind]
            done = {field: item[field]}
            if kind == "function_call":
                done["name"] = item["name"]
            events = self._event(f"{family}.done", **self._place(), **done)
        else:
            part = item["content"][0]
            done = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = self._event(f"{_PARTS[kind]}.done", **self._content(), **done)
            events += self._event("response.content_part.done", **self._content(), part=part)
        return events + self._event(
            "response.output_item.done", output_index=self._index, item=item
        )

    def end(self, answer: dict[str, Any]) -> bytes:
        """The last event."""
        return self._event(_LAST_EVENTS[answer["status"]], response=answer)

    def error(self, error: GatewayError) -> bytes:
        """The event that precedes the end of a response that failed."""
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": self._index}

    def _content(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}

    def _event(self, type: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self._starting_after:
            return b""
        data = encode({"type": type, "sequence_number": number, **fields})
        event = b"event: %s\ndata: %s\n\n" % (type.encode(), data)
        if self._log is not None:
            self._log.append(event)
        return event


def replay(answer: bytes, cuts: Sequence[Cut], starting_after: int = -1) -> bytes:
    """The stream of a stored response once more.

    Args:
        answer: the JSON answer.
        cuts: the deltas that its output came in.
        starting_after: leave out the events up to and with this number.
    """
    whole: dict[str, Any] = msgspec.json.decode(answer)
    unknown = ("completed_at", "incomplete_details", "usage")
    begun = {**whole, "status": "in_progress", "output": [], **dict.fromkeys(unknown)}
    writer = EventWriter(starting_after)
    written = [writer.begin(begun)]
    for number, item in enumerate(whole["output"]):
        written.append(writer.open_item(item))
        content, logprobs = _written(item)
        start = first = 0
        for cut in cuts:
            if cut.item == number:
                end, last = start + cut.characters, first + cut.logprobs
                written.append(writer.delta(content[start:end], logprobs[first:last]))
                start, first = end, last
        written.append(writer.close_item(item))
    written.append(writer.end(whole))
    return b"".join(written)
