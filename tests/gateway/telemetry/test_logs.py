"""One format for all lines, in a process of its own."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness.waiting import until

from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.key_hiding import hide_keys
from parrot_gateway.telemetry.logs import (
    CALL_FIELDS,
    CALLS,
    COMMON_FIELDS,
    CallLog,
    Log,
    LogFormat,
    set_log_level,
)

PROGRAM = """
import logging, sys, warnings
warnings.simplefilter("always")
from parrot_gateway.telemetry.call_record import CallRecord
from parrot_gateway.telemetry.logs import CallLog, configure_logging, set_log_level
for log_format in ("text", "json"):
    log = configure_logging("info", log_format, sys.stdout)
    logger = logging.getLogger("some.library")
    logger.debug("not shown")
    logger.info("the key is %s", "sk-abcdefgh12345678")
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("it failed")
    warnings.warn("old")
    record = CallRecord("req_1", "call_1", 1.0, "/v1/completions", model="a\\n\\x1b[31mb")
    record.status, record.ended = 200, 1.5
    CallLog(log, False)(record)
    CallLog(log, True)(record)
    set_log_level("error")
    CallLog(log, True)(record)
    logger.warning("not shown either")
    print("---")
"""


@pytest.fixture(scope="module")
def logs() -> list[list[str]]:
    """Lines in both formats."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True
    )
    return [part.strip().splitlines() for part in ran.stdout.split("---\n")[:2]]


def test_text(logs: list[list[str]]) -> None:
    head = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (INFO   |WARNING|ERROR  ) ([\w.]+): ")
    lines = [line for line in logs[0] if head.match(line)]
    assert lines[0].endswith(" INFO    some.library: the key is sk-…")
    assert lines[1].endswith(" ERROR   some.library: it failed")
    assert "ZeroDivisionError: division by zero" in logs[0], "behind its line"
    assert "py.warnings: " in lines[2]
    assert lines[-1].endswith(
        r"parrot_gateway.calls: call path=/v1/completions status=200 duration_ms=500.0 "
        r"model='a\n\x1b[31mb' tenant=default call_id=call_1 request_id=req_1"
    )
    assert len(lines) == 4


def test_json(logs: list[list[str]]) -> None:
    lines = [json.loads(line) for line in logs[1]]
    assert [line["level"] for line in lines] == ["info", "error", "warning", "info"]
    assert all(re.fullmatch(r"[-\d]{10}T[:\d]{8}\.\d{3}Z", line["timestamp"]) for line in lines)
    assert lines[0]["event"] == "the key is sk-…"
    assert lines[1]["exception"].endswith("ZeroDivisionError: division by zero")
    assert lines[3]["model"] == "a\n\x1b[31mb"


@pytest.fixture(autouse=True)
def level_of_calls(caplog: pytest.LogCaptureFixture) -> None:
    """Lines of calls are logged from info on, whatever other tests have set."""
    caplog.set_level(logging.INFO, CALLS)


def logged(record: CallRecord, *, logs_all: bool) -> list[dict[str, Any]]:
    """The lines of one call."""
    stream = io.StringIO()
    CallLog(Log(stream, "json"), logs_all)(record)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("status", "error_code", "level"),
    [
        (200, None, None),
        (400, "invalid_value", None),
        (499, "cancelled", None),
        (500, "server_error", "warning"),
        # An error within a stream that had begun.
        (200, "upstream_error", "warning"),
    ],
)
def test_calls_that_fail_by_no_fault_of_their_caller_are_warnings(
    status: int, error_code: str | None, level: str | None
) -> None:
    record = CallRecord("req_1", "call_1", 1.0, "/v1/completions", ended=2.0)
    record.status, record.error_code = status, error_code
    assert [line["level"] for line in logged(record, logs_all=False)] == [level][
        : level is not None
    ]
    assert [line["level"] for line in logged(record, logs_all=True)] == [level or "info"]


