"""`python -m parrot_gateway` as an operator meets it: what it refuses, and in which words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from harness.processes import run_cli

#: Enough to be served by, if it ever came to that.
UPSTREAM = ("--upstream", "x=http://127.0.0.1:1/v1", "--port", "0")


def check_refused(run: CompletedProcess[str], *words: str) -> None:
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    text = run.stderr
    assert "Traceback" not in text
    for word in words:
        assert word in text, text


def test_an_open_address_without_a_key() -> None:
    check_refused(run_cli("serve", "--host", "0.0.0.0", *UPSTREAM), "0.0.0.0", "PARROT_API_KEY")


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        run = run_cli("serve", "--upstream", "x=http://127.0.0.1:1/v1", "--port", port)
    check_refused(run, port, "--port")


def test_an_address_of_another_machine() -> None:
    # Of a range for documentation, which no machine has.
    run = run_cli(
        *("serve", "--host", "192.0.2.1", "--api-key", "env:KEY", *UPSTREAM),
        environment={"KEY": "key"},
    )
    check_refused(run, "192.0.2.1", "--host")
    assert "--port" not in run.stderr


def test_a_literal_key() -> None:
    run = run_cli("serve", "--api-key", "sk-very-secret", *UPSTREAM)
    check_refused(run, "env:NAME", "api_key")
    assert "sk-very-secret" not in run.stderr


def test_a_key_variable_that_is_not_set() -> None:
    check_refused(run_cli("serve", "--api-key", "env:NOT_SET_AT_ALL", *UPSTREAM), "NOT_SET_AT_ALL")


FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "unknown section": ("server: {port: 0}\nservers: {}\n", ("line 2", "servers")),
    "unknown setting": ("server:\n  port: 0\n  prot: 1\n", ("line 3", "server.prot")),
    "wrong type": ("server:\n  port: eighty\n", ("line 2", "server.port")),
    "out of range": ("server:\n\n  port: 65536\n", ("line 3", "server.port")),
    "not YAML": ("server: {port: 0\n", ("line", "YAML")),
    "a list": ("- server\n", ("mapping",)),
    "a literal secret": ("server:\n  api_key: sk-very-secret\n", ("line 2", "env:NAME")),
    "a bad URL": ("upstreams:\n  - name: x\n    url: 10.0.0.5:8000\n", ("line 3", "http://")),
    "an alias of nothing": (
        "models: [{model: parrot-demo}]\naliases:\n  gpt: parrot-demon\n",
        ("line 3", "aliases.gpt", "nothing serves 'parrot-demon'"),
    ),
    "twice the same name": (
        "upstreams:\n  - {name: x, url: http://a}\n  - {name: x, url: http://b}\n",
        ("twice", "x"),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_settings_file_that_is_wrong(tmp_path: Path, name: str) -> None:
    text, words = FILES[name]
    path = tmp_path / "parrot.yaml"
    path.write_text(text, encoding="utf-8")
    run = run_cli("serve", "--config", str(path))
    check_refused(run, *words)
    assert "sk-very-secret" not in run.stderr
    assert name == "twice the same name" or str(path) in run.stderr


def test_a_settings_file_that_is_not_there(tmp_path: Path) -> None:
    check_refused(run_cli("serve", "--config", str(tmp_path / "none.yaml")), "none.yaml")


def test_an_environment_variable_that_is_wrong() -> None:
    run = run_cli("serve", environment={"PARROT_SERVER_PORT": "eighty"})
    check_refused(run, "PARROT_SERVER_PORT")


def test_a_variable_that_holds_a_list_but_no_json() -> None:
    run = run_cli("serve", environment={"PARROT_MODELS": "parrot-demo"})
    check_refused(run, "PARROT_MODELS", "JSON")


def test_a_bad_item_of_a_list_is_told_from_where_it_came() -> None:
    bad = ("--upstream", "x=localhost:9", "--port", "0")
    check_refused(run_cli("serve", *bad), "command line: upstreams.0.url", "http://")
    models = '[{"model": "m", "engines": 0}]'
    run = run_cli("serve", environment={"PARROT_MODELS": models})
    check_refused(run, "environment variable PARROT_MODELS: models.0.engines")


@pytest.mark.parametrize("option", [("--upstream", "x"), ("--alias", "a="), ("--frobnicate",)])
def test_options_of_the_wrong_form(option: tuple[str, ...]) -> None:
    check_refused(run_cli("serve", *option), option[0])


def test_a_model_that_is_not_there() -> None:
    run = run_cli("serve", "--model", "./no/such/folder", "--port", "0")
    assert run.returncode == 1, run.stderr
    assert "no/such/folder" in run.stderr
    assert "Nothing can be served" in run.stderr
    assert "Traceback" not in run.stderr
    assert "ready" not in run.stdout


def test_help_and_version() -> None:
    assert "parrot-gateway" in run_cli("--version").stdout
    text = run_cli("--help").stdout
    assert all(command in text for command in ("serve", "engine", "doctor", "bench"))
    wide = {"COLUMNS": "120"}
    serve = run_cli("serve", "--help", environment=wide).stdout
    assert "--upstream" in serve
    for default in ("127.0.0.1", "8000", "parrot", "info"):
        assert f"[default: ({default})]" in serve
    assert "[default: (all)]" in run_cli("simulate", "policies", "--help", environment=wide).stdout


def test_the_doctor_finds_this_machine_fit() -> None:
    run = run_cli("doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "python" in run.stdout.lower()
    # Structured output needs it.
    assert "llguidance" in run.stdout


def test_an_engine_without_a_join_key() -> None:
    run = run_cli("engine", "--join", "ws://127.0.0.1:1/v1/engines/join", "--model", "x")
    assert run.returncode != 0
    assert "PARROT_JOIN_KEY" in run.stderr
    assert "Traceback" not in run.stderr


def test_an_engine_that_could_never_join_or_listen_ends_before_it_loads() -> None:
    """Loading a large model takes minutes; these are seen before."""
    engine = ("engine", "--model", "parrot-demo")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        runs = {
            address: run_cli(*engine, "--listen", address),
            "ws://": run_cli(
                *engine, "--join", "http://127.0.0.1:1", environment={"PARROT_JOIN_KEY": "key"}
            ),
            "--log-level": run_cli(*engine, "--listen", "127.0.0.1:0", "--log-level", "loud"),
        }
    for word, run in runs.items():
        assert run.returncode not in (0, 1), run.stderr
        assert word in run.stderr
        assert "loading" not in run.stderr
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize("redirect", ["", ">&-", "| head -1"])
def test_output_that_cannot_be_written_ends_in_no_trace(redirect: str) -> None:
    # A terminal of old: no UTF-8, of which Python has not made one itself.
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "COLUMNS": "60"}
    command = f"set -o pipefail; '{sys.executable}' -m parrot_gateway --help {redirect}"
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **plain}
    )
    assert "Traceback" not in run.stderr
    assert ("Usage" in run.stdout) == (not redirect)
