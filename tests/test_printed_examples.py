"""Python blocks of the documentation that no other test runs do what they are printed for.

Each runs as a program of its own, as a reader who pastes it would: nothing of an earlier block is
there.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import API_KEY, GatewayProcess, clean_environment

ROOT = Path(__file__).parent.parent


def blocks(file: str, heading: str) -> list[str]:
    """The Python blocks below a heading of the second level."""
    text = (ROOT / file).read_text(encoding="utf-8")
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


EXAMPLES = {
    f"{file}, {heading}, {number}": code
    for file, heading in (
        ("README.md", "Quick start"),
        ("docs/responses.md", "The Responses API"),
        ("docs/responses.md", "Named contexts"),
    )
    for number, code in enumerate(blocks(file, heading), start=1)
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_by_itself(demo: GatewayProcess, name: str) -> None:
    code = EXAMPLES[name].replace("http://127.0.0.1:8000", demo.root)
    code = code.replace('"none"', repr(API_KEY))
    folders = (".", "engine", "scheduler", "integrations")
    path = ":".join(str(ROOT / folder) for folder in folders)
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        env=clean_environment({"PYTHONPATH": path}),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout) > 20


def test_all_of_them_were_found() -> None:
    assert len(EXAMPLES) == 4