def test_times_of_a_call_that_waited_for_its_inputs() -> None:
    record = CallRecord(
        *("req_1", "call_1", 10.0, "/v1/completions"), ready=14.0, submitted=14.5, queued_s=1.5,
        placed=16.0, first_token=16.25, ended=18.0, status=200, model="m", served_model="m",
    )  # fmt: skip
    (line,) = logged(record, logs_all=True)
    times = {name: value for name, value in line.items() if name.endswith("_ms")}
    assert times == {
        "duration_ms": 8000.0,
        "waited_ms": 4000.0,
        "prepared_ms": 500.0,
        "queued_ms": 1500.0,
        "first_token_ms": 2250.0,
    }
    assert "served_model" not in line


def test_a_line_holds_all_that_is_known_of_a_call() -> None:
    record = CallRecord(
        "req_1", "call_1", 10.0, path="/v1/x", tenant="acme", session="sess", batch="batch",
        model="a" * 300, served_model="s" * 300, engine="engine", reason="prefix",
        explanation="with 3 others", ready=11.0, submitted=11.5, placed=12.0,
        first_token=13.0, ended=14.0, queued_s=0.25, prompt_tokens=7, cached_tokens=5,
        output_tokens=3, status=503, error_code="broke", error_message="It broke.",
        finish_reason="length", streamed=True, deferred=True, client_left=True,
        tried=("other=timeout",),
        lost_engines=("first", "second"),
    )  # fmt: skip
    stream = io.StringIO()
    CallLog(Log(stream, "json"), False)(record)
    line = json.loads(stream.getvalue())
    assert re.fullmatch(r"[-\d]{10}T[:\d]{8}\.\d{3}Z", line.pop("timestamp"))
    assert line == {
        "level": "warning", "logger": CALLS, "event": "call failed", "path": "/v1/x",
        "status": 503, "duration_ms": 4000.0, "model": "a" * 200, "served_model": "s" * 200,
        "engine": "engine", "lost_engines": ["first", "second"], "reason": "prefix",
        "tried": ["other=timeout"], "prompt_tokens": 7, "cached_tokens": 5, "output_tokens": 3,
        "waited_ms": 1000.0, "prepared_ms": 500.0, "queued_ms": 250.0,
        "first_token_ms": 2000.0, "finish_reason": "length", "streamed": True, "deferred": True,
        "client_left": True, "error_code": "broke", "error_message": "It broke.",
        "tenant": "acme", "session": "sess", "batch": "batch", "call_id": "call_1",
        "request_id": "req_1",
    }  # fmt: skip
    # The least that a line says; without inputs to wait for its times begin with the request.
    (line,) = logged(CallRecord("req", "call", 10.0, submitted=10.5), logs_all=True)
    del line["timestamp"]
    assert line == {
        "level": "info", "logger": CALLS, "event": "call", "path": "", "status": 0,
        "prepared_ms": 500.0, "tenant": "default", "call_id": "call", "request_id": "req",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("plain/é-1", "plain/é-1"),
        ("two words", '"two words"'),
        ("", '""'),
        ('a"b', r'"a\"b"'),
        ("a=b", '"a=b"'),
        ("it's", '"it\'s"'),
        ("back\\", r'"back\\"'),
        ("line\nend", r"'line\nend'"),
        ("\u202e", r"'\u202e'"),
    ],
)
def test_values_stay_on_one_line_of_text(value: str, shown: str) -> None:
    stream = io.StringIO()
    record = CallRecord("req", "call", 0.0, "/v1/x", status=200, model=value, prompt_tokens=0)
    CallLog(Log(stream, "text"), True)(record)
    assert stream.getvalue()[23:] == (
        f" INFO    {CALLS}: call path=/v1/x status=200 model={shown} prompt_tokens=0"
        " tenant=default call_id=call request_id=req\n"
    )


