"""Requests and answers of the four APIs as plain conversations, for the linker.

Reads what it can and never refuses: anything not in the API's shape has no text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec


class ToolCall(NamedTuple):
    """A tool call, as an answer asks for it and later prompts repeat it."""

    id: str
    name: str
    #: As JSON text.
    arguments: str


class Message(NamedTuple):
    """One message of a prompt.

    Attributes:
        role: "developer" becomes "system"; the text of a completion has the role "prompt".
        tool_call_id: id that a tool's result answers.
    """

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


class Conversation(NamedTuple):
    """The messages of a request, and the ids and model that it names.

    Attributes:
        previous: id of the response that it continues (`previous_response_id`).
        model: the named model; empty if none.
    """

    messages: tuple[Message, ...]
    previous: str = ""
    model: str = ""


class Choice(NamedTuple):
    """One candidate of an answer."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


#: Status of a response made in the background.
_UNFINISHED = ("queued", "in_progress")


class Answer(NamedTuple):
    """An answer as far as it was read, with the id that the client sees.

    Attributes:
        is_finished: false for a response that is still to be made.
        is_plain: true for a chat's complete answer of text alone, without an error.
        tokens: output tokens of all choices, if the answer states them.
    """

    response_id: str
    choices: tuple[Choice, ...]
    is_finished: bool = True
    is_plain: bool = False
    tokens: int | None = None


class _Request(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    system: Any = None
    instructions: Any = None
    input: Any = None
    previous_response_id: Any = None
    model: Any = None


#: A model's name is kept with its calls, so its length is limited.
_MAX_MODEL = 256
_any_decoder = msgspec.json.Decoder()
_request_decoder = msgspec.json.Decoder(_Request)
_ROLES = {"developer": "system", "function": "tool", "ai": "assistant", "human": "user"}


def conversation_of(path: str, body: bytes) -> Conversation | None:
    """Parse the conversation of a request; None if the body fits none of the APIs.

    Args:
        path: of the route.
        body: as received.
    """
    try:
        request = _request_decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    previous, model = request.previous_response_id, request.model
    return Conversation(
        tuple(_messages(path, request)),
        previous if isinstance(previous, str) else "",
        model[:_MAX_MODEL] if isinstance(model, str) else "",
    )


def _messages(path: str, request: _Request) -> Iterator[Message]:
    if path.endswith("/completions") and not path.endswith("/chat/completions"):
        prompts = request.prompt if _is_list_of(request.prompt, str) else [request.prompt]
        for prompt in prompts:
            if isinstance(prompt, str):
                yield Message("prompt", prompt)
            elif _is_list_of(prompt, int):
                yield Message("prompt", " ".join(map(str, prompt)))
        return
    first = request.instructions if request.instructions is not None else request.system
    if first:
        yield Message("system", _text_of(first))
    given = request.messages if request.messages is not None else request.input
    if isinstance(given, str):
        yield Message("user", given)
    elif isinstance(given, list):
        for item in given:
            if isinstance(item, dict):
                yield from _messages_of(item)


def _messages_of(item: dict[str, Any]) -> Iterator[Message]:
    """Yield the messages of a chat message, or of an item of a response's input."""
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        call = ToolCall(
            _string(item.get("call_id")),
            _string(item.get("name")),
            _string(item.get("arguments", item.get("input"))),
        )
        yield Message("assistant", "", (call,))
    elif kind in ("function_call_output", "custom_tool_call_output"):
        yield Message(
            "tool", _text_of(item.get("output")), tool_call_id=_string(item.get("call_id"))
        )
    elif "role" in item:
        role = _string(item["role"])
        role = _ROLES.get(role, role)
        content = item.get("content")
        if isinstance(content, list):
            # In Anthropic's API tool results are parts of a user's message.
            for part in content:
                if isinstance(part, dict) and part.get("type") == "tool_result":
                    result = _text_of(part.get("content"))
                    yield Message("tool", result, tool_call_id=_string(part.get("tool_use_id")))
        text, calls = _text_of(content), tuple(_tool_calls(item, content))
        if text or calls or not isinstance(content, list):
            yield Message(role, text, calls, _string(item.get("tool_call_id")))


def _tool_calls(message: dict[str, Any], content: Any) -> Iterator[ToolCall]:
    calls = message.get("tool_calls")
    if isinstance(message.get("function_call"), dict):
        calls = [{"function": message["function_call"]}]
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            yield _tool_call(call)
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and part.get("type") == "tool_use":
            yield ToolCall(
                _string(part.get("id")), _string(part.get("name")), _string(part.get("input"))
            )


def _tool_call(call: dict[str, Any]) -> ToolCall:
    function = call.get("function") or call.get("custom")
    function = function if isinstance(function, dict) else {}
    arguments = _string(function.get("arguments", function.get("input")))
    return ToolCall(_string(call.get("id")), _string(function.get("name")), arguments)


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        return ""
    texts: list[str] = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
    return "\n".join(texts)


def argument_texts(arguments: str) -> Iterator[str]:
    """Yield the texts in the arguments of a tool call; all of it if it is not JSON."""
    try:
        value = _any_decoder.decode(arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        yield arguments
        return
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            pending += reversed(value.values())
        elif isinstance(value, list):
            pending += reversed(value)


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else msgspec.json.encode(value).decode()


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], kind)


