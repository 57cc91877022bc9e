"""The answer of one response: reasoning, messages and calls of tools, whole or as events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias, cast

from parrot_engine.text import Tokenizer

from parrot_gateway.api.openai.logprobs import chat_logprobs
from parrot_gateway.api.responses.events import EventWriter, output_text
from parrot_gateway.calls.generation_request import CLOSED, PromptFilled, TextToken, Update
from parrot_gateway.calls.requests.response_tools import ToolName
from parrot_gateway.calls.responses.items import (
    Item,
    ItemStatus,
    MessageItem,
    Part,
    ReasoningItem,
    ToolCallItem,
    mint_item_id,
)
from parrot_gateway.calls.responses.store import Cut
from parrot_gateway.calls.tools.custom_input import CustomInput
from parrot_gateway.calls.tools.parsing import ContentPiece, ToolCallBegin, ToolPiece
from parrot_gateway.calls.usage import Usage
from parrot_gateway.exceptions import GatewayError

#: Takes the whole answer, its items, and the deltas that its output came in.
Keep: TypeAlias = Callable[[dict[str, Any], Sequence[Item], Sequence[Cut]], None]


def response_usage(usage: Usage) -> dict[str, Any]:
    """`usage` as the Responses API shows it; see `Usage` for how tokens are counted."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


