"""The guide to semantic variables knows every header and field; its commands run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from harness.processes import API_KEY, GatewayProcess

from parrot_gateway.api.semantic.fields import FIELDS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "semantic-variables.md").read_text(encoding="utf-8")


def first_block(text: str, heading: str, language: str) -> str:
    """The first code block of a language below a heading."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return next(code for kind, code in blocks if kind == language)


def documented_fields() -> dict[str, str]:
    """The table of fields: header and field of the body."""
    rows = re.findall(r"^\| `(X-Parrot-\w+)` \| `(\w+)` \|", GUIDE, re.MULTILINE)
    return {header.lower(): field for header, field in rows}


def test_the_guide_has_every_field_and_no_other() -> None:
    assert documented_fields() == {header.decode(): field for header, field in FIELDS.items()}


def test_the_guide_has_every_response_header() -> None:
    folder = ROOT / "parrot_gateway" / "api" / "semantic"
    sources = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    sent = set(re.findall(r'b"(x-parrot-[a-z-]+)"', sources))
    assert {"x-parrot-session", "x-parrot-engine", "x-parrot-queue-ms"} <= sent
    told = {name.lower() for name in re.findall(r"`(X-Parrot-[\w-]+)`", GUIDE)}
    assert sent <= told


def test_the_curl_example_runs(demo: GatewayProcess) -> None:
    code = first_block(GUIDE, "With curl", "")
    code = code.replace("http://127.0.0.1:8000", demo.root)
    code = code.replace('-H "$J"', f'-H "$J" -H "Authorization: Bearer {API_KEY}"')
    ran = subprocess.run(["bash", "-ec", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("[[parrot:") == 2
    assert ran.stdout.count('"finish_reason"') == 3
