"""Export of calls, as gateways in a row decide it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot_gateway.telemetry.call_record import CallRecord, CallRecords
from parrot_gateway.telemetry.trace_context import TRACEPARENT, CallTrace, is_sampled

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
