"""The huggingface engine: the protocol, and transformers' own tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, make_checkpoint
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
FAMILIES = ("llama", "mistral-window", "qwen2-windows", "gpt2")


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
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_follows_the_protocol(check: Any, family: str, folders: dict[str, Path]) -> None:
    engine = load(folders[family])
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
        primitives += [Fill(number, prompt), Generate(number, greedy(24))]
    events = run_until_idle(engine, *primitives)
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
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


def count_computed(engine: HuggingFaceEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the number of tokens of each forward pass."""
    model, counts = engine._past.model, list[int]()
    forward = model.forward

    def counted(input_ids: Any, **options: Any) -> Any:
        counts.append(input_ids.numel())
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", counted)
    return counts


def test_few_caches_change_no_token(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    primitives: list[Any] = [Fill(0, list(range(50)))]
    for number in range(1, 7):
        primitives += [Fill(number, [number], parent_context_id=0), Generate(number, greedy(6))]
    engine = load(folders["llama"])
    once = count_computed(engine, monkeypatch)
    plenty = run_until_idle(engine, *primitives)
    engine = load(folders["llama"], replace(SETTINGS, max_cached_contexts=1, max_batch_size=2))
    again = count_computed(engine, monkeypatch)
    few = run_until_idle(engine, *primitives)
    assert sum(once) == 50 + 6 * 6
    # Of the forks one takes over what was computed, and five compute it again.
    assert sum(again) == sum(once) + 5 * 50
    for number in range(1, 7):
        assert tokens_of(few, number) == tokens_of(plenty, number)


def test_few_caches_change_no_prompt_logprob(folders: dict[str, Path]) -> None:
    """A Fill whose past key values are dropped between its chunks scores no token twice."""
    primitives = [
        Fill(number, list(range(number, 150)), prompt_logprobs=0, priority=1)
        for number in range(1, 5)
    ]
    plenty = run_until_idle(load(folders["llama"]), *primitives)
    engine = load(folders["llama"], replace(SETTINGS, max_cached_contexts=1))
    engine.submit(primitives)
    few = engine.step().events
    # More urgent than the fill whose first chunk has been computed.
    few += run_until_idle(engine, Fill(9, [5]))
    assert engine.stats().preemptions > 0
    scores = [
        {e.context_id: e.prompt_logprobs for e in events if isinstance(e, Filled)}
        for events in (plenty, few)
    ]
    for number in range(1, 5):
        expected, found = scores[0][number], scores[1][number]
        assert expected is not None
        assert found is not None
        assert [item and item.token_id for item in found] == [None, *range(number + 1, 150)]
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one is not None
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_caches_go_with_their_contexts(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    run_until_idle(engine, Fill(1, [1, 2]), Fill(2, [3], parent_context_id=1))
    assert engine.stats().contexts == 2
    run_until_idle(engine, FreeContext(1), FreeContext(2))
    assert engine.stats().contexts == 0
    assert engine._past.num_cached == 0


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


def test_a_fork_that_is_freed_before_it_happens_keeps_nothing(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    run_until_idle(engine, Fill(1, [1, 2]), Fill(2, [3], parent_context_id=1), FreeContext(2))
    assert engine._past.num_cached == 1
    assert engine.stats().contexts == 1


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
        # It does not page its KV.
        assert (engine.info.num_blocks, engine.stats().free_blocks) == (0, 0)


def test_as_many_contexts_may_wait_as_exist(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    engine.submit([Fill(number, [1]) for number in range(1100)])
    assert not [event for event in engine.step().events if isinstance(event, Failed)]
    assert engine.stats().waiting > 1024


def test_too_many_contexts_are_refused(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"], replace(SETTINGS, max_contexts=2))
    events = run_until_idle(engine, Fill(1, [1]), Fill(2, [1]), Fill(3, [1]))
    assert [(e.context_id, e.code) for e in events if isinstance(e, Failed)] == [(3, "overloaded")]


def test_broken_numbers_fail_their_context(folders: dict[str, Path]) -> None:
    engine = load(folders["llama"])
    with torch.no_grad():
        engine._past.model.get_input_embeddings().weight[9] = float("nan")
    events = run_until_idle(
        engine,
        Fill(1, [9]), Generate(1, greedy(3)),
        Fill(2, [8]), Generate(2, greedy(3)),
        Fill(3, [1, 9, 2], prompt_logprobs=0),
    )  # fmt: skip
    failed = {e.context_id: e.code for e in events if isinstance(e, Failed)}
    assert failed == {1: "numerical_error", 3: "numerical_error"}
    assert len(tokens_of(events, 2)) == 3


def test_a_failing_forward_pass_fails_its_context_only(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folders["llama"])
    model = engine._past.model

    forward = model.forward

    def out_of_memory(input_ids: Any, **options: Any) -> Any:
        if 9 in input_ids:
            raise RuntimeError("out of memory")
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(model, "forward", out_of_memory)
    events = run_until_idle(
        engine, Fill(1, [9]), Fill(2, [8]), Generate(2, greedy(2, logit_bias={9: -100.0}))
    )
    failed = [e for e in events if isinstance(e, Failed)]
    assert [(e.context_id, e.code) for e in failed] == [(1, "engine_error")]
    assert "memory" not in failed[0].message
    assert len(tokens_of(events, 2)) == 2


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
