"""The largest logit in Triton's interpreter against torch's; tests/gpu has the same on a GPU."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.largest_cases import awkward_logits
from parrot_engine.batch import SamplingRow
from parrot_engine.kernels.sampling.logits import find_largest
from parrot_engine.protocol import SamplingParams
from parrot_engine.runner.sampler import Largest, choose
from parrot_engine.runner.step_inputs import Upload, prepare
from torch import Tensor


def _found(logits: Tensor) -> Largest:
    rows = len(logits)
    found = Largest(
        torch.empty(rows), *(torch.empty(rows, dtype=torch.int64) for _ in ("tokens", "checked"))
    )
    find_largest(logits, *found)
    return found


@pytest.mark.parametrize("vocab_size", [200, 2048, 2049, 5000])
def test_what_torch_finds(vocab_size: int) -> None:
    logits = awkward_logits(vocab_size, vocab_size)
    values, tokens, checked = _found(logits)
    expected = logits.max(dim=-1)
    assert torch.equal(tokens, expected.indices)
    assert torch.equal(values.nan_to_num(nan=7.0), expected.values.nan_to_num(nan=7.0))
    assert torch.equal(checked >= 0, expected.values.isfinite())
    assert torch.equal(checked[checked >= 0], tokens[checked >= 0])


@pytest.mark.parametrize("temperatures", [(0.0,), (0.8,), (0.0, 0.8), (0.0, 0.5, 0.0, 0.7)])
def test_the_sampler_says_the_same_with_it_and_without(temperatures: tuple[float, ...]) -> None:
    logits = awkward_logits(3000, 5)
    rows = [
        SamplingRow(
            SamplingParams(temperature=temperatures[index % len(temperatures)], top_k=5),
            [],
            [],
            index,
            frozenset(),
        )
        for index in range(len(logits))
    ]
    upload = Upload()
    inputs = prepare(rows, logits.shape[1], upload)
    upload.send(logits.device)
    found = _found(logits)
    kept = [part.clone() for part in found]
    expected, choice = choose(logits, inputs), choose(logits, inputs, largest=found)
    assert torch.equal(choice.checked, expected.checked)
    assert torch.equal(choice.tokens, expected.tokens)
    # What a graph fills again belongs to nobody else.
    for part, before in zip(found, kept, strict=True):
        assert torch.equal(part.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))
    found.tokens.fill_(0)
    found.checked.fill_(0)
    assert torch.equal(choice.checked, expected.checked)
    assert torch.equal(choice.tokens, expected.tokens)


def test_an_edit_of_the_logits_goes_before_what_was_found() -> None:
    logits = torch.zeros(1, 300)
    logits[0, 4] = 1.0
    params = SamplingParams(temperature=0, logit_bias={9: 5.0})
    upload = Upload()
    inputs = prepare([SamplingRow(params, [], [], 0, frozenset())], 300, upload)
    upload.send(logits.device)
    assert choose(logits, inputs, largest=_found(logits)).checked.tolist() == [9]
