"""The package itself: what importing it loads and checks, and its names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import langchain_parrot
import pytest
from langchain_parrot._versions import SUPPORTED, Range, VersionError, check_versions

ROOT = Path(__file__).parents[2]


def test_importing_it_loads_little_more_than_langchain_core() -> None:
    code = (
        "import sys; from langchain_core.language_models import BaseChatModel, BaseLLM; "
        "before = set(sys.modules); import langchain_parrot; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    loaded = set(ran.stdout.split())
    assert "langchain_parrot" in loaded
    # Modules of pydantic, and of langsmith, which langchain_core itself has loaded already.
    expected = {"langchain_parrot", "langchain_core", "langsmith", "pydantic", "__mp_main__"}
    assert loaded <= expected | sys.stdlib_module_names


def test_every_public_name_is_there() -> None:
    for name in langchain_parrot.__all__:
        assert getattr(langchain_parrot, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'ParrotChat'"):
        _ = langchain_parrot.ParrotChat


def test_the_versions_are_those_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extra = project["optional-dependencies"]["langchain"]
    for library, versions in SUPPORTED.items():
        assert f"{library}{versions}" in extra


def test_another_version_is_refused_with_the_range_that_works() -> None:
    with pytest.raises(VersionError, match=r"works with openai>=99\.0,<100, and openai \d") as told:
        check_versions({"openai": Range((99, 0), (100, 0))})
    assert isinstance(told.value, ImportError)
    assert told.value.name == "openai"
    assert "pip install 'parrot-gateway[langchain]'" in str(told.value)
    with pytest.raises(VersionError, match=r"openai>=0\.1,<1\.5"):
        check_versions({"openai": Range((0, 1), (1, 5))})
    with pytest.raises(VersionError, match=r"needs no-such-library>=1\.0,<2, which is not"):
        check_versions({"no-such-library": Range((1, 0), (2, 0))})
