"""`ParrotEmbedding` under a `VectorStoreIndex`, on the demo model's toy vectors."""

from __future__ import annotations

import openai
import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.parrot import ParrotEmbedding
from llama_index.llms.parrot import Parrot

STORIES = ["A fisherman caught a golden fish.", "The king slept all night.", "Rain fell on Paris."]


@pytest.fixture
def embedding(demo: GatewayProcess) -> ParrotEmbedding:
    return ParrotEmbedding(model=DEMO_MODEL, base_url=demo.base_url, api_key=API_KEY)


async def test_a_query_engine_over_an_index(
    demo: GatewayProcess, embedding: ParrotEmbedding
) -> None:
    documents = [Document(text=story) for story in STORIES]
    index = VectorStoreIndex.from_documents(documents, embed_model=embedding)
    retriever = index.as_retriever(similarity_top_k=1)
    for story in STORIES:
        [found] = retriever.retrieve(story)
        assert (found.text, found.score) == (story, pytest.approx(1.0, abs=1e-4))
        [found] = await retriever.aretrieve(story)
        assert found.text == story
    llm = Parrot(model=DEMO_MODEL, base_url=demo.base_url, api_key=API_KEY, max_tokens=6)
    answer = index.as_query_engine(llm=llm, similarity_top_k=2).query("What was caught?")
    assert str(answer)
    assert len(answer.source_nodes) == 2


async def test_all_ways_to_a_vector_agree(embedding: ParrotEmbedding) -> None:
    [batch] = embedding.get_text_embedding_batch([STORIES[0]])
    assert len(batch) == 256
    for vector in (
        embedding.get_text_embedding(STORIES[0]),
        await embedding.aget_text_embedding(STORIES[0]),
        embedding.get_query_embedding(STORIES[0]),
        await embedding.aget_query_embedding(STORIES[0]),
        (await embedding.aget_text_embedding_batch([STORIES[0]]))[0],
    ):
        assert vector == pytest.approx(batch, abs=1e-6)


def test_errors_are_openais_with_advice(demo: GatewayProcess) -> None:
    wrong = ParrotEmbedding(model=DEMO_MODEL, base_url=demo.base_url, api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="PARROT_API_KEY"):
        wrong.get_query_embedding("a")
    shorter = ParrotEmbedding(
        model=DEMO_MODEL, base_url=demo.base_url, api_key=API_KEY, dimensions=8, query_prompt="q"
    )
    with pytest.raises(openai.BadRequestError, match="Matryoshka"):
        shorter.get_text_embedding("a")
    assert "wrong" not in wrong.to_json()