@dataclass(eq=False)
class ResponseAnswer:
    """Makes the output of one response of the updates of its generation; a `StreamedAnswer`."""

    #: The answer in progress, with nothing in `output`.
    begun: dict[str, Any]
    tokenizer: Tokenizer
    _: KW_ONLY
    #: Whether messages have log-probabilities.
    wants_logprobs: bool
    #: Whether reasoning is there as `encrypted_content` too.
    packs_reasoning: bool
    #: What the client calls its tools, by what the model does.
    tools: Mapping[str, ToolName]
    #: There is nothing but calls.
    calls_only: bool
    #: Called once with the whole answer, before the client gets the end of it; a `GatewayError`
    #: fails the call.
    keep: Keep
    writer: EventWriter

    def __post_init__(self) -> None:
        self._has_begun = False
        self._done: list[_OpenItem] = []
        self._open: _OpenItem | None = None
        self._cuts: list[Cut] = []
        #: Blank text that is a message's only if more follows, and what was held back with it.
        self._blank = ""
        self._logprobs: list[dict[str, Any]] = []
        self._finish_reason = "stop"
        self._is_closed = False

    def opening(self) -> bytes:
        """Nothing: a call that fails before its text has no message."""
        return b""

    def events(self, update: Update) -> bytes:
        """Take an update; returns its events."""
        if isinstance(update, PromptFilled):
            return b""
        self._finish_reason = update.finish_reason or self._finish_reason
        self._is_closed |= update.is_closed
        events = self._reasoning(update.reasoning) if update.reasoning else b""
        kind = None if self._open is None else self._open.kind
        if update.text or kind != "reasoning":
            self._logprobs += self._logprobs_of(update.tokens)
        if update.pieces is not None:
            return events + b"".join([self._piece(piece) for piece in update.pieces])
        if not update.text and not (self._logprobs and kind == "message"):
            return events
        return events + self._text(update.text)

    def closing(self, usage: Usage) -> bytes:
        return self.finish(usage)[1]

    def finish(self, usage: Usage) -> tuple[dict[str, Any], bytes]:
        """The whole answer, which is kept now, and its last events."""
        events = b""
        if self._open is None and not self._done and not self.calls_only:
            events = self.begin() + self._open_item(_OpenItem("message"))
            if self._blank or self._logprobs:
                events += self._text("")
        is_whole = self._finish_reason != "length"
        status: ItemStatus = "completed" if is_whole else "incomplete"
        if self._open is not None:
            events += self._rest(self._open)
            self._open.status = status
        items = [*self._done, *([] if self._open is None else [self._open])]
        answer = {
            **self.begun,
            "status": status,
            "completed_at": float(int(time.time())) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": [item.to_dict() for item in items],
            "usage": response_usage(usage),
            **(CLOSED if self._is_closed else {}),
        }
        self.keep(answer, [item.item() for item in items], tuple(self._cuts))
        return answer, events + self.begin() + self._close_item() + self.writer.end(answer)

    def failure(self, error: GatewayError) -> bytes:
        return self.fail(error)[1]

    def fail(self, error: GatewayError) -> tuple[dict[str, Any], bytes]:
        """The answer of a call that failed, which is not kept here, and its last events."""
        failed = {
            **self.begun,
            "status": "failed",
            # NOTE: the codes of a response's error are a closed set; the event has our own.
            "error": {"code": "server_error", "message": error.message},
        }
        return failed, self.begin() + self.writer.error(error) + self.writer.end(failed)

    def cancel(self) -> tuple[dict[str, Any], bytes]:
        """The answer of a call that was cancelled, which is not kept here, and its last events."""
        events = self.begin()
        if self._open is not None:
            self._open.status = "incomplete"
            events += self._close_item()
        output = [item.to_dict() for item in self._done]
        cancelled = {**self.begun, "status": "cancelled", "output": output}
        return cancelled, events + self.writer.end(cancelled)

    def begin(self) -> bytes:
        """The first events, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self.writer.begin(self.begun)

    def _piece(self, piece: ToolPiece) -> bytes:
        if isinstance(piece, ContentPiece):
            is_blank = self._open is None or self._open.kind != "message"
            if is_blank and not (self._blank + piece.text).strip():
                self._blank += piece.text
                return b""
            return self._text(piece.text)
        if isinstance(piece, ToolCallBegin):
            self._blank, self._logprobs = "", []
            tool = self.tools.get(piece.name, ToolName(piece.name))
            kind: _Kind = "custom_tool_call" if tool.is_custom else "function_call"
            call = _OpenItem(kind, piece.id, tool)
            return self.begin() + self._close_item() + self._open_item(call)
        assert self._open is not None
        text = self._open.read(piece.text)
        return self._delta(text, []) if text else b""

    def _reasoning(self, text: str) -> bytes:
        events = self.begin()
        if self._open is None or self._open.kind != "reasoning":
            # Log-probabilities so far are those of the mark that opened it.
            self._blank, self._logprobs = "", []
            item = _OpenItem("reasoning", is_packed=self.packs_reasoning)
            events += self._close_item() + self._open_item(item)
        return events + self._delta(text, [])

    def _text(self, text: str) -> bytes:
        events = self.begin()
        if self._open is None or self._open.kind != "message":
            events += self._close_item() + self._open_item(_OpenItem("message"))
        text, self._blank = self._blank + text, ""
        logprobs, self._logprobs = self._logprobs, []
        return events + self._delta(text, logprobs)

    def _delta(self, text: str, logprobs: list[dict[str, Any]]) -> bytes:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        self._cuts.append(Cut(len(text), len(logprobs), len(self._done)))
        return self.writer.delta(text, logprobs)

    def _open_item(self, item: _OpenItem) -> bytes:
        self._open = item
        return self.writer.open_item(item.to_dict())

    def _close_item(self) -> bytes:
        """End the item that is open, if one is."""
        item = self._open
        if item is None:
            return b""
        events = self._rest(item)
        self._done.append(item)
        self._open = None
        return events + self.writer.close_item(item.to_dict())

    def _rest(self, item: _OpenItem) -> bytes:
        """Write the events of the text that an ending item has held back."""
        rest = item.read("", ends=True)
        return self._delta(rest, []) if rest else b""

    def _logprobs_of(self, tokens: Iterable[TextToken]) -> list[dict[str, Any]]:
        if not self.wants_logprobs:
            return []
        return cast(list[dict[str, Any]], chat_logprobs(self.tokenizer, tokens)["content"])


_Kind: TypeAlias = Literal["message", "reasoning", "function_call", "custom_tool_call"]
_PREFIXES: dict[_Kind, str] = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"
}  # fmt: skip
_NO_TOOL = ToolName("")


class _OpenItem:
    """An item of the output, as it grows."""

    def __init__(
        self, kind: _Kind, call_id: str = "", tool: ToolName = _NO_TOOL, *, is_packed: bool = False
    ) -> None:
        self.kind = kind
        self._is_packed = is_packed
        self.status: ItemStatus = "completed"
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._id = mint_item_id(_PREFIXES[kind])
        self._call_id = call_id
        self._tool = tool
        self._input = CustomInput() if kind == "custom_tool_call" else None

    def read(self, text: str, *, ends: bool = False) -> str:
        """Return the text that a piece of a call's arguments adds to the item."""
        return text if self._input is None else self._input.push(text, ends=ends)

    def item(self) -> Item:
        """The item, to be kept."""
        text = "".join(self.texts)
        if self.kind == "message":
            return MessageItem(self._id, "assistant", (Part(text),), self.status)
        if self.kind == "reasoning":
            return ReasoningItem(self._id, (), (text,), self.status, self._is_packed)
        name, namespace, is_custom = self._tool
        return ToolCallItem(self._id, self._call_id, name, text, is_custom, self.status, namespace)

    def to_dict(self) -> dict[str, Any]:
        """The item, as the API shows it."""
        shown = self.item().to_dict()
        if self.kind == "message":
            shown["content"] = [output_text("".join(self.texts), self.logprobs)]
        return shown
