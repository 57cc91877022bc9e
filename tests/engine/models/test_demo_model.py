"""The shipped demo model is a trained, standard checkpoint; its script trains and exports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import parrot_engine
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

ASSETS = Path(parrot_engine.__file__).parent / "assets" / "demo"
ROOT = Path(__file__).parents[3]

#: Passages of the validation split; public domain (Baum, Conan Doyle, Austen, Stevenson).
HELD_OUT = (
    (Path(__file__).parents[1] / "held_out_passages.txt")
    .read_text(encoding="utf-8")
    .strip()
    .split("\n\n***\n\n")
)
TOKENIZER = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerBase:
    return transformers.AutoTokenizer.from_pretrained(ASSETS)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, passage in enumerate(HELD_OUT):
        (folder / f"{number}.txt").write_text("\n\n".join([passage] * 12), encoding="utf-8")
    return folder


def _loss(model: transformers.PreTrainedModel, text: str) -> float:
    ids = torch.tensor([TOKENIZER.encode(text).ids])
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


class TestAssets:
    def test_fit_in_ten_megabytes(self) -> None:
        assert sum(path.stat().st_size for path in ASSETS.iterdir()) <= 10_000_000

    def test_card_names_licence_data_and_limits(self) -> None:
        card = (ASSETS / "README.md").read_text(encoding="utf-8")
        for needed in (
            "license: cc0-1.0",
            "What it cannot do",
            "Gutenberg",
            "| 1342 |",
            "bits per",
        ):
            assert needed in card

    def test_transformers_loads_every_weight(self) -> None:
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(
            ASSETS, output_loading_info=True
        )
        assert loaded.dtype == torch.float32
        assert not info["unexpected_keys"]
        assert not info["mismatched_keys"]
        assert set(info["missing_keys"]) <= {"lm_head.weight"}  # tied to the embeddings
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight

    def test_generation_ends_where_turns_and_texts_end(self) -> None:
        generation = json.loads((ASSETS / "generation_config.json").read_text())
        ends = {TOKENIZER.token_to_id("<|end|>"), TOKENIZER.token_to_id("<|endoftext|>")}
        assert set(generation["eos_token_id"]) == ends


class TestIsTrained:
    def test_reads_passages_it_was_never_trained_on(
        self, model: transformers.PreTrainedModel
    ) -> None:
        losses = [_loss(model, passage) for passage in HELD_OUT]
        assert sum(losses) / len(losses) < 3.7

    def test_an_untrained_model_does_not(self, model: transformers.PreTrainedModel) -> None:
        torch.manual_seed(0)
        untrained = transformers.LlamaForCausalLM(model.config).eval()
        assert abs(_loss(untrained, HELD_OUT[0]) - math.log(model.config.vocab_size)) < 0.5

    def test_word_order_matters_to_it(self, model: transformers.PreTrainedModel) -> None:
        words = HELD_OUT[0].split()
        assert _loss(model, " ".join(reversed(words))) > _loss(model, HELD_OUT[0]) + 1

    def test_reads_as_well_at_the_end_of_its_context(
        self, model: transformers.PreTrainedModel
    ) -> None:
        length = model.config.max_position_embeddings
        passage = TOKENIZER.encode("\n\n" + HELD_OUT[0]).ids
        before = TOKENIZER.encode("\n\n".join(HELD_OUT[1:] * 4)).ids[: length - len(passage)]
        ids = torch.tensor([before + passage])
        assert ids.shape[1] == length
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, -len(passage) : -1]
        at_end = torch.nn.functional.cross_entropy(logits, ids[0, -len(passage) + 1 :])
        assert abs(float(at_end) - _loss(model, HELD_OUT[0])) < 0.2

    def test_answers_a_chat_turn_with_prose_and_ends_it(
        self, model: transformers.PreTrainedModel, tokenizer: transformers.PreTrainedTokenizerBase
    ) -> None:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Tell me a story about a fox."}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        torch.manual_seed(0)
        made = model.generate(**prompt, max_new_tokens=256, num_return_sequences=4)
        answers = made[:, prompt["input_ids"].shape[1] :].tolist()
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        assert sum(end in answer for answer in answers) >= 2
        for answer in answers:
            text = tokenizer.decode(answer, skip_special_tokens=True)
            assert len(text.split()) >= 5
            assert "<|" not in text


class TestTokenizer:
    @given(st.text())
    def test_any_text_round_trips(self, text: str) -> None:
        assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text

    def test_prose_takes_few_tokens(self) -> None:
        text = "\n\n".join(HELD_OUT)
        assert len(text) / len(TOKENIZER.encode(text).ids) > 3

    def test_transformers_reads_the_same_ids(
        self, tokenizer: transformers.PreTrainedTokenizerBase
    ) -> None:
        text = '<|user|>\n"It\'s done," said he—at last.<|end|>\n'
        assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids


class TestChatTemplate:
    def test_renders_every_role(self, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        call = {"function": {"name": "look", "arguments": {"at": "the fox"}}}
        text = tokenizer.apply_chat_template(
            [
                {"role": "developer", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": " Where is it? "}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "In the den.", "tool_call_id": "1"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == (
            "<|system|>\nBe brief.<|end|>\n"
            "<|user|>\nWhere is it?<|end|>\n"
            '<|assistant|>\nlook {"at": "the fox"}<|end|>\n'
            "<|tool|>\nIn the den.<|end|>\n"
            "<|assistant|>\n"
        )

    @pytest.mark.parametrize(
        ("message", "named"),
        [
            ({"role": "critic", "content": "No."}, "critic"),
            ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
        ],
    )
    def test_refuses_what_it_cannot_render(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        message: dict[str, object],
        named: str,
    ) -> None:
        with pytest.raises(Exception, match=named):
            tokenizer.apply_chat_template([message], tokenize=False)


#: A run of the training script that is over at once.
TINY = (
    *("--steps", "6", "--eval-every", "3", "--rows", "3", "--max-position-embeddings", "64"),
    *("--vocab-size", "320", "--hidden-size", "32", "--intermediate-size", "64"),
    *("--num-hidden-layers", "1", "--num-attention-heads", "2", "--num-key-value-heads", "1"),
    *("--head-dim", "16", "--chat-passes", "1", "--device", "cpu"),
)


def test_the_training_script_trains_and_exports(texts: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "parrot_bench.demo_model", "--data", str(texts), "--out",
         str(tmp_path), *TINY],
        env={"OMP_NUM_THREADS": "1", "PATH": "", "PYTHONPATH": str(ROOT / "bench")},
        capture_output=True,
        text=True,
        timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["steps"] == 6
    assert metrics["loss"] < metrics["untrained_loss"]
    checkpoint = tmp_path / "checkpoint"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, output_loading_info=True
    )
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {"lm_head.weight"}  # tied to the embeddings
    prompt = tokenizer("Once", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > 1
    assert "CC0" in (checkpoint / "README.md").read_text(encoding="utf-8")
