"""Check that docstrings begin with a subject or a verb, not with a clause.

Usage: python .ci/lint_docstrings.py FOLDER …
Prints each offending docstring as `file:line: first words` and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: Words that make a docstring a clause without its verb.
FIRST = re.compile(
    r"(What|Whether|Of|That|Those|Which|Who|Whoever|Whatever|Nothing but|How many|How much|As)\b"
)
#: Phrases that a reader stumbles over, anywhere in a docstring.
ANYWHERE = re.compile(r"\b(would else|so many|is wanting|to be had|whosesoever)\b")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def findings(file: Path) -> Iterator[str]:
    """Yield one line per docstring of `file` that breaks a rule."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, DOCUMENTED):
            continue
        text = ast.get_docstring(node)
        if text and (FIRST.match(text) or ANYWHERE.search(text)):
            yield f"{file}:{node.body[0].lineno}: {text.splitlines()[0]}"


def main(folders: list[str]) -> int:
    """Check every Python file below `folders`; return the exit status."""
    files = (file for folder in folders for file in sorted(Path(folder).rglob("*.py")))
    found = [line for file in files for line in findings(file)]
    print("\n".join(found) or "docstrings: no findings")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
