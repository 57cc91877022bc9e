"""The live page's files: small, whole, with their licences, and nothing from elsewhere."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from parrot_gateway.ui.static_files import STATIC

#: What a browser loads at most, compressed.
MAX_BYTES = 300_000
LOADED = {".html", ".js", ".css", ".svg"}
SCRIPTS = sorted((STATIC / "app").rglob("*.js"))
_IMPORT = re.compile(
    r'(?:from|import)\s*\(?\s*"([^"]+)"|new URL\("(\./[^"]+)", import\.meta\.url\)'
)
_NAMES = re.compile(r'import\s+(?:\w+,\s*)?\{([^}]*)\}\s+from\s+"([^"]+)"')
_EXPORT = re.compile(
    r"export\s+(?:default\s+)?(?:async\s+)?(?:function\*?|class|const|let)\s+(\w+)"
)


def test_all_of_the_page_is_small() -> None:
    files = [path for path in STATIC.rglob("*") if path.suffix in LOADED]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < MAX_BYTES


def test_every_import_is_a_file_that_is_there() -> None:
    assert SCRIPTS
    imported = {STATIC / "app" / "main.js", STATIC / "app" / "theme_first.js"}
    for script in SCRIPTS:
        for match in _IMPORT.finditer(script.read_text("utf-8")):
            name = match[1] or match[2]
            assert name.startswith("."), f"{script.name} imports {name}, which no browser finds"
            target = (script.parent / name).resolve()
            assert target.is_file(), f"{script.name} imports {name}"
            imported.add(target)
    assert {*SCRIPTS} <= imported, "some file is imported by none"


def test_every_imported_name_is_exported() -> None:
    for script in SCRIPTS:
        for names, source in _NAMES.findall(script.read_text("utf-8")):
            text = (script.parent / source).resolve().read_text("utf-8")
            exported = {*_EXPORT.findall(text)}
            for group in re.findall(r"export\s*\{([^}]*)\}", text):
                exported |= {name.split(" as ")[-1].strip() for name in group.split(",")}
            wanted = {name.split(" as ")[0].strip() for name in names.split(",")} - {""}
            assert wanted <= exported, f"{script.name}: {source} has no {wanted - exported}"


def test_the_page_names_only_files_that_are_there() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    for name in re.findall(r'(?:href|src)="([^"]+)"', page):
        if not name.startswith("../"):
            assert (STATIC / name).is_file(), name


def test_the_page_asks_for_all_its_modules_at_once() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    listed = {STATIC / name for name in re.findall(r'"modulepreload" href="([^"]+)"', page)}
    needed, waiting = set(), [STATIC / "app" / "main.js"]
    while waiting:
        script = waiting.pop()
        for name in re.findall(r'from "([^"]+)"', script.read_text("utf-8")):
            if (target := (script.parent / name).resolve()) not in needed:
                needed.add(target)
                waiting.append(target)
    assert listed == needed


@pytest.mark.parametrize("path", [STATIC / "index.html", *SCRIPTS], ids=lambda path: path.name)
def test_nothing_is_asked_of_other_servers(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", text.replace("http://www.w3.org", ""))
    # Text of callers becomes elements by Preact alone; the policy forbids inline styles.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.search(r'<[a-z]+[^>]*\sstyle="', text)


def test_style_sheets_ask_nothing_of_other_servers() -> None:
    for path in STATIC.rglob("*.css"):
        assert "url(" not in path.read_text("utf-8"), path
        assert "@import" not in path.read_text("utf-8"), path


def test_libraries_have_their_versions_and_licences() -> None:
    vendor = STATIC / "vendor"
    readme = (vendor / "README.md").read_text("utf-8")
    for path in vendor.iterdir():
        if path.name != "README.md":
            assert f"`{path.name}`" in readme, path.name
    for name in re.findall(r"`(LICENSE-[^`]+)`", readme):
        assert "ermission is hereby granted" in (text := (vendor / name).read_text("utf-8")) or (
            "Apache License" in text
        ), name
