"""Plans of fixed capacity do what plans of exact size do, whatever stood in the buffer before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from harness.engine.attention_cases import SCALE, Context, PagedCase
from harness.engine.interpreted import CHUNK, TUNINGS
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot_engine.attention.host_plan import HostPlan, Parts, PlanLayout
from parrot_engine.attention.interface import AttentionShape
from parrot_engine.attention.launch import Partials
from parrot_engine.attention.policy import Cuts, TileCuts
from parrot_engine.attention.triton_backend import TritonAttention
from torch import Tensor

SHAPE = AttentionShape(8, 2, 16, 16)
MAX_ROWS, MAX_CONTEXT, MAX_SLOTS, START = 8, 120, 24, 96

#: log2(0) of rows that no query fills; they are not stored.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.usefixtures("poison"),
]


def _backend(windows: tuple[int | None, ...] = (None,), **kw: Any) -> TritonAttention:
    return TritonAttention(
        SHAPE,
        windows=windows,
        device=torch.device("cpu"),
        dtype=torch.float32,
        **{"tunings": TUNINGS, "wide_min_bytes": 0, "cuts": Cuts(CHUNK), **kw},
    )


class Fixed:
    """Stand-in for a captured graph: launches that never change, and a buffer that does."""

    def __init__(
        self,
        backend: TritonAttention,
        num_tokens: int,
        parts: Parts = Parts(True, True),  # noqa: B008 -- immutable
        window: int | None = None,
        max_slots: int = MAX_SLOTS,
    ) -> None:
        self.backend = backend
        self.layout = backend.fixed_layout(num_tokens, MAX_ROWS, MAX_CONTEXT, max_slots, START)
        # Nothing may be read that was not written for the step: such an index would be far off.
        self.buffer = torch.full((self.layout.size,), 2**30, dtype=torch.int32)
        self.window = window
        partials = backend.partials(max_slots)
        self.plan = backend.fixed_plan(self.buffer, self.layout, parts, partials)

    def run(self, case: PagedCase, host: HostPlan) -> tuple[Tensor, Tensor]:
        """Attention and cache of a step that is padded to the bucket's tokens."""
        view = self.buffer.numpy()
        view[self.layout.write(view, host.tables, host.lists) :] = 2**30
        assert (view[:START] == 2**30).all()
        count = len(case.query)
        query, key, value = (
            torch.cat([part, torch.full((self.layout.num_tokens - count, *part.shape[1:]), 1e9)])
            for part in (case.query, case.key, case.value)
        )
        cache = case.layer_kv.clone()
        out = self.backend.forward(
            query, key, value, cache, self.plan, window=self.window, scale=SCALE
        )
        return out[:count], cache


def _eager(
    case: PagedCase, backend: TritonAttention, host: HostPlan, window: int | None = None
) -> tuple[Tensor, Tensor]:
    cache = case.layer_kv.clone()
    plan = backend.send(host)
    out = backend.forward(case.query, case.key, case.value, cache, plan, window=window, scale=SCALE)
    return out, cache


def _equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(ours[0], theirs[0]) and torch.equal(
        ours[1].nan_to_num(nan=-77.0), theirs[1].nan_to_num(nan=-77.0)
    )


@st.composite
def batches(draw: st.DrawFn) -> list[Context]:
    """Some decodes, perhaps of one family, some short rows, perhaps a prefill; or one kind."""
    contexts: list[Context] = []
    contexts += map(Context, draw(st.lists(st.integers(0, 100), max_size=4)))
    if draw(st.booleans()):
        root = len(contexts)
        shared = draw(st.sampled_from([32, 64, 70]))
        contexts.append(Context(shared + 2))
        sharers = draw(st.integers(1, 2))
        contexts += [Context(shared + 3 + own, 1, root, shared) for own in range(sharers)]
    if draw(st.booleans()):
        contexts.append(Context(draw(st.integers(0, 50)), draw(st.sampled_from([2, 9, 20]))))
    return contexts or [Context(draw(st.integers(0, 100)))]


@pytest.mark.parametrize("window", [None, 45])
def test_fixed_is_eager(window: int | None) -> None:
    backend = _backend((window,))
    fixed = Fixed(backend, 40, window=window)

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(batches(), st.integers(0, 1000))
    def run(contexts: list[Context], seed: int) -> None:
        case = PagedCase(SHAPE, contexts, seed=seed)
        host = backend.lay_out(case.rows)
        assert fixed.layout.holds(*host)
        assert _equal(fixed.run(case, host), _eager(case, backend, host, window))

    run()


@pytest.mark.parametrize("window", [None, 45])
def test_fixed_is_eager_where_tiles_are_cut(window: int | None) -> None:
    cuts = TileCuts((3,), least=16, start=0, merge=0)
    many = TUNINGS.prefill._replace(programs_per_sm=10)
    tunings = TUNINGS._replace(prefill=many)
    backend = _backend((window,), tile_cuts=cuts, tunings=tunings)
    fixed = Fixed(backend, 24, window=window, max_slots=200)
    cut = [Context(70), Context(75, 14), *map(Context, (3, 90))]
    expected: dict[int, tuple[Tensor, Tensor]] = {}
    for contexts in (cut, [Context(100, 19)], [Context(40)] * 3, cut):
        case = PagedCase(SHAPE, contexts)
        host = backend.lay_out(case.rows)
        assert fixed.layout.holds(*host)
        if id(contexts) not in expected:
            expected[id(contexts)] = _eager(case, backend, host, window)
        assert _equal(fixed.run(case, host), expected[id(contexts)])
    assert len(host.lists[window].tiles) > 2


