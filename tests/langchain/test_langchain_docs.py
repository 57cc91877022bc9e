"""The LangChain examples run as printed, and the guide knows every argument and error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import langchain_parrot
import pytest
from harness.processes import API_KEY, GatewayProcess
from langchain_parrot import ChatParrot, ParrotLLM
from langchain_parrot._base import ParrotModel
from langchain_parrot.deferred import DeferredText
from parrot_client.fields import FIELDS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "langchain.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def example(text: str) -> str:
    """The Python block that imports this package."""
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if "langchain_parrot" in block)


@pytest.mark.parametrize("text", [README, GUIDE], ids=["readme", "guide"])
def test_the_example_runs(
    demo: GatewayProcess,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PARROT_API_KEY", API_KEY)
    code = example(text)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    scope: dict[str, object] = {}
    exec(code.replace("http://127.0.0.1:8000", demo.root), scope)
    printed = capsys.readouterr().out
    assert len(printed) > 20
    assert "[[parrot:" not in printed
    assert type(scope["ship"]) is DeferredText


def test_the_deferred_example_runs(
    demo: GatewayProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PARROT_API_KEY", API_KEY)
    code = example(GUIDE.split("## Deferred chains")[1])
    scope: dict[str, object] = {}
    exec(code.replace("http://127.0.0.1:8000", demo.root), scope)
    printed = capsys.readouterr().out
    assert len(printed) > 20
    assert "[[parrot:" not in printed
    assert type(scope["story"]) is DeferredText


def test_the_guide_has_every_argument() -> None:
    told = set(re.findall(r"`(\w+)`", GUIDE.split("## Answers")[0]))
    own = {"metadata", "variable_transform"}
    given = set(ParrotModel.model_fields) | {"transform", *FIELDS}
    for model in (ChatParrot, ParrotLLM):
        given |= {name for name in inspect.get_annotations(model) if not name.startswith("_")}
    assert given - own <= told


def test_the_guide_has_every_error() -> None:
    errors = {name for name in langchain_parrot.__all__ if name.endswith("Error")}
    assert errors - {"InstallError", "VersionError"} <= set(re.findall(r"`(?:\w+\.)?(\w+)`", GUIDE))
