"""Scripts of the scripted upstream in one line of text, and the bytes of their answers.

Pure, standard library only; the server is in `scripted_upstream.py`. The JSON has spacing and
number forms on purpose that any re-serialisation would change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Literal

Fault = Literal["", "reset", "drop", "half", "truncate", "eof", "stall", "error200", "garbage"]


@dataclass(frozen=True)
class Script:
    #: Status of the answer; from 400 on an error body in OpenAI's shape.
    status: int = 200
    #: Requests with one key share a counter, for `times`.
    key: str = ""
    #: Status and fault concern the first `times` requests of the key only; 0 all of them.
    times: int = 0
    #: Headers of an error answer.
    retry_after: str = ""
    retry_after_ms: str = ""
    should_retry: str = ""
    #: Silence before the first byte, and between chunks.
    first_ms: float = 0.0
    delay_ms: float = 0.0
    #: Silence before the end of a stream, after all of its events.
    end_ms: float = 0.0
    #: Chunks of a stream; bytes of text in a chunk, or in a whole answer.
    chunks: int = 16
    size: int = 8
    #: reset: no answer. Streams: drop (TCP reset), half (close inside an event), truncate (close
    #: without the last HTTP chunk), eof (proper end without a finish reason), stall. error200: an
    #: error body with status 200. garbage: no HTTP.
    fault: Fault = ""
    #: Chunks sent before a fault in a stream.
    after: int = 2
    #: Line ends of the stream.
    framing: Literal["lf", "crlf", "cr"] = "lf"
    #: Send the stream in TCP segments of this many bytes.
    split: int = 0
    #: End with `data: [DONE]`.
    done: int = 1
    #: Send a usage chunk without `include_usage`.
    usage: int = 0
    #: Text beyond ASCII.
    unicode: int = 0
    #: Send a comment as keep-alive before each chunk.
    comments: int = 0


@lru_cache(maxsize=1024)
def parse_script(text: str) -> Script:
    """`"chunks=3, fault=drop"` as a script; `;` separates as well as `,`.

    Raises:
        ValueError: an unknown key or value.
    """
    pairs = (item.partition("=") for item in re.split("[,;]", text) if item.strip())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    kinds = {field.name: type(field.default) for field in fields(Script)}
    if unknown := values.keys() - kinds.keys():
        raise ValueError(f"unknown in script: {', '.join(sorted(unknown))}")
    return Script(**{key: kinds[key](value) for key, value in values.items()})


ERROR_BODY = (
    b'{"error": {"message":"scripted failure","type":"server_error","param":null,"code":null}}'
)
#: Headers of every answer to a script.
ANSWER_HEADERS = (
    ("x-request-id", "fake-req"),
    ("openai-processing-ms", "7"),
    ("openai-organization", "fake-org"),
    ("x-ratelimit-remaining-requests", "42"),
    ("server", "fake"),
    ("set-cookie", "a=b"),
)


def error_body(message: str) -> bytes:
    """An error whose odd spacing only bytes that pass unchanged keep."""
    error = {"message": message, "type": "fake_error", "param": None, "code": "fake"}
    return json.dumps({"error": error}, indent=3).encode()


def error_headers(script: Script) -> tuple[tuple[str, str], ...]:
    named = {"retry-after": script.retry_after, "retry-after-ms": script.retry_after_ms,
             "x-should-retry": script.should_retry}  # fmt: skip
    return tuple((name, value) for name, value in named.items() if value)


def _json(value: str) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()


def _text(size: int, unicode: int) -> str:
    base = "parrots échoñ 日本 🦜 " if unicode else "a parrot repeats what it was told; "
    return (base * (size // len(base) + 1))[:size]


@lru_cache(maxsize=64)
def whole_body(path: str, model: str, size: int, unicode: int = 0) -> bytes:
    """The JSON of a whole answer, with spacing and floats that a re-serialisation would change."""
    usage = b'{"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12, '
    usage += b'"prompt_tokens_details": {"cached_tokens": 3}}'
    text = _json(_text(size, unicode))
    name = _json(model)
    if path.endswith("/chat/completions"):
        return (
            b'{"id":"chatcmpl-fake", "object":"chat.completion","created":1, "model": %b, '
            b'"choices":[{"index":0,"message":{"role":"assistant","content":%b,"refusal":null},'
            b'"logprobs":null,"finish_reason":"stop"}], "temperature": 1.0e0, "usage": %b}'
            % (name, text, usage)
        )
    if path.endswith("/completions"):
        return (
            b'{"id":"cmpl-fake", "object":"text_completion","created":1, "model": %b, '
            b'"choices":[{"index":0,"text":%b,"logprobs":null,"finish_reason":"stop"}], '
            b'"usage": %b}' % (name, text, usage)
        )
    if path.endswith("/responses"):
        return (
            b'{"id": "resp_fake","object":"response","created_at":1.0,"status":"completed",'
            b'"model":%b,"output":[{"type":"message","id":"msg_fake","role":"assistant",'
            b'"status":"completed","content":[{"type":"output_text","text":%b,"annotations":[]}]}],'
            b'"usage":{"input_tokens":7,"input_tokens_details":{"cached_tokens":3},'
            b'"output_tokens":5,"output_tokens_details":{"reasoning_tokens":0},"total_tokens":12}}'
            % (name, text)
        )
    return (
        b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":"AACAPw=="}],'
        b'"model":%b, "usage":{"prompt_tokens":7,"total_tokens":7}}' % name
    )


def stream_events(path: str, model: str, script: Script, usage: bool) -> tuple[bytes, ...]:
    """The events of a stream, blank lines included."""
    end = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}[script.framing]
    return _stream_events(path, model, script, usage or bool(script.usage), end)


@lru_cache(maxsize=64)
def _stream_events(
    path: str, model: str, script: Script, usage: bool, end: bytes
) -> tuple[bytes, ...]:
    if path.endswith("/responses"):
        return tuple(_responses_events(path, model, script, end))
    chat = path.endswith("/chat/completions")
    kind = b"chat.completion.chunk" if chat else b"text_completion"
    head = b'data: {"id":"chatcmpl-fake","object":"%b","created":1, "model":%b,' % (
        kind, _json(model))  # fmt: skip
    text = _json(_text(script.size, script.unicode))
    comment = b": keep-alive" + end + end if script.comments else b""
    # Without usage to come the key is absent, as in the wild; with it, it is null.
    tail = b',"usage":null}' if usage else b"}"

    def event(delta: bytes, finish: bytes) -> bytes:
        body = b'"delta":' + delta if chat else b'"text":' + delta
        choices = b'"choices":[{"index":0,%b,"logprobs":null,"finish_reason":%b}]' % (body, finish)
        return comment + head + choices + tail + end + end

    events = []
    if chat:
        events.append(event(b'{"role":"assistant","content":""}', b"null"))
    content = b'{"content":%b}' % text if chat else text
    events += [event(content, b"null")] * script.chunks
    events.append(event(b"{}" if chat else b'""', b'"stop"'))
    if usage:
        count = b'"usage":{"prompt_tokens":7,"completion_tokens":%d,"total_tokens":%d}}' % (
            script.chunks, 7 + script.chunks)  # fmt: skip
        events.append(comment + head + b'"choices":[],' + count + end + end)
    if script.done:
        events.append(b"data: [DONE]" + end + end)
    return tuple(events)


def _responses_events(path: str, model: str, script: Script, end: bytes) -> Iterator[bytes]:
    for number in range(script.chunks):
        yield b"".join(
            (b"event: response.output_text.delta", end,
             b'data: {"type":"response.output_text.delta","sequence_number":%d,"delta":"a "}'
             % number, end, end)
        )  # fmt: skip
    whole = whole_body(path, model, script.size, script.unicode)
    yield b"".join(
        (b"event: response.completed", end,
         b'data: {"type":"response.completed","sequence_number":%d,"response":%b}'
         % (script.chunks, whole), end, end)
    )  # fmt: skip
