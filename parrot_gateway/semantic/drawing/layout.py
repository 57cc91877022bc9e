"""Where the boxes of a layered drawing go: columns by longest path, rows by neighbours.

Knows numbers only, neither sizes nor texts. Every box gets one place, and an arrow that passes
layers a bend in each of them, so that it runs between boxes and not behind them. Linear in what
is placed, times the few sweeps that untangle the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

#: Sweeps forth and back; more hardly change anything.
_SWEEPS = 4
#: Bends in a drawing; arrows beyond it go straight, whatever is in their way.
_MAX_BENDS = 4_000


class Layout(NamedTuple):
    """Layers in order, the rows of each in order; numbers from `num_boxes` on are bends."""

    layers: list[list[int]]
    #: By arrow, its bends from tail to head; arrows to the next layer have none.
    bends: dict[int, list[int]]


def layout_of(num_boxes: int, arrows: Sequence[tuple[int, int]]) -> Layout:
    """Place boxes, and bends of arrows that pass layers.

    Every arrow leads to a later layer. Boxes that nothing leads to stand right before the first
    box that they lead to.

    Raises:
        ValueError: the arrows go in a circle.
    """
    heads: list[list[int]] = [[] for _ in range(num_boxes)]
    tails: list[list[int]] = [[] for _ in range(num_boxes)]
    for tail, head in arrows:
        heads[tail].append(head)
        tails[head].append(tail)
    layer = _longest_paths(heads, tails)
    for box in range(num_boxes):
        if not tails[box] and heads[box]:
            layer[box] = min(layer[head] for head in heads[box]) - 1
    layers: list[list[int]] = [[] for _ in range(max(layer, default=-1) + 1)]
    for box in range(num_boxes):
        layers[layer[box]].append(box)
    bends: dict[int, list[int]] = {}
    heads, tails = [[] for _ in range(num_boxes)], [[] for _ in range(num_boxes)]
    for arrow, (tail, head) in enumerate(arrows):
        passed = range(layer[tail] + 1, layer[head])
        if len(heads) - num_boxes + len(passed) > _MAX_BENDS:
            passed = range(0)
        way = [tail]
        for number in passed:
            way.append(len(heads))
            layers[number].append(len(heads))
            heads.append([])
            tails.append([])
        way.append(head)
        for one, other in pairwise(way):
            heads[one].append(other)
            tails[other].append(one)
        if passed:
            bends[arrow] = way[1:-1]
    _untangle(layers, heads, tails)
    return Layout(layers, bends)


def _longest_paths(heads: Sequence[Sequence[int]], tails: Sequence[Sequence[int]]) -> list[int]:
    missing = [len(before) for before in tails]
    order = [box for box, count in enumerate(missing) if count == 0]
    layer = [0] * len(heads)
    for box in order:
        for head in heads[box]:
            layer[head] = max(layer[head], layer[box] + 1)
            missing[head] -= 1
            if missing[head] == 0:
                order.append(head)
    if len(order) != len(heads):
        raise ValueError("the arrows go in a circle")
    return layer


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
