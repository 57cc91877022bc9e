"""Low-rank products of several adapters in Triton's interpreter against float64."""

from __future__ import annotations

import harness.engine.interpreted  # noqa: F401 -- skips this module where it cannot run
import pytest
import torch
from harness.engine.lora_cases import CASES, error_of
from parrot_engine.kernels.matmul import lora_product
from parrot_engine.models.lora import GroupedTokens, max_tiles

pytestmark = pytest.mark.usefixtures("poison")

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_several_rows(case: str) -> None:
    assert error_of(CASES[case], torch.float32, CPU, 16) < 1e-6


def test_half_precision_and_large_tiles() -> None:
    assert error_of(CASES["fused, mixed with the base"], torch.float16, CPU, 64) < 2e-3


def test_columns_are_divided_where_cores_are_idle() -> None:
    assert lora_product.num_splits(32, 8, 132) == 8
    assert lora_product.num_splits(32, 264, 132) == 1
    assert lora_product.num_splits(1, 1, 132) == 1


def test_another_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with one rank less the error is seen."""
    write = torch.Tensor.copy_

    def short(target: torch.Tensor, source: torch.Tensor, **options: bool) -> torch.Tensor:
        is_ranks = target.dtype is torch.int32
        return write(target, (source - 1).clamp(min=0) if is_ranks else source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", short)
    assert error_of(CASES["one adapter, one token"], torch.float32, CPU, 16) > 1e-2


@pytest.mark.parametrize("num_tokens", [1, 16, 100, 300])
def test_tiles_have_room(num_tokens: int) -> None:
    for num_slots in (1, 3, 200):
        slots = [min(token % 7, num_slots - 1) for token in range(num_tokens)]
        grouped = GroupedTokens.of(slots, [1] * num_tokens)
        size = 16 if num_tokens <= 256 else 64
        assert len(grouped.tiles(size)) <= max_tiles(num_tokens, num_slots)
