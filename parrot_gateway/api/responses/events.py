"""The answer and the stream of one response with one message of text. Pure: values in, bytes out.

The order of events is the one that the client's accumulator demands. Each is named by its type and
numbered without a gap; there is no `[DONE]`, as at OpenAI.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from parrot_gateway.api.openai.answers import encode
from parrot_gateway.engines.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.responses.store import Cut

#: What says that a response ended, by its status.
_LAST_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete"}


def response_usage(usage: Usage) -> dict[str, Any]:
    """`usage` as the Responses API shows it; see `Usage` for how tokens are counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    """The one part of the message."""
    return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}


def output_message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """The message."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


def finished(
    answer: dict[str, Any],
    *,
    status: str,
    message: dict[str, Any],
    usage: Usage,
    now: float,
) -> dict[str, Any]:
    """An answer in progress, come to its end.

    Args:
        status: `completed`, or `incomplete` for one cut off by its length.
    """
    whole = status == "completed"
    return {
        **answer,
        "status": status,
        "completed_at": now if whole else None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "output": [message],
        "usage": response_usage(usage),
    }


class ResponseEvents:
    """The events of one response, in order.

    Args:
        answer: in progress, with nothing in `output`.
        item_id: of its message.
    """

    __slots__ = ("_answer", "_at", "_number", "opened")

    def __init__(self, answer: dict[str, Any], item_id: str) -> None:
        self._answer = answer
        self._at = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._number = 0
        #: Whether the first events were made.
        self.opened = False

    def opening(self) -> list[bytes]:
        """Those before the text."""
        self.opened = True
        item = output_message(str(self._at["item_id"]), "in_progress", [])
        return [
            self._event("response.created", response=self._answer),
            self._event("response.in_progress", response=self._answer),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._at, part=output_text("", [])),
        ]

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        """Some text."""
        return self._event("response.output_text.delta", **self._at, delta=text, logprobs=logprobs)

    def closing(self, answer: dict[str, Any]) -> list[bytes]:
        """Those after the text.

        Args:
            answer: see `finished`.
        """
        message = answer["output"][0]
        part = message["content"][0]
        return [
            self._event(
                "response.output_text.done", **self._at, text=part["text"],
                logprobs=part["logprobs"],
            ),
            self._event("response.content_part.done", **self._at, part=part),
            self._event("response.output_item.done", output_index=0, item=message),
            self._event(_LAST_EVENTS[answer["status"]], response=answer),
        ]  # fmt: skip

    def failure(self, error: GatewayError) -> list[bytes]:
        """The end of a stream that failed: what happened, then what became of the response."""
        started = []
        if not self.opened:
            started = [
                self._event("response.created", response=self._answer),
                self._event("response.in_progress", response=self._answer),
            ]
        failed = {
            **self._answer,
            "status": "failed",
            # NOTE: the codes of a response's error are a closed set; the event has our own.
            "error": {"code": "server_error", "message": error.message},
        }
        return [
            *started,
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=failed),
        ]

    def _event(self, type: str, **fields: Any) -> bytes:
        data = encode({"type": type, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (type.encode(), data)


def replay(answer: bytes, cuts: Sequence[Cut], starting_after: int = -1) -> Iterator[bytes]:
    """The stream of a stored response once more, event by event.

    Args:
        answer: the JSON answer.
        cuts: how its text came.
        starting_after: leave out the events up to and with this number.
    """
    whole: dict[str, Any] = msgspec.json.decode(answer)
    message = whole["output"][0]
    part = message["content"][0]
    begun = {
        **whole,
        "status": "in_progress",
        "completed_at": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }
    events = ResponseEvents(begun, message["id"])

    def everything() -> Iterator[bytes]:
        yield from events.opening()
        text = logprobs = 0
        for cut in cuts:
            yield events.delta(
                part["text"][text : text + cut.characters],
                part["logprobs"][logprobs : logprobs + cut.logprobs],
            )
            text, logprobs = text + cut.characters, logprobs + cut.logprobs
        yield from events.closing(whole)

    for number, event in enumerate(everything()):
        if number > starting_after:
            yield event
