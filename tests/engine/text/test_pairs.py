"""Pairs as chat templates of rerankers write them, whole and cut."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.pooling_checkpoints import write_logit_score, write_model
from parrot_engine.text.chat import ChatTemplateError
from parrot_engine.text.loading import load_text_assets
from parrot_engine.text.pairs import encode_written_pairs, write_pair
from parrot_engine.text.tokenizer import Tokenizer
from transformers import AutoTokenizer

PAIRS = [("the king", "a fish swims and sleeps"), ("night", "")]
VARIABLES = {"add_generation_prompt": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reranker")
    write_model("qwen3-rerank", folder)
    write_logit_score(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(load_text_assets(folder))


@pytest.mark.parametrize("instruction", [None, "young sea"])
def test_tokens_are_those_of_transformers(
    folder: Path, tokenizer: Tokenizer, instruction: str | None
) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    got = encode_written_pairs(tokenizer, PAIRS, instruction, VARIABLES)
    for (query, document), tokens in zip(PAIRS, got, strict=True):
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        expected = theirs.apply_chat_template(messages, return_dict=True, **VARIABLES)["input_ids"]
        assert tokens.token_ids == expected
        assert tokens.second_from is None


def test_what_is_cut_keeps_the_end_of_the_template(tokenizer: Tokenizer) -> None:
    [whole] = encode_written_pairs(tokenizer, PAIRS[:1], None, VARIABLES)
    # Behind the document: `sleeps and a`.
    for size in (len(whole.token_ids) - 1, 10, 3, 2):
        [cut] = encode_written_pairs(tokenizer, PAIRS[:1], None, VARIABLES, max_tokens=size)
        kept = max(0, size - 3)
        assert cut.token_ids == whole.token_ids[:kept] + whole.token_ids[-min(size, 3) :]
    [same] = encode_written_pairs(tokenizer, PAIRS[:1], None, VARIABLES, max_tokens=99)
    assert same == whole


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer) -> None:
    pairs = [("the \ud83d", "king"), ("the \ufffd", "king")]
    first, second = encode_written_pairs(tokenizer, pairs, None, VARIABLES)
    assert first == second


def test_without_a_template(tokenizer: Tokenizer) -> None:
    chat = type(tokenizer.chat)(None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        write_pair(chat, PAIRS[0], None, {})
