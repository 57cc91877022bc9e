"""The sampler against transformers' own processors and a plain reference for one row."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.batch import SamplingRow
from parrot_engine.kernels.selection import Kernels
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner import sampler, step_inputs
from parrot_engine.runner.sampler import prompt_logprobs, sample
from parrot_engine.runner.step_inputs import uniforms
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

#: Triton's in its interpreter; see `conftest.py`.
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None,
    reason="where there is a GPU, tests/gpu has the kernels",
)
both_kernels = pytest.mark.parametrize(
    "kernels", ["torch", pytest.param("triton", marks=interpreted)]
)
VOCAB = 50
ENDS = frozenset({7, 9})


def _logits(rows: int, seed: int, vocab: int = VOCAB) -> Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def _row(
    params: SamplingParams,
    *,
    prompt: list[int] | None = None,
    generated: list[int] | None = None,
    seed: int = 0,
) -> SamplingRow:
    return SamplingRow(params, prompt or [], generated or [], seed, ENDS)


@st.composite
def rows(draw: st.DrawFn) -> SamplingRow:
    history = st.lists(st.integers(0, VOCAB - 1), max_size=12)
    penalty = st.sampled_from([0.0, 0.0, 0.7, -1.5])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.95, 0.6, 0.1])),
        top_k=draw(st.sampled_from([0, 1, 5, 30, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3])),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=draw(
            st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=3)
        ),
        min_tokens=draw(st.sampled_from([0, 3])),
        logprobs=draw(st.sampled_from([None, 0, 4])),
    )
    return SamplingRow(params, draw(history), draw(history), draw(st.integers(0, 2**64 - 1)), ENDS)


def _processed(logits: Tensor, row: SamplingRow) -> Tensor:
    """Return a row's scores before temperature, by transformers' processor where it has one."""
    params, scores = row.params, logits.clone()
    history = row.prompt_token_ids + row.generated_token_ids
    if params.repetition_penalty != 1.0 and history:
        processor = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)
        scores = processor(torch.tensor([history]), scores[None])[0]
    for token, count in Counter(row.generated_token_ids).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(row.generated_token_ids) < params.min_tokens:
        scores[list(row.end_token_ids)] = -math.inf
    return scores


def _distribution(logits: Tensor, row: SamplingRow) -> Tensor:
    """Probabilities of one row, by transformers' warpers in the order that `generate` has."""
    params, warpers = row.params, LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    scores: Tensor = warpers(None, _processed(logits, row)[None])[0]
    return scores.double().softmax(dim=-1)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(rows(), min_size=1, max_size=6), st.integers(0, 10_000), st.sampled_from([1, 8, 512])
)
def test_equals_the_reference(batch: list[SamplingRow], seed: int, span: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "_DRAW_SPAN", span)
        _check_against_the_reference(batch, seed, "torch")


@interpreted
@settings(max_examples=30, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=6), st.integers(0, 10_000))
def test_kernels_equal_the_reference(batch: list[SamplingRow], seed: int) -> None:
    _check_against_the_reference(batch, seed, "triton")


def _check_against_the_reference(batch: list[SamplingRow], seed: int, kernels: Kernels) -> None:
    logits = _logits(len(batch), seed)
    untouched = logits.clone()
    outcomes = sample(logits, batch, kernels=kernels)
    assert torch.equal(logits, untouched)
    for raw, row, outcome in zip(logits, batch, outcomes, strict=True):
        token = outcome.token_id
        assert token is not None
        if row.params.temperature == 0:
            assert token == int(_processed(raw, row).argmax())
        else:
            # The token is the one whose interval of the cumulative distribution holds u.
            cumulative = _distribution(raw, row).cumsum(dim=-1)
            u = float(uniforms([row.seed], [len(row.generated_token_ids)])[0])
            below = float(cumulative[token - 1]) if token else 0.0
            assert below - 1e-5 <= u < float(cumulative[token]) + 1e-5
            assert float(cumulative[token]) > below
        if row.params.logprobs is None:
            assert outcome.logprobs is None
            continue
        assert outcome.logprobs is not None
        scores = raw.log_softmax(dim=-1)
        assert outcome.logprobs.token_id == token
        assert outcome.logprobs.logprob == pytest.approx(float(scores[token]), abs=1e-5)
        values, ids = scores.topk(row.params.logprobs)
        assert [entry[0] for entry in outcome.logprobs.top] == ids.tolist()
        assert [entry[1] for entry in outcome.logprobs.top] == pytest.approx(
            values.tolist(), abs=1e-5
        )


@settings(max_examples=100, deadline=None)
@given(st.lists(rows(), min_size=2, max_size=6), st.integers(0, 10_000))
def test_does_not_depend_on_the_batch(batch: list[SamplingRow], seed: int) -> None:
    _check_in_other_company(batch, seed, "torch")


