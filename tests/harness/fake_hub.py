"""A Hugging Face hub on this machine: set `HF_ENDPOINT` to its address."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "a" * 40


class FakeHub:
    """Repositories that are folders; notes which files were fetched.

    Args:
        repositories: folders by name.
    """

    def __init__(self, repositories: dict[str, Path]) -> None:
        self.repositories = repositories
        #: Names of repositories that want their terms accepted.
        self.gated: set[str] = set()
        #: Files that end after half of their bytes, once, until this is set.
        self.held: dict[str, threading.Event] = {}
        self.fetched: list[str] = []
        #: Set when half of a held file has been sent.
        self.holding = threading.Event()
        self.url = ""

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables by which a program uses this hub, with a cache of its own."""
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        for name, folder in self.repositories.items():
            if path.startswith((f"/api/models/{name}", f"/{name}/resolve/")):
                if name in self.gated:
                    _send(request, 403, {"error": "gated"}, code="GatedRepo")
                elif "/resolve/" in path:
                    self._send_file(request, folder / path.rpartition(f"{COMMIT}/")[2])
                elif "/tree/" in path:
                    _send(request, 200, _tree(folder))
                else:
                    _send(request, 200, {"id": name, "sha": COMMIT, "siblings": []})
                return
        _send(request, 404, {"error": "not found"}, code="RepoNotFound")

    def _send_file(self, request: BaseHTTPRequestHandler, file: Path) -> None:
        data = file.read_bytes()
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.send_header("ETag", f'"{_digest(data)}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.end_headers()
        if request.command == "HEAD":
            return
        self.fetched.append(file.name)
        held = self.held.get(file.name)
        if held is not None and not held.is_set():
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            self.holding.set()
            held.wait(30)
            data = data[len(data) // 2 :]
        # Who was ended meanwhile reads no more.
        with suppress(OSError):
            request.wfile.write(data)


def _digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _tree(folder: Path) -> list[dict[str, Any]]:
    entries = []
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            data, path = file.read_bytes(), file.relative_to(folder).as_posix()
            entries.append({"type": "file", "oid": _digest(data), "size": len(data), "path": path})
    return entries


def _send(
    request: BaseHTTPRequestHandler, status: int, value: Any, code: str | None = None
) -> None:
    data = json.dumps(value).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json")
    request.send_header("Content-Length", str(len(data)))
    if code is not None:
        request.send_header("X-Error-Code", code)
        request.send_header("X-Error-Message", "said the hub")
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)


@contextmanager
def fake_hub(repositories: dict[str, Path]) -> Iterator[FakeHub]:
    """Serve repositories until the end of the block."""
    hub = FakeHub(repositories)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield hub
    finally:
        for held in hub.held.values():
            held.set()
        server.shutdown()
        serving.join()
        server.server_close()
