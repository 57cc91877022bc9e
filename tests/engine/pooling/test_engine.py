"""The queue of the pooling engine, beside generations too; refusals; texts through `LLM`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.pooling_checkpoints import (
    VOCAB,
    change_config,
    write_json,
    write_logit_score,
    write_model,
    write_modules,
)
from parrot_engine import LLM, SamplingParams
from parrot_engine.exceptions import GenerationError
from parrot_engine.loading.factory import EngineOptions, load_engine_alone
from parrot_engine.protocol import (
    Engine,
    Event,
    Failed,
    Fill,
    FreeContext,
    Generate,
    Generated,
    Pool,
    Pooled,
)
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bert")
    write_model("bert", folder)
    write_modules(folder, prompts={"query": "the king ", "none": ""}, default_prompt_name="none")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": True})
    return folder


def load(folder: Path, **options: int) -> Engine:
    return load_engine_alone(EngineOptions(str(folder), device="cpu", **options))


def step(engine: Engine) -> list[Event]:
    return engine.step().events


def pooled(events: list[Event]) -> list[int]:
    assert all(isinstance(event, Pooled) for event in events), events
    return [event.context_id for event in events]


class TestQueue:
    def test_steps_hold_so_many_tokens_and_the_urgent_come_first(self, folder: Path) -> None:
        engine = load(folder, max_batch_tokens=20)
        engine.submit([Pool(1, [5] * 15), Pool(2, [6] * 15), Pool(3, [7] * 4, priority=-1)])
        engine.submit([Pool(4, [7] * 5)])
        assert pooled(step(engine)) == [3, 1]
        assert engine.stats().waiting == 2
        assert pooled(step(engine)) == [4, 2]
        assert not engine.step().has_work
        assert (engine.stats().steps, engine.stats().filled_tokens) == (2, 39)

    def test_a_text_longer_than_a_step_is_one_of_its_own(self, folder: Path) -> None:
        engine = load(folder, max_batch_tokens=8)
        engine.submit([Pool(1, [5] * 30), Pool(2, [6])])
        assert pooled(step(engine)) == [1]
        assert pooled(step(engine)) == [2]

    def test_what_was_freed_is_not_computed(self, folder: Path) -> None:
        engine = load(folder)
        engine.submit([Pool(1, [5]), Pool(2, [6]), FreeContext(1), FreeContext(9)])
        assert pooled(step(engine)) == [2]
        # Its id can be used again, once it has ended as well.
        engine.submit([Pool(1, [5]), Pool(2, [6])])
        assert pooled(step(engine)) == [1, 2]

    def test_a_full_queue_refuses(self, folder: Path) -> None:
        engine = load(folder, max_contexts=2)
        engine.submit([Pool(number, [5]) for number in range(3)])
        failed, *others = step(engine)
        assert isinstance(failed, Failed)
        assert (failed.context_id, failed.code) == (2, "overloaded")
        assert pooled(others) == [0, 1]

    @pytest.mark.parametrize(
        ("pool", "code"),
        [
            (Pool(1, []), "invalid_request"),
            (Pool(1, [5] * 41), "context_too_long"),
            (Pool(1, [len(VOCAB)]), "invalid_request"),
            (Pool(1, [-1]), "invalid_request"),
            (Pool(1, [5, 6], 2), "invalid_request"),
            (Pool(1, [5], dimensions=33), "invalid_request"),
            (Fill(1, [5]), "invalid_request"),
            (Generate(1, SamplingParams()), "invalid_request"),
        ],
    )
    def test_refusals(self, folder: Path, pool: Pool, code: str) -> None:
        engine = load(folder)
        engine.submit([pool, Pool(2, [5])])
        failed, good = step(engine)
        assert isinstance(failed, Failed)
        assert failed.code == code
        assert isinstance(good, Pooled)

    def test_a_context_in_use_is_refused(self, folder: Path) -> None:
        engine = load(folder)
        engine.submit([Pool(1, [5]), Pool(1, [6])])
        [failed] = step(engine)
        assert isinstance(failed, Failed)

    def test_a_vector_that_is_not_finite_fails_alone(self, tmp_path: Path) -> None:
        model = write_model("bert", tmp_path)
        with torch.no_grad():
            model.embeddings.word_embeddings.weight[9] = math.nan
        model.save_pretrained(tmp_path)
        engine = load(tmp_path)
        engine.submit([Pool(1, [5, 9]), Pool(2, [5, 6])])
        events = {event.context_id: event for event in step(engine)}
        assert isinstance(events[1], Failed)
        assert events[1].code == "numerical_error"
        assert isinstance(events[2], Pooled)


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine_alone(EngineOptions("parrot-demo", device="cpu", max_batch_tokens=64))


class TestBesideGenerations:
    def test_the_demo_model_generates_and_makes_vectors(self, demo: Engine) -> None:
        assert demo.info.generates
        assert demo.info.pooling is not None
        assert demo.info.pooling.is_toy
        demo.submit([Fill(1, [40, 41]), Generate(1, SamplingParams(max_tokens=4, temperature=0))])
        # Sixteen tokens of a step of 64 are for what is not urgent.
        demo.submit([Pool(number, [50 + number] * 10) for number in range(2, 5)])
        seen: dict[int, list[Event]] = {}
        steps = 0
        has_work = True
        while has_work:
            events, has_work = demo.step()
            steps += 1
            for event in events:
                seen.setdefault(event.context_id, []).append(event)
        tokens = [t for e in seen[1] if isinstance(e, Generated) for t in e.token_ids]
        assert len(tokens) == 4
        vectors = [np.frombuffer(seen[n][0].values, "<f4") for n in (2, 3, 4)]  # type: ignore[union-attr]
        assert [len(vector) for vector in vectors] == [256] * 3
        assert all(abs(np.linalg.norm(vector) - 1) < 1e-5 for vector in vectors)
        demo.submit([FreeContext(1), Fill(9, [40, 41])])
        demo.submit([Generate(9, SamplingParams(max_tokens=4, temperature=0))])
        alone: list[int] = []
        while len(alone) < 4:
            alone += [t for e in step(demo) if isinstance(e, Generated) for t in e.token_ids]
        assert tokens == alone
        demo.submit([FreeContext(9)])
        step(demo)

    def test_freeing_reaches_both(self, demo: Engine) -> None:
        demo.submit([Fill(1, [40]), Pool(2, [50]), FreeContext(1), FreeContext(2)])
        assert [e for e in step(demo) if isinstance(e, Pooled)] == []
        assert demo.stats().contexts == 0


class TestThroughLLM:
    def test_texts_and_ids(self, folder: Path) -> None:
        with LLM(str(folder), device="cpu") as llm:
            text, ids = "the FISH swims", [2, 4, 6, 16, 3]
            both = llm.embed([text, ids])
            assert np.allclose(both[0], both[1], atol=1e-6)
            queried = llm.embed(text, prompt_name="query")
            assert np.allclose(queried, llm.embed("the king the fish swims"), atol=1e-6)
            assert len(llm.embed(["a"] * 700, dimensions=5)[0]) == 5
            # Half of a surrogate pair is no text.
            assert llm.embed("a \ud800") == llm.embed("a \ufffd")
            with pytest.raises(ValueError, match="there is no prompt 'nobody'"):
                llm.embed("a", prompt_name="nobody")
            with pytest.raises(GenerationError, match="context_too_long"):
                llm.embed(["a", "a " * 60])
            with pytest.raises(ValueError, match="makes no scores"):
                llm.score([("a", "fish")])
            with pytest.raises(GenerationError, match="generates no text"):
                llm.generate("a")

    def test_scores_of_pairs(self, tmp_path: Path) -> None:
        model = write_model("bert-score", tmp_path)
        with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
            [score] = llm.score([("the king", "a fish swims")])
            tokenizer_says = torch.tensor([[2, 4, 10, 3, 5, 6, 16, 3]])
            types = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
            with torch.no_grad():
                logit = model(tokenizer_says, token_type_ids=types).logits
            assert abs(score - logit.sigmoid().item()) < 1e-5

    @pytest.mark.parametrize(
        ("name", "no", "details"),
        [
            ("qwen3-rerank", "queen", {}),
            ("qwen3-rerank-untied", "queen", {"activation_fn": "torch.nn.Identity"}),
            ("qwen3-rerank", None, {"prompts": {"a": "young"}, "default_prompt_name": "a"}),
        ],
    )
    def test_scores_by_the_next_token(
        self, name: str, no: str | None, details: dict[str, Any], tmp_path: Path
    ) -> None:
        """The probability of one token against another, behind what the chat template writes."""
        model = write_model(name, tmp_path)
        write_logit_score(tmp_path, no=no, **details)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        pairs = [("the king", "a fish swims"), ("night", "")]
        given = {None: "young" if details.get("prompts") else "old night", "sea of": "sea of"}
        with LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
            assert not llm.info.generates
            for instruction, written in given.items():
                scores = llm.score(pairs, instruction=instruction)
                for (query, document), score in zip(pairs, scores, strict=True):
                    text = f"sea {written} day {query} ship {document} sleeps and a"
                    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
                    with torch.no_grad():
                        logits = model(ids).logits[0, -1]
                    wanted = logits[VOCAB["king"]]
                    if no is not None:
                        wanted = wanted - logits[VOCAB[no]]
                    if "activation_fn" not in details:
                        wanted = wanted.sigmoid()
                    assert abs(score - wanted.item()) < 1e-5

    def test_a_decoder_has_no_scores(self) -> None:
        with LLM(device="cpu") as llm, pytest.raises(ValueError, match="makes no scores"):
            llm.score([("a", "b")])


class TestLoading:
    @pytest.fixture
    def bert(self, tmp_path: Path) -> Path:
        write_model("bert", tmp_path)
        write_modules(tmp_path)
        return tmp_path

    def test_limits_and_prompts_are_the_checkpoints(self, folder: Path) -> None:
        info = load(folder).info
        assert not info.generates
        assert info.pooling is not None
        assert (info.max_context_tokens, info.pooling.dimensions) == (40, 32)
        stored = (folder / "model.safetensors").stat().st_size
        assert 0.8 * stored < info.weight_bytes < stored
        assert info.pooling.prompts == {"query": "the king ", "none": ""}
        assert info.pooling.lowercase
        assert not info.pooling.is_matryoshka

    def test_matryoshka(self, bert: Path) -> None:
        change_config(bert, matryoshka_dimensions=[8, 16])
        pooling = load(bert).info.pooling
        assert pooling is not None
        assert (pooling.is_matryoshka, pooling.matryoshka_dimensions) == (True, [8, 16])

    def refuses(self, folder: Path, message: str, **options: object) -> None:
        with pytest.raises(Exception, match=message):
            load_engine_alone(EngineOptions(str(folder), device="cpu", **options))  # type: ignore[arg-type]

    def test_refusals_by_name(self, bert: Path) -> None:
        good = (bert / "modules.json").read_text()
        write_json(bert / "modules.json", [{"path": "", "type": "a.Transformer"}, {"type": "b.X"}])
        self.refuses(bert, "the module 'X' at place 1")
        write_json(bert / "modules.json", [{"path": "..", "type": "a.Transformer"}])
        self.refuses(bert, "outside the checkpoint")
        write_json(bert / "modules.json", {})
        self.refuses(bert, "JSON array")
        (bert / "modules.json").write_text(good)
        write_json(bert / "1_Pooling" / "config.json", {"pooling_mode": "weightedmean"})
        self.refuses(bert, "pooling 'weightedmean'")
        write_modules(bert, prompts={"a": "b"}, default_prompt_name="c")
        self.refuses(bert, "there is no prompt 'c'")
        write_modules(bert)
        change_config(bert, position_embedding_type="relative_key")
        self.refuses(bert, "position embeddings of type 'relative_key'")
        change_config(bert, position_embedding_type="absolute", architectures=["DebertaModel"])
        self.refuses(bert, "architecture 'DebertaModel'")
        change_config(bert, architectures=["BertModel"], hidden_size=36)
        self.refuses(bert, "has shape")
        self.refuses(bert, "only the builtin engine", kind="huggingface")

    def test_refusals_of_rerankers_by_name(self, tmp_path: Path) -> None:
        write_model("qwen3-rerank", tmp_path)
        write_logit_score(tmp_path)
        limits = tmp_path / "sentence_bert_config.json"
        good = limits.read_text()
        write_json(limits, {})
        self.refuses(tmp_path, "pairs that the chat template does not write")
        write_json(limits, {"modality_config": {"message": {"format": "structured"}}})
        self.refuses(tmp_path, "messages of several parts")
        modality = {"modality_config": {"message": {"format": "flat"}}}
        write_json(limits, {**modality, "processing_kwargs": {"chat_template": {"tools": []}}})
        self.refuses(tmp_path, r"\[\] as 'tools' of the chat template")
        limits.write_text(good)
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
        self.refuses(tmp_path, "leaves out query or document")
        (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
        self.refuses(tmp_path, "writes no pairs: .*no")
        write_json(tmp_path / "1_LogitScore" / "config.json", {"true_token_id": 5_000})
        self.refuses(tmp_path, r"1_LogitScore/config.json: 5000 is no token of a vocabulary of 22")
        write_modules(tmp_path, model_type="CrossEncoder")
        self.refuses(tmp_path, "scores from the modules Transformer, Pooling, Normalize")
        write_logit_score(tmp_path)
        change_config(tmp_path, architectures=["BertModel"])
        self.refuses(tmp_path, "scores from logits of an encoder")

    def test_a_classifier_is_no_reranker(self, tmp_path: Path) -> None:
        write_model("bert-score", tmp_path)
        change_config(tmp_path, id2label={"0": "a", "1": "b"})
        self.refuses(tmp_path, "a classifier of 2 labels")
        change_config(tmp_path, id2label={"0": "a"}, sentence_transformers={"activation_fn": "x.Y"})
        self.refuses(tmp_path, "activation 'x.Y' of scores")
