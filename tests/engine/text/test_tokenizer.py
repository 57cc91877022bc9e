"""The tokenizer against transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from harness.engine.tokenizer_kinds import CORPUS, KINDS, byte_level, write_folder, write_kind
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.text import TextAssets, TextAssetsError, Tokenizer
from parrot_engine.text.length_bound import read_bound
from parrot_engine.text.loading import load_text_assets
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "  lead",
    "tail  ",
    "<s>hello</s> x",
    "<|im_end|>hi<|endoftext|> <|begin|>",
    "a<tool call>b",
    "<0xE2>",
    "e\u0301",
    "🦜👩‍👩‍👧",
    "\x00\ufffd",
]


class Pair:
    """Ours and the reference."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.ours = Tokenizer(load_text_assets(folder))
        self.theirs = AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(write_kind(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_transformers(pair: Pair, text: str, add_special_tokens: bool) -> None:
    expected = pair.theirs.encode(text, add_special_tokens=add_special_tokens)
    assert pair.ours.encode(text, add_special_tokens=add_special_tokens) == expected


#: Text that pipelines shorten, if any does: composed, singletons, blanks, added tokens.
DENSE = ["e\u0301", "\u1100\u1161\u11a8", "\u212a", "\u1fef", "\u03b1\u0313\u0301\u0345",
         " ", "a", "the", "<tool call>", "<|endoftext|>", "</s>", "\n\n", "🦜", "▁",
         "\ud83e", "日本語"]  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.tuples(st.sampled_from(DENSE) | st.text(), st.integers(1, 300)), max_size=4)
)
def test_the_bound_is_never_above_the_tokens(pair: Pair, parts: list[tuple[str, int]]) -> None:
    text = "".join(part * times for part, times in parts)
    assert pair.ours.least_tokens(text) <= len(pair.ours.encode(text, add_special_tokens=False))


def test_the_bound_says_something(pair: Pair) -> None:
    least = pair.ours.least_tokens("the quick brown fox " * 50_000)
    # What WordPiece makes of a text cannot be bounded: any word may be one unknown token.
    is_opaque = pair.ours.pieces.plan.kind == "opaque"
    assert least == 0 if is_opaque else least > 20_000


def test_the_bound_of_text_that_becomes_shorter_in_nfc() -> None:
    pipeline = json.loads(byte_level(bos=False).to_str())
    pipeline["normalizer"] = {"type": "NFC"}
    tokenizer = Backend.from_str(json.dumps(pipeline))
    tokenizer.add_tokens([AddedToken("\u00e9" * 8, normalized=True)])
    ours = Tokenizer(TextAssets(tokenizer.to_str()))
    text = "e\u0301" * 80
    assert len(ours.encode(text)) == 10
    assert 1 <= ours.least_tokens(text) <= 10


def test_pipelines_that_lose_text_have_no_bound() -> None:
    def bound(change: Callable[[dict[str, Any]], None]) -> object:
        pipeline = json.loads(byte_level(bos=False).to_str())
        change(pipeline)
        return read_bound(pipeline)

    assert bound(lambda pipeline: None) is not None
    assert bound(lambda pipeline: pipeline.update(normalizer={"type": "Lowercase"})) is None
    removing = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    assert bound(lambda pipeline: pipeline.update(pre_tokenizer=removing)) is None
    assert bound(lambda pipeline: pipeline["added_tokens"][0].update(rstrip=True)) is None
    assert bound(lambda pipeline: pipeline["model"]["vocab"].pop("a")) is None
    assert bound(lambda pipeline: pipeline.update(pre_tokenizer=None)) is None


def test_many_ids_decode_as_few_do(pair: Pair) -> None:
    ids = pair.ours.encode("Grüße, the fox 🦜. ", add_special_tokens=False) * 2000
    assert len(ids) > 8192
    assert pair.ours.decode(ids) == pair.theirs.backend_tokenizer.decode(ids)


@settings(deadline=None, max_examples=60)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_any_text(pair: Pair, text: str) -> None:
    assert pair.ours.encode(text) == pair.theirs.encode(text)


