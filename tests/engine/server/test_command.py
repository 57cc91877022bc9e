"""The engine as a program: how it ends where it cannot begin."""

from __future__ import annotations

import subprocess
import sys

import pytest
from parrot_engine.server.command import EXIT_CONFIG


@pytest.mark.parametrize("package", ["torch", "safetensors"])
def test_packages_that_are_not_installed_are_named(package: str) -> None:
    program = (
        f"import sys; sys.modules['{package}'] = None; "
        "from parrot_engine.server.command import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ("--model", "parrot-demo", "--listen", "127.0.0.1:0")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (EXIT_CONFIG, "")
    # The last line is what the gateway says of a model that it cannot run.
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"error: {package} is not installed")
    assert "pip install 'parrot-gateway[engine]'" in last
    assert "Traceback" not in done.stderr
