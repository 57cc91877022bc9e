"""The benchmark of the host tier, in its smallest form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parrot_engine.bench import host_tier


def test_all_figures_come_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    size = ["--contexts", "16", "--tokens", "128", "--shape", "tiny"]
    host_tier.main([*size, "--host-min-tokens", "1", "--json", str(path)])
    report = json.loads(path.read_text())
    assert report["computed"]["blocks_from_host"] == 0
    assert report["host_tier"]["blocks_from_host"] > 0
    # All but what each prompt's last token asks for.
    assert report["host_tier"]["found"] == pytest.approx(127 / 128, abs=1e-3)
    assert set(report["gb_per_s"]) == {
        "blocks_out",
        "blocks_in",
        "blocks_both",
        "large_out",
        "large_in",
    }
    assert "first time, alone" in capsys.readouterr().out


def test_too_few_contexts_are_refused() -> None:
    with pytest.raises(SystemExit):
        host_tier.main(["--contexts", "3"])
