"""The guide to the LangChain models knows every argument and error."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import langchain_parrot
from langchain_parrot import ChatParrot, ParrotLLM
from langchain_parrot._base import ParrotModel
from parrot_client.fields import FIELDS

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "langchain.md").read_text(encoding="utf-8")


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
