"""Every example runs as the README of `examples/` says, against a real gateway."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.interpreter import environment_of, run_python
from harness.processes import GatewayProcess, clean_environment, closed_port

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
#: Model calls of the smallest size.
CALLS = {
    "chain_summary.py": 3,
    "map_reduce_summary.py": 4,
    "multi_agent_coding.py": 7,
    "copilot.py": 4,
    "gpts.py": 4,
    "mixed.py": 6,
    "langgraph_agent.py": 5,
    "llamaindex_tree_summary.py": 3,
    "plain_openai.py": 3,
}
#: Those without a row of figures at the end.
OTHERS = {"functions_quickstart.py", "curl.sh", "typescript/"}
REFERENCE = "[[parrot:"


def commands() -> dict[str, str]:
    """The table of the README: files and their commands."""
    rows = re.findall(r"^\| \[`([^`]+)`\]\(\S+\) \|.*\| `([^`]+)` \|$", README, re.MULTILINE)
    return dict(rows)


def run(command: str, gateway: GatewayProcess, *options: str, cwd: Path = ROOT) -> str:
    """A command of the README against a gateway; what it printed."""
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable if program == "python" else program, *arguments, *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=cwd,
        env=environment_of(gateway),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(printed: str) -> dict[str, tuple[int, int, list[str]]]:
    """Read the table at the end: calls, round trips and the figures behind them, by way."""
    table = printed[printed.index("\nway ") + 1 :].splitlines()[1:]
    found = {}
    for line in table:
        cells = re.split(r"\s{2,}", line.strip())
        if len(cells) < 7:
            break
        found[cells[0]] = (int(cells[1]), int(cells[2]), cells[3:])
    return found


def test_the_readme_has_all_examples() -> None:
    files = {path.name for path in EXAMPLES.glob("*.py")} - {"comparison.py", "network.py"}
    assert set(commands()) == files | OTHERS
    assert files - OTHERS == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_an_example_runs_and_prints_its_row(
    demo: GatewayProcess, name: str, tmp_path: Path
) -> None:
    program, script, *arguments = shlex.split(commands()[name])
    assert program == "python"
    environment = environment_of(demo)
    printed = run_python(ROOT / script, [*arguments, "--quick"], environment, tmp_path)
    texts, _, _ = printed.partition("\nway ")
    assert texts.startswith("- ")
    assert len(texts) > 20
    assert REFERENCE not in texts
    [(calls, round_trips, figures)] = rows(printed).values()
    assert calls == CALLS[name]
    assert 1 <= round_trips <= calls
    computed, _, output = (int(figure.replace(",", "")) for figure in figures[1:4])
    assert computed > 0
    # Every call writes twelve tokens at least.
    assert output >= 12 * calls
    assert "other calls" not in printed


def test_a_comparison_has_fewer_round_trips_with_the_graph(demo: GatewayProcess) -> None:
    printed = run(commands()["plain_openai.py"], demo, "--quick", "--compare", "--rounds", "1")
    assert "medians of 1 rounds, the same texts in all ways" in printed
    found = rows(printed)
    assert list(found) == ["call by call", "references", "names"]
    assert {calls for calls, _, _ in found.values()} == {3}
    # One connection, one call after the other: as many round trips as requests.
    assert found["call by call"][1] == found["references"][1] == 3
    assert found["names"][1] < 3


def test_a_gateway_that_is_not_there_is_told(demo: GatewayProcess) -> None:
    command = f"{sys.executable} examples/gpts.py --base-url http://127.0.0.1:9/v1"
    done = subprocess.run(
        shlex.split(command), capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_gateway_that_wants_a_key_is_told(demo: GatewayProcess) -> None:
    command = f"{sys.executable} examples/gpts.py --base-url {demo.base_url}"
    done = subprocess.run(
        shlex.split(command),
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        check=False,
    )
    assert done.returncode == 1
    assert "set PARROT_API_KEY" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(demo: GatewayProcess) -> None:
    printed = run(commands()["curl.sh"], demo)
    assert printed.count(REFERENCE) == 2
    assert "flowchart LR" in printed
    assert '"finish_reason":"length"' in printed


def test_functions(demo: GatewayProcess) -> None:
    printed = run(commands()["functions_quickstart.py"], demo)
    assert re.findall(r"^[A-Z]+$", printed, re.MULTILINE) == ["TASK", "STORY", "PRAISE", "WISH"]
    assert REFERENCE not in printed


def test_without_a_gateway_functions_say_so_in_a_line() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / "functions_quickstart.py")],
        env={**clean_environment(), "PARROT_BASE_URL": f"http://127.0.0.1:{closed_port()}/v1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 1
    (line,) = ran.stderr.splitlines()
    assert "`parrot-gateway serve` starts a gateway" in line


@pytest.mark.skipif(
    not (EXAMPLES / "typescript" / "node_modules").is_dir(),
    reason="run `npm install` in examples/typescript first",
)
def test_typescript(demo: GatewayProcess) -> None:
    assert commands()["typescript/"].endswith("&& npm install && npm start")
    printed = run("npm start --silent", demo, cwd=EXAMPLES / "typescript")
    assert len([line for line in printed.splitlines() if line.strip()]) >= 2
    assert REFERENCE not in printed
