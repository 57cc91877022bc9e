"""The offline API, on a real checkpoint with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness.engine.checkpoints import CONFIGS, make_checkpoint
from parrot_engine import LLM, SamplingParams
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.exceptions import (
    GenerationError,
    ParrotEngineError,
    SettingsError,
    UnsupportedModelError,
)
from parrot_engine.llm.request import Completion
from parrot_engine.protocol import Generated, TokenLogprobs
from transformers import AutoModelForCausalLM, GPT2Config

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = ["The parrot", "said to the gateway:", "one, two, three, one, two, three, one,"]
EOS = 256
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 9}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "tiny-llama"
    return make_checkpoint(folder, CONFIGS["llama"], generation=SAMPLED)


@pytest.fixture(scope="module")
def shared(checkpoint: Path) -> Iterator[LLM]:
    with LLM(
        str(checkpoint), device="cpu", dtype="float32", num_blocks=64, max_batch_size=3
    ) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The module's LLM; a test that leaves something behind in its engine fails."""
    yield shared
    shared._session.step()
    stats = shared.stats()
    assert (stats.contexts, stats.free_blocks) == (0, shared.info.num_blocks)
    assert not shared._session._handlers
    assert isinstance(shared._engine, BuiltinEngine)
    shared._engine.check_integrity()


def test_greedy_equals_transformers(llm: LLM, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        wanted = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, ids.shape[1] :].tolist()
        completion = output.outputs[0]
        assert completion.token_ids == wanted
        assert completion.finish_reason == "length"
        whole = llm.decode([*output.prompt_token_ids, *wanted])
        assert output.prompt is not None
        assert output.prompt + completion.text == whole


def test_a_small_cache_and_batch_change_nothing(llm: LLM, checkpoint: Path) -> None:
    prompts = [f"{prompt} {number}" for prompt in PROMPTS for number in range(4)]
    large = llm.generate(prompts, GREEDY)
    with LLM(
        str(checkpoint), device="cpu", dtype="float32", num_blocks=6, max_batch_tokens=9
    ) as small:
        outputs = small.generate(prompts, GREEDY)
        assert small.stats().preemptions > 0
    texts = [output.outputs[0].text for output in large]
    assert [output.outputs[0].text for output in outputs] == texts


def test_prompts_of_all_shapes(llm: LLM) -> None:
    ids = llm.encode(PROMPTS[0])
    text = llm.generate(PROMPTS[0], GREEDY)
    assert len(text) == 1
    assert text[0].prompt_token_ids == ids
    alone = llm.generate(ids, GREEDY)
    assert alone[0].prompt is None
    several = llm.generate([ids, PROMPTS[0]], [GREEDY, replace(GREEDY, max_tokens=3)])
    tokens = text[0].outputs[0].token_ids
    assert alone[0].outputs[0].token_ids == several[0].outputs[0].token_ids == tokens
    assert several[1].outputs[0].token_ids == tokens[:3]
    assert llm.generate([], GREEDY) == []