@interpreted
@settings(max_examples=10, deadline=None)
@given(st.lists(rows(), min_size=2, max_size=6), st.integers(0, 10_000))
def test_kernels_do_not_depend_on_the_batch(batch: list[SamplingRow], seed: int) -> None:
    _check_in_other_company(batch, seed, "triton")


def _check_in_other_company(batch: list[SamplingRow], seed: int, kernels: Kernels) -> None:
    logits = _logits(len(batch), seed)
    together = sample(logits, batch, kernels=kernels)
    alone = [sample(logits[i : i + 1], [row], kernels=kernels)[0] for i, row in enumerate(batch)]
    assert [outcome.token_id for outcome in together] == [outcome.token_id for outcome in alone]
    backwards = sample(logits.flip(0), batch[::-1], kernels=kernels)[::-1]
    assert [outcome.token_id for outcome in together] == [o.token_id for o in backwards]


PARAMS = SamplingParams(temperature=0.9, top_k=12, top_p=0.9, min_p=0.02)


@pytest.mark.parametrize(
    "params",
    [PARAMS, SamplingParams(temperature=1.0), SamplingParams(top_p=0.8), SamplingParams(top_k=3)],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits, draws = _logits(1, seed=5), 20_000
    batch = [_row(params, seed=seed) for seed in range(draws)]
    tokens = torch.tensor([o.token_id for o in sample(logits.expand(draws, -1), batch)])
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    expected = _distribution(logits[0], batch[0]) * draws
    assert not counts[expected == 0].any()
    likely = expected >= 5
    chi_squared = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert chi_squared < freedom + 5 * math.sqrt(2 * freedom)


def test_no_dropped_token_is_ever_drawn() -> None:
    # A vocabulary of several spans, most of it dropped, at many points of the unit interval.
    logits = _logits(1, seed=6, vocab=3000).expand(4000, -1)
    params = SamplingParams(temperature=1.5, top_k=40, top_p=0.97)
    batch = [_row(params, seed=seed) for seed in range(4000)]
    kept = _distribution(logits[0], batch[0]) > 0
    drawn = {outcome.token_id for outcome in sample(logits, batch)}
    assert drawn == set(kept.nonzero()[:, 0].tolist())


def test_control_a_wrong_distribution_is_noticed() -> None:
    logits, draws = _logits(1, seed=5), 20_000
    batch = [_row(SamplingParams(temperature=1.1), seed=seed) for seed in range(draws)]
    tokens = torch.tensor([o.token_id for o in sample(logits.expand(draws, -1), batch)])
    counts = torch.bincount(tokens, minlength=VOCAB).double()
    expected = _distribution(logits[0], _row(SamplingParams())) * draws
    likely = expected >= 5
    chi_squared = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert chi_squared > freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("span", [4, 512])
def test_the_ends_of_the_unit_interval(monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(sampler, "_DRAW_SPAN", span)
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3], logits[0, 20] = 0.1, 0.2
    row = _row(SamplingParams())
    monkeypatch.setattr(step_inputs, "uniforms", lambda seeds, _: np.zeros(len(seeds)))
    assert sample(logits, [row])[0].token_id == 3
    last = 1 - 2.0**-53
    monkeypatch.setattr(step_inputs, "uniforms", lambda seeds, _: np.full(len(seeds), last))
    assert sample(logits, [row])[0].token_id == 20


def test_seeds_and_steps_make_the_stream() -> None:
    logits = torch.zeros(1, 1000)

    def draw(seed: int) -> list[int | None]:
        generated: list[int] = []
        for _ in range(20):
            row = _row(SamplingParams(), generated=generated, seed=seed)
            token = sample(logits, [row])[0].token_id
            assert token is not None
            generated = [*generated, token]
        return list(generated)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len(set(draw(1))) > 15


def test_uniform_is_uniform_within_and_across_streams() -> None:
    within = uniforms([42] * 20_000, range(20_000)).tolist()
    across = uniforms(range(20_000), [0] * 20_000).tolist()
    for numbers in (within, across):
        assert all(0 <= number < 1 for number in numbers)
        counts = Counter(int(number * 100) for number in numbers)
        chi_squared = sum((counts[bucket] - 200) ** 2 / 200 for bucket in range(100))
        assert chi_squared < 99 + 5 * math.sqrt(2 * 99)
    pairs = torch.tensor([within[:-1], within[1:]])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.03
    neighbours = torch.tensor([across[:-1], across[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 0.03
    # Any Python integer is a seed.
    assert uniforms([-1], [3]) == uniforms([2**64 - 1], [3])


def test_uniform_is_splitmix64() -> None:
    # First outputs of Vigna's splitmix64.c for the state 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    states = [(1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64 for i in range(3)]
    assert step_inputs._mix64(np.array(states, dtype=np.uint64)).tolist() == expected


GREEDY = SamplingParams(temperature=0)


@both_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [None, {3: 100.0}])
def test_bad_logits_fail_only_their_row(
    kernels: Kernels, temperature: float, bias: dict[int, float] | None
) -> None:
    logits = _logits(5, seed=0)
    logits[0, 4] = math.nan
    logits[1] = -math.inf
    logits[2, 4] = math.inf
    logits[3, 4] = -math.inf
    params = SamplingParams(temperature=temperature, logit_bias=bias, top_p=0.9, logprobs=2)
    outcomes = sample(logits, [_row(params)] * 5, kernels=kernels)
    assert [outcome.token_id is None for outcome in outcomes] == [True, True, True, False, False]
    assert [outcome.logprobs is None for outcome in outcomes] == [True, True, True, False, False]


@both_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logits_are_seen_behind_what_covers_them(
    kernels: Kernels, temperature: float, bad: float
) -> None:
    """A banned token's logit is overwritten: what comes out is finite, its logits were not."""
    logits = _logits(2, seed=0)
    end = 7  # Of `_row`: banned while `min_tokens` asks for more.
    params = SamplingParams(temperature=temperature, min_tokens=2, logit_bias={end: -100.0})
    assert end in _row(params).end_token_ids
    logits[1, end] = bad
    sound, covered = sample(logits, [_row(params)] * 2, kernels=kernels)
    assert sound.token_id is not None
    assert covered.token_id is None


@both_kernels
def test_nothing_left_to_draw(kernels: Kernels) -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf))
    assert sample(_logits(1, seed=0), [_row(params)], kernels=kernels)[0].token_id is None


def test_min_tokens_bans_the_ends_until_then() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 7], logits[:, 9], logits[:, 11] = 9.0, 8.0, 7.0
    params = replace(GREEDY, min_tokens=2)
    batch = [_row(params, generated=[1]), _row(params, generated=[1, 2])]
    assert [outcome.token_id for outcome in sample(logits, batch)] == [11, 7]


