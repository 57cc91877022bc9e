"""A server of one "model" that always writes the same text, and goes on with what it is given.

It breaks off where a test says so: after a byte of its stream, or at an event. Runs in the test's
loop, on a real socket.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

#: Blanks before, behind and between, quotes, and characters of several bytes.
PIECES = ("So ", 'Ä "x"', "\n\n", "and", "  so", " on 🦜.", "\n")
TEXT = "".join(PIECES)
PROMPT = "Say it: "

Fault = Literal["cut", "end", "stall", "malformed", "in_band_error", "abort"]
#: How it is told to continue a chat; `refuse` answers such a request with a 400.
Takes = Literal["continue_final_message", "prefill", "prefix", "refuse"]

TOOL_CALL = {
    "index": 0, "id": "call_1", "type": "function",
    "function": {"name": "look", "arguments": "{}"},
}  # fmt: skip
ERROR = {"error": {"message": "the model fell over", "type": "server_error", "code": "fell"}}


@dataclass
class ContinuingServer:
    """One server.

    Attributes:
        takes: see `Takes`.
        trims: blanks around what it is given are lost, as in many chat templates.
        fault: happens to streams after `cut` bytes of events.
        faults_left: streams that it happens to; shared by the servers of one upstream.
        status: of all its answers.
        requests: bodies of the calls it got.
    """

    takes: Takes = "continue_final_message"
    trims: bool = False
    fault: Fault = "cut"
    cut: int = 0
    faults_left: list[None] = field(default_factory=list)
    status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    port: int = 0
    #: In ids, where not the port.
    identity: int | None = None
    #: It ends each answer with a call of a tool.
    calls_tool: bool = False
    #: Behind a fault that does not end the connection comes the rest of its answer.
    follows: bool = False
    #: The other end has closed the connection of a stream that stalled.
    hung_up: bool = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def events(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer; of a request that it refuses, none."""
        is_chat = "messages" in body
        given = self._given(body)
        if given is None:
            return []
        pieces = rest_of(given)
        object_ = "chat.completion.chunk" if is_chat else "text_completion"
        identity = self.port if self.identity is None else self.identity
        envelope = {
            "id": f"answer-{identity}", "object": object_, "created": identity,
            "model": body["model"],
        }  # fmt: skip
        shown = [given, *pieces] if self.takes == "prefix" and is_chat and given else pieces
        deltas: list[dict[str, Any]] = [
            {"delta": {"content": piece}} if is_chat else {"text": piece} for piece in shown
        ]
        if is_chat:
            deltas.insert(0, {"delta": {"role": "assistant", "content": ""}})
        empty: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
        if self.calls_tool:
            deltas.append({"delta": {"tool_calls": [TOOL_CALL]}})
        deltas.append({**empty, "finish_reason": "tool_calls" if self.calls_tool else "stop"})
        chunks = [
            {**envelope, "choices": [{"index": 0, "finish_reason": None, **delta}]}
            for delta in deltas
        ]
        if (body.get("stream_options") or {}).get("include_usage"):
            prompt, completion = 10 + len(PIECES) - len(pieces), len(pieces)
            usage = {"prompt_tokens": prompt, "completion_tokens": completion,
                     "total_tokens": prompt + completion}  # fmt: skip
            chunks.append({**envelope, "choices": [], "usage": usage})
        return [*map(event, chunks), b"data: [DONE]\n\n"]

    def _given(self, body: dict[str, Any]) -> str | None:
        if "prompt" in body:
            return str(body["prompt"]).removeprefix(PROMPT)
        last = body["messages"][-1]
        if last["role"] != "assistant":
            return ""
        marked = {
            "continue_final_message": body.get("continue_final_message") is True
            and body.get("add_generation_prompt") is False,
            "prefix": last.get("prefix") is True,
            "prefill": "continue_final_message" not in body and "prefix" not in last,
            "refuse": False,
        }
        given = str(last["content"])
        if not marked[self.takes] or (self.takes == "prefill" and given != given.rstrip()):
            return None
        return given.strip() if self.trims else given

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, and close the connection."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            body = json.loads(await reader.readexactly(length))
            self.requests.append(body)
            events = self.events(body)
            if self.status != 200 or not events:
                writer.write(_whole(400 if self.status == 200 else self.status))
                return
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            data, ends = b"".join(events), True
            if self.faults_left and self.cut < len(data):
                self.faults_left.pop()
                rest = data[self.cut :] if self.follows and self.fault in _FAULTS else b""
                data, ends = data[: self.cut], self.fault not in ("cut", "stall")
                data += _FAULTS.get(self.fault, b"") + rest
            if data:
                writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            if ends:
                writer.write(b"0\r\n\r\n")
            await writer.drain()
            if self.fault == "stall" and not ends:
                # Until the gateway hangs up.
                await reader.read()
                self.hung_up = True
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ContinuingServer]:
        """Listen until the end of the block."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def rest_of(given: str) -> Sequence[str]:
    """The pieces of the text behind what is given, the first maybe a part of one."""
    assert TEXT.startswith(given), given
    pieces, length = [], len(given)
    for piece in PIECES:
        if length < len(piece):
            pieces.append(piece[length:])
        length = max(0, length - len(piece))
    return pieces


_FAULTS: dict[Fault, bytes] = {
    "malformed": b"data: {'choices': oops}\n\n",
    "in_band_error": event(ERROR) + b"data: [DONE]\n\n",
    "abort": event({"choices": [{"index": 0, "delta": {}, "text": "", "finish_reason": "abort"}]})
    + b"data: [DONE]\n\n",
}


def _whole(status: int) -> bytes:
    error = {"message": "not like this", "type": "invalid_request_error", "code": None}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