@settings(deadline=None, max_examples=100)
@given(data=st.data(), skip=st.booleans())
def test_decode_any_ids(pair: Pair, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, len(pair.theirs) - 1)))
    expected = pair.theirs.decode(ids, skip_special_tokens=skip)
    assert pair.ours.decode(ids, skip_special_tokens=skip) == expected


def test_names_and_sizes(pair: Pair) -> None:
    assert pair.ours.vocab_size == len(pair.theirs)
    assert pair.ours.assets.special_tokens == pair.theirs.special_tokens_map
    assert pair.ours.eos_token_id == pair.theirs.eos_token_id
    assert pair.ours.bos_token_id == pair.theirs.bos_token_id
    for token_id in pair.theirs.all_special_ids:
        assert pair.ours.is_special(token_id)


def test_token_bytes_join_to_the_text(pair: Pair) -> None:
    if pair.ours.pieces.plan.kind == "opaque" or pair.ours.pieces.plan.bare_first:
        pytest.skip("no bytes per token in this kind")
    for text in CORPUS[:4]:
        ids = pair.ours.encode(text, add_special_tokens=False)
        joined = b"".join(map(pair.ours.token_bytes, ids)).decode()
        assert joined.lstrip(" ") == pair.ours.decode(ids, skip_special_tokens=False)


def test_assets_travel(pair: Pair) -> None:
    packed = msgspec.msgpack.encode(pair.ours.assets)
    again = Tokenizer(msgspec.msgpack.decode(packed, type=TextAssets))
    assert again.encode(CORPUS[0]) == pair.ours.encode(CORPUS[0])


def test_token_text_of_partial_characters(tmp_path: Path) -> None:
    for kind in ("byte_level", "llama"):
        tokenizer = Tokenizer(load_text_assets(write_kind(kind, tmp_path / kind)))
        texts = [tokenizer.token_text(t) for t in range(tokenizer.vocab_size)]
        assert "bytes:\\xe2" in texts
        assert " the" in texts
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""


def test_ids_outside_the_vocabulary_are_no_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(load_text_assets(write_kind("byte_level", tmp_path)))
    ids = tokenizer.encode("a b")
    assert tokenizer.decode([-1, *ids, 10**7, 2**40]) == "a b"


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer(load_text_assets(write_kind("byte_level", tmp_path)))
    assert tokenizer.decode(tokenizer.encode("a\ud83db")) == "a\ufffdb"


def test_lengths_without_a_limit(tmp_path: Path) -> None:
    assert load_text_assets(write_kind("llama_legacy", tmp_path / "a")).model_max_length is None
    assert load_text_assets(write_kind("qwen3", tmp_path / "b")).model_max_length == 4096


def test_older_folders_spread_their_names(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(
        tmp_path, byte_level(bos=False), {"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False, "normalized": False,
                           "rstrip": False, "single_word": False},
             "pad_token": "<pad>", "additional_special_tokens": ["<|tool|>"]}  # fmt: skip
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = Tokenizer(load_text_assets(folder)), AutoTokenizer.from_pretrained(folder)
    text = "x<|tool|>y<pad><|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.decode(ours.encode(text)) == theirs.decode(
        theirs.encode(text), skip_special_tokens=True
    )


def test_other_classes_are_left_to_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    folder = write_folder(tmp_path, byte_level(bos=False), config, model_type="gpt2")
    ours, theirs = Tokenizer(load_text_assets(folder)), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, "tokenizer"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": '{"model": {}}'}, "tokenizer.json"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "[]"}, "tokenizer_config.json"),
    ],
)
def test_unusable_folders_say_why(tmp_path: Path, files: dict[str, str], names: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(TextAssetsError, match=names):
        load_text_assets(tmp_path)


def test_importing_text_is_light() -> None:
    code = (
        "import sys, parrot_engine.text\n"
        "assert not {'tokenizers', 'jinja2', 'msgspec', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_padding_in_the_file_is_not_applied(tmp_path: Path) -> None:
    backend = byte_level(bos=False)
    backend.enable_padding(length=64)
    backend.enable_truncation(4)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = Tokenizer(load_text_assets(write_folder(tmp_path, backend, config)))
    text = "The quick brown fox jumps"
    assert tokenizer.decode(tokenizer.encode(text)) == text
