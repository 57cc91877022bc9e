"""The lines of batches, what a killed process leaves of them, and the states of a batch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from parrot_gateway.batches.batch import Batch, Status
from parrot_gateway.batches.journal import Journal
from parrot_gateway.batches.lines import (
    MAX_ERRORS,
    BatchLine,
    LineAnswer,
    LineUsage,
    answer_line,
    parse_line,
    raw_lines,
    read_written,
    single_line,
    validate,
)

URL = "/v1/chat/completions"
BATCH_ID = "batch_parrot_0123"
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "custom_id": st.text(min_size=1) | JSON,
        "method": st.just("POST") | JSON,
        "url": st.just(URL) | JSON,
        "body": st.fixed_dictionaries({"model": st.just("m")}, optional={"x": JSON}) | JSON,
        "more": JSON,
    },
)


def good(custom_id: str, **body: Any) -> bytes:
    body = {"model": "m", **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": body}).encode()


@given(raw=st.binary() | FIELDS.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_request_or_a_fault(raw: bytes) -> None:
    line = parse_line(raw, 7, URL)
    if isinstance(line, BatchLine):
        given_line = json.loads(raw)
        assert given_line["custom_id"] == line.custom_id
        assert given_line["body"] == json.loads(line.body)
        assert given_line["body"]["model"] == line.model
    else:
        assert (line.line, bool(line.code), bool(line.message)) == (7, True, True)


@given(lines=st.lists(st.binary(max_size=40).filter(lambda raw: b"\n" not in raw)))
def test_lines_are_numbered_and_bounded(lines: list[bytes]) -> None:
    found = list(raw_lines(io.BytesIO(b"\n".join(lines)), 20))
    shown = [(n, raw) for n, raw in enumerate(lines, 1) if raw.strip() or len(raw) > 20]
    # An over-long blank line is no line either way.
    assert [n for n, _ in found] == [n for n, raw in shown]
    for (_, raw), (_, whole) in zip(found, shown, strict=True):
        assert raw == whole.strip() if len(whole) <= 20 else whole.startswith(raw[:20])


@given(ids=st.lists(st.text(min_size=1, max_size=5)))
def test_custom_ids_are_unique(ids: list[str]) -> None:
    content = b"\n".join(map(good, ids))
    found = validate(io.BytesIO(content), URL, max_lines=10_000, max_line_bytes=10_000)
    if ids:
        assert found.total == len(ids) or len(found.errors) == MAX_ERRORS
        assert len(found.errors) == min(MAX_ERRORS, len(ids) - len(set(ids)))
    else:
        assert [error.code for error in found.errors] == ["empty_file"]


def test_faults_are_bounded() -> None:
    found = validate(io.BytesIO(b"{\n" * 10_000), URL, max_lines=50_000, max_line_bytes=100)
    assert len(found.errors) == MAX_ERRORS


@pytest.mark.parametrize(
    "raw",
    [
        good("a").replace(b'"m"', b"[" * 100_000),
        good("a").replace(b'"a"', b"[" * 100_000 + b"]" * 100_000),
        good("a").replace(b'"m"', b'"m", "x": ' + b"[" * 100_000 + b"]" * 100_000),
        good("a").replace(b'"a"', b'"\\ud800"'),
        good("a").replace(b'"a"', b'"\xff"'),
        b"[1]",
        b"null",
    ],
    ids=range(7),
)
def test_odd_lines_are_faults(raw: bytes) -> None:
    assert not isinstance(parse_line(raw, 1, URL), BatchLine)


@given(custom_id=st.text(min_size=1), body=st.dictionaries(st.text(), JSON))
def test_answers_are_one_line_each_and_can_be_read_back(
    custom_id: str, body: dict[str, Any]
) -> None:
    body = {**body, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    flat = single_line(json.dumps(body, indent=2).encode())
    assert flat is not None
    line = BatchLine(12, custom_id, "m", b"{}")
    written = answer_line(BATCH_ID, line, LineAnswer(200, "req_1", flat))
    assert (written.count(b"\n"), written.endswith(b"\n")) == (1, True)
    decoded = json.loads(written)
    assert (decoded["custom_id"], decoded["response"]["body"]) == (custom_id, body)
    assert read_written(written) == (12, LineUsage(3, 0, 2, 0))


@pytest.mark.parametrize("body", [b"", b"[1]", b"<html>", b"{", b'{"a": "\xff"}'])
def test_what_is_no_object_is_no_answer(body: bytes) -> None:
    assert single_line(body) is None


@given(data=st.data())
def test_a_journal_survives_a_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    output, errors = folder / "o", folder / "e"
    journal = Journal(output, errors)
    numbers = data.draw(st.lists(st.integers(1, 30), unique=True, min_size=1))
    for number in numbers:
        body = b'{"usage":{"input_tokens":1,"output_tokens":2}}'
        answer = LineAnswer(200, "req", body)
        written = answer_line(BATCH_ID, BatchLine(number, f"{number}", "m", b"{}"), answer)
        assert journal.add(number, written, succeeded=True)
        assert not journal.add(number, written, succeeded=False)
    whole = output.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    output.write_bytes(whole[:cut])
    again = Journal(output, errors)
    kept = whole[:cut].count(b"\n")
    assert again.done == set(numbers[:kept])
    assert (again.completed, again.failed) == (kept, 0)
    assert again.usage == LineUsage(kept, 0, 2 * kept, 0)
    assert output.read_bytes() == whole[: len(output.read_bytes())]
    again.close()
    assert not again.add(99, b"{}\n", succeeded=True)


class BatchStates(RuleBasedStateMachine):
    """Any order of changes: only those of the diagram happen, and an end is an end."""

    @initialize()
    def make(self) -> None:
        self.batch = Batch(BATCH_ID, "default", URL, "file-parrot-1", 0, 10)
        self.now = 0

    @rule(status=st.sampled_from(get_args(Status)))
    def change(self, status: Status) -> None:
        self.now += 1
        had_ended, before = self.batch.has_ended, self.batch.status
        if self.batch.can_become(status):
            self.batch.become(status, self.now)
            assert not had_ended
            assert self.batch.reached[status] == self.now
        else:
            with pytest.raises(ValueError, match="cannot become"):
                self.batch.become(status, self.now)
            assert self.batch.status == before

    @invariant()
    def times_grow(self) -> None:
        times = list(self.batch.reached.values())
        assert times == sorted(times)
        assert len(times) <= 3
        assert bool(self.batch.ended_at) == self.batch.has_ended


TestBatchStates = BatchStates.TestCase


def test_the_folder_of_a_journal_may_be_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "o", tmp_path / "e")
    journal.close()
    assert (journal.done, list(tmp_path.iterdir())) == (set(), [])
