"""LangChain's own integration tests, on a running gateway: ChatParrot, and ChatOpenAI beside it.

A scripted model stands behind the gateway, since the tests need one that calls their tools. Left
out by their own flags: only what needs recordings of a provider's HTTP traffic
(`enable_vcr_tests`, test_stream_time: a time measured on a recording, and there is none of a
gateway), and video, for which LangChain has no test yet.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import langchain_tests.integration_tests.chat_models as standard
import pytest
from harness.processes import GatewayProcess
from harness.scripted_model import MODEL, OTHER_MODEL, THINKING_MODEL
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI
from langchain_parrot import ChatParrot
from langchain_tests.integration_tests import ChatModelIntegrationTests


class OnTheGateway(ChatModelIntegrationTests):
    """Common part of both classes."""

    gateway: GatewayProcess

    @pytest.fixture(autouse=True)
    def on_the_gateway(self, gateway: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
        """The models go there, and what the tests fetch from the internet does not come from it."""
        self.gateway = gateway
        content = SimpleNamespace(content=b"bytes of a picture, a sound or a document")
        monkeypatch.setattr(standard, "httpx", SimpleNamespace(get=lambda *_, **__: content))
        monkeypatch.setenv("LANGCHAIN_TESTS_USER_AGENT", "nobody is asked")

    @property
    def chat_model_params(self) -> dict[str, Any]:
        base_url, key = self.gateway.base_url, self.gateway.api_key
        return {"model": MODEL, "base_url": base_url, "api_key": key, "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_image_inputs(self) -> bool:
        return True

    @property
    def supports_image_urls(self) -> bool:
        return True

    @property
    def supports_pdf_inputs(self) -> bool:
        return True

    @property
    def supports_audio_inputs(self) -> bool:
        return True

    @property
    def supports_image_tool_message(self) -> bool:
        return True

    @property
    def supports_pdf_tool_message(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        # No audio tokens: nothing behind a gateway of today tells them.
        details = ["cache_read_input", "reasoning_output"]
        return {"invoke": details, "stream": details}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        return self.answer("Tell me of the sea once more.", MODEL, stream)

    def invoke_with_reasoning_output(self, *, stream: bool = False) -> AIMessage:
        return self.answer("What is 2 + 2?", THINKING_MODEL, stream)

    def answer(self, question: str, model_name: str, stream: bool) -> AIMessage:
        model = self.chat_model_class(**{**self.chat_model_params, "model": model_name})
        if not stream:
            return model.invoke(question)
        whole: AIMessageChunk | None = None
        for chunk in model.stream(question):
            whole = cast(AIMessageChunk, chunk if whole is None else whole + chunk)
        assert whole is not None
        return whole


class TestChatParrotOnTheGateway(OnTheGateway):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatParrot


class TestChatOpenAIOnTheGateway(OnTheGateway):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI
