"""`parrot-gateway simulate`, as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from parrot_bench.simulator.reports.plots import PlotsUnavailableError
from typer.testing import CliRunner, Result

from parrot_gateway.cli.main import app


def simulate(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def test_compares_policies(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = simulate(
        "gpts", "--set", "count=40", "--policy", "round-robin,lmetric", "--engines", 2,
        "--scale", 0.1, "--json", file, "--network-ms", "200-300", "--warm-up", 0.25,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert sorted(data) == ["lmetric", "round-robin"]
    for name, run in data.items():
        assert f"\n{name}" in result.stdout
        assert run["total"]["applications"] == 30
        assert run["settings"]["network_s"] == [0.2, 0.3, 0]
        assert run["settings"]["config"]["place"] == name
        assert len(run["engines"]) == 2
    # Progress and speed are not part of the table.
    assert "events/s" in result.stderr
    assert "events/s" not in result.stdout


def test_policies_of_a_setup_can_be_replaced(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--order", "plas", "--admission", "open", "--place", "lmetric", "--keep", "none"]
    result = simulate("gpts", "--set", "count=4", "--scale", 0.1, *arguments, "--json", file)
    assert result.exit_code == 0, result.output
    config = json.loads(file.read_text())["parrot"]["settings"]["config"]
    assert [config[name] for name in ("order", "admission", "place", "keep")] == arguments[1::2]


def test_a_sweep_runs_every_value(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    result = simulate(
        "gpts", "--set", "count=8", "--scale", 0.1, "--policy", "lmetric",
        "--policy", "round-robin", "--sweep", "rate=1,4", "--json", file,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    data = json.loads(file.read_text())
    assert list(data) == [
        "lmetric rate=1", "lmetric rate=4", "round-robin rate=1", "round-robin rate=4",
    ]  # fmt: skip
    assert data["lmetric rate=1"]["duration_s"] > 2 * data["lmetric rate=4"]["duration_s"]


def test_same_command_same_output() -> None:
    arguments = ("mixed", "--requests", 12, "--scale", 0.2, "--mode", "session", "--seed", 3)
    assert simulate(*arguments).stdout == simulate(*arguments).stdout
    assert simulate(*arguments).stdout != simulate(*arguments[:-1], 4).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "WORKLOAD is missing"),
        (["nonsense"], "no workload and no file 'nonsense'"),
        (["gpts", "--set", "rat=3"], "rat"),
        (["gpts", "--set", "rate"], "--set 'rate'"),
        (["gpts", "--policy", "best"], "--policy 'best': there are parrot"),
        (["gpts", "--place", "best"], "best"),
        (["gpts", "--profile", "H9000"], "--profile 'H9000': there are A100"),
        (["gpts", "--mode", "psychic"], "--mode 'psychic'"),
        (["gpts", "--sweep", "rate=a"], "--sweep 'rate=a'"),
        (["gpts", "--sweep", "=1,2"], "--sweep '=1,2'"),
        (["gpts", "--sweep", "rate=1,2", "--log", "x"], "--log"),
        (["gpts", "--network-ms", "fast"], "--network-ms 'fast'"),
        (["gpts", "--network-ms", "300-200"], "--network-ms"),
        (["gpts", "--policy", "parrot,paper", "--log", "x"], "--log"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    result = simulate(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_log_replays_to_the_same_decisions(tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = simulate("mixed", "--requests", 12, "--scale", 0.2, "--log", log, "--stale-ms", 50)
    assert run.exit_code == 0, run.output
    same = CliRunner().invoke(app, ["replay", str(log)])
    assert same.exit_code == 0, same.output
    assert "the same decisions, byte for byte" in same.stdout


def test_two_runs_write_the_same_log(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "parrot_gateway", "simulate", "agents", "--requests", "2",
        "--scale", "0.05", "--log",
    ]  # fmt: skip
    logs = []
    for seed in ("1", "2"):
        log = tmp_path / seed
        subprocess.run(
            [*command, str(log)], check=True, capture_output=True, env={"PYTHONHASHSEED": seed}
        )
        logs.append(log.read_bytes())
    assert logs[0] == logs[1]
    assert logs[0].count(b"\n") > 10


def test_traces_can_be_simulated(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{s:02}.0000000,{100 + s},{5 + s}" for s in range(20)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    result = simulate(trace)
    assert result.exit_code == 0, result.output
    assert " 20 " in result.stdout
    assert simulate(trace, "--scale", 2).exit_code == 2


def test_pictures_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = simulate("gpts", "--plots", tmp_path / "plots")
    assert result.exit_code == 2
    assert "pip install 'parrot-bench[plots]'" in result.stderr
    from parrot_bench.simulator.reports.plots import require_matplotlib

    with pytest.raises(PlotsUnavailableError):
        require_matplotlib()


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'parrot-bench[plots]'")
    pictures = []
    for folder in ("one", "two"):
        result = simulate(
            "mixed", "--requests", 12, "--scale", 0.2, "--engines", 2,
            "--policy", "parrot,lmetric", "--plots", tmp_path / folder,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        files = sorted((tmp_path / folder).iterdir())
        assert [file.name for file in files] == [
            "completion.svg", "engines-lmetric.svg", "engines-parrot.svg",
        ]  # fmt: skip
        pictures.append([file.read_bytes() for file in files])
    assert pictures[0] == pictures[1]
    assert all(b"<svg" in picture for picture in pictures[0])


def test_pictures_of_load(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pip install 'parrot-bench[plots]'")
    result = simulate(
        "gpts", "--set", "count=8", "--scale", 0.1, "--sweep", "rate=1,8", "--policy",
        "round-robin,lmetric", "--plots", tmp_path, "--png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert sorted(file.name for file in tmp_path.iterdir()) == ["completion.png", "load.png"]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_fitted_to_a_log_is_simulated(tmp_path: Path) -> None:
    log, file, results = (tmp_path / name for name in ("run.jsonl", "mine.json", "results.json"))
    recorded = simulate("mixed", "--set", "count=24", "--engines", 1, "--log", log)
    assert recorded.exit_code == 0, recorded.output
    fitted = simulate("fit", log, "--json", file, "--name", "mine")
    assert fitted.exit_code == 0, fitted.output
    assert "each token of prompts filled" in fitted.stdout
    assert "calls on 1 engines" in fitted.stderr
    run = simulate("gpts", "--set", "count=4", "--profile", file, "--json", results)
    assert run.exit_code == 0, run.output
    for wrong, why in ((log, "no fitted profile"), (tmp_path / "none.json", "there are A100")):
        refused = simulate("gpts", "--profile", wrong)
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.output
    assert "line 1" in simulate("fit", file).stderr
