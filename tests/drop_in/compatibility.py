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
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from harness.clever_engine import FACTS, REPORT, CleverEngine  # noqa: E402
from harness.gateway.serving import serving  # noqa: E402
from harness.processes import DEMO_MODEL, GatewayProcess, clean_environment  # noqa: E402

TIMEOUT_S = 180.0
INSTALL_TIMEOUT_S = 600.0
MARK = "DROP_IN "
#: Of the folder `node`: what programs share.
_NO_PROGRAM = ("common", "weather_server")
#: Lines of a program's error that a report shows.
SHOWN_LINES = 12
_ERROR = re.compile(r"[\w.]*(Error|Exception|Failure|Exceeded)\b")


class Outcome(NamedTuple):
    """Result of a program; `fault` is empty when it was right."""

    version: str = ""
    fault: str = ""
    details: str = ""
    #: Why part of it could not be asked for; the rest was right.
    note: str = ""


class Programs(NamedTuple):
    """Programs, and how to run them."""

    chosen: Sequence[Path]
    #: The interpreter of each.
    interpreters: dict[Path, str]
    #: Why there is none.
    faults: dict[Path, str]


def programs(folder: Path = HERE) -> list[Path]:
    """All of them: Python first."""
    python = sorted((folder / "programs").glob("p_*.py"))
    node = [
        path for path in sorted((folder / "node").glob("*.mjs")) if path.stem not in _NO_PROGRAM
    ]
    return [*python, *node]


def title(program: Path) -> str:
    """The comment that a program begins with."""
    line = program.read_text(encoding="utf-8").splitlines()[0]
    return line.strip('/" ').rstrip(".")


async def installed(chosen: Sequence[Path], uv: str | None, python: str) -> Programs:
    """Install what programs need, one after another.

    Args:
        uv: gives each Python program, which names its libraries, an environment of its own; without
            it they all run with `python`.
    """
    interpreters: dict[Path, str] = {}
    faults: dict[Path, str] = {}
    for program in chosen:
        try:
            interpreters[program] = await _interpreter(program, uv, python)
        except RuntimeError as error:
            faults[program] = str(error)
    return Programs(chosen, interpreters, faults)


async def _interpreter(program: Path, uv: str | None, python: str) -> str:
    if program.suffix == ".py" and uv is None:
        return python
    if program.suffix == ".py":
        print(f"installing what {program.name} needs", flush=True)
        script = ("--script", str(program))
        commands = [
            [str(uv), "sync", "--quiet", "--upgrade", "--python", python, *script],
            [str(uv), "python", "find", *script],
        ]
        for command in commands:
            returncode, lines = await _output(command, dict(os.environ), INSTALL_TIMEOUT_S)
            if returncode != 0:
                print("\n".join(lines), flush=True)
                raise RuntimeError(f"not installed: {_gist(lines)}")
        return lines[-1]
    node = program.parent / "node_modules" / "node" / "bin" / "node"
    found = str(node) if node.exists() else shutil.which("node")
    if found is None:
        raise RuntimeError("there is no node on this machine")
    return found


async def run(program: Path, interpreter: str, base_url: str, model: str, clever: bool) -> Outcome:
    """Run one program; what is wrong with its report, if it gives any."""
    environment = {
        **clean_environment(),
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": "none",
        "DROP_IN_MODEL": model,
        "DROP_IN_ONLY_STRUCTURED": "0" if clever else "1",
    }
    returncode, lines = await _output([interpreter, str(program)], environment, TIMEOUT_S)
    if returncode is None:
        return Outcome(
            fault=f"did not end within {TIMEOUT_S:g} s", details="\n".join(lines[-SHOWN_LINES:])
        )
    reports = [line.removeprefix(MARK) for line in lines if line.startswith(MARK)]
    tail = "\n".join(lines[-SHOWN_LINES:])
    if not reports:
        return Outcome(fault=_gist(lines), details=tail)
    seen = json.loads(reports[-1])
    return Outcome(seen["version"], fault_of(seen, clever), tail, _note(seen, clever))


