"""Tables: no name and no figure is lost."""

from __future__ import annotations

import math

import pytest
from parrot_bench import serving
from parrot_bench.engine.report import CaseResult
from parrot_bench.report import Row, show
from parrot_bench.tables import markdown, number, percent, text_table, yes_or_no


def test_columns_are_aligned_and_empty_ones_left_out() -> None:
    text = text_table(
        ("name", "time", "peer", "n"), [("a long name", "1.5 s", "", "10"), ("b", "10 s", "", "9")]
    )
    assert text.splitlines() == [
        "name          time   n",
        "----------------------",
        "a long name  1.5 s  10",
        "b             10 s   9",
    ]


def test_markdown() -> None:
    rows = [("a", "1", ""), ("b", "2", "")]
    assert markdown(("name", "n", "peer"), rows).splitlines() == [
        "| name | n |", "| --- | --: |", "| a | 1 |", "| b | 2 |",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(123456.0, "123,456"), (12.345, "12.3"), (0.01234, "0.0123"), (0.0, "0"), (math.nan, "-"),
     (None, "-"), (-2.5, "-2.5")],
)  # fmt: skip
def test_numbers_have_three_digits_that_matter(value: float | None, text: str) -> None:
    assert number(value) == text


def test_shares_and_answers() -> None:
    assert (percent(0.123), percent(math.nan)) == ("12 %", "-")
    assert [yes_or_no(met) for met in (True, False, None)] == ["yes", "no", ""]


def test_figures_stand_beside_those_of_peers(capsys: pytest.CaptureFixture[str]) -> None:
    peers = {"bare": 345678.0, "LiteLLM": math.nan}
    rows = [
        Row("32 calls", "calls/s", 123456.0, 234567.0, peers, at_least=1.0),
        Row("16 streams", "ms", 3.1, direct=2.2, at_most=0.5, aims_at_added=True),
    ]
    show("bench overhead", rows, ["a note"])
    _, head, _, calls, streams, note = capsys.readouterr().out.splitlines()
    assert head.split() == ["direct", "gateway", "added", "ratio", "bare", "LiteLLM", "aim", "met"]
    assert calls.split()[2:] == [
        "calls/s", "234,567", "123,456", "0.53", "345,678", "failed", "≥", "1", "yes",
    ]  # fmt: skip
    assert streams.endswith("no")
    assert note == "a note"


def test_a_server_that_did_not_start_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    runs = serving.Runs()
    runs.add("64 streams", "tok/s", throughput=12345.6)
    results = [*runs.results("gateway"), *runs.results("vllm")]
    results.append(CaseResult("all", "other", skipped="did not start"))
    serving.show(serving.Plan("parrot-demo", [64], 512, 128, 1, 0, 0), results)
    shown = capsys.readouterr().out
    assert "other all: skipped: did not start" in shown
    assert "ahead 1.00x" in shown
