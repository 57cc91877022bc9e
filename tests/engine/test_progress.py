"""Progress as lines: seldom, whole, and silent where the wait is short."""

from __future__ import annotations

import pytest
from parrot_engine.progress import ProgressLines, download_bar


def test_short_waits_are_silent_and_long_ones_speak_seldom() -> None:
    now, lines = 0.0, []
    progress = ProgressLines("loading", write=lines.append, clock=lambda: now)
    for done in range(1, 11):
        now = done * 0.5
        progress(done, 10)
    assert lines == [
        "loading: 20 % (2 of 10)",
        "loading: 60 % (6 of 10)",
        "loading: 100 % (10 of 10)",
    ]


def test_downloads_are_told_in_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bar = download_bar()(total=100, desc="Downloading bytes", unit="B")
    bar.delay = bar.mininterval = 0
    bar.update(40)
    bar.update(60)
    bar.close()
    told = capsys.readouterr().err
    assert "\r" not in told
    assert told.endswith("\n")
    assert any("Downloading bytes" in line and "100%" in line for line in told.splitlines())
