"""`POST /v1/embeddings`, `/v1/rerank` and `/v1/score` on models of own engines."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from harness.gateway.pooling_remote import PoolingRemote
from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.serving import Service, serving, until
from harness.pooling_checkpoints import (
    VOCAB,
    change_config,
    write_json,
    write_logit_score,
    write_model,
    write_modules,
)
from parrot_engine import LLM
from parrot_engine.protocol import Pool
from parrot_engine.text.pairs import encode_written_pairs

from parrot_gateway.api.openai import embeddings, pooling_input
from parrot_gateway.telemetry.call_record import CallRecord

TEXTS = ["the king sleeps", "a fish swims in the sea", "night", "the old queen"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {name: root / name for name in ("bert", "qwen3", "bert-score", "qwen3-rerank")}
    for name, folder in folders.items():
        folder.mkdir()
        write_model(name, folder)
    write_modules(folders["bert"], prompts={"query": "the king "})
    change_config(folders["bert"], matryoshka_dimensions=[8, 16])
    write_json(folders["bert"] / "sentence_bert_config.json", {"max_seq_length": 30})
    write_modules(folders["qwen3"], mode="lasttoken")
    write_logit_score(folders["qwen3-rerank"])
    return folders


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> np.ndarray:
    with LLM(str(folders["bert"]), device="cpu", dtype="float32") as llm:
        return np.array(llm.embed(TEXTS))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooling(folders: dict[str, Path]) -> AsyncIterator[Service]:
    """An embedder, a decoder that embeds, two rerankers, and a model that generates."""
    engines = [PoolingRemote(folder, name) for name, folder in folders.items()]
    async with serving(*engines, ScriptedRemoteEngine()) as service:
        yield service


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def embed(service: Service, **body: Any) -> dict[str, Any]:
    status, answer = await service.ask("/v1/embeddings", {"model": "bert", **body})
    assert status == 200, answer
    return answer


async def refused(service: Service, path: str, body: Any, param: str | None) -> dict[str, Any]:
    status, answer = await service.ask(path, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    return answer["error"]


def vectors(answer: dict[str, Any]) -> np.ndarray:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return np.array([item["embedding"] for item in answer["data"]])


class TestEmbeddings:
    async def test_texts(self, pooling: Service, expected: np.ndarray) -> None:
        records: list[CallRecord] = []
        pooling.gateway.call_records.sinks.append(records.append)
        answer = await embed(pooling, input=TEXTS)
        assert np.abs(vectors(answer) - expected).max() < 1e-5
        tokens = sum(2 + len(text.split()) for text in TEXTS)
        assert (records[0].path, records[0].prompt_tokens) == ("/v1/embeddings", tokens)
        assert (records[0].model, records[0].engine, records[0].status) == ("bert", "scripted", 200)
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (answer["object"], answer["model"]) == ("list", "bert")
        assert {item["object"] for item in answer["data"]} == {"embedding"}
        [one] = vectors(await embed(pooling, input=TEXTS[1], user="me"))
        assert np.abs(one - expected[1]).max() < 1e-5

    async def test_token_ids(self, pooling: Service, expected: np.ndarray) -> None:
        ids = [[2, *(VOCAB[word] for word in text.split()), 3] for text in TEXTS]
        assert np.abs(vectors(await embed(pooling, input=ids)) - expected).max() < 1e-5
        [one] = vectors(await embed(pooling, input=ids[2]))
        assert np.abs(one - expected[2]).max() < 1e-5

    async def test_base64(self, pooling: Service, expected: np.ndarray) -> None:
        answer = await embed(pooling, input=TEXTS, encoding_format="base64")
        for item, vector in zip(answer["data"], expected, strict=True):
            got = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
            assert np.abs(got - vector).max() < 1e-5

    async def test_the_real_client(self, pooling: Service, expected: np.ndarray) -> None:
        async with pooling.client() as client:
            for options in ({}, {"encoding_format": "float"}):
                answer = await client.embeddings.create(model="bert", input=TEXTS, **options)
                got = np.array([item.embedding for item in answer.data])
                assert np.abs(got - expected).max() < 1e-5
            short = await client.embeddings.create(model="bert", input=TEXTS[0], dimensions=8)
            assert len(short.data[0].embedding) == 8

    async def test_dimensions(self, pooling: Service, expected: np.ndarray) -> None:
        [short] = vectors(await embed(pooling, input=TEXTS[0], dimensions=16))
        wanted = expected[0][:16] / np.linalg.norm(expected[0][:16])
        assert np.abs(short - wanted).max() < 1e-5
        [whole] = vectors(await embed(pooling, input=TEXTS[0], dimensions=32))
        assert np.abs(whole - expected[0]).max() < 1e-5

    async def test_prompts(self, pooling: Service) -> None:
        prompted = vectors(await embed(pooling, input="sleeps", prompt_name="query"))
        assert np.abs(prompted - vectors(await embed(pooling, input=TEXTS[0]))).max() < 1e-5

    async def test_truncation(self, pooling: Service) -> None:
        cut = vectors(await embed(pooling, input="a cat and a king", truncate_prompt_tokens=4))
        assert np.abs(cut - vectors(await embed(pooling, input="a cat"))).max() < 1e-5
        answer = await embed(pooling, input="a " * 90, truncate_prompt_tokens=-1)
        assert answer["usage"]["prompt_tokens"] == 30
        ids = await embed(pooling, input=[4] * 90, truncate_prompt_tokens=-1)
        assert ids["usage"]["prompt_tokens"] == 30

    async def test_many_texts_come_in_portions(self, pooling: Service) -> None:
        answer = await embed(pooling, input=[f"{TEXTS[n % 4]} cat" for n in range(2048)])
        assert len(answer["data"]) == 2048
        assert np.array_equal(answer["data"][1]["embedding"], answer["data"][2045]["embedding"])

    async def test_calls_of_several_clients_share_steps(
        self, pooling: Service, folders: dict[str, Path]
    ) -> None:
        engine = PoolingRemote(folders["bert"], "bert", automatic=False)
        async with serving(engine) as service:
            calls = [asyncio.create_task(embed(service, input=text)) for text in TEXTS]
            await engine.wait_for(lambda: len(engine.contexts) == len(TEXTS))
            engine.step()
            assert len(await asyncio.gather(*calls)) == len(TEXTS)
            assert engine._engine.stats().steps == 1

    async def test_more_calls_are_at_an_engine_than_a_step_takes(
        self, pooling: Service, folders: dict[str, Path]
    ) -> None:
        engine = PoolingRemote(folders["bert"], "bert", automatic=False)
        async with serving(engine) as service:
            count = 2 * engine.info.max_batch_size
            calls = [asyncio.create_task(embed(service, input="a")) for _ in range(count)]
            await engine.wait_for(lambda: len(engine.contexts) == count)
            engine.step()
            engine.step()
            await asyncio.gather(*calls)

    async def test_a_client_that_leaves_cancels(
        self, pooling: Service, folders: dict[str, Path]
    ) -> None:
        engine = PoolingRemote(folders["bert"], "bert", automatic=False)
        async with serving(engine) as service:
            body = json.dumps({"model": "bert", "input": ["a", "the"]}).encode()
            _, writer = await service.send("/v1/embeddings", body)
            await engine.wait_for(lambda: len(engine.contexts) == 2)
            writer.close()
            await engine.settle()
            engine.step()
            assert engine._engine.stats().filled_tokens == 0

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "input"),
            ({"input": []}, "input"),
            ({"input": ""}, "input"),
            ({"input": ["a", ""]}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": ["a", 5]}, "input"),
            ({"input": 5}, "input"),
            ({"input": {"a": 1}}, "input"),
            ({"input": [1.5]}, "input[0]"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "a " * 29}, "input"),
            ({"input": [4] * 31}, "input"),
            ({"input": [5, len(VOCAB)]}, "input"),
            ({"input": [5] * 300_001}, "input"),
            ({"input": [[5] * 151_000] * 2}, "input"),
            ({"input": [[5], [-1]]}, "input"),
            ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
            ({"input": "a", "encoding_format": 5}, "encoding_format"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "dimensions": 9}, "dimensions"),
            ({"input": "a", "dimensions": 33}, "dimensions"),
            ({"input": "a", "dimensions": "8"}, "dimensions"),
            ({"input": "a", "user": 5}, "user"),
            ({"input": "a", "prompt_name": "nobody"}, "prompt_name"),
            ({"input": [5], "prompt_name": "query"}, "prompt_name"),
            ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
            ({"input": "a", "model": 5}, "model"),
        ],
    )
    async def test_bad_fields(self, pooling: Service, body: Any, param: str) -> None:
        await refused(pooling, "/v1/embeddings", {"model": "bert", **body}, param)

    async def test_refusals_say_what_would_do(
        self, pooling: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = "/v1/embeddings"
        error = await refused(pooling, path, {"model": "bert", "input": "a " * 29}, "input")
        assert error["code"] == "context_length_exceeded"
        assert "30 tokens" in error["message"]
        error = await refused(pooling, path, {"model": "bert", "input": [1000]}, "input")
        assert "check_embedding_ctx_length=False" in error["message"]
        error = await refused(
            pooling, path, {"model": "text-embedding-3-small", "input": [[5]]}, "input"
        )
        assert "OpenAI's vocabulary" in error["message"]
        error = await refused(
            pooling, path, {"model": "qwen3", "input": "a", "dimensions": 8}, "dimensions"
        )
        assert "is_matryoshka" in error["message"]
        error = await refused(
            pooling, path, {"model": "qwen3", "input": "a", "prompt_name": "x"}, "prompt_name"
        )
        assert "no prompts" in error["message"]
        error = await refused(pooling, path, {"input": "a"}, "model")
        assert error["code"] == "missing_required_parameter"
        monkeypatch.setattr(embeddings, "MAX_TOKENS", 10)
        error = await refused(pooling, path, {"model": "bert", "input": TEXTS}, "input")
        assert error["code"] == "max_tokens_per_request"
        monkeypatch.setattr(pooling_input, "MAX_CHARACTERS", 30)
        error = await refused(pooling, path, {"model": "bert", "input": TEXTS}, "input")
        assert error["code"] == "string_above_max_length"

    async def test_unknown_fields_are_named(self, pooling: Service) -> None:
        _, headers, _ = await pooling.post(
            "/v1/embeddings", {"model": "bert", "input": "a", "colour": 1}
        )
        assert headers[b"x-parrot-ignored"] == b"colour"


class TestScores:
    async def scores(self, folders: dict[str, Path], pairs: list[tuple[str, str]]) -> np.ndarray:
        with LLM(str(folders["bert-score"]), device="cpu", dtype="float32") as llm:
            return np.array(llm.score(pairs))

    @pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
    async def test_rerank(self, pooling: Service, folders: dict[str, Path], path: str) -> None:
        query, documents = "young king", [*TEXTS[:3], {"text": TEXTS[3], "title": "x"}]
        body = {"model": "bert-score", "query": query, "documents": documents}
        status, answer = await pooling.ask(path, body)
        assert status == 200
        wanted = await self.scores(folders, [(query, text) for text in TEXTS])
        order = [int(index) for index in np.argsort(-wanted)]
        assert [item["index"] for item in answer["results"]] == order
        for item in answer["results"]:
            assert abs(item["relevance_score"] - wanted[item["index"]]) < 1e-5
            assert item["document"] == {"text": TEXTS[item["index"]]}
        assert answer["usage"]["total_tokens"] == sum(5 + len(text.split()) for text in TEXTS)
        few = {**body, "top_n": 2, "return_documents": False}
        _, answer = await pooling.ask(path, few)
        assert [item["index"] for item in answer["results"]] == order[:2]
        assert "document" not in answer["results"][0]

    @pytest.mark.parametrize("path", ["/v1/score", "/score"])
    async def test_score(self, pooling: Service, folders: dict[str, Path], path: str) -> None:
        wanted = await self.scores(folders, [("king", text) for text in TEXTS])
        for first in ("king", ["king"] * 4, ["king"]):
            body = {"model": "bert-score", "text_1": first, "text_2": TEXTS}
            status, answer = await pooling.ask(path, body)
            assert status == 200
            got = [item["score"] for item in answer["data"]]
            assert np.abs(np.array(got) - wanted).max() < 1e-5
        one = {"model": "bert-score", "text_1": "king", "text_2": TEXTS[0]}
        _, answer = await pooling.ask(path, one)
        assert [item["object"] for item in answer["data"]] == ["score"]

    async def test_a_reranker_that_takes_instructions(
        self, pooling: Service, folders: dict[str, Path]
    ) -> None:
        with LLM(str(folders["qwen3-rerank"]), device="cpu", dtype="float32") as llm:
            pairs = [("king", text) for text in TEXTS]
            wanted = [llm.score(pairs, instruction=given) for given in (None, "old ship")]
        assert np.abs(np.subtract(*wanted)).min() > 1e-4
        for given, scores in zip((None, "old ship"), wanted, strict=True):
            body = {"model": "qwen3-rerank", "query": "king", "documents": TEXTS}
            status, answer = await pooling.ask("/v1/rerank", {**body, "instruction": given})
            assert status == 200, answer
            for item in answer["results"]:
                assert abs(item["relevance_score"] - scores[item["index"]]) < 1e-5
            body = {"model": "qwen3-rerank", "text_1": "king", "text_2": TEXTS}
            status, answer = await pooling.ask("/v1/score", {**body, "instruction": given})
            got = [item["score"] for item in answer["data"]]
            assert np.abs(np.subtract(got, scores)).max() < 1e-5

    async def test_many_pairs_are_written_in_a_thread(
        self, pooling: Service, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        threads = []
        monkeypatch.setattr(
            pooling_input, "encode_written_pairs",
            lambda *given, **options: threads.append(threading.current_thread())
            or encode_written_pairs(*given, **options),
        )  # fmt: skip
        for count in (1, 20):
            body = {"model": "qwen3-rerank", "query": "king", "documents": ["a fish"] * count}
            status, _ = await pooling.ask("/v1/rerank", body)
            assert status == 200
        assert [thread is threading.main_thread() for thread in threads] == [True, False]

    async def test_truncation_keeps_the_query(self, pooling: Service) -> None:
        answers = []
        for document, cut in (("a fish", None), ("a fish " + "the " * 90, 7)):
            body = {"model": "bert-score", "query": "old king", "documents": [document]}
            status, answer = await pooling.ask(
                "/v1/rerank", {**body, "truncate_prompt_tokens": cut}
            )
            assert status == 200, answer
            answers.append(answer["results"][0]["relevance_score"])
        assert abs(answers[0] - answers[1]) < 1e-6

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/v1/rerank", {"documents": ["a"]}, "query"),
            ("/v1/rerank", {"query": "a"}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": [{}]}, "documents[0].text"),
            ("/v1/rerank", {"query": "a", "documents": ["a " * 90]}, "documents"),
            ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
            ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": "b"}, "instruction"),
            ("/v1/rerank", {"query": "a", "documents": ["a"], "instruction": 5}, "instruction"),
            ("/v1/score", {"text_1": "a"}, "text_2"),
            ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
            ("/v1/score", {"text_1": [], "text_2": ["a"]}, "text_1"),
            ("/v1/score", {"text_1": 5, "text_2": ["a"]}, "text_1"),
        ],
    )
    async def test_bad_fields(self, pooling: Service, path: str, body: Any, param: str) -> None:
        await refused(pooling, path, {"model": "bert-score", **body}, param)


class TestOtherModels:
    @pytest.mark.parametrize(
        ("path", "body", "message"),
        [
            ("/v1/embeddings", {"model": "m", "input": "a"}, "/v1/chat/completions"),
            ("/v1/embeddings", {"model": "bert-score", "input": "a"}, "/v1/rerank"),
            ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b"]}, "cross-encoder"),
            ("/v1/score", {"model": "m", "text_1": "a", "text_2": "b"}, "cross-encoder"),
            ("/v1/completions", {"model": "bert", "prompt": "a"}, "/v1/embeddings"),
            (
                "/v1/chat/completions",
                {"model": "bert-score", "messages": [{"role": "user", "content": "a"}]},
                "/v1/rerank and /v1/score",
            ),
        ],
    )
    async def test_are_refused_by_name(
        self, pooling: Service, path: str, body: dict[str, Any], message: str
    ) -> None:
        error = await refused(pooling, path, body, "model")
        assert error["code"] == "unsupported_route"
        assert message in error["message"]
        assert body["model"] in error["message"]

    async def test_the_real_clients_error(self, pooling: Service) -> None:
        async with pooling.client() as client:
            with pytest.raises(openai.BadRequestError, match="makes no vectors"):
                await client.embeddings.create(model="m", input="a")
            with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
                await client.responses.create(model="qwen3", input="a")


async def test_texts_of_a_call_keep_two_steps_ahead(folders: dict[str, Path]) -> None:
    engine = PoolingRemote(folders["bert"], "bert", automatic=False)
    engine.info = replace(engine.info, max_batch_tokens=20)
    widths: list[int] = []
    async with serving(engine) as service:
        task = asyncio.create_task(embed(service, input=["the king sleeps"] * 30))
        while sum(widths) < 30:
            await engine.wait_for(lambda: bool(engine.contexts))
            widths.append(len(engine.contexts))
            engine.step()
        assert len((await task)["data"]) == 30
    # As many at a time until there are no more, not one by one once there was no room.
    assert len(set(widths[:-1])) == 1
    assert widths[0] > 1


async def test_what_a_lost_engine_has_not_computed_is_sent_to_another(
    folders: dict[str, Path],
) -> None:
    engines = [PoolingRemote(folders["bert"], "bert", automatic=False) for _ in range(2)]
    for engine in engines:
        engine.info = replace(engine.info, max_batch_tokens=20)
    texts = [f"the king sleeps {'a ' * number}" for number in range(12)]
    async with serving(*engines) as service:
        call = asyncio.create_task(embed(service, input=texts))
        await until(lambda: any(engine.contexts for engine in engines))
        first = 0 if engines[0].contexts else 1
        lost, other = engines[first], engines[1 - first]
        # A step, and what is sent after it.
        lost.step()
        sent = len(lost.contexts)
        await lost.wait_for(lambda: len(lost.contexts) > sent)
        service.gateway.registry.remove(service.remotes[first].id, "it was unplugged")
        lost.contexts.clear()
        other.automatic = True
        answer = await call
        again = {tuple(each.token_ids) for each in other.submitted if isinstance(each, Pool)}
        assert 0 < len(again) < len(texts)
        whole = await embed(service, input=texts)
        assert np.allclose(vectors(answer), vectors(whole), atol=1e-5)
        assert answer["usage"] == whole["usage"]
