"""The tests of the openai client once more, with the interpreter that has openai 3.x.

Each with one of the two clients, sync or async in turn: the run with 2.x has both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLIENT_PYTHON = os.environ.get("PARROT_CLIENT_PYTHON")
ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(
    CLIENT_PYTHON is None,
    reason="PARROT_CLIENT_PYTHON names no interpreter with openai 3.x (`make test` does)",
)
@pytest.mark.timeout(840)
def test_the_client_tests_pass_with_openai_3() -> None:
    assert CLIENT_PYTHON is not None
    version = subprocess.run(
        [CLIENT_PYTHON, "-c", "import openai; print(openai.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    assert version.startswith("3."), f"{CLIENT_PYTHON} has openai {version}"
    environment = {
        **os.environ,
        "PARROT_SERVER_PYTHON": sys.executable,
        "PARROT_CLIENT_KINDS": "alternating",
    }
    run = subprocess.run(
        [
            CLIENT_PYTHON,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "tests/openai_client",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-2000:]
