"""Places the boxes of a layered drawing: layers by longest path, rows by neighbours.

An arrow that passes layers gets a bend in each of them, so that it runs between boxes. Linear in
boxes and bends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

#: Sweeps forth and back; more change little.
_SWEEPS = 4
#: Bends in a drawing; further arrows are straight.
_MAX_BENDS = 4_000


class Layout(NamedTuple):
    """Layers in order, the rows of each in order; numbers from `num_boxes` on are bends."""

    layers: list[list[int]]
    #: By arrow, its bends from tail to head; arrows to the next layer have none.
    bends: dict[int, list[int]]


def layout_of(num_boxes: int, arrows: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes, and bends of arrows that pass layers.

    Every arrow leads to a later layer. Boxes without tails stand right before their first head.

    Raises:
        ValueError: the arrows form a cycle.
    """
    heads, tails = _neighbours(num_boxes, arrows)
    layer = [0] * num_boxes
    for box in TopologicalSorter(dict(enumerate(tails))).static_order():
        layer[box] = max((layer[tail] + 1 for tail in tails[box]), default=0)
    for box in range(num_boxes):
        if not tails[box] and heads[box]:
            layer[box] = min(layer[head] for head in heads[box]) - 1
    layers: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for box in range(num_boxes):
        layers[layer[box]].append(box)
    bends: dict[int, list[int]] = {}
    segments: list[tuple[int, int]] = []
    size = num_boxes
    for arrow, (tail, head) in enumerate(arrows):
        passed = range(layer[tail] + 1, layer[head])
        if size - num_boxes + len(passed) > _MAX_BENDS:
            passed = range(0)
        for bend, number in enumerate(passed, size):
            layers[number].append(bend)
        if passed:
            bends[arrow] = list(range(size, size + len(passed)))
        segments += pairwise([tail, *bends.get(arrow, ()), head])
        size += len(passed)
    _untangle(layers, *_neighbours(size, segments))
    return Layout(layers, bends)


def _neighbours(
    size: int, arrows: Iterable[tuple[int, int]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Heads and tails of every box."""
    heads: list[list[int]] = [[] for _ in range(size)]
    tails: list[list[int]] = [[] for _ in range(size)]
    for tail, head in arrows:
        heads[tail].append(head)
        tails[head].append(tail)
    return heads, tails


def _untangle(
    layers: list[list[int]], heads: Sequence[Sequence[int]], tails: Sequence[Sequence[int]]
) -> None:
    """Sort each layer by the mean place of its neighbours, forth by tails and back by heads."""
    place = [0.0] * len(heads)

    def note(boxes: Sequence[int]) -> None:
        for row, box in enumerate(boxes):
            place[box] = row - len(boxes) / 2

    def mean(box: int, neighbours: Sequence[Sequence[int]]) -> float:
        around = neighbours[box]
        return sum(place[other] for other in around) / len(around) if around else place[box]

    for boxes in layers:
        note(boxes)
    for sweep in range(_SWEEPS):
        neighbours = tails if sweep % 2 == 0 else heads
        for boxes in layers if sweep % 2 == 0 else reversed(layers):
            keys = {box: mean(box, neighbours) for box in boxes}
            boxes.sort(key=keys.__getitem__)
            note(boxes)
