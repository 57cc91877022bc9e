"""Compile the scheduler and its simulator with mypyc: the same decisions in less time.

Optional, and nothing in the source tree changes: copies of the packages are made, and what decides
and what simulates engines and clients is compiled there.

    make compiled                                # a few minutes, into build/compiled
    PYTHONPATH=build/compiled parrot-gateway bench scheduler
    PYTHONPATH=build/compiled parrot-gateway simulate mapreduce-fleet --engines 1000

`make compiled` stands for these two; a C compiler is needed:

    python -m pip install -e '.[compile]'
    python tools/compile_scheduler.py

What is compiled checks its types as it runs, and takes no subclasses from outside: a policy of your
own is compiled along, as a file in the folder of its kind. After a change to the sources, or under
another Python, compile again.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1] / "scheduler"
SCHEDULER, SIMULATOR = "parrot_scheduler", "parrot_simulator"
#: Left as it is: `event_log` reads the fields of dataclasses.
NOT_COMPILED = ("event_log.py",)
#: Of the simulator, what runs for each call.
COMPILED = (
    "clients.py", "clock.py", "knowledge.py", "metrics.py", "options.py", "plan.py", "profiles.py",
    "simulation.py", "tasks.py", "engines/*.py",
)  # fmt: skip


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
    for path in map(Path, paths):
        path.write_text(with_inits(path.read_text(encoding="utf-8")), encoding="utf-8")
    # Types are checked in the source tree; its strict settings are not applied again.
    modules = mypycify(["--config-file=", *paths], opt_level="3")
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    command.run()
    shutil.rmtree("build")


def with_inits(source: str) -> str:
    """A module in which dataclasses have an `__init__` that is written out.

    The one that `dataclass` makes while it runs is not compiled, and millions of values are made.
    Frozen classes, those with keywords only and subclasses stay as they are.
    """
    tree = ast.parse(source)
    changed = False
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.bases:
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "dataclass":
                    changed |= _write_init(node, decorator)
    return ast.unparse(tree) if changed else source


def _write_init(node: ast.ClassDef, decorator: ast.Call) -> bool:
    """Whether the class got one."""
    fields = [line for line in node.body if isinstance(line, ast.AnnAssign)]
    methods = {line.name for line in node.body if isinstance(line, ast.FunctionDef)}
    options = {keyword.arg for keyword in decorator.keywords}
    if not fields or "__init__" in methods or options & {"frozen", "kw_only"}:
        return False
    parameters, lines = ["self"], []
    for each in fields:
        name, kind, default = ast.unparse(each.target), ast.unparse(each.annotation), each.value
        if kind == "KW_ONLY":
            parameters.append("*")
            continue
        # A default in the class is set by mypyc in each value, before its `__init__`.
        each.value = None
        given = {}
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "field":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in default.keywords}
        if given.keys() == {"init"}:
            continue
        if given.keys() == {"default_factory"}:
            parameters.append(f"{name}: {kind} | None = None")
            made = f"({given['default_factory']})()"
            lines.append(f"self.{name} = {made} if {name} is None else {name}")
            continue
        if given:
            raise ValueError(f"{node.name}.{name}: {given} is not known here")
        value = f" = {ast.unparse(default)}" if default is not None else ""
        parameters.append(f"{name}: {kind}{value}")
        lines.append(f"self.{name} = {name}")
    if "__post_init__" in methods:
        lines.append("self.__post_init__()")
    text = f"def __init__({', '.join(parameters)}) -> None:\n    " + "\n    ".join(lines)
    node.body += ast.parse(text).body
    decorator.keywords.append(ast.keyword("init", ast.Constant(value=False)))
    return True


def main() -> None:
    """Compile into the folder that is named, or `build/compiled`."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "build/compiled").absolute()
    if folder.exists() and not (folder / SCHEDULER).is_dir():
        sys.exit(f"{folder} is there already, and no compiled scheduler")
    compile_into(folder)
    print(f"compiled; use it with PYTHONPATH={folder}")


if __name__ == "__main__":
    main()
