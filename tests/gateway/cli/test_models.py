"""`parrot-gateway models …`: to which addresses the admin key goes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from click.testing import Result
from typer.testing import CliRunner

from parrot_gateway.cli.main import app
from parrot_gateway.cli.models import list_text

KEY = "key-of-the-operator"
ELSEWHERE = "https://api.openai.com/v1"


class _Handler(BaseHTTPRequestHandler):
    #: `Authorization` of the requests that came.
    seen: ClassVar[list[str | None]]
    #: Where they are sent on to, if anywhere.
    location: ClassVar[str | None]

    def do_GET(self) -> None:
        self.seen.append(self.headers["Authorization"])
        if self.location is None:
            body = json.dumps({"object": "list", "data": [], "downloads": []}).encode()
            self.send_response(200)
        else:
            body = b""
            self.send_response(307)
            self.send_header("Location", self.location)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


class Recorded:
    """An address of this machine, and what came there."""

    def __init__(self, port: int, seen: list[str | None]) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/v1"
        self.seen = seen


@contextmanager
def recording(location: str | None = None) -> Iterator[Recorded]:
    seen: list[str | None] = []
    handler = type("Handler", (_Handler,), {"seen": seen, "location": location})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            yield Recorded(server.server_port, seen)
        finally:
            server.shutdown()


@pytest.fixture
def gateway() -> Iterator[Recorded]:
    with recording() as gateway:
        yield gateway


def models(*arguments: str, **environment: str) -> Result:
    usual = {"PARROT_ADMIN_KEY": KEY, "PARROT_ADMIN_URL": None, "OPENAI_BASE_URL": None}
    return CliRunner().invoke(app, ["models", *arguments], env={**usual, **environment})


def test_the_key_goes_to_this_machine(gateway: Recorded) -> None:
    done = models("list", OPENAI_BASE_URL=gateway.url)
    assert (done.exit_code, done.stdout) == (0, "no models\n")
    assert gateway.seen == [f"Bearer {KEY}"]


@pytest.mark.parametrize(
    "elsewhere",
    [ELSEWHERE, "http://127.0.0.1@example.com/v1", "http://10.0.0.1:8000/v1", "no address"],
)
def test_the_key_does_not_follow_clients_to_another_host(elsewhere: str) -> None:
    for command in (["list"], ["unload", "m"], ["load", "m"]):
        done = models(*command, OPENAI_BASE_URL=elsewhere)
        assert done.exit_code == 1
        for remedy in (elsewhere, "--base-url", "PARROT_ADMIN_URL", "--config"):
            assert remedy in done.stderr
        assert KEY not in done.output


def test_the_key_goes_where_the_operator_says(gateway: Recorded, tmp_path: Path) -> None:
    config = tmp_path / "parrot.yaml"
    config.write_text(f"server: {{port: {gateway.port}, admin_key: env:FROM_FILE}}")
    for arguments, variable in (
        (["--base-url", gateway.url], "http://127.0.0.1:1/v1"),
        ([], gateway.url),
        (["--config", str(config)], "http://127.0.0.1:1/v1"),
    ):
        done = models(
            "list", *arguments,
            PARROT_ADMIN_URL=variable, OPENAI_BASE_URL=ELSEWHERE, FROM_FILE="of-the-file",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    assert gateway.seen == [f"Bearer {KEY}", f"Bearer {KEY}", "Bearer of-the-file"]


def test_the_key_follows_no_redirect(gateway: Recorded) -> None:
    with recording(location=gateway.url) as first:
        done = models("list", "--base-url", first.url)
    assert done.exit_code == 1
    assert f"redirects to {gateway.url}" in done.stderr
    assert (len(first.seen), gateway.seen) == (1, [])


def test_a_key_on_its_way_unencrypted_is_told() -> None:
    done = models("list", "--base-url", "http://gateway.invalid/v1")
    assert done.exit_code == 1
    assert "unencrypted" in done.stderr
    assert "No gateway answers" in done.stderr
    done = models("list", "--base-url", "https://gateway.invalid/v1")
    assert "unencrypted" not in done.stderr


def test_downloads_are_listed_until_they_end() -> None:
    downloads = [
        {"state": state, "model": state, "done_bytes": 5e6, "total_bytes": 2e9}
        for state in ("waiting", "downloading", "done", "failed")
    ]
    assert list_text({"data": [], "downloads": downloads}, 0.0).splitlines() == [
        "downloading waiting: 5 MB of 2 GB",
        "downloading downloading: 5 MB of 2 GB",
    ]


def test_a_download_here_needs_no_gateway() -> None:
    """Wherever clients are pointed to."""
    done = models("pull", "no name", OPENAI_BASE_URL=ELSEWHERE)
    assert done.exit_code == 1
    assert "is not the name of a hub repository" in done.stderr
