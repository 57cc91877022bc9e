"""`ParrotEmbeddings`: vectors of texts from the gateway, for LangChain's retrievers."""

from __future__ import annotations

from typing import Any

from langchain_core.embeddings import Embeddings
from parrot_client.connection import Connection, OpenAIClients, default_api_key, default_base_url
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr

#: Maximum texts of a request, as at OpenAI.
_MAX_TEXTS = 2048


class ParrotEmbeddings(BaseModel, Embeddings):
    """Vectors of texts from `/v1/embeddings`.

    Texts are sent unchanged: the gateway adds the prompts from the checkpoint's files. For models
    with a prompt of each kind, `query_prompt` and `document_prompt` name them.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    #: With `/v1`; by default PARROT_BASE_URL, OPENAI_API_BASE, OPENAI_BASE_URL, or port 8000 here.
    base_url: str = Field(default_factory=default_base_url)
    #: By default PARROT_API_KEY or OPENAI_API_KEY; an open gateway needs none.
    api_key: SecretStr | None = None
    #: Length of vectors, for models trained for shorter ones.
    dimensions: int | None = Field(default=None, gt=0)
    query_prompt: str | None = None
    document_prompt: str | None = None
    #: Texts per request.
    chunk_size: int = Field(default=256, gt=0, le=_MAX_TEXTS)
    timeout: float = Field(default=600.0, gt=0)
    max_retries: int = Field(default=2, ge=0)

    _openai_clients: OpenAIClients | None = PrivateAttr(default=None)

    @property
    def _clients(self) -> OpenAIClients:
        key = default_api_key() if self.api_key is None else self.api_key.get_secret_value()
        connection = Connection(
            base_url=self.base_url, api_key=key, timeout=self.timeout, max_retries=self.max_retries
        )
        if self._openai_clients is None or self._openai_clients.connection != connection:
            self._openai_clients = OpenAIClients(connection)
        return self._openai_clients

    def _requests(self, texts: list[str], prompt: str | None) -> list[dict[str, Any]]:
        fields: dict[str, Any] = {"model": self.model}
        if self.dimensions is not None:
            fields["dimensions"] = self.dimensions
        if prompt is not None:
            fields["extra_body"] = {"prompt_name": prompt}
        size = self.chunk_size
        return [
            {**fields, "input": texts[begin : begin + size]} for begin in range(0, len(texts), size)
        ]

    def _embed(self, texts: list[str], prompt: str | None) -> list[list[float]]:
        create = self._clients.sync().embeddings.create
        answers = [create(**request) for request in self._requests(texts, prompt)]
        return [item.embedding for answer in answers for item in answer.data]

    async def _aembed(self, texts: list[str], prompt: str | None) -> list[list[float]]:
        create = self._clients.of_running_loop().embeddings.create
        answers = [await create(**request) for request in self._requests(texts, prompt)]
        return [item.embedding for answer in answers for item in answer.data]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each text."""
        return self._embed(texts, self.document_prompt)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        return self._embed([text], self.query_prompt)[0]

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vector of each text without blocking the event loop."""
        return await self._aembed(texts, self.document_prompt)

    async def aembed_query(self, text: str) -> list[float]:
        """Return the vector of a query without blocking the event loop."""
        return (await self._aembed([text], self.query_prompt))[0]
