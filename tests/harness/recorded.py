"""A server in the client's own process: keeps what it was sent, answers as a gateway would."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
from parrot_functions import Client, Session

DEADLINE_S = 60.0


class Sent(NamedTuple):
    """One request."""

    method: str
    path: str
    params: dict[str, str]
    body: Any
    headers: dict[str, str]


class Recorded:
    """Answers every call and every read with success, unless told otherwise.

    Attributes:
        sent: all requests so far.
        answered: those that were not dropped while they were held.
        special: looks at each request first; may answer it, or raise in its place.
        hold: while it is set, POST requests are taken and not answered.
        is_held: of which POST requests that is true.
    """

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.answered: list[Sent] = []
        self.special: Callable[[Sent], httpx.Response | Exception | None] = lambda sent: None
        self.hold = threading.Event()
        self.is_held: Callable[[Sent], bool] = lambda sent: True
        self.hold_reads = threading.Event()
        self._changed = threading.Condition()

    def session(self, **options: Any) -> Session:
        """A session whose requests come here."""
        return Session(client=self.client(), **options)

    def client(self, **options: Any) -> Client:
        """Connections that lead here."""
        options = {"model": "m", "timeout": DEADLINE_S, **options}
        return Client("http://gateway/v1", transport=httpx.MockTransport(self._answer), **options)

    def of(self, method: str, path: str) -> list[Sent]:
        """The requests of a method whose paths begin like that."""
        return [s for s in self.sent if s.method == method and s.path.startswith(path)]

    def wait_for(self, count: int, method: str, path: str) -> list[Sent]:
        """Wait until there were `count` of them."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: len(self.of(method, path)) >= count, DEADLINE_S
            )
        assert arrived, self.sent
        return self.of(method, path)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        sent = Sent(
            request.method,
            request.url.path.removeprefix("/v1"),
            dict(request.url.params),
            json.loads(request.content) if request.content else None,
            dict(request.headers),
        )
        with self._changed:
            self.sent.append(sent)
            self._changed.notify_all()
        held = self.hold if sent.method == "POST" else self.hold_reads
        if sent.method == "POST" and not self.is_held(sent):
            held = threading.Event()
        until = time.monotonic() + DEADLINE_S
        # NOTE: polled, as it is set and cleared on another thread.
        while held.is_set() and time.monotonic() < until and sent.method != "DELETE":  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.answered.append(sent)
        special = self.special(sent)
        if isinstance(special, Exception):
            raise special
        return special if special is not None else _success(sent)


def _success(sent: Sent) -> httpx.Response:
    if sent.path == "/completions":
        name = sent.body["parrot"]["output"]
        return httpx.Response(200, json={"choices": []}, headers={"x-parrot-variable": f"v.{name}"})
    if sent.method == "POST":
        name = sent.body["name"]
        return httpx.Response(201, json={"id": f"v.{name}", "name": name})
    if sent.method == "GET":
        name = sent.path.rpartition("/v.")[2]
        return httpx.Response(200, json={"state": "ready", "value": f"text of {name}"})
    return httpx.Response(200, json={})


def error(status: int, code: str, *, headers: Any = None, **fields: Any) -> httpx.Response:
    """An answer in the form of the gateway's errors."""
    body = {"message": "no", "type": "t", "param": None, "code": code}
    return httpx.Response(status, json={"error": body, **fields}, headers=headers)
