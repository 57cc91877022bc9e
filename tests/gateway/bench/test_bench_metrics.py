"""The benchmark of the page of metrics runs, and counts what there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from parrot_gateway.bench.metrics import metrics_command


def test_the_page_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.json"
    metrics_command(engines=3, models=2, tenants=2, rounds=2, json_file=path)
    assert "a page, p50" in capsys.readouterr().out
    written = msgspec.json.decode(path.read_bytes())
    rows = {row["name"]: row["gateway"] for row in written["rows"]}
    assert rows["samples"] > 300
    assert (
        0
        < rows["longest turn of the event loop, p50"]
        <= 1000 * max(page["longest_turn_s"] for page in written["pages"])
    )
    assert rows["counting a call, CPU"] > 0
    assert len(written["pages"]) == 2
