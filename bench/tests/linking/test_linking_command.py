"""`parrot-gateway bench linking` prints tables and writes JSON."""

from __future__ import annotations

import json
from pathlib import Path

from parrot_bench.linking.cost import measure
from parrot_bench.linking.score import GatewayLinker
from typer.testing import CliRunner

from parrot_gateway.cli.main import app


def test_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "linking.json"
    options = "--workload debate --workload windows --instances 4 --no-cost --show 1"
    result = CliRunner().invoke(app, ["bench", "linking", *options.split(), "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "session F1" in result.output
    assert "Forecasts of debate" in result.output
    content = json.loads(file.read_text())
    assert content["machine"]["cores"]
    assert [row["workload"] for row in content["rows"]] == ["debate", "windows"]
    assert content["rows"][0]["recall"] == 1.0
    assert [each["role"] for each in content["forecasts"]["debate"]] == ["debater", "all"]


def test_an_unknown_workload_is_named() -> None:
    result = CliRunner().invoke(app, ["bench", "linking", "--workload", "nothing"])
    assert result.exit_code == 2
    assert "nothing" in result.output


def test_cost_is_measured_by_size() -> None:
    found = measure(GatewayLinker, indexed=50, sizes_kb=(1, 4, 100))
    assert found.indexed == 50
    assert found.microseconds[100] > found.microseconds[1] > 0
    assert found.megabytes > 0
