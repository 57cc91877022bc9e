"""`serve --check`: what is printed, and with which status it ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from harness.processes import free_port
from harness.scripted_upstream import ScriptedUpstream, document
from typer.testing import CliRunner

from parrot_gateway import extras
from parrot_gateway.cli.main import app
from parrot_gateway.server import check as check_module


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
upstreams: [{{name: openai, url: "https://bob:hunter2@127.0.0.1:1/v1"}}]
aliases: {{gpt: mine, "*": openai/gpt-4o}}
""",
    )
    done = check("--config", file)
    assert done.exit_code == 0
    assert "hunter2" not in done.output
    (warning,) = done.stderr.splitlines()
    assert warning.startswith(
        f"warning: {file}, line 4: upstreams.0.url: openai (https://127.0.0.1:1"
    )
    lines = done.stdout.splitlines()
    assert lines[0].endswith("/v1, with the key in env:THE_KEY, admin routes off")
    assert lines[1:] == [
        f"model mine ({tmp_path}/mine; 2 engines on auto)",
        "model owner/on-the-hub (owner/on-the-hub, to be downloaded; 1 engine on auto)",
        "upstream openai (https://127.0.0.1:1/v1, with the key in env:OPENAI_API_KEY; models as "
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
    warning, *problems = done.stderr.splitlines()
    assert warning.startswith(
        f"warning: {file}, line 9: upstreams.0.url: own (http://127.0.0.1:1/v1)"
    )
    assert problems == [
        f"{file}, line 2: server.api_key: The environment variable NOT_SET_ANYWHERE is not set, "
        "but env:NOT_SET_ANYWHERE needs it.",
        f"{file}, line 4: models.0.model: there is no folder {tmp_path}/nowhere",
        f"{file}, line 5: models.1.model: {tmp_path}/empty has no config.json",
        f"{file}, line 6: models.1.adapters.sql: {tmp_path}/sql is no PEFT adapter",
        f"{file}, line 13: scheduler.record: there is no folder {tmp_path}/no/such",
        f"{file}, line 15: aliases.gpt: nothing serves 'nothing'",
        f"{file}, line 11: upstreams.0.fallback: nothing serves 'nobody'",
    ]


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    done = check("--config", written(tmp_path, "server:\n  prot: 1\nsessions:\n  ttl_s: soon\n"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "line 2: server.prot: unknown setting; is server.port meant?" in done.stderr
    assert "line 4: sessions.ttl_s" in done.stderr
    done = check("--config", written(tmp_path, "port: 1\nupstreams: [{nam: x}]\nqwertz: 1\n"))
    assert "line 1: port: unknown setting; is server.port meant?" in done.stderr
    assert "line 2: upstreams.0.nam: unknown setting; is upstreams.name meant?" in done.stderr
    assert "line 3: qwertz: unknown setting\n" in done.stderr
    done = check("--config", written(tmp_path, "server: {port: 1}\naliases: {}\nserver: {}\n"))
    assert "line 3: 'server' stands twice in the same mapping (first on line 1)" in done.stderr


def test_a_port_that_is_taken_and_a_host_without_a_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = check("--port", str(taken.getsockname()[1]))
    assert done.exit_code == 2
    assert "command line: server.port: Cannot listen on" in done.stderr
    done = check("--host", "0.0.0.0")
    assert done.exit_code == 2
    assert "Refusing to listen on 0.0.0.0 without a key" in done.stderr


def test_packages_that_are_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"engine": ("no_such_torch", "typer"), "tracing": ("typer.no_sdk", "no_such.exporter")}
    monkeypatch.setattr(extras, "EXTRAS", named)
    done = check("--model", "parrot-demo")
    assert done.exit_code == 2
    assert "command line: models: not installed: no_such_torch; pip install" in done.stderr
    text = "telemetry: {traces_endpoint: 'http://127.0.0.1:1/v1/traces'}\nupstreams: []\n"
    done = check("--config", written(tmp_path, text + "engines: {join_key: env:PATH}\n"))
    assert done.exit_code == 2
    assert "line 1: telemetry.traces_endpoint: not installed: typer.no_sdk" in done.stderr
    assert "parrot-gateway[tracing]" in done.stderr
    assert "no_such_torch" not in done.stderr


def test_models_that_cannot_be_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = check("--model", "owner/model")
    assert done.exit_code == 2
    assert f"owner/model is not in the hub cache {cache}, and HF_HUB_OFFLINE" in done.stderr
    assert not cache.exists()
    snapshot = cache / "models--owner--model" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    assert check("--model", "owner/model").exit_code == 0
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_CACHE", str(snapshot / "config.json" / "below"))
    done = check("--model", "owner/other")
    assert "owner/other cannot be downloaded: nothing can be written into" in done.stderr


def test_what_a_start_survives_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARROT_SRVER_PORT", "1")
    monkeypatch.setenv("PARROT_MY_KEY", "a key with a name of the user's")
    text = f"""
server: {{api_key: env:PARROT_MY_KEY}}
upstreams: [{{name: own, url: "http://127.0.0.1:1/v1"}}]
batches: {{folder: {tmp_path}/file/below}}
"""
    file = written(tmp_path, text)
    done = check("--config", file)
    assert done.exit_code == 0
    folder, upstream, variable = done.stderr.splitlines()
    assert folder.startswith(f"warning: {file}, line 4: batches.folder: no files and batches")
    assert "line 3: upstreams.0.url: own (http://127.0.0.1:1/v1): " in upstream
    assert variable == (
        "warning: environment variable PARROT_SRVER_PORT: is no setting, and is not read"
    )


@pytest.mark.parametrize(
    ("status", "models", "warning"),
    [
        (200, None, None),
        (401, None, "It wants a key"),
        (401, ["listed"], "It wants a key"),
        (404, None, "GET /models answered 404"),
        (404, ["listed"], None),
        (503, ["listed"], "GET /models answered 503"),
    ],
)
def test_upstreams_are_asked_for_their_models(
    tmp_path: Path, status: int, models: Any, warning: str | None
) -> None:
    with ScriptedUpstream() as server:
        server.answer_all(document({"data": [{"id": "listed"}]}, status))
        said = "" if models is None else f", models: {models}"
        entry = f"{{name: own, url: '{server.base_url}'{said}}}"
        done = check("--config", written(tmp_path, f"upstreams: [{entry}]"))
    assert (done.exit_code, [call.target for call in server.received]) == (0, ["/v1/models"])
    assert (done.stderr == "") if warning is None else (warning in done.stderr)


def test_an_upstream_that_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_module, "_UPSTREAMS_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        file = written(tmp_path, f"upstreams: [{{name: own, urls: ['{url}', '{url}x']}}]")
        done = check("--config", file)
    assert (done.exit_code, done.stderr.count("no answer within 0.05 s")) == (0, 2)
