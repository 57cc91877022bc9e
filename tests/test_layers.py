"""Imports point one way, and the light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "parrot_gateway": ROOT / "parrot_gateway",
    "parrot_scheduler": ROOT / "scheduler" / "parrot_scheduler",
    "parrot_bench": ROOT / "bench" / "parrot_bench",
    "parrot_bench.simulator": ROOT / "bench" / "parrot_bench" / "simulator",
    "parrot_engine": ROOT / "engine" / "parrot_engine",
    "parrot_client": ROOT / "integrations" / "parrot_client",
    "parrot_functions": ROOT / "integrations" / "parrot_functions",
    "langchain_parrot": ROOT / "integrations" / "langchain_parrot",
    "llama_index.llms.parrot": ROOT / "integrations" / "llama_index" / "llms" / "parrot",
}
#: What each package may import of the others; a prefix of a dotted name.
ALLOWED = {
    "parrot_gateway": (
        "parrot_scheduler",
        "parrot_engine.protocol",
        "parrot_engine.kv_cache.block_hash",
        "parrot_engine.link.wire",
        "parrot_engine.text",
    ),
    "parrot_scheduler": (),
    "parrot_bench": ("parrot_gateway", "parrot_scheduler", "parrot_engine", "parrot_bench"),
    # The simulator is pure: of the gateway it knows what is deduced from a graph of calls.
    "parrot_bench.simulator": (
        "parrot_scheduler",
        "parrot_bench.simulator",
        "parrot_bench.applications",
        "parrot_bench.tables",
        "parrot_bench.policies",
        "parrot_gateway.semantic",
    ),
    "parrot_engine": (),
    "parrot_client": (),
    "parrot_functions": ("parrot_client",),
    "langchain_parrot": ("parrot_client",),
    "llama_index.llms.parrot": ("parrot_client",),
}


def imported_names(file: Path) -> Iterator[str]:
    """Every absolute dotted name that a file imports, at any depth."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(package: str, folder: Path) -> list[str]:
    others = [name for name in PACKAGES if name != package]
    found = []
    for file in sorted(folder.rglob("*.py")):
        for name in imported_names(file):
            if not any(name == other or name.startswith(other + ".") for other in others):
                continue
            if not any(name == ok or name.startswith(ok + ".") for ok in ALLOWED[package]):
                found.append(f"{file.name}: {name}")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    assert violations(package, PACKAGES[package]) == []


#: The gateway's rooms: each imports from itself and from those before it.
ROOMS = ("settings", "calls", "backends", "routing", "telemetry", "semantic", "batches",
         "http", "linking", "api", "ui", "server", "cli")  # fmt: skip


def module_graph(package: str, folder: Path) -> dict[str, set[str]]:
    """By module of a package, what it imports of the package; type-checking imports count."""
    prefix = folder.relative_to(folder.parents[package.count(".")])
    files = {
        ".".join([*prefix.parts, *file.relative_to(folder).with_suffix("").parts]): file
        for file in folder.rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): file for name, file in files.items()}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        imported = set()
        for name in imported_names(file):
            # Of `from a.b import c` the module is `a.b.c`, or else `a.b`.
            candidates = (name, name.rpartition(".")[0])
            imported.add(next((each for each in candidates if each in files), module))
        graph[module] = imported - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some nodes that import each other in a loop; empty when there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def folder_graph(graph: dict[str, set[str]], folder: str) -> dict[str, set[str]]:
    """By file or folder right below `folder`, what it imports of the others there."""
    depth = folder.count(".") + 2

    def child(module: str) -> str | None:
        within = module.startswith(folder + ".")
        return ".".join(module.split(".")[:depth]) if within else None

    children: dict[str, set[str]] = {}
    for module, imported in graph.items():
        source = child(module)
        if source is not None:
            targets = {child(each) for each in imported}
            children.setdefault(source, set()).update(
                target for target in targets if target is not None and target != source
            )
    return children


@pytest.mark.parametrize("package", PACKAGES)
def test_no_files_or_folders_import_each_other_in_a_circle(package: str) -> None:
    graph = module_graph(package, PACKAGES[package])
    assert circle(graph) == []
    for folder in {name.rpartition(".")[0] for name in graph if "." in name}:
        assert circle(folder_graph(graph, folder)) == [], folder


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "p"
    for name, text in {
        "a/one.py": "from p.b.two import x",
        "b/two.py": "x = 1",
        "b/three.py": "if TYPE_CHECKING:\n    from p.a import one",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    graph = module_graph("p", package)
    assert graph["p.b.three"] == {"p.a.one"}
    assert circle(graph) == []
    assert set(circle(folder_graph(graph, "p"))) == {"p.a", "p.b"}


def test_the_gateways_rooms_import_downwards() -> None:
    upwards = []
    for module, imports in module_graph("parrot_gateway", PACKAGES["parrot_gateway"]).items():
        room = module.partition(".")[2].partition(".")[0]
        for other in imports:
            below = other.partition(".")[2].partition(".")[0]
            known = room in ROOMS and below in ROOMS
            if known and ROOMS.index(below) > ROOMS.index(room):
                upwards.append(f"{module} imports {other}")
    assert upwards == []


def test_every_room_of_the_gateway_has_its_place_in_the_order() -> None:
    rooms = {file.parent.name for file in PACKAGES["parrot_gateway"].glob("*/__init__.py")}
    assert rooms == set(ROOMS)


def test_a_wrong_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        "def f():\n    from parrot_gateway.server.app import create_app\n"
    )
    assert violations("parrot_engine", tmp_path) == [
        "wrong.py: parrot_gateway.server.app.create_app"
    ]


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("parrot_gateway.server.app", ["torch", "transformers", "tokenizers", "jinja2", "openai"]),
        ("parrot_gateway.server.serve", ["parrot_gateway.linking.linker.linker", "numpy.random"]),
        (
            "parrot_gateway.cli.main",
            ["torch", "fastapi", "aiohttp", "uvicorn", "pydantic", "yaml", "numpy"],
        ),
        ("parrot_gateway.cli.main", ["parrot_bench", "parrot_gateway.semantic"]),
        ("parrot_engine.protocol", ["torch", "msgspec", "tokenizers"]),
        ("parrot_engine.text", ["torch", "transformers"]),
        ("parrot_scheduler.scheduler", ["torch", "asyncio", "msgspec"]),
        ("parrot_bench.simulator.simulation", ["torch", "asyncio", "msgspec"]),
        ("parrot_functions", ["torch", "msgspec", "pydantic", "openai", "aiohttp"]),
        ("langchain_parrot", ["torch", "openai", "httpx", "parrot_gateway", "langgraph"]),
        ("parrot_engine.llm", ["msgspec", "websockets", "fastapi", "transformers"]),
    ],
)
def test_light_modules_stay_light(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print(*[m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_files_of_tests_import_nothing_from_each_other() -> None:
    """Shared helpers lie in `tests/harness`: a file of tests is not on the import path."""
    tests = Path(__file__).parent
    names = {path.stem for path in tests.rglob("test_*.py")}
    assert [
        f"{path.relative_to(tests)} imports {module}"
        for path in tests.rglob("*.py")
        for module in imported_names(path)
        if not names.isdisjoint(module.split("."))
    ] == []
