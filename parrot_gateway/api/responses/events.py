"""The answer and the stream of one response with one message of text.

The order of events is the one that the client's accumulator demands. Each is named by its type and
numbered without a gap; there is no `[DONE]`, as at OpenAI.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

import msgspec
from parrot_engine.text import Tokenizer

from parrot_gateway.api.openai.answers import chat_logprobs, encode
from parrot_gateway.engines.usage import Usage
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.generation.generate import CollectedPrompt
from parrot_gateway.generation.request import PromptFilled, TextToken, Update
from parrot_gateway.generation.responses.items import Item, Part
from parrot_gateway.generation.responses.store import Cut

#: The event at the end of a response, by its status.
_LAST_EVENTS = {"completed": "response.completed", "incomplete": "response.incomplete"}

#: Takes the whole answer, its message, and the deltas that its text came in.
Keep: TypeAlias = Callable[[dict[str, Any], Item, Sequence[Cut]], None]


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
    """The one item of the output."""
    return {
        "id": item_id,
        "type": "message",
        "status": status,
        "role": "assistant",
        "content": content,
    }


class ResponseAnswer:
    """The `Answer` of one response.

    Args:
        begun: the answer in progress, with nothing in `output`.
        item_id: of its message.
        tokenizer: the model's.
        wants_logprobs: whether the text has log-probabilities.
        keep: called once with the whole answer, before the client gets the end of it; a
            `GatewayError` fails the call.
    """

    def __init__(
        self,
        begun: dict[str, Any],
        item_id: str,
        tokenizer: Tokenizer,
        *,
        wants_logprobs: bool,
        keep: Keep,
    ) -> None:
        self._begun = begun
        self._item_id = item_id
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._keep = keep
        self._events = ResponseEvents(begun, item_id)
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._cuts: list[Cut] = []
        self._finish_reason = "stop"

    def opening(self) -> bytes:
        """See `Answer`: nothing, since a call that fails before its text has no message."""
        return b""

    def events(self, update: Update) -> bytes:
        if isinstance(update, PromptFilled):
            return b""
        self._finish_reason = update.finish_reason or self._finish_reason
        logprobs = self._logprobs_of(update.tokens)
        if not update.text and not logprobs:
            return b""
        self._add(update.text, logprobs)
        return self._events.opening() + self._events.delta(update.text, logprobs)

    def closing(self, usage: Usage) -> bytes:
        return self._events.opening() + self._events.closing(self._end(usage))

    def failure(self, error: GatewayError) -> bytes:
        return self._events.failure(error)

    def whole(self, collected: Sequence[CollectedPrompt], usage: Usage) -> bytes:
        candidate = collected[0].candidates[0]
        self._finish_reason = candidate.finish_reason
        end, tokens = 0, deque(token for token in candidate.tokens if not token.is_end)
        for text in candidate.texts:
            end += len(text)
            shown: list[TextToken] = []
            while tokens and tokens[0].offset < end:
                shown.append(tokens.popleft())
            self._add(text, self._logprobs_of(shown))
        if tokens:
            self._add("", self._logprobs_of(tokens))
        return encode(self._end(usage))

    def _logprobs_of(self, tokens: Iterable[TextToken]) -> list[dict[str, Any]]:
        if not self._wants_logprobs:
            return []
        return cast(list[dict[str, Any]], chat_logprobs(self._tokenizer, tokens)["content"])

    def _add(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._texts.append(text)
        self._logprobs += logprobs
        self._cuts.append(Cut(len(text), len(logprobs)))

    def _end(self, usage: Usage) -> dict[str, Any]:
        text = "".join(self._texts)
        is_whole = self._finish_reason != "length"
        item = Item(
            self._item_id, "assistant", (Part(text),), "completed" if is_whole else "incomplete"
        )
        answer = {
            **self._begun,
            "status": item.status,
            "completed_at": float(int(time.time())) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": [
                output_message(self._item_id, item.status, [output_text(text, self._logprobs)])
            ],
            "usage": response_usage(usage),
        }
        self._keep(answer, item, tuple(self._cuts))
        return answer


class ResponseEvents:
    """The events of one response, in order.

    Args:
        answer: in progress, with nothing in `output`.
        item_id: of its message.
        starting_after: events up to and with this number are left out.
    """

    __slots__ = ("_answer", "_at", "_is_open", "_number", "_starting_after")

    def __init__(self, answer: dict[str, Any], item_id: str, starting_after: int = -1) -> None:
        self._starting_after = starting_after
        self._answer = answer
        self._at = {"item_id": item_id, "output_index": 0, "content_index": 0}
        self._number = 0
        self._is_open = False

    def opening(self) -> bytes:
        """Those before the text, once."""
        if self._is_open:
            return b""
        self._is_open = True
        item = output_message(str(self._at["item_id"]), "in_progress", [])
        return (
            self._begun()
            + self._event("response.output_item.added", output_index=0, item=item)
            + self._event("response.content_part.added", **self._at, part=output_text("", []))
        )

    def delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        return self._event("response.output_text.delta", **self._at, delta=text, logprobs=logprobs)

    def closing(self, answer: dict[str, Any]) -> bytes:
        message = answer["output"][0]
        part = message["content"][0]
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        return (
            self._event("response.output_text.done", **self._at, **done)
            + self._event("response.content_part.done", **self._at, part=part)
            + self._event("response.output_item.done", output_index=0, item=message)
            + self._event(_LAST_EVENTS[answer["status"]], response=answer)
        )

    def failure(self, error: GatewayError) -> bytes:
        failed = {
            **self._answer,
            "status": "failed",
            # NOTE: the codes of a response's error are a closed set; the event has our own.
            "error": {"code": "server_error", "message": error.message},
        }
        return (
            (b"" if self._is_open else self._begun())
            + self._event("error", code=error.code, message=error.message, param=error.param)
            + self._event("response.failed", response=failed)
        )

    def _begun(self) -> bytes:
        return self._event("response.created", response=self._answer) + self._event(
            "response.in_progress", response=self._answer
        )

    def _event(self, type: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        if number <= self._starting_after:
            return b""
        data = encode({"type": type, "sequence_number": number, **fields})
        return b"event: %s\ndata: %s\n\n" % (type.encode(), data)


def replay(answer: bytes, cuts: Sequence[Cut], starting_after: int = -1) -> bytes:
    """The stream of a stored response once more.

    Args:
        answer: the JSON answer.
        cuts: the deltas that its text came in.
        starting_after: leave out the events up to and with this number.
    """
    whole: dict[str, Any] = msgspec.json.decode(answer)
    message = whole["output"][0]
    part = message["content"][0]
    unknown = ("completed_at", "incomplete_details", "usage")
    begun = {**whole, "status": "in_progress", "output": [], **dict.fromkeys(unknown)}
    events = ResponseEvents(begun, message["id"], starting_after)
    written = [events.opening()]
    text = logprobs = 0
    for cut in cuts:
        written.append(
            events.delta(
                part["text"][text : text + cut.characters],
                part["logprobs"][logprobs : logprobs + cut.logprobs],
            )
        )
        text, logprobs = text + cut.characters, logprobs + cut.logprobs
    return b"".join([*written, events.closing(whole)])
