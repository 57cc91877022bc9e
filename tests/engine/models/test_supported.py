"""The tables of families and formats agree with the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from parrot_engine.exceptions import UnsupportedModelError
from parrot_engine.models import supported
from parrot_engine.models.families.registry import ENCODERS, FAMILIES, family_of
from parrot_engine.quantization.registry import METHODS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_holds_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    supported.main([])
    assert PAGE.read_text(encoding="utf-8").endswith(capsys.readouterr().out)


def test_every_family_and_every_format_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    supported.main(["--json"])
    described = json.loads(capsys.readouterr().out)
    assert set(described["architectures"]) == set(FAMILIES)
    assert set(described["encoders"]) == set(ENCODERS)
    assert set(described["quantization"]) == set(METHODS)
    assert all(text for rows in described.values() for text in rows.values())


def test_an_unknown_architecture_is_refused_with_what_there_is() -> None:
    with pytest.raises(UnsupportedModelError, match="'GPT2LMHeadModel'") as caught:
        family_of({"architectures": ["GPT2LMHeadModel"]})
    assert all(name in str(caught.value) for name in FAMILIES)
    assert "huggingface engine" in str(caught.value)
