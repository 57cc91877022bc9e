"""LlamaIndex on Parrot Gateway: the embedding model `ParrotEmbedding`."""

from __future__ import annotations

from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.llms.parrot._errors import with_advice
from parrot_client.connection import Connection, OpenAIClients, default_api_key, default_base_url
from pydantic import AliasChoices

__all__ = ["ParrotEmbedding"]


class ParrotEmbedding(BaseEmbedding):
    """Vectors of texts from `/v1/embeddings`.

    The gateway applies the prompts from the checkpoint's files. For models with a prompt of each
    kind, `query_prompt` and `text_prompt` name them.
    """

    model_name: str = Field(
        validation_alias=AliasChoices("model_name", "model"),
        description="A model that the gateway serves, or an alias.",
    )
    base_url: str | None = Field(
        default=None,
        validation_alias=AliasChoices("base_url", "api_base"),
        description="Where the gateway is, up to /v1; else as for the model `Parrot`.",
    )
    api_key: str | None = Field(default=None, exclude=True, repr=False)
    dimensions: int | None = Field(default=None, gt=0, description="Of models that were made so.")
    query_prompt: str | None = Field(default=None, description="Name of the prompt of queries.")
    text_prompt: str | None = Field(default=None, description="Name of the prompt of documents.")
    embed_batch_size: int = Field(default=256, gt=0, le=2048, description="Texts of a request.")
    timeout: float = Field(default=600.0, gt=0, description="Of one request, in seconds.")
    max_retries: int = Field(default=3, ge=0, description="Of requests that may be repeated.")

    _openai_clients: OpenAIClients | None = PrivateAttr(default=None)

    @classmethod
    def class_name(cls) -> str:
        """Return the name by which LlamaIndex writes and reads it."""
        return "ParrotEmbedding"

    @property
    def _clients(self) -> OpenAIClients:
        """Return the clients of the current connection."""
        connection = Connection(
            base_url=self.base_url or default_base_url(),
            api_key=self.api_key or default_api_key(),
            timeout=self.timeout,
            max_retries=self.max_retries,
        )
        if self._openai_clients is None or self._openai_clients.connection != connection:
            self._openai_clients = OpenAIClients(connection)
        return self._openai_clients

    def _fields(self, texts: list[str], prompt: str | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self.model_name, "input": texts}
        if self.dimensions is not None:
            fields["dimensions"] = self.dimensions
        if prompt is not None:
            fields["extra_body"] = {"prompt_name": prompt}
        return fields

    def _embed(self, texts: list[str], prompt: str | None) -> list[list[float]]:
        clients = self._clients
        with with_advice(clients.connection.base_url):
            answer = clients.sync().embeddings.create(**self._fields(texts, prompt))
        return [item.embedding for item in answer.data]

    async def _aembed(self, texts: list[str], prompt: str | None) -> list[list[float]]:
        clients = self._clients
        with with_advice(clients.connection.base_url):
            client = clients.of_running_loop()
            answer = await client.embeddings.create(**self._fields(texts, prompt))
        return [item.embedding for item in answer.data]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embed([query], self.query_prompt)[0]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return (await self._aembed([query], self.query_prompt))[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embed([text], self.text_prompt)[0]

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return (await self._aembed([text], self.text_prompt))[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return self._embed(texts, self.text_prompt)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await self._aembed(texts, self.text_prompt)
