"""Export of calls, as gateways in a row decide it."""

from __future__ import annotations

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.telemetry.call_record import CallRecord, CallRecords
from parrot_gateway.telemetry.trace_context import (
    TRACEPARENT,
    CallTrace,
    is_sampled,
    session_span_id,
    session_trace_id,
)

RATIOS = st.sampled_from((0.0, 0.3, 1.0))


def sent_on(record: CallRecord) -> dict[bytes, bytes]:
    headers = record.outgoing_headers([(b"accept", b"*/*")])
    assert len(headers) == len(dict(headers))
    return dict(headers)


def record(ratio: float, headers: dict[bytes, bytes], session: str | None = None) -> CallRecord:
    made = CallRecord("req_1", "call_1", 0.0, session=session)
    CallRecords(ratio).begin(made, "/v1/chat/completions", headers)
    return made


@given(RATIOS, RATIOS, st.none() | st.text(min_size=1))
def test_a_gateway_behind_another_exports_the_same_calls(
    first: float, second: float, session: str | None
) -> None:
    front = record(first, {}, session)
    headers = sent_on(front)
    back = record(second, headers)
    sent_on(back)
    assert front.trace is not None
    assert back.trace is not None
    assert back.trace.sampled == front.trace.sampled
    if front.trace.sampled:
        assert back.trace.trace_id == front.trace.trace_id
        assert back.trace.parent_id == front.trace.span_id


def test_nothing_is_sent_on_where_no_traces_are_made() -> None:
    made = CallRecord("req_1", "call_1", 0.0)
    assert sent_on(made) == {b"accept": b"*/*"}


def test_the_lower_half_of_the_id_decides_as_in_opentelemetry() -> None:
    low, middle, high = 1, 1 << 63, (1 << 64) - 1
    for upper in (0, 1 << 64, ((1 << 64) - 1) << 64):
        told = [is_sampled(upper + lower, 0.5) for lower in (low, middle - 1, middle, high)]
        assert told == [True, True, False, False]
        assert is_sampled(upper + high, 1.0)
        assert not is_sampled(upper, 0.0)


@pytest.mark.parametrize(("version", "is_read"), [("00", False), ("01", True), ("ff", False)])
def test_only_later_versions_may_have_more_fields(version: str, is_read: bool) -> None:
    header = f"{version}-{7:032x}-{9:016x}-01-more"
    trace = CallTrace.of_client(header.encode())
    assert (trace is not None) == is_read
    if trace is not None:
        assert (trace.trace_id, trace.parent_id, trace.sampled) == (7, 9, True)


@pytest.mark.parametrize(
    "text", ["", "00-0-0-01", f"00-{'0' * 32}-{'1' * 16}-01", "ff-" + "1" * 49]
)
def test_a_malformed_header_is_replaced(text: str) -> None:
    headers = sent_on(record(1.0, {TRACEPARENT: text.encode()}))
    assert re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers[TRACEPARENT])
    assert CallTrace.of_client(headers[TRACEPARENT]) is not None


@pytest.mark.parametrize(
    ("trace", "moves"),
    [
        (CallTrace(5, 7), True),
        (CallTrace(5, 7, parent_id=9), False),
        (CallTrace(5, 7, sent_on=True), False),
    ],
)
def test_a_trace_joins_its_session_while_nobody_has_been_told_of_it(
    trace: CallTrace, moves: bool
) -> None:
    trace.move(8)
    assert (trace.trace_id, trace.span_id) == (8 if moves else 5, 7)
    sent = dict(trace.headers([(TRACEPARENT, b"old"), (b"accept", b"*/*")]))
    value = b"00-%032x-%016x-01" % (trace.trace_id, 7)
    assert sent == {b"accept": b"*/*", TRACEPARENT: value}
    assert trace.sent_on


def test_of_traces_that_are_not_exported_only_the_clients_goes_on() -> None:
    client = b"00-%032x-%016x-00" % (5, 7)
    made = CallTrace.of_client(b" " + client + b" ")
    assert made is not None
    assert made.headers([(TRACEPARENT, client)]) == [(TRACEPARENT, client)]
    own = CallTrace.choose("t", "s", 0.0)
    sent = [dict(own.headers([]))[TRACEPARENT] for _ in range(2)]
    assert all(re.fullmatch(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-00", each) for each in sent)
    assert sent[0] != sent[1]
    assert (own.sent_on, made.sent_on) == (False, False)


def test_ids_are_made_of_a_session_and_the_part_of_it() -> None:
    """Other processes come to the same: these values may not change."""
    assert session_trace_id("t", "s") == int.from_bytes(hashlib.sha256(b"t\0s").digest()[:16])
    ids = [session_span_id(5), session_span_id(5, 0), session_span_id(5, 1), session_span_id(6)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    assert session_trace_id("ts", "") != session_trace_id("t", "s")
