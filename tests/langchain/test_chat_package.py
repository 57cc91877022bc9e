"""The package itself: what importing it loads and its names."""

from __future__ import annotations

import subprocess
import sys

import langchain_parrot
import pytest


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
    expected = {
        "langchain_parrot",
        "parrot_client",
        "langchain_core",
        "langsmith",
        "pydantic",
        "__mp_main__",
    }
    assert loaded <= expected | sys.stdlib_module_names


def test_every_public_name_is_there() -> None:
    for name in langchain_parrot.__all__:
        assert getattr(langchain_parrot, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'ParrotChat'"):
        _ = langchain_parrot.ParrotChat
