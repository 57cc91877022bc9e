"""Runs the programs of this folder against the gateway and writes what came of it.

`make drop-in` does. Each program is a process of its own that knows the gateway by its base URL.
It runs twice: before a scripted engine that answers as a clever model would, where an agent has to
call its tool and end with what that said; and before the demo model, which follows no
instructions, for what grammars enforce on any model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "gateway")]

from clever_engine import FACTS, REPORT, CleverEngine  # noqa: E402
from harness.processes import DEMO_MODEL, GatewayProcess, clean_environment  # noqa: E402
from serving import serving  # noqa: E402

TIMEOUT_S = 180.0
MARK = "DROP_IN "
#: Lines of a program's error that a report shows.
SHOWN_LINES = 12
_ERROR = re.compile(r"[\w.]*(Error|Exception|Failure|Exceeded)\b")


@dataclass(frozen=True)
class Outcome:
    """What a program did; `fault` is empty when it was right."""

    version: str = ""
    fault: str = ""
    details: str = ""


def programs(folder: Path = HERE) -> list[Path]:
    """All of them: Python first."""
    python = sorted((folder / "programs").glob("p_*.py"))
    node = [path for path in sorted((folder / "node").glob("*.mjs")) if path.stem != "common"]
    return [*python, *node]


def title(program: Path) -> str:
    """The comment that a program begins with."""
    line = program.read_text(encoding="utf-8").splitlines()[0]
    return line.strip('/" ').rstrip(".")


async def run(program: Path, python: str, base_url: str, model: str, clever: bool) -> Outcome:
    """Run one program; what is wrong with its report, if it gives any."""
    interpreter = python if program.suffix == ".py" else shutil.which("node")
    if interpreter is None:
        return Outcome(fault="there is no node on this machine")
    environment = {
        **clean_environment(),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "DROP_IN_MODEL": model,
        "DROP_IN_ONLY_STRUCTURED": "0" if clever else "1",
    }
    process = await asyncio.create_subprocess_exec(
        interpreter,
        str(program),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        cwd=program.parent,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return Outcome(fault=f"did not end within {TIMEOUT_S:g} s")
    lines = output.decode("utf-8", "replace").splitlines()
    reports = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    tail = "\n".join(lines[-SHOWN_LINES:])
    if not reports:
        return Outcome(fault=_gist(lines), details=tail)
    seen = json.loads(reports[-1])
    return Outcome(seen["version"], fault_of(seen, clever), tail)


def _gist(lines: Sequence[str]) -> str:
    """The line of an output that names the error, or the last one."""
    told = [line.strip() for line in lines if line.strip()]
    named = [line for line in told if _ERROR.match(line)]
    return (named or told or ["said nothing"])[-1][:160]


def fault_of(seen: dict[str, Any], clever: bool) -> str:
    """What is wrong with a report."""
    structured = seen["structured"]
    if not (
        isinstance(structured, dict)
        and isinstance(structured.get("city"), str)
        and isinstance(structured.get("temperature"), int)
    ):
        return f"structured output: {structured!r}"
    if not clever:
        return ""
    if structured != FACTS:
        return f"structured output: {structured!r}"
    if set(seen["called"]) != {FACTS["city"]}:
        return f"calls of the tool: {seen['called']!r}"
    if REPORT not in seen["text"]:
        return f"text: {seen['text'][:100]!r}"
    return ""


async def run_all(
    chosen: Sequence[Path], python: str, base_url: str, model: str, clever: bool
) -> dict[str, Outcome]:
    """Run programs, two at a time."""
    room = asyncio.Semaphore(2)

    async def one(program: Path) -> tuple[str, Outcome]:
        async with room:
            outcome = await run(program, python, base_url, model, clever)
        state = outcome.fault or "works"
        print(f"{model:12} {program.name:28} {outcome.version:12} {state}", flush=True)
        if outcome.fault:
            print("\n".join(f"    {line}" for line in outcome.details.splitlines()), flush=True)
        return program.name, outcome

    return dict(await asyncio.gather(*map(one, chosen)))


@asynccontextmanager
async def demo() -> AsyncIterator[GatewayProcess]:
    """A gateway with the demo model."""
    gateway = await asyncio.to_thread(GatewayProcess, config={"models": [DEMO_MODEL]})
    try:
        yield gateway
    finally:
        await asyncio.to_thread(gateway.close)


async def compare(chosen: Sequence[Path], python: str) -> list[dict[str, Outcome]]:
    """Outcomes before the scripted engine, and before the demo model."""
    async with serving(CleverEngine(), call_timeout_s=60) as service:
        clever = await run_all(chosen, python, f"{service.root}/v1", "clever", True)
    async with demo() as gateway:
        plain = await run_all(chosen, python, gateway.base_url, DEMO_MODEL, False)
    return [clever, plain]


def table(chosen: Sequence[Path], outcomes: Sequence[dict[str, Outcome]]) -> str:
    """The outcomes as Markdown."""
    rows = ["| program | version | agent with a tool | any model, kept to a schema |",
            "|---|---|---|---|"]  # fmt: skip
    for program in chosen:
        found = [outcome[program.name] for outcome in outcomes]
        version = next((each.version for each in found if each.version), "")
        cells = [each.fault.replace("|", "\\|") or "works" for each in found]
        rows.append(" | ".join([f"| {title(program)}", version, *cells]) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="with the Python libraries")
    parser.add_argument("--write", type=Path, help="a document whose table is replaced")
    parser.add_argument("names", nargs="*", help="parts of names; all programs without any")
    options = parser.parse_args()
    chosen = [
        program
        for program in programs()
        if not options.names or any(name in program.name for name in options.names)
    ]
    outcomes = asyncio.run(compare(chosen, options.python))
    written = table(chosen, outcomes)
    print(written)
    if options.write is not None:
        begin, end = "<!-- table -->\n", "<!-- end of table -->"
        text = options.write.read_text(encoding="utf-8")
        head, _, rest = text.partition(begin)
        options.write.write_text(
            f"{head}{begin}\n{written}\n{end}{rest.partition(end)[2]}", encoding="utf-8"
        )
    if any(outcome.fault for found in outcomes for outcome in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    os.environ.setdefault("NO_PROXY", "127.0.0.1")
    main()