async def _output(
    command: Sequence[str], environment: dict[str, str], timeout_s: float
) -> tuple[int | None, list[str]]:
    """The status of a command, None when it takes too long, and what it printed."""
    with tempfile.TemporaryFile() as printed:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=printed,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            cwd=HERE / "programs",
        )
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            returncode = None
        else:
            returncode = process.returncode
        printed.seek(0)
        return returncode, printed.read().decode("utf-8", "replace").splitlines()


def _gist(lines: Sequence[str]) -> str:
    """The line of an output that names the error, or the last one."""
    told = [line.strip() for line in lines if line.strip()]
    named = [line for line in told if _ERROR.match(line)]
    return (named or told or ["said nothing"])[-1][:160]


def _note(seen: dict[str, Any], clever: bool) -> str:
    """Return what a program that works did not do."""
    if clever and seen["text"] is None:
        return "it has no agent; the form works"
    return "" if clever else seen.get("unable") or ""


def fault_of(seen: dict[str, Any], clever: bool) -> str:
    """Return what is wrong with a report."""
    structured = seen["structured"]
    if not clever and seen.get("unable"):
        return ""
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
    if seen["text"] is None:
        return ""
    if set(seen["called"]) != {FACTS["city"]}:
        return f"calls of the tool: {seen['called']!r}"
    if REPORT not in seen["text"]:
        return f"text: {seen['text'][:100]!r}"
    return ""


async def run_all(
    programs: Programs, base_url: str, model: str, clever: bool
) -> dict[str, Outcome]:
    """Run programs, two at a time."""
    room = asyncio.Semaphore(2)

    async def one(program: Path) -> tuple[str, Outcome]:
        if program in programs.faults:
            return program.name, Outcome(fault=programs.faults[program])
        async with room:
            interpreter = programs.interpreters[program]
            outcome = await run(program, interpreter, base_url, model, clever)
        state = outcome.fault or outcome.note or "works"
        print(f"{model:12} {program.name:28} {outcome.version:12} {state}", flush=True)
        if outcome.fault:
            print("\n".join(f"    {line}" for line in outcome.details.splitlines()), flush=True)
        return program.name, outcome

    return dict(await asyncio.gather(*map(one, programs.chosen)))


@asynccontextmanager
async def demo() -> AsyncIterator[GatewayProcess]:
    """A gateway with the demo model."""
    gateway = await asyncio.to_thread(GatewayProcess, config={"models": [DEMO_MODEL]})
    try:
        yield gateway
    finally:
        await asyncio.to_thread(gateway.close)


async def compare(chosen: Sequence[Path], uv: str | None, python: str) -> list[dict[str, Outcome]]:
    """Outcomes before the scripted engine, and before the demo model."""
    programs = await installed(chosen, uv, python)
    async with serving(CleverEngine(), call_timeout_s=60) as service:
        clever = await run_all(programs, f"{service.root}/v1", "clever", True)
    async with demo() as gateway:
        plain = await run_all(programs, gateway.base_url, DEMO_MODEL, False)
    return [clever, plain]


def table(chosen: Sequence[Path], outcomes: Sequence[dict[str, Outcome]]) -> str:
    """The outcomes as Markdown."""
    rows = ["| program | version | agent with a tool | any model, kept to a schema |",
            "|---|---|---|---|"]  # fmt: skip
    for program in chosen:
        found = [outcome[program.name] for outcome in outcomes]
        version = next((each.version for each in found if each.version), "")
        cells = [each.fault.replace("|", "\\|") or each.note or "works" for each in found]
        rows.append(" | ".join([f"| {title(program)}", version, *cells]) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", help="makes an environment for each Python program")
    parser.add_argument("--python", default=sys.executable, help="for all of them")
    parser.add_argument("--write", type=Path, help="a document whose table is replaced")
    parser.add_argument("names", nargs="*", help="parts of names; all programs without any")
    options = parser.parse_args()
    chosen = [
        program
        for program in programs()
        if not options.names or any(name in program.name for name in options.names)
    ]
    outcomes = asyncio.run(compare(chosen, options.uv, options.python))
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
