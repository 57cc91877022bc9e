"""Recorded traces: read as they were meant, streamed, and refused with the file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parrot_bench.simulator.plan import ApplicationPlan, Segment, Workload
from parrot_bench.simulator.traces import TraceError, open_trace
from parrot_bench.simulator.traces.agentic import read_agentic
from parrot_bench.simulator.traces.lines import MAX_LINE_BYTES

MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [1, 2, 3]},
    {"timestamp": 27482, "input_length": 1024, "output_length": 26, "hash_ids": [1, 4]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,110,27\n"
)
AGENTIC = [
    {
        "request_id": "r1",
        "session_id": "root",
        "timestamp": 1000.0,
        "input_length": 130,
        "output_length": 5,
        "hash_ids": [11, 22, 33],
        "prefix_reset": True,
        "branches": ["child"],
    },
    {
        "request_id": "child",
        "session_id": "sub",
        "wait_for": ["r1"],
        "delay": 100.0,
        "input_length": 64,
        "output_length": 7,
        "hash_ids": [44],
    },
    {
        "request_id": "r2",
        "session_id": "root",
        "wait_for": ["r1", "child"],
        "delay": 20.0,
        "tool_wait_ms": 180.0,
        "tool_events": [{"tool_class": "shell"}],
        "input_length": 200,
        "output_length": 9,
        "hash_ids": [11, 22, 55, 66],
    },
]


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    return path


def plans_of(path: Path, trace_format: str = "auto") -> list[ApplicationPlan]:
    workload: Workload = open_trace(path, trace_format)
    plans = list(workload.arrivals())
    assert all(workload.successor(plan, 0.0) is None for plan in plans)
    return plans


def test_mooncake_blocks_are_shared_between_calls(tmp_path: Path) -> None:
    first, second = plans_of(jsonl(tmp_path / "m.jsonl", MOONCAKE))
    assert first.calls[0].prompt == (
        Segment(("block", 1), 512),
        Segment(("block", 2), 512),
        Segment(("block", 3), 176),
    )
    assert second.calls[0].prompt == (Segment(("block", 1), 512), Segment(("block", 4), 512))
    assert (second.arrival_s, second.calls[0].output_tokens) == (27.482, 26)


def test_prompts_longer_than_their_hashes_end_in_something_of_their_own(tmp_path: Path) -> None:
    rows = [{**MOONCAKE[0], "hash_ids": [1]}, {**MOONCAKE[0], "hash_ids": []}]
    first, second = plans_of(jsonl(tmp_path / "m.jsonl", rows))
    assert [s.tokens for s in first.calls[0].prompt] == [512, 688]
    assert [s.tokens for s in second.calls[0].prompt] == [1200]
    assert first.calls[0].prompt[-1].content != second.calls[0].prompt[-1].content


@pytest.mark.parametrize(
    "text", [AZURE, AZURE.replace("0,4808", "0+00:00,4808").replace("0,110", "0+00:00,110")]
)
def test_azure_times_count_from_the_first_row(tmp_path: Path, text: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff" + text, encoding="utf-8")
    first, second = plans_of(path)
    assert (first.arrival_s, second.arrival_s) == (0.0, pytest.approx(0.052))
    assert [s.tokens for s in first.calls[0].prompt] == [4808]
    assert (first.calls[0].output_tokens, second.calls[0].output_tokens) == (10, 27)


def test_agents_keep_their_graph_and_pauses(tmp_path: Path) -> None:
    (plan,) = plans_of(jsonl(tmp_path / "a.jsonl", AGENTIC))
    assert (plan.id, plan.arrival_s) == ("r1", 1.0)
    assert [call.after for call in plan.calls] == [(), (0,), (0, 1)]
    assert [call.pause_s for call in plan.calls] == [0.0, pytest.approx(0.1), pytest.approx(0.2)]
    # Blocks of 64 tokens, which is what makes 3 of 130 tokens.
    assert [s.tokens for s in plan.calls[0].prompt] == [64, 64, 2]
    assert plan.calls[2].prompt[:2] == plan.calls[0].prompt[:2]


def test_applications_come_in_order_of_arrival_however_rows_are_mixed(tmp_path: Path) -> None:
    def row(name: str, at: float | None = None, *wait_for: str, session: str | None = None) -> Any:
        return {
            "request_id": name,
            "input_length": 10,
            "output_length": 1,
            "timestamp": at,
            "wait_for": list(wait_for),
            "session_id": session,
        }

    rows = [
        row("b", 500),
        row("a", 100),
        row("c", 900, session="s"),
        row("b2", None, "b"),
        row("d", 1500, session="s"),
        # Joins a and b: one application from now on.
        row("ab", None, "a", "b2"),
    ]
    plans = plans_of(jsonl(tmp_path / "a.jsonl", rows))
    assert [(plan.arrival_s, len(plan.calls)) for plan in plans] == [(0.1, 4), (0.9, 2)]
    joined, session = plans
    by_name = {c.prompt[0].content: c for c in joined.calls}
    last = by_name["own", "ab"]
    assert {joined.calls[i].prompt[0].content for i in last.after} == {("own", "a"), ("own", "b2")}
    assert by_name["own", "b"].pause_s == pytest.approx(0.4)
    assert [call.pause_s for call in session.calls] == [0.0, pytest.approx(0.6)]


def test_the_window_bounds_what_is_remembered(tmp_path: Path) -> None:
    rows = [{**AGENTIC[0], "request_id": f"r{n}", "session_id": f"s{n}"} for n in range(50)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert len(list(read_agentic(path, window_rows=3))) == 50
    late = {**AGENTIC[1], "request_id": "late", "wait_for": ["r0"]}
    path = jsonl(tmp_path / "b.jsonl", [*rows, late])
    assert len(list(read_agentic(path))) == 50
    message = r"b\.jsonl:51: waits for 'r0', which none of the 3 rows before"
    with pytest.raises(TraceError, match=message):
        list(read_agentic(path, window_rows=3))


def test_rows_are_read_as_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "endless.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\n" + "not JSON\n", encoding="utf-8")
    plans = open_trace(path).arrivals()
    assert next(plans).arrival_s == 0.0
    with pytest.raises(TraceError, match=r"endless\.jsonl:2: not JSON"):
        next(plans)


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    assert len(plans_of(path)) == 2
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match=r"m\.jsonl\.gz"):
        plans_of(path)


def first_field(**changes: object) -> list[Any]:
    return [{**MOONCAKE[0], **changes}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (first_field(timestamp=None), "1: timestamp is missing"),
        (first_field(timestamp=-1), "1: timestamp must be a number of 0 or more, not -1"),
        (first_field(timestamp="0"), "1: timestamp must be a number"),
        (first_field(input_length=True), "1: input_length must be a number"),
        (first_field(input_length=1e400), "1: input_length must be a number"),
        (first_field(input_length=10**400), "1: input_length must be a number"),
        (first_field(input_length=1.5), "1: input_length must be a whole number of tokens"),
        (first_field(input_length=10**12), "1: input_length must be a whole number of tokens"),
        (first_field(hash_ids=[1, "2"]), "1: hash_ids must be a list of int"),
        (first_field(hash_ids=[1, 2, 3, 4]), "1: hash_ids has 4 blocks of 512 tokens"),
        ([MOONCAKE[1], MOONCAKE[0]], "2: timestamp goes back"),
        ([MOONCAKE[0], 7], "2: not a JSON object"),
        ([MOONCAKE[0], [[]]], "2: not a JSON object"),
        (
            [{"x": 1}],
            "1: neither a Mooncake nor an Azure trace: wanted is a JSON object with 'request_id', "
            "or with 'timestamp' and 'input_length', or a CSV header with TIMESTAMP, ",
        ),
        ([AGENTIC[0], AGENTIC[0]], "2: request_id 'r1' is there twice"),
        ([AGENTIC[0], {**AGENTIC[1], "wait_for": ["nope"]}], "2: waits for 'nope'"),
        ([{**AGENTIC[0], "request_id": 3}], "1: request_id must be a text"),
        ([{**AGENTIC[0], "session_id": 3}], "1: session_id must be a text"),
        ([{**AGENTIC[0], "timestamp": None}], "1: timestamp is missing"),
        ([AGENTIC[0], {**AGENTIC[1], "delay": -5}], "2: delay must be a number of 0 or more"),
    ],
)
def test_wrong_rows_are_refused_with_their_place(
    tmp_path: Path, rows: list[Any], message: str
) -> None:
    path = jsonl(tmp_path / "t.jsonl", rows)
    with pytest.raises(TraceError) as caught:
        plans_of(path)
    assert f"{path}:{message}" in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE.replace("ContextTokens", "Context"), ":1: no column ContextTokens"),
        (AZURE.replace("110", "many"), ":3: ContextTokens must be a whole number, not 'many'"),
        (AZURE.replace("110,27", "110"), ":3: 2 cells, the header has 3"),
        (AZURE.replace("110,27", "-1,27"), ":3: ContextTokens must be a number of 0 or more"),
        (AZURE.replace("18:17:04", "yesterday"), ":3: TIMESTAMP is no date and time"),
        (AZURE.replace("18:17:04", "18:17:01"), ":3: TIMESTAMP goes back"),
        ("", ": empty"),
    ],
)
def test_wrong_azure_rows_are_refused_with_their_place(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        plans_of(path, "azure")
    assert f"{path}{message}" in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match="no trace format 'nope'; there are auto, agentic_mooncake"
    ):
        open_trace(tmp_path / "m.jsonl", "nope")
    with pytest.raises(TraceError, match="No such file"):
        open_trace(tmp_path / "m.jsonl")
    (tmp_path / "empty").touch()
    with pytest.raises(TraceError, match="empty"):
        open_trace(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"{\xff\xfe}\n")
    with pytest.raises(TraceError, match=r"binary:1: not UTF-8"):
        open_trace(tmp_path / "binary")
    (tmp_path / "long").write_bytes(b" " * (MAX_LINE_BYTES + 1))
    with pytest.raises(TraceError, match=r"long:1: longer than"):
        open_trace(tmp_path / "long")
    (tmp_path / "deep").write_bytes(b"[" * 200_000)
    with pytest.raises(TraceError, match=r"deep:1: "):
        open_trace(tmp_path / "deep")


# Whatever is in a file, it is read or refused; and what is read is well formed.

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5000),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from(["a", "b", "c"])), max_size=4),
)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "request_id": st.one_of(st.sampled_from("abcdef"), VALUES),
        "session_id": st.one_of(st.sampled_from("st"), VALUES),
        "timestamp": st.one_of(st.integers(0, 10_000), VALUES),
        "delay": VALUES,
        "tool_wait_ms": VALUES,
        "wait_for": st.lists(st.sampled_from("abcdef"), max_size=3),
        "input_length": st.one_of(st.integers(1, 4000), VALUES),
        "output_length": st.one_of(st.integers(1, 4000), VALUES),
        "hash_ids": st.lists(st.integers(0, 9), max_size=8),
    },
)


def well_formed(plans: Iterator[ApplicationPlan]) -> int:
    """Checks up to the first error; gives the number of calls."""
    latest = 0.0
    calls = 0
    try:
        for plan in islice(plans, 1000):
            assert plan.arrival_s >= latest
            latest = plan.arrival_s
            assert [call.index for call in plan.calls] == list(range(len(plan.calls)))
            for call in plan.calls:
                calls += 1
                assert all(producer < call.index for producer in call.after)
                assert call.pause_s >= 0
                assert call.output_tokens >= 1
                assert sum(segment.tokens for segment in call.prompt) >= 1
                assert all(segment.tokens >= 1 for segment in call.prompt)
    except TraceError as error:
        message = str(error)
    else:
        message = ""
    assert not message or "trace.jsonl" in message
    return calls


# Rows take long to draw where other work runs beside.
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ROWS, max_size=8), st.sampled_from(["agentic_mooncake", "mooncake"]))
def test_any_rows_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], trace_format: str
) -> None:
    path = jsonl(tmp_path_factory.getbasetemp() / "trace.jsonl", rows)
    well_formed(open_trace(path, trace_format).arrivals())


@given(st.binary(max_size=200), st.sampled_from(["auto", "agentic_mooncake", "mooncake", "azure"]))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, trace_format: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "trace.jsonl"
    path.write_bytes(content)
    try:
        workload = open_trace(path, trace_format)
    except TraceError:
        return
    well_formed(workload.arrivals())


@given(st.lists(st.tuples(st.integers(0, 5000), st.sets(st.integers(0, 7))), max_size=8))
def test_every_row_of_a_good_file_becomes_one_call(
    tmp_path_factory: pytest.TempPathFactory, graph: list[tuple[int, set[int]]]
) -> None:
    rows = []
    for number, (at, wait_for) in enumerate(graph):
        earlier = sorted(producer for producer in wait_for if producer < number)
        rows.append(
            {
                "request_id": f"r{number}",
                "timestamp": at,
                "wait_for": [f"r{producer}" for producer in earlier],
                "input_length": 100 + number,
                "output_length": 1 + number,
            }
        )
    path = jsonl(tmp_path_factory.getbasetemp() / "trace.jsonl", rows)
    assert well_formed(open_trace(path, "agentic_mooncake").arrivals()) == len(rows)
