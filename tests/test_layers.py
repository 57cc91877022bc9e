"""Imports point one way, and the light packages stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "parrot_gateway": ROOT / "parrot_gateway",
    "parrot_scheduler": ROOT / "scheduler" / "parrot_scheduler",
    "parrot_simulator": ROOT / "scheduler" / "parrot_simulator",
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
        "parrot_simulator",
        "parrot_engine.protocol",
        "parrot_engine.kv_cache.block_hash",
        "parrot_engine.link.wire",
        "parrot_engine.text",
    ),
    "parrot_scheduler": (),
    "parrot_simulator": ("parrot_scheduler",),
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
ROOMS = ("settings", "engines", "generation", "scheduling", "semantic", "http", "api", "server",
         "bench", "cli")  # fmt: skip


def gateway_imports() -> dict[str, set[str]]:
    """The modules of the gateway that each of them imports, for type checking or not."""
    root = PACKAGES["parrot_gateway"]
    files = {
        ".".join(file.relative_to(root.parent).with_suffix("").parts): file
        for file in root.rglob("*.py")
    }
    names = {module.removesuffix(".__init__"): module for module in files}
    return {
        module: {
            names[found]
            for name in imported_names(file)
            for found in (name, name.rpartition(".")[0])
            if found in names and names[found] != module
        }
        for module, file in files.items()
    }


def test_the_gateways_rooms_import_downwards() -> None:
    upwards = []
    for module, imports in gateway_imports().items():
        room = module.split(".")[1]
        for other in imports:
            below = other.split(".")[1]
            if room in ROOMS and below in ROOMS and ROOMS.index(below) > ROOMS.index(room):
                upwards.append(f"{module} imports {other}")
    assert upwards == []


def test_the_gateway_has_no_circle() -> None:
    left = gateway_imports()
    # Modules that import nothing that is left go, until only circles are.
    while free := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in free:
            del left[module]
    assert sorted(left) == []


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
        ("parrot_gateway.cli.main", ["torch", "fastapi", "aiohttp", "uvicorn", "pydantic", "yaml"]),
        ("parrot_engine.protocol", ["torch", "msgspec", "tokenizers"]),
        ("parrot_engine.text", ["torch", "transformers"]),
        ("parrot_scheduler.scheduler", ["torch", "asyncio", "msgspec"]),
        ("parrot_simulator.simulation", ["torch", "asyncio", "msgspec", "matplotlib"]),
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


def test_files_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two files of one name only one would be collected."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
