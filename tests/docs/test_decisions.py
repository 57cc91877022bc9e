"""Records of decisions: each with a number of its own, and in the architecture's table."""

from __future__ import annotations

import re

from harness.python_blocks import ROOT


def test_each_decision_has_its_own_number_and_its_line() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    numbers = [int(path.name.partition("-")[0]) for path in records]
    assert numbers == list(range(1, len(records) + 1))
    for number, path in zip(numbers, records, strict=True):
        titled = re.match(r"# (\d+)\.", path.read_text())
        assert titled is None or int(titled[1]) == number, path.name
    table = (ROOT / "docs" / "architecture.md").read_text()
    linked = re.findall(r"^\| \[(\d+)\]\(decisions/([^)]+)\)", table, re.MULTILINE)
    assert linked == [
        (str(number), path.name) for number, path in zip(numbers, records, strict=True)
    ]
