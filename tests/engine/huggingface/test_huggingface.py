"""The huggingface engine: the protocol, and transformers' own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, load_reference, make_checkpoint
from harness.engine_checks import ENGINE_CHECKS, greedy, run_until_idle, tokens_of
from parrot_engine.exceptions import CheckpointError, SettingsError
from parrot_engine.huggingface import HuggingFaceEngine, HuggingFaceSettings
from parrot_engine.loading.factory import EngineOptions, load_engine
from parrot_engine.protocol import (
    Failed,
    Fill,
    Filled,
    FreeContext,
    Generate,
    Generated,
    Grammar,
    SamplingParams,
)
from parrot_engine.text import Tokenizer

SETTINGS = HuggingFaceSettings(device="cpu", dtype="float32", max_batch_tokens=64)

#: Families with full attention, with windows, and one that the builtin engine does not know.
FAMILIES = ("llama", "qwen2-windows", "gpt2")


def gpt2_config() -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=257, n_embd=32, n_layer=2, n_head=2, n_positions=256,
        bos_token_id=None, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {**CONFIGS, "gpt2": gpt2_config()}
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_checkpoint(root / name, configs[name]) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Path:
    return folders[request.param]


def load(folder: Path, settings: HuggingFaceSettings = SETTINGS) -> HuggingFaceEngine:
    return HuggingFaceEngine.load(folder, settings, model="m")


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_follows_the_protocol(check: Any, folders: dict[str, Path]) -> None:
    engine = load(folders["gpt2"])
    check(engine)
    engine.close()
    engine.close()


def test_greedy_tokens_are_those_of_generate(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [[5], list(range(1, 40)), [7, 7, 200, 3], list(range(100, 230))]
    engine = load(folder)
    primitives: list[Any] = []
    for number, prompt in enumerate(prompts):
        primitives += [Fill(number, prompt), Generate(number, greedy(12))]
    events = run_until_idle(engine, *primitives)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            eos_token_id=None,
        )  # fmt: skip
        assert tokens_of(events, number) == expected[0, len(prompt) :].tolist()


def test_prompt_logprobs_equal_one_forward_pass(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = list(range(3, 150))
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    expected = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    # In two fills, each in several chunks.
    events = run_until_idle(
        load(folder),
        Fill(1, tokens[:70], prompt_logprobs=2),
        Fill(1, tokens[70:], prompt_logprobs=2),
    )
    found = [item for e in events if isinstance(e, Filled) for item in e.prompt_logprobs or ()]
    assert found[0] is None
    values = [item.logprob for item in found if item is not None]
    torch.testing.assert_close(torch.tensor(values), expected[:, 0], atol=1e-4, rtol=1e-4)
    assert [item.token_id for item in found if item is not None] == tokens[1:]
    assert all(len(item.top) == 2 for item in found if item is not None)


def test_a_freed_parent_still_forks(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    whole = run_until_idle(engine, Fill(9, [1, 2, 3, 4]), Generate(9, greedy(3)))
    events = run_until_idle(
        engine,
        Fill(1, [1, 2, 3]), Fill(2, [4], parent_context_id=1), Generate(2, greedy(3)),
        FreeContext(1),
    )  # fmt: skip
    assert tokens_of(events, 2) == tokens_of(whole, 9)
    assert [event for event in events if event.context_id == 1] == [Filled(1, 3, 0)]
    assert engine.stats().contexts == 2


def test_forks_of_a_failed_context_fail(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    events = run_until_idle(
        engine,
        Fill(1, [1]), Fill(1, [1] * 10_000), Generate(2, greedy(3), parent_context_id=1),
    )  # fmt: skip
    codes = {e.context_id: e.code for e in events if isinstance(e, Failed)}
    assert codes == {1: "context_too_long", 2: "context_too_long"}


def test_a_failed_fork_that_was_freed_is_not_failed_again(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    events = run_until_idle(
        engine,
        Fill(1, [1] * 100), Fill(1, [1] * 10_000), Fill(2, [1], parent_context_id=1),
        Fill(2, [-1]), FreeContext(2), Fill(2, [5]),
    )  # fmt: skip
    failed = [(e.context_id, e.code) for e in events if isinstance(e, Failed)]
    assert failed == [(2, "invalid_request"), (1, "context_too_long")]
    assert len(tokens_of(run_until_idle(engine, Generate(2, greedy(2))), 2)) == 2


def test_limits_are_those_of_model_and_settings(folders: dict[str, Path]) -> None:
    longest = load(folders["llama"]).info.max_context_tokens
    for given, expected in ((64, 64), (10**6, longest)):
        engine = load(folders["llama"], replace(SETTINGS, max_context_tokens=given))
        assert engine.info.max_context_tokens == expected


def test_as_many_contexts_may_wait_as_exist(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    engine.submit([Fill(number, [1]) for number in range(1100)])
    assert not [event for event in engine.step().events if isinstance(event, Failed)]
    assert engine.stats().waiting > 1024


def test_too_many_contexts_are_refused(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], replace(SETTINGS, max_contexts=2))
    events = run_until_idle(engine, Fill(1, [1]), Fill(2, [1]), Fill(3, [1]))
    assert [(e.context_id, e.code) for e in events if isinstance(e, Failed)] == [(3, "overloaded")]


def test_broken_numbers_fail_their_context(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_reference(folders["llama"], torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    model.save_pretrained(tmp_path)
    engine = load(tmp_path)
    events = run_until_idle(
        engine,
        Fill(1, [9]), Generate(1, greedy(3)),
        Fill(2, [8]), Generate(2, greedy(3)),
        Fill(3, [1, 9, 2], prompt_logprobs=0),
    )  # fmt: skip
    failed = {e.context_id: e.code for e in events if isinstance(e, Failed)}
    assert failed == {1: "numerical_error", 3: "numerical_error"}
    assert len(tokens_of(events, 2)) == 3


def test_outputs_follow_a_grammar() -> None:
    engine, text = load_engine(EngineOptions("parrot-demo", kind="huggingface"))
    assert engine.info.kind == "huggingface"
    assert engine.info.supports_grammars
    tokenizer = Tokenizer(text)
    sampling = SamplingParams(20, grammar=Grammar("choice", '["yes", "no"]'), seed=1)
    events = run_until_idle(
        engine, Fill(1, tokenizer.encode("Is a cat a dog?")), Generate(1, sampling)
    )
    assert tokenizer.decode(tokens_of(events, 1)) in ("yes", "no")
    engine.close()


def test_the_checkpoints_end_of_text_ends(folders: dict[str, Path], tmp_path: Path) -> None:
    first = tokens_of(
        run_until_idle(load(folders["llama"]), Fill(1, [5]), Generate(1, greedy(1))), 1
    )
    folder = make_checkpoint(tmp_path, CONFIGS["llama"], generation={"eos_token_id": first})
    engine = load(folder)
    assert engine.info.eos_token_ids == first
    sampling = replace(greedy(5), ignore_eos=False)
    events = run_until_idle(engine, Fill(1, [5]), Generate(1, sampling))
    assert events[-1] == Generated(1, first, None, "stop")


def test_unusable_folders_and_settings(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(CheckpointError, match="no-such-model"):
        load(tmp_path)
    with pytest.raises(SettingsError, match="max_contexts"):
        HuggingFaceSettings(max_contexts=0)
