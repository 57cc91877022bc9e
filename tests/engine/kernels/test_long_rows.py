"""Rows of some hundred tokens behind a long context: prefill tiles whose keys are cut and merged.

In Triton's interpreter, against float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.engine.attention_cases import Context, PagedCase, relative_error
from harness.engine.interpreted import TUNINGS, interpreted_backend, take_natural_logarithms
from parrot_engine.attention import host_plan, launch, work_list
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.policy import TileCuts
from parrot_engine.attention.triton_backend import TritonAttention

#: log2(0) of rows that see nothing of a part, and of those that no token fills.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]

#: One head, since the interpreter merges token by token and head by head.
SHAPE = AttentionShape(1, 1, 16, 16)
TILE = 32


def _tunings(shape: AttentionShape) -> launch.Tunings:
    """32 tokens a tile, and as many programs at once as there may be."""
    rows = 32 * shape.num_heads // shape.num_kv_heads
    return TUNINGS._replace(prefill=launch.Tuning(rows, TILE, 4, 1, programs_per_sm=100))


def _backend(
    shape: AttentionShape,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    parts: int = 3,
    **options: Any,
) -> TritonAttention:
    cuts = TileCuts((parts,), least=1, start=0, merge=0)
    options = {"tunings": _tunings(shape), "tile_cuts": cuts, **options}
    return interpreted_backend(shape, window, dtype, **options)


def _cuts_made(backend: TritonAttention, case: PagedCase) -> set[int]:
    """Numbers of parts of the step's tokens, those of single parts aside."""
    (work,) = backend.lay_out(case.rows).lists.values()
    return set(work.merges[:, 2].tolist())


def _error(case: PagedCase, window: int | None = None, **kw: Any) -> float:
    backend = _backend(case.shape, window, case.query.dtype, **kw)
    assert _cuts_made(backend, case)
    return relative_error(case.run(backend, window), case.expected(window))


# Ends of tiles of 32 tokens.
@pytest.mark.parametrize("new", [65, 66, 127, 128])
def test_numbers_of_new_tokens(new: int) -> None:
    assert _error(PagedCase(SHAPE, [Context(200, new)])) < 2e-6


# Ends of blocks (16), of tiles of keys (32) and of chunks (32); of parts, which are multiples.
@pytest.mark.parametrize("cached", [79, 80, 81, 95, 96, 97, 127, 128, 129])
def test_contexts_at_edges(cached: int) -> None:
    assert _error(PagedCase(SHAPE, [Context(cached, 65)])) < 2e-6


@pytest.mark.parametrize(("asked", "made"), [(2, 2), (8, 7), (19, 19)])
def test_numbers_of_parts(asked: int, made: int) -> None:
    """More than a step of the merge reads, and parts of which some tokens see nothing.

    Parts are whole tiles of keys, so that there may be fewer than asked for.
    """
    case = PagedCase(SHAPE, [Context(539, 65)])
    assert max(_cuts_made(_backend(SHAPE, parts=asked), case)) == made
    assert _error(case, parts=asked) < 2e-6


@pytest.mark.parametrize(("group", "kv_heads"), [(1, 2), (4, 2), (8, 1)])
def test_query_heads_of_a_group(group: int, kv_heads: int) -> None:
    shape = AttentionShape(group * kv_heads, kv_heads, 16, 16)
    assert _error(PagedCase(shape, [Context(150, 66)])) < 2e-6


@pytest.mark.parametrize(("window", "parts"), [(100, 3), (150, 5), (300, 2), (45, 2)])
def test_windows(window: int, parts: int) -> None:
    """Parts that late tokens of a tile do not see, and parts that early ones do not see."""
    case = PagedCase(SHAPE, [Context(230, 70), Context(40, 65)])
    assert _error(case, window, parts=parts) < 2e-6


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 16), (64, 24), (16, 64)])
def test_blocks_and_heads(block_size: int, head_dim: int) -> None:
    shape = SHAPE._replace(block_size=block_size, head_dim=head_dim)
    assert _error(PagedCase(shape, [Context(177, 90)])) < 2e-6


@pytest.mark.parametrize("quantized", [False, True])
def test_tiles_through_the_copy_engine(quantized: bool) -> None:
    shape = AttentionShape(1, 1, 64, 64)
    tunings = launch.Tunings(*(tuning._replace(descriptors=True) for tuning in _tunings(shape)))
    case = PagedCase(shape, [Context(177, 90)], quantized=quantized)
    assert _error(case, tunings=tunings, quantized=quantized) < 2e-6


@pytest.mark.parametrize("window", [None, 120])
def test_a_cache_of_float8(window: int | None) -> None:
    shape = AttentionShape(1, 1, 64, 16)
    case = PagedCase(shape, [Context(150, 70)], quantized=True)
    assert _error(case, window, quantized=True) < 2e-6


def test_float16() -> None:
    case = PagedCase(SHAPE, [Context(170, 80)], dtype=torch.float16)
    assert _error(case) < 1e-3


#: Decodes of a family, strangers, a short prompt, and two rows behind the family's prefix.
MIXED = [
    Context(130),
    *(Context(128 + own, 1, 0, 128) for own in (1, 2, 17)),
    Context(128, 70, 0, 128),
    Context(3),
    Context(129, 66, 0, 128),
    Context(0, 40),
    Context(70, 9),
]


@pytest.mark.parametrize("window", [None, 90])
def test_in_company(window: int | None) -> None:
    assert _error(PagedCase(SHAPE, MIXED), window, wide_min_bytes=0) < 2e-6


def test_others_read_what_they_read_without() -> None:
    """Cut tiles change neither who shares what nor a bit of the other rows."""
    case = PagedCase(SHAPE, MIXED)
    whole, cut = (_backend(SHAPE, parts=parts, wide_min_bytes=0) for parts in (1, 3))
    before, after = (backend.lay_out(case.rows).lists[None] for backend in (whole, cut))
    assert len(after.tiles) > len(before.tiles)
    for name in ("narrow", "wide", "member_tokens", "member_positions", "member_slots"):
        assert (getattr(before, name) == getattr(after, name)).all()
    tiled = {t for row in after.tiles.tolist() for t in range(row[3], row[3] + row[4])}
    others = [token for token in range(len(case.query)) if token not in tiled]
    assert torch.equal(case.run(whole)[others], case.run(cut)[others])


def test_a_nan_of_one_row_stays_its_own() -> None:
    case = PagedCase(SHAPE, [Context(130, 65), Context(140, 70)])
    backend = _backend(SHAPE)
    sound = case.run(backend)
    case.value[64] = float("nan")
    out = case.run(backend)
    assert out[64].isnan().all()
    others = [token for token in range(len(out)) if token != 64]
    assert torch.equal(out[others], sound[others])


# -- controls: the comparisons above must notice these


#: Field of a tile, and by how much it is off.
@pytest.mark.parametrize(("field", "off"), [(1, TILE), (2, -1), (6, 1), (7, 1)])
def test_control_tiles(field: int, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kw: Any) -> work_list.WorkList:
        work = work_list.build(*args, **kw)
        work.tiles[:, field] += off
        # Slots behind the last are not the test's.
        return work._replace(num_slots=work.num_slots + 1000)

    case = PagedCase(SHAPE, [Context(200, 65)])
    monkeypatch.setattr(host_plan, "build", wrong)
    assert _error(case) > 1e-2


def test_control_natural_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    take_natural_logarithms(monkeypatch)
    assert _error(PagedCase(SHAPE, [Context(200, 65)])) > 1e-2
