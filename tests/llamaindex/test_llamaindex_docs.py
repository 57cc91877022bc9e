"""The guide to the LlamaIndex model knows every setting, and its example runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.processes import API_KEY, GatewayProcess
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.llms.parrot import Parrot
from parrot_client.fields import REFERENCE

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "llama-index.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example_of(text: str, heading: str) -> str:
    section = text.split(f"# {heading}\n")[1]
    return re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)[0]


def test_every_setting_is_documented_and_no_other() -> None:
    section = GUIDE.split("## Settings\n")[1].split("\n## ")[0]
    documented: set[str] = set()
    for line in section.splitlines():
        if line.startswith("| `"):
            documented |= set(re.findall(r"`(\w+)`", line.split("|")[1]))
    own = set(Parrot.model_fields) - set(FunctionCallingLLM.model_fields)
    assert documented - {"api_base"} == own


@pytest.mark.parametrize("text", [README, GUIDE], ids=["README", "guide"])
def test_the_example_runs_as_printed(
    demo: GatewayProcess,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = example_of(text, "LlamaIndex")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    monkeypatch.setenv("PARROT_BASE_URL", demo.base_url)
    monkeypatch.setenv("PARROT_API_KEY", API_KEY)
    scope: dict[str, object] = {}
    exec(code, scope)
    printed = capsys.readouterr().out
    assert printed.strip()
    assert REFERENCE.search(printed) is None
    assert REFERENCE.fullmatch(str(scope["response"]))
