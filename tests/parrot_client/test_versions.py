"""Versions of libraries are checked at import, against the ranges of the project's extras."""

from __future__ import annotations

import tomllib
from pathlib import Path

import langchain_parrot
import pytest
from llama_index.llms import parrot
from parrot_client import versions
from parrot_client.versions import VersionError, check_versions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("extra", "ranges"), [("langchain", langchain_parrot._RANGES), ("llama-index", parrot._RANGES)]
)
def test_the_ranges_are_those_of_the_extra(extra: str, ranges: dict[str, str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = {f"{library}{supported}" for library, supported in ranges.items()}
    assert stated == set(project["optional-dependencies"][extra])
    check_versions("the package", extra, ranges)


def test_another_version_is_refused_with_the_range_that_works() -> None:
    with pytest.raises(VersionError, match=r"works with openai>=99\.0,<100, and openai \d") as told:
        check_versions("langchain_parrot", "langchain", {"openai": ">=99.0,<100"})
    assert isinstance(told.value, ImportError)
    assert told.value.name == "openai"
    assert "pip install 'parrot-gateway[langchain]'" in str(told.value)
    with pytest.raises(VersionError, match=r"openai>=0\.1,<1\.5"):
        check_versions("p", "langchain", {"openai": ">=0.1,<1.5"})
    with pytest.raises(VersionError, match=r"needs no-such-library>=1\.0,<2, which is not"):
        check_versions("p", "langchain", {"no-such-library": ">=1.0,<2"})


@pytest.mark.parametrize(
    ("installed", "works"),
    [
        ("0.14.19", False),
        ("0.14.20", True),
        ("0.14.20rc1", True),
        ("0.14.21.post1", True),
        ("0.15.0", False),
        ("0.15", False),
    ],
)
def test_three_numbers_count(monkeypatch: pytest.MonkeyPatch, installed: str, works: bool) -> None:
    monkeypatch.setattr(versions, "version", lambda library: installed)
    ranges = {"llama-index-core": ">=0.14.20,<0.15"}
    if works:
        check_versions("p", "llama-index", ranges)
        return
    with pytest.raises(VersionError, match=rf"llama-index-core>=0.14.20,<0.15.*{installed}"):
        check_versions("p", "llama-index", ranges)