@pytest.mark.parametrize(
    ("log_format", "shape"),
    [("json", "%Y-%m-%dT%H:%M:%S.{:03}Z"), ("text", "%Y-%m-%d %H:%M:%S,{:03}")],
)
def test_a_line_has_its_own_time_to_the_millisecond(
    log_format: LogFormat, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    moments = [1e9, 1e9 + 0.25, 1e9 + 0.0625, 1e9 + 61.5]
    stream, zone_s = io.StringIO(), 0 if log_format == "json" else (5 * 60 + 45) * 60
    log = Log(stream, log_format)
    for moment in moments:
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        log.call(CallRecord("req", "call", 0.0), "info", "call")
    monkeypatch.undo()
    time.tzset()
    times = [time.strftime(shape, time.gmtime(each + zone_s)) for each in moments]
    lines = stream.getvalue().splitlines()
    for line, text, each in zip(lines, times, moments, strict=True):
        assert text.format(int(each % 1 * 1000)) in line


async def test_lines_of_calls_are_held_a_moment_and_stay_in_order() -> None:
    raw = io.BytesIO()
    log = Log(io.TextIOWrapper(raw), "json")

    def events_() -> list[str]:
        return [json.loads(line)["event"] for line in raw.getvalue().splitlines()]

    record = CallRecord("req", "call", 0.0)
    # As many as are held at once.
    for number in range(65):
        assert events_() == []
        log.call(record, "info", str(number))
        if number == 63:
            assert events_() == [str(each) for each in range(64)]
            raw.truncate(0)
            raw.seek(0)
    log.write('{"event": "between"}\n')
    log.call(record, "info", "last")
    assert events_() == []
    log.flush()
    assert events_() == ["64", "between", "last"]
    for number in range(2):
        log.call(record, "info", f"late {number}")
        await until(lambda number=number: f"late {number}" in events_())


def test_levels_hold_for_calls_and_for_libraries_that_say_too_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed, fine = (CallRecord("req", "call", 0.0, status=status) for status in (500, 200))
    for changed in ("", "uvicorn", "websockets", "urllib3", CALLS):
        caplog.set_level(logging.NOTSET, changed)
    levels = []
    for level in ("debug", "info", "warning", "error"):
        set_log_level(level)
        loggers = map(logging.getLogger, ("", "uvicorn", "websockets.server", "urllib3"))
        shown = [logging.getLevelName(each.getEffectiveLevel()) for each in loggers]
        lines = [len(logged(each, logs_all=True)) for each in (failed, fine)]
        levels.append((*shown, *lines))
    assert levels == [
        ("DEBUG", "WARNING", "WARNING", "WARNING", 1, 1),
        ("INFO", "WARNING", "WARNING", "WARNING", 1, 1),
        ("WARNING", "WARNING", "WARNING", "WARNING", 1, 0),
        ("ERROR", "ERROR", "ERROR", "ERROR", 0, 0),
    ]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("sk-abcdefg1", "sk-…"),
        ("sk-abcdef1", "sk-abcdef1"),
        ("sk-" + "a" * 20, "sk-…"),
        ("sk-" + "a" * 19, "sk-" + "a" * 19),
        ("a task-12345678", "a task-12345678"),
        ("BEARER abcd.1234", "BEARER …"),
        ("Bearer of bad news", "Bearer of bad news"),
        *((f"({prefix}12345678)", f"({prefix}…)") for prefix in
          ("hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "gsk_", "xai-", "AIza", "AKIA")),
        ("two: sk-12345678, xai-12345678.", "two: sk-…, xai-…"),
    ],
)  # fmt: skip
def test_what_looks_like_a_key_is_hidden(text: str, hidden: str) -> None:
    assert hide_keys(text) == hidden


def test_fields_are_documented() -> None:
    """Each in the tables of the page, in the order in which they are written, and no other."""
    page = Path(__file__).parents[3] / "docs" / "observability.md"
    text = page.read_text(encoding="utf-8").split("\n## The log\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == [*COMMON_FIELDS, *CALL_FIELDS]


def test_what_nothing_handles_is_a_line_of_the_log() -> None:
    program = """
import threading
from parrot_gateway.telemetry.logs import configure_logging, log_uncaught
configure_logging("info", "json")
log_uncaught()
thread = threading.Thread(target=lambda: int("of a thread"))
thread.start()
thread.join()
int("of the process")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["critical", "critical"]
    assert "of a thread" in lines[0]["exception"]
    assert "of the process" in lines[1]["exception"]
    assert ran.returncode == 1
