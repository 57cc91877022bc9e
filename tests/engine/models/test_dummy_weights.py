"""Models of which only the shape is there, and an LLM without a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from parrot_engine import LLM, SamplingParams
from parrot_engine.exceptions import (
    CheckpointError,
    GenerationError,
    SettingsError,
    UnsupportedModelError,
)
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.loading.hub import ModelNotFoundError, resolve_model, shape_names
from parrot_engine.models.loader import load_model, read_model_config

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a configuration."""
    folder = tmp_path_factory.mktemp("shapes") / "tiny"
    folder.mkdir()
    config = CONFIGS["llama"].to_dict() | {"architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def open_llm(folder: Path, **changes: Any) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 32, "dummy_weights": True}
    return LLM(str(folder), skip_tokenizer=True, **{**given, **changes})


def said(llm: LLM) -> list[int]:
    output = llm.generate(PROMPT, GREEDY)[0].outputs[0]
    assert output.text == ""
    assert len(output.token_ids) == GREEDY.max_tokens
    return output.token_ids


def test_weights_follow_from_the_seed(shape: Path) -> None:
    heard = []
    for seed in (None, 0, 7, 7):
        with open_llm(shape, seed=seed) as llm:
            heard.append(said(llm))
    assert heard[0] == heard[1]
    assert heard[2] == heard[3] != heard[0]


def test_every_weight_is_drawn(shape: Path) -> None:
    models = [
        load_model(shape, torch.device("cpu"), "float32", dummy_seed=seed).model for seed in (1, 2)
    ]
    for (name, one), (_, two) in zip(*(model.named_parameters() for model in models), strict=True):
        assert torch.isfinite(one).all(), name
        if "norm" in name:
            assert (one == 1).all(), name
        else:
            assert 0.015 < one.std() < 0.025, name
            assert not torch.equal(one, two), name


def test_a_checkpoint_keeps_its_own_weights_unless_told(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "real", CONFIGS["llama"])
    heard = []
    for dummy in (False, True):
        with open_llm(folder, dummy_weights=dummy) as llm:
            heard.append(said(llm))
    assert heard[0] != heard[1]
    loaded = load_engine(EngineOptions(str(folder), device="cpu", dummy_weights=True))
    assert loaded.text.tokenizer_json
    loaded.engine.close()


def test_shapes_of_known_models() -> None:
    layers = {"llama-3.1-8b": 32, "llama-3.1-70b": 80, "llama-7b": 32, "qwen2.5-0.5b": 24}
    layers["qwen3-30b-a3b"] = 48
    assert shape_names() == sorted(layers)
    for name, count in layers.items():
        assert read_model_config(resolve_model(name, with_weights=False)).num_layers == count
    with pytest.raises(ModelNotFoundError, match="dummy weights"):
        resolve_model("llama-3.1-8b")


def test_a_configuration_alone_asks_for_what_it_lacks(shape: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        LLM(str(shape), dummy_weights=True)
    with pytest.raises(SettingsError, match="dummy_weights"):
        open_llm(shape, kind="huggingface")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(UnsupportedModelError):
        open_llm(tmp_path)


def test_an_llm_without_tokenizer_takes_and_gives_token_ids(shape: Path) -> None:
    with open_llm(shape) as llm:
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.generate("a text", GREEDY)
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.encode("a text")
        with pytest.raises(ValueError, match="stop strings"):
            llm.generate(PROMPT, replace(GREEDY, stop=("x",)))
        with llm.context() as context:
            context.fill(PROMPT)
            assert context.generate(GREEDY).token_ids == said(llm)
            with pytest.raises(ValueError, match="no tokenizer"):
                _ = context.text


def test_requests_run_while_somebody_steps(shape: Path) -> None:
    with open_llm(shape, max_context_tokens=64) as llm:
        wanted = said(llm)
        counts: list[int] = []
        first = llm.submit(PROMPT, GREEDY, on_tokens=lambda ids: counts.append(len(ids)))
        too_long = llm.submit(PROMPT * 3, GREEDY)
        given_up = llm.submit(PROMPT[1:], GREEDY)
        assert not first.finished
        llm.step()
        given_up.cancel()
        while not (first.finished and too_long.finished):
            llm.step()
        assert first.output().outputs[0].token_ids == wanted
        assert sum(counts) == len(wanted)
        assert not given_up.finished
        with pytest.raises(GenerationError, match="context_too_long"):
            too_long.output()
        llm.step()
        assert llm.stats().contexts == 0


def test_text_comes_only_where_it_is_wanted(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", CONFIGS["llama"])
    with LLM(str(folder), device="cpu", num_blocks=32) as llm:
        with_text, without = (
            llm.generate("A parrot", GREEDY, detokenize=detokenize)[0].outputs[0]
            for detokenize in (True, False)
        )
        assert with_text.text == llm.decode(with_text.token_ids)
        assert without == replace(with_text, text="")
