"""Compile the scheduler and its simulator with mypyc: the same decisions in less time.

Optional, and nothing in the source tree changes: copies of the packages are made, and what decides
and what simulates engines and clients is compiled there.

    python -m pip install -e '.[compile]'        # mypy and setuptools; a C compiler is needed
    python tools/compile_scheduler.py            # a few minutes, into build/compiled
    PYTHONPATH=build/compiled parrot-gateway bench scheduler
    PYTHONPATH=build/compiled parrot-gateway simulate mapreduce-fleet --engines 1000

What is compiled checks its types as it runs, and takes no subclasses from outside: a policy of your
own is compiled along, as a file in the folder of its kind. After a change to the sources, or under
another Python, compile again.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "scheduler"
SCHEDULER, SIMULATOR = "parrot_scheduler", "parrot_simulator"
#: Left as it is: `event_log` reads the fields of dataclasses.
NOT_COMPILED = ("event_log.py",)
#: Of the simulator, what runs for each call, but for `metrics`, which goes by its classes' slots.
COMPILED = ("clock.py", "simulation.py", "clients.py", "tasks.py", "engines/*.py")


def compile_into(folder: Path) -> None:
    """Make `folder` hold the packages, compiled; whatever it held of earlier ones goes."""
    from mypyc.build import mypycify
    from setuptools import Distribution

    if folder.exists():
        shutil.rmtree(folder)
    for name in (SCHEDULER, SIMULATOR):
        shutil.copytree(SOURCES / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    os.chdir(folder)
    found = [*Path(SCHEDULER).rglob("*.py")]
    found += [path for pattern in COMPILED for path in Path(SIMULATOR).glob(pattern)]
    paths = sorted(str(path) for path in found if not set(NOT_COMPILED) & set(path.parts))
    # Types are checked in the source tree; its strict settings are not applied again.
    modules = mypycify(["--config-file=", *paths], opt_level="3")
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    command.run()
    shutil.rmtree("build")


def main() -> None:
    """Compile into the folder that is named, or `build/compiled`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/compiled").absolute()
    if folder.exists() and not (folder / SCHEDULER).is_dir():
        sys.exit(f"{folder} is there already, and no compiled scheduler")
    compile_into(folder)
    print(f"compiled; use it with PYTHONPATH={folder}")


if __name__ == "__main__":
    main()