def answer_of(path: str, body: bytes) -> Answer | None:
    """Parse a call's answer, JSON or server-sent events; None if it contains none.

    Args:
        path: of the route.
        body: the whole answer as sent.
    """
    try:
        if body.lstrip()[:1] != b"{":
            return _streamed(body)
        try:
            found = _text_answer_decoder.decode(body)
        except msgspec.ValidationError:
            return _whole(_any_decoder.decode(body))
        choices = tuple(Choice(choice.message.content) for choice in found.choices)
        tokens = None if found.usage is None else found.usage.completion_tokens
        return Answer(found.id, choices, is_plain=True, tokens=tokens) if choices else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    except (ValueError, TypeError, AttributeError):
        # A part has an unexpected type.
        return None


def _whole(answer: Any) -> Answer | None:
    if not isinstance(answer, dict):
        return None
    if isinstance(answer.get("output"), list):
        choice = _choice_of_items(answer["output"])
        is_finished = answer.get("status") not in _UNFINISHED
        return Answer(_string(answer.get("id")), (choice,), is_finished)
    if isinstance(answer.get("choices"), list):
        choices = [_choice(each) for each in answer["choices"] if isinstance(each, dict)]
        return Answer(_string(answer.get("id")), tuple(choices)) if choices else None
    if isinstance(answer.get("content"), list):
        content = answer["content"]
        calls = tuple(_tool_calls({}, content))
        return Answer(_string(answer.get("id")), (Choice(_text_of(content), calls),))
    return None


def _choice(choice: dict[str, Any]) -> Choice:
    message = choice.get("message")
    if not isinstance(message, dict):
        return Choice(_string(choice.get("text")))
    content = message.get("content")
    return Choice(_text_of(content), tuple(_tool_calls(message, content)))


def _choice_of_items(items: list[Any]) -> Choice:
    texts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        if isinstance(item, dict):
            for message in _messages_of(item):
                calls += message.tool_calls
                if message.text:
                    texts.append(message.text)
    return Choice("\n".join(texts), tuple(calls))


class _Parts:
    """One choice of a stream while it is assembled."""

    def __init__(self) -> None:
        self.text: list[str] = []
        #: By the call's index: id, name and pieces of the arguments.
        self.calls: dict[int, tuple[list[str], list[str], list[str]]] = {}

    def add_call(self, index: int, id_: Any, name: Any, arguments: Any) -> None:
        pieces = self.calls.setdefault(index, ([], [], []))
        for piece, value in zip(pieces, (id_, name, arguments), strict=True):
            if isinstance(value, str) and value:
                piece.append(value)

    def choice(self) -> Choice:
        calls = [
            ToolCall(ids[0] if ids else "", "".join(names), "".join(arguments))
            for ids, names, arguments in self.calls.values()
        ]
        return Choice("".join(self.text), tuple(calls))


class _TextMessage(msgspec.Struct):
    content: str
    tool_calls: None = None
    function_call: None = None


class _MessageChoice(msgspec.Struct):
    message: _TextMessage


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _TextAnswer(msgspec.Struct):
    """A chat's complete answer with text alone; others fail to decode."""

    id: str
    choices: list[_MessageChoice]
    output: None = None
    usage: _Usage | None = None


class _TextDelta(msgspec.Struct):
    content: str | None = None
    tool_calls: None = None


class _TextChoice(msgspec.Struct):
    delta: _TextDelta
    index: int = 0


class _TextEvent(msgspec.Struct):
    """An event of a chat's stream with text alone; others fail to decode."""

    id: str
    choices: list[_TextChoice]
    type: None = None


_text_answer_decoder = msgspec.json.Decoder(_TextAnswer)
_text_events_decoder = msgspec.json.Decoder(list[_TextEvent])
#: Separators between the events of most streams, whose data has no line breaks.
_FIRST_DATA, _NEXT_DATA, _LAST_DATA = b"data: ", b"\n\ndata: ", b"\n\ndata: [DONE]\n\n"
_STRING = re.compile(rb'(?:[^"\\]|\\.)*')
_CONTENT = re.compile(rb'"content": ?"(' + _STRING.pattern + rb')"')


