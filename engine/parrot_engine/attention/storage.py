"""The layout of keys and values in the cache: the model's dtype, or float8 with scales.

A quantized head of a token has `head_dim` bytes of float8_e4m3fn and a float32 scale: its largest
magnitude divided by the format's largest number. So nothing depends on other tokens or on the
batch. The scales follow the keys of their (block, head) tile: a tile of `block_size` rows of
`head_dim` bytes gets as many extra rows as the scales take. Copying a block copies its scales too.

A head that is not finite has a scale that is not finite, and reads as NaN.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from parrot_engine.exceptions import SettingsError

#: Elements of a quantized cache: bits of float8_e4m3fn, or parts of a scale.
QUANTIZED_DTYPE: Final = torch.uint8

_SCALE_BYTES = 4
_LARGEST = 448.0
#: Scales stop shrinking below this magnitude, where they are 2^-60. Kernels add logarithms of
#: scales to scores, and float32 keeps only about 120 below the largest.
_LEAST = _LARGEST * 2.0**-60


def is_quantized(kv_cache_dtype: str, head_dim: int) -> bool:
    """Return true if a cache with this setting and head size is quantized.

    Raises:
        SettingsError: scales would not be aligned.
    """
    if kv_cache_dtype == "auto":
        return False
    if head_dim % _SCALE_BYTES:
        raise SettingsError(
            "kv_cache_dtype", f"{kv_cache_dtype} needs heads of a multiple of four, not {head_dim}"
        )
    return True


def cache_dtype(dtype: torch.dtype, *, quantized: bool) -> torch.dtype:
    """Return the dtype of the cache's elements for a model of `dtype`."""
    return QUANTIZED_DTYPE if quantized else dtype


def tile_rows(block_size: int, head_dim: int, *, quantized: bool) -> int:
    """Return the rows of a (block, head) tile, each of `head_dim` elements."""
    return block_size + (-(-block_size * _SCALE_BYTES // head_dim) if quantized else 0)


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype, *, quantized: bool) -> int:
    """Return the bytes of a token's keys and values in one layer, as attention reads them."""
    of_head = head_dim + _SCALE_BYTES if quantized else head_dim * dtype.itemsize
    return 2 * kv_heads * int(of_head)


def quantize(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize heads `[..., head_dim]` to bits `[..., head_dim]` and float32 scales `[...]`."""
    values = heads.float()
    # A GPU divides by a host number by multiplying with its inverse, which changes the last digit.
    largest = torch.full((), _LARGEST, device=heads.device)
    scales = values.abs().amax(-1).clamp_min(_LEAST) / largest
    return (values / scales[..., None]).to(torch.float8_e4m3fn).view(QUANTIZED_DTYPE), scales


def dequantize(bits: Tensor, scales: Tensor) -> Tensor:
    """Convert the results of `quantize` back to float32."""
    return bits.view(torch.float8_e4m3fn).float() * scales[..., None]


def write_quantized(tiles: Tensor, rows: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Write heads `[n, head_dim]` with their scales `[n]` into tiles `[.., tile_rows, head_dim]`.

    `rows` `[n]` number the rows of all tiles, one tile after the other; they are never rows of
    scales.
    """
    count, head_dim = tiles.shape[-2:]
    tiles.view(-1, head_dim).index_copy_(0, rows, bits)
    per_row = head_dim // _SCALE_BYTES
    block_size = _block_size(count, head_dim)
    places = (rows // count * count + block_size) * per_row + rows % count
    tiles.view(torch.float32).view(-1).index_copy_(0, places, scales)


def read_quantized(tiles: Tensor) -> Tensor:
    """Return the heads of tiles `[n, tile_rows, head_dim]`: float32 `[n, block_size, head_dim]`."""
    block_size = _block_size(*tiles.shape[-2:])
    scales = tiles[:, block_size:].reshape(len(tiles), -1).view(torch.float32)[:, :block_size]
    return dequantize(tiles[:, :block_size], scales)


def _block_size(rows: int, head_dim: int) -> int:
    """Return the block size of a tile with `rows` rows; the inverse of `tile_rows`."""
    return rows * head_dim // (head_dim + _SCALE_BYTES)
