"""`bench` and `simulate` come from parrot-bench, and say so where it is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

#: Runs the command line as if parrot-bench were not installed.
WITHOUT = """
import sys
sys.modules["parrot_bench"] = None
from parrot_gateway.cli import main
main()
"""


@pytest.mark.parametrize(
    "arguments",
    [["bench", "overhead", "--quick"], ["bench", "overhead", "--help"], ["simulate"], ["bench"]],
)
def test_a_missing_distribution_is_named(arguments: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert f"`parrot-gateway {arguments[0]}` needs parrot-bench" in ran.stderr
    assert "pip install ./bench" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_other_commands_need_no_benchmarks() -> None:
    command = [sys.executable, "-c", WITHOUT, "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0
    assert "Needs parrot-bench" in ran.stdout
