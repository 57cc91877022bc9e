"""Copies through pinned memory hold what the host has, whatever their size, shape and dtype."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from parrot_engine.models.upload import Upload

pytestmark = pytest.mark.gpu

#: Of rows of 4 KB in two bytes a buffer holds 512.
BUFFER_BYTES = 2 << 20


@pytest.mark.parametrize("rows", [1, 255, 256, 511, 512, 513, 1024, 3000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_tensors_of_all_sizes(rows: int, dtype: torch.dtype) -> None:
    upload = Upload(torch.device("cuda"), BUFFER_BYTES)
    sources = [torch.randn(rows, 2048).to(dtype) for _ in range(4)]
    copies = [upload.to_device(source) for source in sources]
    for source, copy in zip(sources, copies, strict=True):
        assert copy.is_cuda
        assert torch.equal(copy.cpu().view(torch.uint8), source.view(torch.uint8))


@pytest.mark.parametrize(
    "source",
    [
        torch.randn(2000, 3000)[:, 1000:2500],
        torch.randn(3000, 1000).t(),
        torch.randn(3_000_000),
        torch.randn(1, 2_000_000),
        torch.randn(70, 90, 300),
        torch.tensor(1.5),
        torch.empty(0, 5),
    ],
    ids=[
        "columns",
        "transposed",
        "one dimension",
        "a row that no buffer holds",
        "3D",
        "0D",
        "empty",
    ],
)
def test_all_shapes_become_the_dtype_of_their_target(source: torch.Tensor) -> None:
    upload = Upload(torch.device("cuda"), BUFFER_BYTES)
    target = torch.empty(source.shape, dtype=torch.bfloat16, device="cuda")
    upload.fill(target, source)
    assert torch.equal(target.cpu(), source.to(torch.bfloat16))


def test_a_part_of_a_stacked_weight() -> None:
    upload = Upload(torch.device("cuda"), BUFFER_BYTES)
    stacked = torch.zeros(3000, 1024, dtype=torch.bfloat16, device="cuda")
    part = torch.randn(1500, 1024, dtype=torch.bfloat16)
    upload.fill(stacked[1000:2500], part)
    assert torch.equal(stacked[1000:2500].cpu(), part)
    assert not stacked[:1000].any()
    assert not stacked[2500:].any()
