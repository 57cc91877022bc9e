"""`parrot-gateway models …`: to which addresses the admin key goes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from harness.scripted_upstream import ScriptedUpstream, document
from typer.testing import CliRunner

from parrot_gateway.cli.main import app
from parrot_gateway.cli.models import list_text

KEY = "key-of-the-operator"
ELSEWHERE = "https://api.openai.com/v1"


@pytest.fixture
def gateway() -> Iterator[ScriptedUpstream]:
    """An address of this machine that has no models."""
    with ScriptedUpstream() as server:
        server.answer_all(document({"object": "list", "data": [], "downloads": []}))
        yield server


def keys(server: ScriptedUpstream) -> list[str | None]:
    """Return what `Authorization` said in the requests that came."""
    return [call.headers.get("authorization") for call in server.received]


def models(*arguments: str, **environment: str) -> Result:
    usual = {"PARROT_ADMIN_KEY": KEY, "PARROT_ADMIN_URL": None, "OPENAI_BASE_URL": None}
    return CliRunner().invoke(app, ["models", *arguments], env={**usual, **environment})


def test_the_key_goes_to_this_machine(gateway: ScriptedUpstream) -> None:
    done = models("list", OPENAI_BASE_URL=gateway.base_url)
    assert (done.exit_code, done.stdout) == (0, "no models\n")
    assert keys(gateway) == [f"Bearer {KEY}"]


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


def test_the_key_goes_where_the_operator_says(gateway: ScriptedUpstream, tmp_path: Path) -> None:
    config = tmp_path / "parrot.yaml"
    config.write_text(f"server: {{port: {gateway.port}, admin_key: env:FROM_FILE}}")
    for arguments, variable in (
        (["--base-url", gateway.base_url], "http://127.0.0.1:1/v1"),
        ([], gateway.base_url),
        (["--config", str(config)], "http://127.0.0.1:1/v1"),
    ):
        done = models(
            "list", *arguments,
            PARROT_ADMIN_URL=variable, OPENAI_BASE_URL=ELSEWHERE, FROM_FILE="of-the-file",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
    assert keys(gateway) == [f"Bearer {KEY}", f"Bearer {KEY}", "Bearer of-the-file"]


def test_the_key_follows_no_redirect(gateway: ScriptedUpstream) -> None:
    with ScriptedUpstream() as first:
        first.answer_all(document(b"", 307, {"location": gateway.base_url}))
        done = models("list", "--base-url", first.base_url)
    assert done.exit_code == 1
    assert f"redirects to {gateway.base_url}" in done.stderr
    assert (len(first.received), gateway.received) == (1, [])


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
