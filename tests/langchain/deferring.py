"""The least models that defer, over the real client, for tests of deferred texts."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import AIMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatResult, LLMResult
from langchain_parrot.deferred import (
    DeferredText,
    GatewayResolver,
    deferred_generation,
    deferred_message,
)
from langchain_parrot.linking import fields_of_run
from parrot_client.connection import Connection, OpenAIClients
from pydantic import Field


class Book:
    """Values by reference, as a resolver, and how often it was asked."""

    def __init__(self, **values: str | Exception) -> None:
        self.values = values
        self.asked: list[str] = []

    def text(self, name: str) -> DeferredText:
        """A deferred text of one of the values."""
        return DeferredText(f"[[{name}]]", self)

    def get(self, reference: str, timeout: float) -> str:
        self.asked.append(reference)
        value = self.values[reference.strip("[]")]
        if isinstance(value, Exception):
            raise value
        return value

    async def aget(self, reference: str, timeout: float) -> str:
        return self.get(reference, timeout)


class BookChat(BaseChatModel):
    """Answers every prompt with the next deferred text of a list."""

    texts: list[Any]
    prompts: list[Any] = Field(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "book"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        self.prompts.append([message.content for message in messages])
        message = deferred_message(self.texts.pop(0))
        return ChatResult(generations=[ChatGeneration(message=message)])


class BookLLM(BaseLLM):
    """The same as a text model."""

    texts: list[Any]

    @property
    def _llm_type(self) -> str:
        return "book"

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        made = [[deferred_generation(self.texts.pop(0))] for _ in prompts]
        return LLMResult(generations=made)


class Wire:
    """Clients of a gateway, and the path of every request that they send."""

    def __init__(self, base_url: str, api_key: str = "none") -> None:
        clients = OpenAIClients(Connection(base_url, api_key, max_retries=0))
        self.sync = clients.sync()
        self.asynchronous = clients.of_running_loop
        self.resolver = GatewayResolver(clients)


class DeferringChat(BaseChatModel):
    """Chat completions of a gateway, deferred or not, linked to their runs."""

    wire: Any
    model: str = "parrot-demo"
    defer: bool = True
    parrot: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int = 8

    @property
    def _llm_type(self) -> str:
        return "deferring"

    def _body(self, messages: Any, run_manager: Any) -> dict[str, Any]:
        for_wire = [
            message.model_copy(update={"content": f"{message.content}"}) for message in messages
        ]
        fields = {**fields_of_run(run_manager), **self.parrot}
        if self.defer:
            fields["defer"] = True
        return {
            "model": self.model,
            "messages": convert_to_openai_messages(for_wire),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "extra_body": {"parrot": fields},
        }

    def _result(self, answer: Any) -> ChatResult:
        content = answer.choices[0].message.content or ""
        if self.defer:
            message = deferred_message(DeferredText(content, self.wire.resolver, timeout=60))
            return ChatResult(generations=[ChatGeneration(message=message)])
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content=content))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any) -> Any:
        client = self.wire.sync
        return self._result(client.chat.completions.create(**self._body(messages, run_manager)))

    async def _agenerate(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **_: Any
    ) -> Any:
        client = self.wire.asynchronous()
        body = self._body(messages, run_manager)
        return self._result(await client.chat.completions.create(**body))
