"""Predicted lengths: close where a template is known, `max_tokens` where nothing is."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parrot_scheduler.lengths import FadingHistogram, LengthPredictor


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_is_right_within_a_bin(values: list[int], share: float) -> None:
    sketch = FadingHistogram()
    for value in values:
        sketch.add(value)
    estimate = sketch.quantile(share)
    below = sum(value <= estimate for value in values)
    assert below >= share * len(values) - 1e-9
    # The next smaller edge is exceeded by more.
    smaller = sum(value <= estimate / 2**0.26 for value in values)
    assert estimate <= 1 or smaller < share * len(values) or smaller == below


def test_a_template_is_believed_once_enough_of_it_is_known() -> None:
    lengths = LengthPredictor(10)
    for _ in range(7):
        lengths.observe("t", "summary", 50, 1000)
    assert lengths.predict("t", "summary", 1000) == 1000
    lengths.observe("t", "summary", 50, 1000)
    assert 50 <= lengths.predict("t", "summary", 1000) <= 60
    assert lengths.predict("t", "summary", 30) == 30


def test_templates_of_other_tenants_say_nothing() -> None:
    lengths = LengthPredictor(10)
    for _ in range(10):
        lengths.observe("t", "summary", 50, 1000)
    assert lengths.predict("other", "summary", 1000) == 1000


def test_quantiles_of_a_spread_template() -> None:
    rng = random.Random(0)
    lengths = LengthPredictor(10)
    for _ in range(250):
        lengths.observe("t", "x", rng.uniform(0, 1000), 4000)
    assert 420 <= lengths.predict("t", "x", 4000, 0.5) <= 620
    assert 820 <= lengths.predict("t", "x", 4000, 0.9) <= 1100


def test_it_follows_a_template_that_changes() -> None:
    lengths = LengthPredictor(10)
    for length in [10] * 300 + [400] * 600:
        lengths.observe("t", "x", length, 4000)
    assert lengths.predict("t", "x", 4000, 0.5) >= 400


def test_a_few_long_outputs_do_not_raise_the_median_of_many() -> None:
    lengths = LengthPredictor(10)
    for number in range(2001):
        lengths.observe("t", "x", 1000 if number % 10 == 0 else 10, 4000)
    assert 10 <= lengths.predict("t", "x", 4000, 0.5) <= 12


def test_without_a_template_the_used_share_of_max_tokens_counts() -> None:
    lengths = LengthPredictor(10)
    for _ in range(40):
        lengths.observe("t", "", 95, 1000)
    assert lengths.predict("t", "", 2000) == 200
    assert lengths.predict("t", "unknown", 0) == 0


@pytest.mark.parametrize("limit", [1, 3])
def test_templates_are_bounded(limit: int) -> None:
    lengths = LengthPredictor(limit)
    for number in range(20):
        for _ in range(9):
            lengths.observe("t", f"x{number}", 5, 1000)
    assert len(lengths) == limit
    assert lengths.predict("t", "x19", 1000) < 10
