"""`parrot-gateway import`: settings on stdout or in a file, the report on stderr."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from parrot_gateway.cli.main import app
from parrot_gateway.settings.sources import load_settings

FILE = """
model_list:
  - model_name: gpt-4o
    litellm_params:
      model: openai/gpt-4o
      api_key: sk-secret
  - model_name: claude
    litellm_params: {model: bedrock/claude}
general_settings: {master_key: os.environ/MASTER}
"""


def run(folder: Path, text: str | bytes, *options: str) -> tuple[int, str, str]:
    file = folder / "litellm.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = CliRunner().invoke(app, ["import", str(file), *options])
    return result.exit_code, result.stdout, result.stderr


def test_settings_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = tmp_path / "parrot.yaml"
    status, out, report = run(tmp_path, FILE, "--output", str(written))
    assert (status, out) == (0, "")
    assert "line 7: model_list[1]: 'claude': calls cannot be passed on to bedrock" in report
    assert "OPENAI_API_KEY  the value of model_list[0].litellm_params.api_key" in report
    assert "sk-secret" not in report + written.read_text()
    monkeypatch.setenv("MASTER", "key of clients")
    settings = load_settings({}, written)
    assert settings.upstreams[0].models == ["gpt-4o"]
    assert settings.server.api_key == "env:MASTER"


def test_the_file_of_settings_is_a_new_one(tmp_path: Path) -> None:
    target = tmp_path / "parrot.yaml"
    target.write_text("mine")
    status, _, report = run(tmp_path, FILE, "--output", str(target))
    assert (status, target.read_text()) == (2, "mine")
    assert "cannot be written" in report


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "model_list: {a: 1}"])
def test_a_file_without_models(tmp_path: Path, text: str) -> None:
    status, out, report = run(tmp_path, text)
    assert (status, yaml.safe_load(out)) == (0, None)
    assert ": model_list: is not there or not a list: there is nothing to serve" in report
    assert "0 upstreams, 1 not carried over.\nNo model of it can be served" in report


@pytest.mark.parametrize(("text", "status"), [(FILE, 1), (FILE.replace("bedrock/", ""), 0)])
def test_strict(tmp_path: Path, text: str, status: int) -> None:
    found, out, _ = run(tmp_path, text, "--strict")
    assert found == status
    assert "name: openai" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model_list: [", "not valid YAML"),
        ("- a", "must be a mapping"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("a: " + "x" * 1_000_001, "larger than"),
        ("a: " + "[" * 1_500, "nested too deeply"),
        ("a: &a [*a]", "alias inside itself"),
        ("model_list: []\nmodel_list: []", "line 2: 'model_list' stands twice"),
        (
            "a0: &a0 [x]\n"
            + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)),
            "aliases",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | bytes, message: str) -> None:
    status, out, report = run(tmp_path, text)
    assert (status, out) == (2, "")
    assert message in report
    assert len(report) < 500