FAMILY = [Context(70), *(Context(70 + own, 1, 0, 64) for own in range(1, 8))]


@pytest.mark.parametrize(
    ("contexts", "parts"),
    [
        ([Context(0)], Parts(False, False, False)),
        ([Context(31), Context(20)], Parts(False, False, False)),
        ([Context(90), Context(31), Context(32)], Parts(False, False)),
        (FAMILY, Parts(False, True)),
        ([Context(0, 9)], Parts(True, False)),
        ([*FAMILY[:6], Context(3, 12)], Parts(True, True)),
    ],
)
def test_what_is_not_there_need_not_be_launched(contexts: list[Context], parts: Parts) -> None:
    backend = _backend()
    case = PagedCase(SHAPE, contexts)
    host = backend.lay_out(case.rows)
    assert parts.cover(host.parts)
    expected = _eager(case, backend, host)
    for more in (parts, Parts(True, True)):
        assert _equal(Fixed(backend, 24, more).run(case, host), expected)


def test_needed_parts_are_told() -> None:
    backend = _backend()
    assert backend.lay_out(PagedCase(SHAPE, FAMILY).rows).parts == Parts(False, True)
    assert backend.lay_out(PagedCase(SHAPE, [Context(0, 9)]).rows).parts == Parts(
        True, False, False
    )
    assert Parts(True, True).cover(Parts(False, True))
    assert not Parts(True, False).cover(Parts(False, True))


def test_steps_of_fewer_tokens_need_no_such_parts() -> None:
    backend = _backend()
    least = backend.min_tokens(Parts(False, True))
    for count, wide in ((least - 1, False), (least, True)):
        assert backend.lay_out(PagedCase(SHAPE, FAMILY[:count]).rows).parts.wide == wide
    least = backend.min_tokens(Parts(True, False))
    for count, tiles in ((least - 1, False), (least, True)):
        assert backend.lay_out(PagedCase(SHAPE, [Context(0, count)]).rows).parts.tiles == tiles
    assert backend.min_tokens(Parts(False, False)) == 1


@pytest.mark.parametrize(
    "contexts",
    [
        [Context(0)] * 9,  # tokens
        [Context(119)] * 7,  # partial results
        [Context(0, 1), Context(2000)],  # blocks, chunks
    ],
)
def test_what_does_not_fit_is_told(contexts: list[Context]) -> None:
    backend = _backend(wide_min_bytes=10**12)
    host = backend.lay_out(PagedCase(SHAPE, contexts).rows)
    layout = backend.fixed_layout(8, MAX_ROWS, MAX_CONTEXT, MAX_SLOTS, START)
    assert not layout.holds(*host)
    assert layout.holds(*backend.lay_out(PagedCase(SHAPE, [Context(119)] * 6).rows))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 64), st.integers(1, 5000), st.integers(0, 500), st.integers(1, 3))
def test_parts_of_a_layout_do_not_overlap(
    num_tokens: int, max_context: int, start: int, num_windows: int
) -> None:
    windows: list[int | None] = [None, 7, 300][:num_windows]
    backend = _backend(tuple(windows))
    layout = backend.fixed_layout(num_tokens, MAX_ROWS, max_context, MAX_SLOTS, start)
    _check_places(layout, start)


def _check_places(layout: PlanLayout, start: int) -> None:
    capacity = layout.capacity
    spans = [(layout.slots, layout.num_tokens), (layout.block_ids, layout.num_block_ids)]
    for places in layout.lists.values():
        spans += [(places.narrow, 8 * capacity.narrow), (places.wide, 8 * capacity.wide)]
        spans += [(place, capacity.members) for place in places.members]
        spans += [(places.merges, 3 * capacity.merges), (places.tiles, 8 * capacity.tiles)]
        spans += [(place, 1) for place in places.counts]
    spans.sort()
    ends = [begin + count for begin, count in spans]
    assert spans[0][0] >= start
    assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=False))
    assert ends[-1] <= layout.size
    assert spans[-1][0] == layout.block_ids


def test_nothing_to_do_touches_nothing() -> None:
    """Graphs are captured with a step of padding alone."""
    backend = _backend()
    case = PagedCase(SHAPE, [Context(20)])
    layout = backend.fixed_layout(4, MAX_ROWS, MAX_CONTEXT, MAX_SLOTS, 0)
    buffer = torch.from_numpy(np.full(layout.size, 2**30, dtype=np.int32))
    layout.write_nothing(buffer.numpy())
    partials: Partials = backend.partials(MAX_SLOTS)
    plan = backend.fixed_plan(buffer, layout, Parts(True, True), partials)
    query = torch.zeros(4, SHAPE.num_heads, SHAPE.head_dim)
    key = torch.zeros(4, SHAPE.num_kv_heads, SHAPE.head_dim)
    cache = case.layer_kv.clone()
    backend.forward(query, key, key, cache, plan, window=None, scale=SCALE)
    assert torch.equal(cache.nan_to_num(-77.0), case.layer_kv.nan_to_num(-77.0))
