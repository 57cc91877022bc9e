"""Mixtures with packed experts in Triton's interpreter against float64."""

from __future__ import annotations

from pathlib import Path

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.attention_cases import relative_error
from harness.engine.checkpoints import CONFIGS
from harness.engine.expert_cases import Operands, compute, draw_packed, reference, sum_of_ranks
from harness.engine.quantized_checkpoints import write_checkpoint
from parrot_engine.kernels.experts.grouped_tuning import (
    Mixture,
    MixtureTuning,
    packed_mixture_tuning,
)
from parrot_engine.kernels.matmul.quantized_tuning import is_grouped
from parrot_engine.kernels.tuning import Tuning
from parrot_engine.models.experts import SparseMLP
from parrot_engine.models.loader import load_model
from parrot_engine.models.ops import Affine, Experts, Ops
from parrot_engine.models.triton_ops import TritonOps

pytestmark = pytest.mark.usefixtures("poison")

#: bfloat16 is looser than on a device: the interpreter cuts where a GPU rounds.
BOUND = 2e-2
#: Of each size of codes; scales of rows and of groups, with zero points.
SOME_KINDS = ["fp8-blocks", "int8", "int4-zeros"]
#: Several steps a row, the last one not whole.
VECTORS = MixtureTuning(Tuning("vector", 1, 16, 64, 4, 1), Tuning("vector", 1, 32, 32, 4, 2))
TILES = MixtureTuning(Tuning("tile", 16, 32, 32, 4, 2), Tuning("tile", 16, 32, 32, 4, 2))
SPLIT = MixtureTuning(*(tuning._replace(kind="split") for tuning in TILES))
STREAMED = MixtureTuning(*(tuning._replace(descriptors=True) for tuning in SPLIT))
CASE = Mixture(3, 2, 4, 96, 32, torch.bfloat16)


def check(case: Mixture, operands: Operands, tuning: MixtureTuning, bound: float = BOUND) -> None:
    out = compute(case, operands, tuning)
    assert out.dtype is case.dtype
    assert relative_error(out, reference(case, operands)) < bound


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_pairs_one_by_one(kind: str) -> None:
    case = CASE._replace(num_tokens=2)
    check(case, draw_packed(case, kind, residual=kind != "int8", bounded=kind == "int8"), VECTORS)


@pytest.mark.parametrize("kind", ["fp8-blocks", "int4-zeros"])
def test_tiles_of_pairs(kind: str) -> None:
    """Experts without a pair, and with less than a tile of them."""
    check(CASE, draw_packed(CASE, kind, bounded=kind == "fp8-blocks"), TILES)


@pytest.mark.parametrize(("kind", "tuning"), [("fp8-blocks", SPLIT), ("fp8-rows", STREAMED)])
def test_x_in_two_numbers_of_8_bits(kind: str, tuning: MixtureTuning) -> None:
    """Experts with several tiles work as well."""
    case = CASE._replace(num_tokens=20, num_experts=3, top_k=2)
    check(case, draw_packed(case, kind, residual=False), tuning)


@pytest.mark.parametrize("tuning", [VECTORS, TILES], ids=["vectors", "tiles"])
def test_ranks_with_whole_experts_add_up(tuning: MixtureTuning) -> None:
    operands = draw_packed(CASE, "int4-zeros", bounded=True)
    out = sum_of_ranks(CASE, operands, tuning)
    assert relative_error(out, reference(CASE, operands)) < BOUND


def test_x_in_one_number_of_8_bits() -> None:
    rounded = MixtureTuning(*(tuning._replace(kind="rounded") for tuning in STREAMED))
    check(CASE, draw_packed(CASE, "fp8-blocks"), rounded, bound=8e-2)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("tuning", [VECTORS, SPLIT], ids=["vectors", "tiles"])
def test_rows_know_nothing_of_each_other(tuning: MixtureTuning) -> None:
    """The same bits whatever the other rows hold, be it NaN; experts of such rows exist."""
    operands = draw_packed(CASE, "fp8-blocks")
    out = compute(CASE, operands, tuning)
    others = operands._replace(x=operands.x.clone(), logits=operands.logits.clone())
    others.x[1:] = float("nan")
    others.logits[2:] = float("nan")
    poisoned = compute(CASE, others, tuning)
    assert torch.equal(poisoned[:1], out[:1])
    assert bool(poisoned[1:].isnan().all())


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_table_fits_every_weight(kind: str) -> None:
    """Steps lie within groups, and stages in a program's memory; FP8 is multiplied as it is."""
    packed = draw_packed(CASE, kind).experts.packed
    assert packed is not None
    for num_tokens, activations in ((1, "none"), (64, "none"), (9000, "none"), (9000, "dynamic")):
        mixture = CASE._replace(num_tokens=num_tokens)
        asked = packed._replace(down=packed.down._replace(activations=activations))
        for shared_memory in (99 * 1024, 227 * 1024):
            hopper = shared_memory > 200_000
            tuning = packed_mixture_tuning(mixture, asked, shared_memory, copy_engine=hopper)
            if num_tokens == 1:
                assert {part.kind for part in tuning} == {"vector"}
                continue
            assert tuning.gate_up.tokens == tuning.down.tokens
            for part, weight in zip(tuning, asked, strict=True):
                assert not is_grouped(weight) or weight.group % part.block_in == 0
                assert part.num_stages >= 1
            is_split = kind.startswith("fp8") and hopper
            expected = "tile"
            if is_split:
                expected = "rounded" if activations == "dynamic" else "split"
            assert tuning.down.kind == expected


def test_operations_are_those_of_torch() -> None:
    case = CASE._replace(num_tokens=9)
    x, weights, _, residual = draw_packed(case, "fp8-blocks")
    assert residual is not None
    router = Affine(torch.randn(4, 96).bfloat16())
    ours = TritonOps().experts_onto(residual, x, router, Experts(weights, 2, normalize=True))
    dense = weights._replace(
        gate_up=weights.gate_up.bfloat16(), down=weights.down.bfloat16(), packed=None
    )
    theirs = Ops().experts_onto(residual, x, router, Experts(dense, 2, normalize=True))
    assert relative_error(ours.hidden, Ops().total(theirs).double()) < BOUND


def test_experts_of_a_checkpoint_are_kept_packed(tmp_path: Path) -> None:
    """Their codes stand for the dense model's weights."""
    config = CONFIGS["qwen3-moe"]
    config = type(config).from_dict({**config.to_dict(), "moe_intermediate_size": 64})
    path, dense = write_checkpoint(tmp_path, "fp8-blocks", config)
    ours, theirs = (
        next(
            module
            for module in load_model(
                folder, torch.device("cpu"), "bfloat16", kernels="triton"
            ).model.modules()
            if isinstance(module, SparseMLP)
        )
        for folder in (path, dense)
    )
    assert ours.packed is not None
    assert ours.is_meta
    for weight, whole in zip(ours.packed, (theirs.gate_up, theirs.down), strict=True):
        torch.testing.assert_close(weight.dense(torch.bfloat16).view(whole.shape), whole.data)
