"""LangChain's own unit tests, on ChatParrot."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_parrot import ChatParrot
from langchain_tests.unit_tests import ChatModelUnitTests

PATH = ("langchain_parrot", "ChatParrot")


class TestChatParrotUnit(ChatModelUnitTests):
    @pytest.fixture(autouse=True)
    def listed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The class is among those that LangChain reads back when it is told to read "all".

        That is a list in langchain_core of packages it knows. The test reads with it and cannot
        say `allowed_objects=[ChatParrot]`, which is what a program does.
        """
        # `langchain_core.load` has a function of the module's name.
        load = import_module("langchain_core.load.load")
        monkeypatch.setitem(load.ALL_SERIALIZABLE_MAPPINGS, PATH, PATH)
        monkeypatch.setattr(load, "_default_class_paths_cache", {})

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatParrot

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "parrot-demo", "base_url": "http://127.0.0.1:8000/v1"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return (
            {"PARROT_API_KEY": "a-key", "PARROT_BASE_URL": "http://10.0.0.9:8000/v1"},
            {"model": "parrot-demo"},
            {"api_key": "a-key", "base_url": "http://10.0.0.9:8000/v1"},
        )
