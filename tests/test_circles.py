"""Files of a package import each other in one direction, and so do its rooms.

Imports for type checking count, and so do those inside functions.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: The folder that each package lies in.
PACKAGES = {
    "parrot_engine": ROOT / "engine",
    "parrot_scheduler": ROOT / "scheduler",
    "parrot_simulator": ROOT / "scheduler",
    "parrot_client": ROOT / "integrations",
    "parrot_functions": ROOT / "integrations",
    "langchain_parrot": ROOT / "integrations",
    "llama_index": ROOT / "integrations",
}


def modules_of(package: str, root: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for file in sorted((root / package).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports_of(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules that a file imports, by the longest name that is one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules.keys()
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found |= {name if name in modules else node.module} & modules.keys()
    return found


def file_graph(package: str, root: Path) -> dict[str, set[str]]:
    modules = modules_of(package, root)
    return {name: imports_of(file, modules) - {name} for name, file in modules.items()}


def room_graph(files: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between the rooms; a file right below the package is a room of its own."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for name, imported in files.items():
        room = ".".join(name.split(".")[:2])
        rooms[room] |= {".".join(other.split(".")[:2]) for other in imported} - {room}
    return rooms


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """A circle, from a module back to itself; empty without any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_files_make_no_circle(package: str) -> None:
    assert circle_of(file_graph(package, PACKAGES[package])) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_make_no_circle(package: str) -> None:
    graph = room_graph(file_graph(package, PACKAGES[package]))
    # The package's own file hands names on.
    graph.pop(package, None)
    assert circle_of(graph) == []


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    (tmp_path / "p" / "b").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("")
    (tmp_path / "p" / "a" / "one.py").write_text("from p.b import two\n")
    (tmp_path / "p" / "a" / "three.py").write_text("")
    (tmp_path / "p" / "b" / "two.py").write_text("def f():\n    import p.a.three\n")
    files = file_graph("p", tmp_path)
    assert circle_of(files) == []
    assert set(circle_of(room_graph(files))) == {"p.a", "p.b"}
    (tmp_path / "p" / "a" / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a.one import two\n"
    )
    assert set(circle_of(file_graph("p", tmp_path))) == {"p.a.one", "p.b.two", "p.a.three"}
