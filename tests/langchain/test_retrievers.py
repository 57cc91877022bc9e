"""Retrievers on the demo model's toy vectors: LangChain's own embeddings class and ours."""

from __future__ import annotations

import os
from typing import Any

import llama_index.core
import openai
import pytest
from harness.processes import DEMO_MODEL, GatewayProcess
from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from langchain_parrot import ParrotEmbeddings

STORIES = ["A fisherman caught a golden fish.", "The king slept all night.", "Rain fell on Paris."]

#: OpenAI's vocabulary, which tiktoken else downloads.
TIKTOKEN = os.path.join(os.path.dirname(llama_index.core.__file__), "_static", "tiktoken_cache")


@pytest.fixture(autouse=True)
def environment(demo: GatewayProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a LangChain program has to change."""
    monkeypatch.setenv("OPENAI_BASE_URL", demo.base_url)
    monkeypatch.setenv("OPENAI_API_KEY", demo.api_key or "")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", TIKTOKEN)


def embeddings(kind: str) -> Embeddings:
    if kind == "langchain-openai":
        return OpenAIEmbeddings(model=DEMO_MODEL, check_embedding_ctx_length=False)
    return ParrotEmbeddings(model=DEMO_MODEL, chunk_size=2)


@pytest.mark.parametrize("kind", ["langchain-openai", "parrot"])
async def test_a_retriever_finds_a_text_by_itself(kind: str) -> None:
    store = InMemoryVectorStore.from_texts(STORIES, embeddings(kind))
    retriever = store.as_retriever(search_kwargs={"k": 1})
    for story in STORIES:
        [found] = retriever.invoke(story)
        assert found.page_content == story
        [found] = await retriever.ainvoke(story)
        assert found.page_content == story


def test_both_classes_get_the_same_vectors() -> None:
    vectors = [embeddings(kind).embed_documents(STORIES) for kind in ("langchain-openai", "parrot")]
    assert all(a == pytest.approx(b, abs=1e-6) for a, b in zip(*vectors, strict=True))
    assert len(vectors[0][0]) == 256


def test_token_ids_of_another_vocabulary_fail_with_what_to_do() -> None:
    """By default LangChain sends token ids of OpenAI's vocabulary."""
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as caught:
        OpenAIEmbeddings(model=DEMO_MODEL).embed_documents(STORIES)
    assert caught.value.param == "input"


@pytest.mark.parametrize("fields", [{"colour": 1}, {"dimensions": 0}, {"chunk_size": 4096}])
def test_arguments_are_checked(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        ParrotEmbeddings(model=DEMO_MODEL, **fields)


def test_fields_of_requests(demo: GatewayProcess) -> None:
    model = ParrotEmbeddings(model=DEMO_MODEL, base_url=demo.base_url, dimensions=8)
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        model.embed_query("A fish?")
    prompted = ParrotEmbeddings(model=DEMO_MODEL, query_prompt="query")
    with pytest.raises(openai.BadRequestError, match="no prompts"):
        prompted.embed_query("A fish?")
    assert len(prompted.embed_documents(["A fish."])) == 1
