"""`serve --check`: what is printed, and with which status it ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import Result
from harness.processes import free_port
from typer.testing import CliRunner

from parrot_gateway.cli.main import app


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PARROT_"):
            monkeypatch.delenv(name)


def check(*options: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--check", "--port", str(free_port()), *options])


def written(folder: Path, text: str) -> str:
    path = folder / "parrot.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_what_would_be_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret-of-clients")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-of-the-upstream")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    file = written(
        tmp_path,
        f"""
server: {{api_key: env:THE_KEY}}
models: [{{model: {tmp_path}/mine, engines: 2}}, owner/on-the-hub]
upstreams: [{{name: openai, url: "https://bob:hunter2@api.openai.com/v1"}}]
aliases: {{gpt: mine, "*": openai/gpt-4o}}
""",
    )
    done = check("--config", file)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].endswith("/v1, with the key in env:THE_KEY, admin routes off")
    assert lines[1:] == [
        f"model mine ({tmp_path}/mine; 2 engines on auto)",
        "model owner/on-the-hub (owner/on-the-hub, to be downloaded; 1 engine on auto)",
        "upstream openai (https://api.openai.com/v1, with the key in env:OPENAI_API_KEY; models as "
        "it lists them)",
        "alias gpt -> mine",
        "alias * -> openai/gpt-4o",
    ]


def test_everything_that_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    file = written(
        tmp_path,
        f"""server:
  api_key: env:NOT_SET_ANYWHERE
models:
  - {tmp_path}/nowhere
  - model: {tmp_path}/empty
    adapters: {{sql: {tmp_path}/sql}}
upstreams:
  - name: own
    url: http://127.0.0.1:1/v1
    models: [listed]
    fallback: nobody
scheduler:
  record: {tmp_path}/no/such/folder.log
aliases:
  gpt: nothing
  good: listed
""",
    )
    done = check("--config", file)
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        f"{file}, line 2: server.api_key: The environment variable NOT_SET_ANYWHERE is not set, "
        "but env:NOT_SET_ANYWHERE needs it.",
        f"{file}, line 4: models.0.model: there is no folder {tmp_path}/nowhere",
        f"{file}, line 5: models.1.model: {tmp_path}/empty has no config.json",
        f"{file}, line 6: models.1.adapters.sql: {tmp_path}/sql is no PEFT adapter",
        f"{file}, line 13: scheduler.record: nothing can be written into {tmp_path}/no/such",
        f"{file}, line 15: aliases.gpt: nothing serves 'nothing'",
        f"{file}, line 11: upstreams.0.fallback: nothing serves 'nobody'",
    ]


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    done = check("--config", written(tmp_path, "server:\n  prot: 1\nsessions:\n  ttl_s: soon\n"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "line 2: server.prot: unknown setting" in done.stderr
    assert "line 4: sessions.ttl_s" in done.stderr


def test_a_port_that_is_taken_and_a_host_without_a_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = check("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "command line: server.port: Cannot listen on" in done.stderr
    done = check("--host", "0.0.0.0")
    assert done.exit_code == 2
    assert "Refusing to listen on 0.0.0.0 without a key" in done.stderr
