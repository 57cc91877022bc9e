"""The benchmark of the host tier, in its smallest form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_studies import harness, host_tier


def test_all_figures_come_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    size = ["--contexts", "16", "--tokens", "128", "--shape", "tiny"]
    harness.run_study(host_tier, [*size, "--host-min-tokens", "1", "--json", str(path)])
    (report,) = json.loads(path.read_text())
    assert report["computed"]["blocks_from_host"] == 0
    assert report["host_tier"]["blocks_from_host"] > 0
    # All but what each prompt's last token asks for.
    assert report["host_tier"]["found"] == pytest.approx(127 / 128, abs=1e-3)
    for name in ("computed", "host_tier"):
        figures = report[name]
        gaps = figures["longest_and_median"]
        assert gaps[0]["ms"] == pytest.approx(figures["between_tokens_longest_ms"], abs=0.01)
        assert gaps[-1]["ms"] == pytest.approx(figures["between_tokens_ms"], abs=0.01)
        # All of a gap is accounted for by its steps.
        for gap in gaps:
            steps = gap["steps"]
            assert gap["ms"] == pytest.approx(gap["outside_ms"] + sum(s["ms"] for s in steps), 1e-3)
            assert 0 <= gap["outside_ms"] < gap["ms"]
            for step in steps:
                parts = sum(step[part] for part in ("launch_ms", "wait_ms", "copies_ms", "rest_ms"))
                assert step["ms"] == pytest.approx(parts, abs=0.01)
                assert "rows, kernel by kernel" in step["launched"]
    asking = [entry["asks_for_blocks"] for entry in report["computed"]["steps_beside"]]
    assert not any(asking)
    asked = [entry["steps"] for entry in report["host_tier"]["steps_beside"]]
    # Each context asks once.
    assert asked[1] == 16
    assert set(report["gb_per_s"]) == {
        "blocks_out",
        "blocks_in",
        "blocks_both",
        "large_out",
        "large_in",
    }
    said = capsys.readouterr().out
    assert "first time, alone" in said
    assert "16 steps, kernel by kernel, blocks requested" in said


def test_too_few_contexts_are_refused() -> None:
    with pytest.raises(SystemExit):
        harness.run_study(host_tier, ["--contexts", "3"])
