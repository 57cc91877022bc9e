"""How the page's files are served: types, caching, compression, and nothing else of the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from parrot_gateway.http.exchange import Exchange
from parrot_gateway.server.app import create_app
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import Settings
from parrot_gateway.ui.static_files import STATIC, PageFiles

SCRIPT = "export const numbers = [" + "1, " * 2000 + "];"


@pytest.fixture(scope="module")
def client() -> TestClient:
    # Without its lifespan: nothing is started.
    return TestClient(create_app(Gateway(Settings())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    (folder / "app").mkdir(parents=True)
    (folder / "index.html").write_text("<p>page</p>")
    (folder / "app" / "main.js").write_text(SCRIPT)
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.fixture
def files(folder: Path) -> TestClient:
    page = PageFiles(folder)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        handler = page.find(exchange)
        assert handler is not None
        await handler(exchange)

    return TestClient(serve, headers={"accept-encoding": "identity"})


def test_the_page_answers_under_a_strict_policy(client: TestClient) -> None:
    answer = client.get("/ui/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_ui_without_a_slash_leads_to_the_page(client: TestClient) -> None:
    answer = client.get("/ui", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    assert client.get("/ui").url.path == "/ui/"


def test_files_are_open_where_calls_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARROT_API_KEY", "secret")
    client = TestClient(create_app(Gateway(Settings())))
    assert client.get("/ui/").status_code == 200
    assert client.get("/v1/models").status_code == 401


def test_a_name_that_a_page_may_have_bound_is_refused_without_a_key() -> None:
    client = TestClient(create_app(Gateway(Settings())), base_url="http://evil.example")
    assert client.get("/ui/").json()["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/index.html", "text/html; charset=utf-8"),
        ("/ui/app/main.js", "text/javascript; charset=utf-8"),
        ("/ui/LICENSE", "text/plain; charset=utf-8"),
    ],
)
def test_content_types(files: TestClient, path: str, content_type: str) -> None:
    assert files.get(path).headers["content-type"] == content_type


def test_a_text_is_compressed_for_those_who_take_it(files: TestClient) -> None:
    zipped = files.get("/ui/app/main.js", headers={"accept-encoding": "gzip, br"})
    plain = files.get("/ui/app/main.js")
    assert zipped.headers["content-encoding"] == "gzip"
    assert int(zipped.headers["content-length"]) < len(SCRIPT) / 10
    assert "content-encoding" not in plain.headers
    assert zipped.text == plain.text == SCRIPT
    assert zipped.headers["vary"] == plain.headers["vary"] == "accept-encoding"


def test_an_unchanged_file_is_not_sent_again(files: TestClient, folder: Path) -> None:
    first = files.get("/ui/app/main.js")
    known = {"if-none-match": f'"other", {first.headers["etag"]}'}
    again = files.get("/ui/app/main.js", headers=known)
    assert (again.status_code, again.content) == (304, b"")
    assert "content-length" not in again.headers
    path = folder / "app" / "main.js"
    path.write_text("changed")
    os.utime(path, ns=(0, 0))
    changed = files.get("/ui/app/main.js", headers=known)
    assert (changed.status_code, changed.text) == (200, "changed")


@pytest.mark.parametrize(
    "path",
    [
        "/ui/%2e%2e/%2e%2e/static_files.py",
        "/ui/app/../../static_files.py",
        "/ui/%2e%2e/static_files.py",
        "/ui/..%2fstatic_files.py",
        "/ui//etc/passwd",
        "/ui/app",
        "/ui/app/",
        "/ui/%00",
        "/ui/nothing.js",
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "unknown_route"


def test_only_get_and_head(client: TestClient) -> None:
    assert client.head("/ui/").status_code == 200
    assert client.post("/ui/", json={}).status_code == 405


def test_every_file_is_in_the_wheel() -> None:
    """Folders of these names are left out by `.gitignore`."""
    left_out = {"build", "dist", "runs", "node_modules"}
    assert (STATIC / "index.html").is_file()
    assert not [path for path in STATIC.rglob("*") if left_out.intersection(path.parts)]