def test_bad_arguments(llm: LLM) -> None:
    with pytest.raises(ValueError, match="n must be"):
        llm.generate("a", GREEDY, n=0)
    with pytest.raises(ValueError, match="2 prompts, but 1 params"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(ValueError, match="no tokens"):
        llm.generate(["a", []], GREEDY)
    with pytest.raises(TypeError, match="prompts must be"):
        llm.generate(5, GREEDY)  # type: ignore[arg-type]


def test_n_continuations_share_the_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    filled = llm.stats().filled_tokens
    output = llm.generate("n of them", params, n=7)[0]
    assert llm.stats().filled_tokens - filled == len("n of them")
    assert [completion.index for completion in output.outputs] == list(range(7))
    assert len({completion.text for completion in output.outputs}) == 7
    for index in (0, 4):
        alone = llm.generate("n of them", replace(params, seed=3 + index))[0]
        assert alone.outputs[0].token_ids == output.outputs[index].token_ids
    assert alone.cached_tokens == 0, "nine tokens are less than a block"


def test_stop_strings_never_show(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[2], GREEDY)[0].outputs[0]
    for start in (0, 3, 9):
        stop = whole.text[start : start + 3]
        first = whole.text.index(stop)
        output = llm.generate(PROMPTS[2], replace(GREEDY, stop=("never", stop)))[0].outputs[0]
        assert output.text == whole.text[:first]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert len(output.token_ids) < len(whole.token_ids) or first + 3 == len(whole.text)
        assert whole.token_ids[: len(output.token_ids)] == output.token_ids
        assert stop in llm.decode(output.token_ids)
    assert llm.generate(PROMPTS[2], replace(GREEDY, stop=("never",)))[0].outputs[0] == whole


def test_end_of_text_and_stop_ids(llm: LLM) -> None:
    forced = replace(GREEDY, ignore_eos=False, logit_bias={EOS: 1000.0})
    output = llm.generate("a", forced)[0].outputs[0]
    assert (output.text, output.token_ids) == ("", [EOS])
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    token = llm.encode("x")[0]
    stopped = replace(GREEDY, logit_bias={token: 1000.0}, stop_token_ids=(token,))
    output = llm.generate("a", stopped)[0].outputs[0]
    assert (output.text, output.token_ids, output.stop_reason) == ("", [token], token)


def test_logprobs(llm: LLM) -> None:
    output = llm.generate("scores", replace(GREEDY, logprobs=2), prompt_logprobs=1)[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert [score.token_id for score in completion.logprobs] == completion.token_ids
    assert all(score.top[0][0] == score.token_id for score in completion.logprobs)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    found = [score.token_id for score in output.prompt_logprobs[1:] if score is not None]
    assert found == output.prompt_token_ids[1:]
    assert llm.generate("scores", GREEDY)[0].prompt_logprobs is None


def test_logprobs_end_with_the_token_that_completed_a_stop_string(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=0, stop=["b"])
    completion = Completion(llm._tokenizer, [], params)
    token_ids = llm._tokenizer.encode("abcd", add_special_tokens=False)
    scores = [TokenLogprobs(token_id, -1.0, []) for token_id in token_ids]
    assert completion.push(Generated(1, token_ids, scores, None))
    output = completion.output()
    assert (output.text, output.stop_reason) == ("a", "b")
    assert output.token_ids == token_ids[:2]
    assert output.logprobs == scores[:2]


def test_defaults_of_the_checkpoint(llm: LLM) -> None:
    params = llm.default_params()
    assert (params.temperature, params.top_k) == (0.7, 9)
    assert len(llm.generate("a")[0].outputs[0].token_ids) <= params.max_tokens


def test_progress(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate(["a"] * 5, GREEDY, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(number, 5) for number in range(1, 6)]


def test_failure_cancels_the_rest_and_leaves_the_llm_usable(llm: LLM) -> None:
    with pytest.raises(GenerationError) as caught:
        llm.generate(["a", "too long " * 100, "b"], GREEDY)
    assert caught.value.code == "context_too_long"
    with pytest.raises(GenerationError, match="temperature"):
        llm.generate("a", replace(GREEDY, temperature=-1.0), n=3)
    assert llm.generate("a", GREEDY)[0].outputs[0].finish_reason == "length"


def test_interrupt_cancels(llm: LLM) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS * 3, GREEDY, progress=interrupt)
    llm._session.step()
    assert llm.stats().contexts == 0


# Contexts


def test_context_is_filled_and_extended(llm: LLM) -> None:
    with llm.context() as context:
        context.fill("one, two, ")
        filled = context.fill("three,")
        assert filled.num_tokens == 6
        first = context.generate(GREEDY)
        context.fill(" and ")
        second = context.generate(GREEDY)
        text = "one, two, three," + first.text + " and " + second.text
        assert context.token_ids == [
            *llm.encode("one, two, three,"),
            *first.token_ids,
            *llm.encode(" and "),
            *second.token_ids,
        ]
    whole = llm.generate("one, two, three,", GREEDY)[0].outputs[0]
    assert whole.token_ids == first.token_ids
    assert text.startswith("one, two, three," + whole.text)
    again = llm.generate(context.token_ids[: -len(second.token_ids)], GREEDY)[0]
    assert again.outputs[0].token_ids == second.token_ids


def test_forks_live_apart(llm: LLM) -> None:
    with llm.context() as story:
        story.fill("Once upon a time")
        fork = story.fork()
        ending = story.generate(GREEDY)
        fork.fill("!")
        assert fork.text == "Once upon a time!"
        assert story.text == "Once upon a time" + ending.text
    other = fork.generate(GREEDY)
    assert other.token_ids == llm.generate("Once upon a time!", GREEDY)[0].outputs[0].token_ids
    fork.free()
    fork.free()


@pytest.mark.parametrize("found", [True, False])
def test_stop_string_in_a_context(llm: LLM, found: bool) -> None:
    whole = llm.generate(PROMPTS[2], GREEDY)[0].outputs[0]
    stop = whole.text[4:7] if found else "never"
    with llm.context() as context:
        context.fill(PROMPTS[2])
        output = context.generate(replace(GREEDY, stop=(stop,)))
        assert (output.stop_reason == stop) == found
        assert context.token_ids == llm.encode(PROMPTS[2]) + output.token_ids
        after = context.generate(GREEDY)
        wanted = llm.generate(llm.encode(PROMPTS[2]) + output.token_ids, GREEDY)[0].outputs[0]
        assert after.token_ids == wanted.token_ids


def test_prompt_logprobs_of_a_context(llm: LLM) -> None:
    with llm.context() as context:
        first = context.fill("ab", prompt_logprobs=0).prompt_logprobs
        second = context.fill("cd", prompt_logprobs=0).prompt_logprobs
    whole = llm.generate("abcd", replace(GREEDY, max_tokens=1), prompt_logprobs=0)[0]
    assert first is not None
    assert second is not None
    for one, other in zip(first + second, whole.prompt_logprobs or [], strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_closed_and_failed_contexts(llm: LLM) -> None:
    context = llm.context()
    with pytest.raises(GenerationError, match="empty"):
        context.generate(GREEDY)
    with pytest.raises(ValueError, match="freed or failed"):
        context.fill("a")
    other = llm.context()
    with pytest.raises(GenerationError, match="context_too_long"):
        other.fill("too long " * 100)
    third = llm.context()
    third.free()
    with pytest.raises(ValueError, match="freed or failed"):
        third.fork()


# Loading


def test_unknown_model_and_settings(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ParrotEngineError, match="no model"):
        LLM(str(tmp_path))
    with pytest.raises(TypeError, match="colour"):
        LLM(str(checkpoint), colour="green")
    with pytest.raises(SettingsError, match="block_size"):
        LLM(str(checkpoint), block_size=0)


def test_models_that_the_builtin_engine_does_not_know(tmp_path: Path) -> None:
    """They run on the huggingface engine, with all that an LLM offers."""
    config = GPT2Config(
        vocab_size=257, n_embd=32, n_layer=1, n_head=2, n_positions=128,
        bos_token_id=None, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    folder = str(make_checkpoint(tmp_path / "gpt2", config))
    with pytest.raises(UnsupportedModelError):
        LLM(folder, kind="builtin")
    with LLM(folder, device="cpu", num_blocks=64) as other:
        assert other.info.kind == "huggingface"
        whole, *rest = other.generate(PROMPTS, GREEDY)
        assert len(rest) == 2
        several = other.generate(PROMPTS[0], GREEDY, n=3)[0].outputs
        assert [output.token_ids for output in several] == [whole.outputs[0].token_ids] * 3
        with other.context() as context:
            context.fill(PROMPTS[0])
            with context.fork() as fork:
                assert fork.generate(replace(GREEDY, stop=("never",))).text == (
                    whole.outputs[0].text
                )
            assert context.generate(GREEDY).token_ids == whole.outputs[0].token_ids
        other._session.step()
        assert other.stats().contexts == 0


def test_the_kind_of_engine_can_be_chosen(checkpoint: Path, llm: LLM) -> None:
    with LLM(str(checkpoint), kind="huggingface", device="cpu", dtype="float32") as other:
        assert other.info.kind == "huggingface"
        for one, two in zip(
            other.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY), strict=True
        ):
            assert one.outputs == two.outputs


def test_any_engine(checkpoint: Path, llm: LLM) -> None:
    from parrot_engine.settings import BuiltinSettings

    engine = BuiltinEngine.load(
        checkpoint, BuiltinSettings(device="cpu", dtype="float32", num_blocks=40), model="other"
    )
    with LLM.of(engine, llm.tokenizer) as other:
        assert other.info.model == "other"
        assert other.generate("a", GREEDY)[0].outputs == llm.generate("a", GREEDY)[0].outputs