def test_penalties_see_the_right_tokens() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, 5], logits[:, 6] = 2.0, 1.0
    batch = [
        # Presence and frequency count generated tokens only.
        _row(replace(GREEDY, presence_penalty=1.5), prompt=[5], generated=[]),
        _row(replace(GREEDY, frequency_penalty=0.6), prompt=[], generated=[5, 5]),
        # Repetition counts the prompt as well.
        _row(replace(GREEDY, repetition_penalty=3.0), prompt=[5], generated=[]),
    ]
    assert [outcome.token_id for outcome in sample(logits, batch)] == [5, 6, 6]


def test_ids_outside_the_vocabulary_are_ignored() -> None:
    logits = _logits(2, seed=3)
    params = replace(
        GREEDY, logit_bias={VOCAB: 100.0, -1: 100.0}, repetition_penalty=1.5, min_tokens=3
    )
    row = SamplingRow(params, [VOCAB + 3], [], 0, frozenset({VOCAB, 10**9}))
    expected = logits.argmax(dim=-1).tolist()
    assert [outcome.token_id for outcome in sample(logits, [row, row])] == expected


@both_kernels
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=2.0, top_p=0.0),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=2.0, min_p=1.0),
    ],
)
def test_extremes_leave_the_likeliest_token(kernels: Kernels, params: SamplingParams) -> None:
    logits = 30 * _logits(20, seed=8)
    batch = [_row(params, seed=seed) for seed in range(20)]
    found = [outcome.token_id for outcome in sample(logits, batch, kernels=kernels)]
    assert found == logits.argmax(dim=-1).tolist()


@both_kernels
def test_ties_at_the_border_are_kept(kernels: Kernels) -> None:
    # So many of these seeds draw every token.
    logits = torch.zeros(150, VOCAB)
    batch = [_row(SamplingParams(top_k=1, top_p=0.1), seed=seed) for seed in range(150)]
    drawn = {outcome.token_id for outcome in sample(logits, batch, kernels=kernels)}
    assert drawn == set(range(VOCAB))


def test_empty_batches() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
    assert prompt_logprobs(torch.empty(0, VOCAB), [], 3) == []


def test_more_alternatives_than_the_vocabulary() -> None:
    [entry] = prompt_logprobs(_logits(1, seed=1), [4], VOCAB + 10)
    assert len(entry.top) == VOCAB
    assert sum(math.exp(value) for _, value in entry.top) == pytest.approx(1.0)


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(_logits(2, seed=0), [_row(GREEDY)])
