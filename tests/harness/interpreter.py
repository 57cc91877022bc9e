"""Programs in interpreters of their own that need not import the large client libraries again.

They are forks of a process that has loaded these and nothing else, so that a program takes a tenth
of a second instead of a few. Nothing of the test process is in them.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from harness.processes import API_KEY, GatewayProcess, clean_environment

ROOT = Path(__file__).parents[2]
FOLDERS = [str(ROOT / folder) for folder in (".", "engine", "scheduler", "integrations")]
LIBRARIES = [
    "langchain_core.language_models",
    "langchain_openai",
    "langgraph.graph",
    "llama_index.core",
    "openai",
]
DEADLINE_S = 100.0


def environment_of(gateway: GatewayProcess) -> dict[str, str]:
    """Variables by which a program finds a gateway."""
    return clean_environment(
        {
            "PYTHONPATH": os.pathsep.join(FOLDERS),
            "PARROT_BASE_URL": gateway.base_url,
            "OPENAI_BASE_URL": gateway.base_url,
            "PARROT_API_KEY": API_KEY,
            "OPENAI_API_KEY": API_KEY,
        }
    )


def run_python(
    script: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> str:
    """Run `python script arguments` to its end.

    Args:
        folder: for its outputs.

    Returns:
        its stdout. Any end but the ordinary one fails the test, with both outputs.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    process = context.Process(
        target=_interpret, args=(str(script), list(arguments), dict(environment), str(folder))
    )
    process.start()
    process.join(DEADLINE_S)
    process.kill()
    process.join()
    printed = (folder / "stdout").read_text(encoding="utf-8")
    assert process.exitcode == 0, printed + (folder / "stderr").read_text(encoding="utf-8")
    return printed


def _interpret(script: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = [script, *arguments]
    sys.path[:0] = [os.path.dirname(script), *FOLDERS]
    with (
        Path(folder, "stdout").open("w", encoding="utf-8") as out,
        Path(folder, "stderr").open("w", encoding="utf-8") as err,
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except Exception:
            # The fork itself would print it where nobody looks.
            sys.excepthook(*sys.exc_info())
            sys.exit(1)
