"""What a cache of 8 bits does to the demo model, on texts that it was not trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_studies import harness, kv_accuracy


def test_eight_bits_are_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    folder = Path(__file__).parents[1]
    passages = (folder / "held_out_passages.txt").read_text(encoding="utf-8")
    text.write_text("\n\n***\n\n".join(passages.split("\n\n***\n\n")[:2]), encoding="utf-8")
    path = tmp_path / "figures.json"
    harness.run_study(kv_accuracy, ["--text", str(text), "--json", str(path)])
    cases = json.loads(path.read_text())
    assert {case["texts"] for case in cases} == {"passages", "joined"}
    assert "fp8_e4m3" in capsys.readouterr().out
    for texts in ("passages", "joined"):
        by_way = {case["kv"]: case for case in cases if case["texts"] == texts}
        whole, rounded = by_way["as computed"], by_way["fp8_e4m3"]
        assert (whole["same_top"], whole["kl"], whole["kl_max"]) == (1, 0, 0)
        assert 2.5 < whole["nats"] < 4.5
        assert rounded["nats"] == pytest.approx(whole["nats"], abs=0.03)
        assert rounded["same_top"] > 0.93
        # Not nothing, and less than without scales.
        assert 1e-4 < rounded["kl"] < by_way["fp8, no scales"]["kl"] < 1e-2
        assert by_way["bfloat16"]["kl"] < rounded["kl"] / 10
