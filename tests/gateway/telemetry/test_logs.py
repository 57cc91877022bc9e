"""One format for all lines, in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parrot_gateway.telemetry.logs import CALL_FIELDS, COMMON_FIELDS

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