def _streamed(body: bytes) -> Answer | None:
    if body.startswith(_FIRST_DATA) and body.endswith(_LAST_DATA):
        data = _merged(body[len(_FIRST_DATA) : -len(_LAST_DATA)]).replace(_NEXT_DATA, b",")
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            return _streamed_text(_text_events_decoder.decode(b"[" + data + b"]"))
    events = [
        line[5:]
        for line in body.splitlines()
        if line.startswith(b"data:") and not line.endswith(b"[DONE]")
    ]
    try:
        return _streamed_text(_text_events_decoder.decode(b"[" + b",".join(events) + b"]"))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _streamed_anything(events)


def _merged(data: bytes) -> bytes:
    """Merge events that differ only in their content into one, which takes a third of the work.

    Args:
        data: the events, separated by `_NEXT_DATA`.
    """
    begin = data.find(_NEXT_DATA, len(data) // 2) + len(_NEXT_DATA)
    event = data[begin : data.find(_NEXT_DATA, begin)]
    found = _CONTENT.search(event)
    if found is None:
        return data
    head, tail = event[: found.start(1)], event[found.end(1) :]
    first, *others = data.split(tail + _NEXT_DATA + head)
    begin = first.rfind(_NEXT_DATA)
    begin = 0 if begin < 0 else begin + len(_NEXT_DATA)
    content = first[begin + len(head) :] + b"".join(others[:-1])
    # Other kinds of events may begin and end alike.
    if not first.startswith(head, begin) or (b'"' in content and not _STRING.fullmatch(content)):
        return data
    return b"".join([first, *others])


def _streamed_text(events: list[_TextEvent]) -> Answer | None:
    """Assemble the answer of a stream with text alone."""
    texts: dict[int, list[str]] = {}
    for event in events:
        for choice in event.choices:
            content = choice.delta.content
            if content:
                texts.setdefault(choice.index, []).append(content)
            elif choice.index not in texts:
                texts[choice.index] = []
    if not texts:
        return None
    choices = tuple(Choice("".join(texts[index])) for index in sorted(texts))
    return Answer(next((event.id for event in events if event.id), ""), choices, is_plain=True)


def _streamed_anything(events: list[bytes]) -> Answer | None:
    """Assemble the answer of any stream, as far as it came."""
    response_id = ""
    choices: dict[int, _Parts] = {}
    for data in events:
        try:
            event = _any_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # The stream broke off here.
            break
        if not isinstance(event, dict):
            continue
        kind = event.get("type")
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            return _whole(event.get("response"))
        response_id = response_id or _string(event.get("id"))
        if kind == "response.created" and isinstance(event.get("response"), dict):
            response_id = _string(event["response"].get("id"))
            choices.setdefault(0, _Parts())
        if kind == "message_start" and isinstance(event.get("message"), dict):
            response_id = _string(event["message"].get("id"))
        handler = _EVENTS.get(kind) if isinstance(kind, str) else None
        if handler is not None:
            handler(choices.setdefault(0, _Parts()), event)
        for choice in event.get("choices") or ():
            parts = choices.setdefault(choice.get("index", 0), _Parts())
            delta = choice.get("delta")
            if not isinstance(delta, dict):
                parts.text.append(_string(choice.get("text")))
                continue
            parts.text.append(_string(delta.get("content")))
            for number, call in enumerate(delta.get("tool_calls") or ()):
                function = call.get("function") or {}
                index = call.get("index", number)
                name, arguments = function.get("name"), function.get("arguments")
                parts.add_call(index, call.get("id"), name, arguments)
    if not choices:
        return None
    ordered = tuple(choices[index].choice() for index in sorted(choices))
    return Answer(response_id, ordered)


def _block_start(parts: _Parts, event: dict[str, Any]) -> None:
    block = event.get("content_block") or {}
    if block.get("type") == "tool_use":
        parts.add_call(event.get("index", 0), block.get("id"), block.get("name"), None)


def _block_delta(parts: _Parts, event: dict[str, Any]) -> None:
    delta = event.get("delta") or {}
    parts.text.append(_string(delta.get("text")))
    if delta.get("partial_json"):
        parts.add_call(event.get("index", 0), None, None, delta["partial_json"])


def _text_delta(parts: _Parts, event: dict[str, Any]) -> None:
    parts.text.append(_string(event.get("delta")))


#: Handlers for events of messages' and responses' streams that carry text.
_EVENTS: Mapping[str, Callable[[_Parts, dict[str, Any]], None]] = {
    "content_block_start": _block_start,
    "content_block_delta": _block_delta,
    "response.output_text.delta": _text_delta,
}
