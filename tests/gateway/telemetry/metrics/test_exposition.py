"""Samples as Prometheus reads them: heads, values, labels and buckets."""

from __future__ import annotations

import math

import pytest

from parrot_gateway.telemetry.metrics.definitions import Definition
from parrot_gateway.telemetry.metrics.distribution import Distribution
from parrot_gateway.telemetry.metrics.exposition import (
    CONTENT_TYPE,
    OPENMETRICS,
    family,
    negotiate,
    number,
    with_head,
)
from parrot_gateway.telemetry.metrics.labels import BoundedValues, label_text, within
from parrot_gateway.telemetry.trace_context import CallTrace

HISTOGRAM = Definition("h", "histogram", ("a",), "A help.", (1.0, 2.5, 5.0))


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (True, "1"), (-3.0, "-3"), (0.5, "0.5"), (1e15 - 1, "999999999999999"),
        (1e15, "1000000000000000.0"), (-1e15, "-1000000000000000.0"), (math.nan, "NaN"),
        (math.inf, "+Inf"), (-math.inf, "-Inf"),
    ],
)  # fmt: skip
def test_values(value: float, written: str) -> None:
    assert number(value) == written


@pytest.mark.parametrize(
    ("kind", "content_type", "name"),
    [
        ("counter", CONTENT_TYPE, "n_total"),
        ("counter", OPENMETRICS, "n"),
        ("gauge", CONTENT_TYPE, "n"),
        ("gauge", OPENMETRICS, "n"),
    ],
)
def test_a_family_has_its_head_once_however_long_it_is(
    kind: str, content_type: str, name: str
) -> None:
    definition = Definition("n", kind, ("a",), "A help.")  # type: ignore[arg-type]
    samples = {f'{{a="{each}"}}': each + 0.5 for each in range(300)}
    pieces = list(family(definition, samples, content_type))
    sample = "n_total" if kind == "counter" else "n"
    assert "".join(pieces).splitlines() == [
        f"# HELP {name} A help.",
        f"# TYPE {name} {kind}",
        *(f"{sample}{labels} {value}" for labels, value in samples.items()),
    ]
    assert max(piece.count("\n") for piece in pieces) < 131, "other work may go on in between"
    assert list(family(definition, {}, content_type)) == []
    assert "".join(with_head(HISTOGRAM, ["h_sum 1\n"], content_type)) == (
        "# HELP h A help.\n# TYPE h histogram\nh_sum 1\n"
    )


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=1.0.0", True),
    ],
)
def test_the_format_that_a_scraper_accepts(accept: str, is_open: bool) -> None:
    assert negotiate(accept) == (OPENMETRICS if is_open else CONTENT_TYPE)


def test_buckets_hold_all_that_is_not_above_them() -> None:
    one, more = Distribution(HISTOGRAM), Distribution(HISTOGRAM)
    for value, times in ((1.0, 1), (1.25, 2), (6.0, 1)):
        one.observe(value, times)
    more.observe(2.0, 3)
    traces = [CallTrace(number, 1, has_span=number != 3) for number in range(1, 5)]
    for trace, value in zip(traces, (1.25, 6.0, 1.0, 2.0), strict=True):
        one.exemplify(value, trace, 7.0)
    lines = [
        'h_bucket{a="b",le="1"} 1',
        'h_bucket{a="b",le="2.5"} 3',
        'h_bucket{a="b",le="5"} 3',
        'h_bucket{a="b",le="+Inf"} 4',
        'h_count{a="b"} 4',
        'h_sum{a="b"} 9.5',
    ]

    def told(which: Distribution, **options: bool) -> list[str]:
        return "".join(which.lines(HISTOGRAM, '{a="b"}', **options)).splitlines()

    assert told(one) == lines
    # The latest of each bucket; one without a span is not named.
    lines[1] += f' # {{trace_id="{4:032x}"}} 2 7.000'
    lines[3] += f' # {{trace_id="{2:032x}"}} 6 7.000'
    assert told(one, has_exemplars=True) == lines
    more.add(one)
    counts = [line.split(" # ")[0].split()[1] for line in told(more, has_exemplars=True)]
    assert counts == ["1", "6", "6", "7", "7", "15.5"]
    assert [" # " in line for line in told(more, has_exemplars=True)] == [
        *(False, True, False, True), False, False
    ]  # fmt: skip
    # Under a metric with the first of its bounds, and without labels.
    fewer = Definition("f", "histogram", (), "A help.", (1.0,))
    assert "".join(one.lines(fewer, "", has_exemplars=True)).splitlines() == [
        'f_bucket{le="1"} 1',
        f'f_bucket{{le="+Inf"}} 4 # {{trace_id="{2:032x}"}} 6 7.000',
        "f_count 4",
        "f_sum 9.5",
    ]


def test_labels_are_escaped_cut_and_bounded() -> None:
    assert label_text(("a", "b"), ('"\\', "x\ny")) == r'{a="\"\\",b="x\ny"}'
    names = ["a" * 300, "b", "c"]
    assert within(2, names) == {names[0]: "a" * 200, "b": "b", "c": "other"}
    values = BoundedValues(2)
    told = [values.of(names[0]), values.is_full, values.of("b"), values.is_full, values.of("c")]
    assert told == ["a" * 200, False, "b", True, "other"]
    assert list(values.shown) == ["a" * 200, "b"]
    assert (values.keep({names[0], "b"}), values.keep({"b"}), values.keep({"b"})) == (
        *(False, True), False
    )  # fmt: skip
    assert [values.of(each) for each in ("c", names[0], "b")] == ["c", "other", "b"]
