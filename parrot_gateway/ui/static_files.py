"""Serves the live page's files at `/ui/`.

The files contain no secret and need no key. Only files found at the start are served, so no path
leads out of the folder; a file that has changed since is read again.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from parrot_gateway.exceptions import MethodNotAllowedError, NotFoundError
from parrot_gateway.http.dispatch import Handler
from parrot_gateway.http.exchange import Exchange, Headers

STATIC = Path(__file__).parent / "static"
#: The page at `/docs`; its scripts and styles are among the files.
REFERENCE = Path(__file__).parent / "reference.html"

#: Only scripts, styles and data of this server; nothing inline, and no frame around it.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: Headers of everything under `/ui`.
SAFE_HEADERS: Headers = [
    (b"content-security-policy", _POLICY.encode()),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
_OTHER_TYPE = "text/plain; charset=utf-8"
_COMPRESSED = frozenset({".png", ".woff2"})


@dataclass(frozen=True, slots=True)
class _File:
    modified_ns: int
    content_type: bytes
    etag: bytes
    body: bytes
    #: Empty if compression gains nothing.
    zipped: bytes


class PageFiles:
    """Answers `/ui` and `/ui/…`.

    Args:
        folder: the files; `index.html` answers `/ui/`.
    """

    def __init__(self, folder: Path = STATIC) -> None:
        self._paths = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        #: Files that were requested, compressed once.
        self._read: dict[str, _File] = {}

    def find(self, exchange: Exchange) -> Handler | None:
        """Return the handler of a path of the page; None for other paths."""
        path = exchange.path
        return self._answer if path.startswith("/ui/") or path == "/ui" else None

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.method != "GET":
            raise MethodNotAllowedError(f"{exchange.path} takes GET, not {exchange.method}.")
        if exchange.path == "/ui":
            # NOTE: relative, because a proxy may serve the gateway under a path prefix.
            await exchange.respond(307, b"", [(b"location", b"ui/"), *SAFE_HEADERS])
            return
        name = exchange.path.removeprefix("/ui/") or "index.html"
        path = self._paths.get(name)
        if path is None:
            raise NotFoundError(f"The page has no file '{name[:80]}'.", code="unknown_route")
        file = self._read.get(name)
        if file is None or path.stat().st_mtime_ns != file.modified_ns:
            file = self._read[name] = await asyncio.to_thread(_read, path)
        headers = [
            (b"content-type", file.content_type),
            (b"etag", file.etag),
            (b"cache-control", b"no-cache"),
            (b"vary", b"accept-encoding"),
            *SAFE_HEADERS,
        ]
        if file.etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.start_stream(304, headers, b"", is_whole=True)
        elif file.zipped and b"gzip" in exchange.headers.get(b"accept-encoding", b""):
            await exchange.respond(200, file.zipped, [*headers, (b"content-encoding", b"gzip")])
        else:
            await exchange.respond(200, file.body, headers)


def _read(path: Path) -> _File:
    modified_ns, body = path.stat().st_mtime_ns, path.read_bytes()
    zipped = b"" if path.suffix in _COMPRESSED else gzip.compress(body, mtime=0)
    # NOTE: a weak tag, because it stands for both encodings.
    etag = f'W/"{hashlib.sha256(body).hexdigest()[:24]}"'.encode()
    content_type = _TYPES.get(path.suffix, _OTHER_TYPE).encode()
    return _File(modified_ns, content_type, etag, body, zipped if len(zipped) < len(body) else b"")
