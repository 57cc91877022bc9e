"""`parrot-gateway top`: what it shows, in terminals of any size and in a pipe, and its keys."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from contextlib import suppress
from typing import Any

import pytest
from harness.processes import DEADLINE_S, GatewayProcess, clean_environment, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from parrot_gateway.cli.main import app
from parrot_gateway.cli.top import View

NOW = 1000.0


def engine(name: str, state: str = "serving", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "name": name, "model": "m", "state": state, "running": 2, "waiting": 1,
        "max_batch_size": 8, "kv_used": 30, "kv_total": 100, "prefix_hit_rate": 0.5,
        "step_ms": 12.34, "tokens_per_s": 3456.0, **more,
    }  # fmt: skip


def session(name: str, **more: Any) -> dict[str, Any]:
    return {
        "id": f"id-{name}", "name": name, "title": name, "state": "running", "calls": 3,
        "running": 1, "failed": 0, "depth": 2, "width": 3, "prompt_tokens": 1500,
        "output_tokens": 20, "last_activity": NOW - 5, **more,
    }  # fmt: skip


def tenant(calls: int = 10, tokens: int = 100) -> dict[str, Any]:
    return {
        "tenant": "default", "calls": calls, "running": 1, "prompt_tokens": 2_000_000,
        "cached_tokens": 500_000, "output_tokens": tokens, "errors": 1,
    }  # fmt: skip


def overview(**more: Any) -> dict[str, Any]:
    return {
        "at": NOW, "version": "1.2", "uptime_s": 7300, "draining": False,
        "calls": {"running": 1, "accepted": 10, "refused": 0}, "models": ["m"],
        "engines": [engine("e")], "tenants": [tenant()], "sessions": [session("app")],
        "scheduler": {
            "policy": "parrot", "held": [],
            "queues": [{"model": "m", "waiting": 4, "held": 2, "oldest_s": 1.25}],
        },
        **more,
    }  # fmt: skip


def view_of(**more: Any) -> View:
    view = View(lambda: NOW)
    view.apply("overview", overview(**more))
    return view


def text(view: View, width: int = 1000, height: int | None = None) -> str:
    return "\n".join(line.plain for line in view.lines(width, height))


def test_everything_at_a_glance() -> None:
    held = {"application": "a", "tasks": 4, "why": "no room", "since": NOW - 7}
    scheduler = {**overview()["scheduler"], "held": [held]}
    upstream = engine("up", "draining", max_batch_size=None, kv_used=None, kv_total=None,
                      prefix_hit_rate=None, step_ms=None, tokens_per_s=None)  # fmt: skip
    shown = text(view_of(engines=[engine("e"), upstream], scheduler=scheduler, draining=True))
    assert [line.split() for line in shown.splitlines() if line] == [
        ["Parrot", "Gateway", "1.2", "up", "2h", "draining"],
        ["1", "calls", "running", "1", "of", "1", "sessions", "active"],
        ["ENGINE", "STATE", "BATCH", "WAIT", "KV", "HITS", "STEP", "ms", "TOK/S"],
        ["e", "serving", "2/8", "1", "30", "%", "50", "%", "12.3", "3,456"],
        ["up", "draining", "2", "1", "-", "-", "-", "-"],
        ["QUEUE", "(parrot)", "WAIT", "HELD", "OLDEST", "s"],
        ["m", "4", "2", "1.2"],
        ["held", "7s:", "a", "(4", "calls):", "no", "room"],
        ["TENANT", "CALLS", "RUN", "PROMPT", "CACHED", "OUTPUT", "ERRORS"],
        ["default", "10", "1", "2.0M", "25", "%", "100", "1"],
        ["SESSION", "(by", "activity)", "STATE", "CALLS", "RUN", "FAIL", "GRAPH", "PROMPT",
         "OUTPUT", "AGO"],
        ["app", "running", "3", "1", "0", "2x3", "1.5k", "20", "5s"],
    ]  # fmt: skip


def test_events_change_it_and_give_rates() -> None:
    now = NOW
    view = View(lambda: now)
    view.apply("overview", overview(engines=[engine("up", tokens_per_s=None)]))
    now += 2
    view.apply("tenants", [tenant(calls=30, tokens=500)])
    view.apply("sessions", [session("other"), session("app", state="idle")])
    assert "10.0 calls/s  200 tokens/s  1 of 2 sessions active" in text(view)
    view.apply("sessions", {"gone": ["id-app"]})
    view.apply("engines", [engine("new", "lost"), engine("other")])
    assert "10.0 calls/s  6,912 tokens/s" in text(view)
    assert "1 of 1 sessions" in text(view)
    assert "new" in text(view)
    assert " app" not in text(view)


def test_rates_are_those_of_the_last_seconds() -> None:
    now = NOW
    view = View(lambda: now)
    view.apply("overview", overview(tenants=[tenant(calls=0)]))
    for calls in (10, 30, 60):
        now += 2
        view.apply("tenants", [tenant(calls=calls)])
    assert "10.0 calls/s" in text(view)
    now += 2
    view.apply("tenants", [tenant(calls=100)])
    assert "15.0 calls/s" in text(view)


def test_keys_sort_sessions() -> None:
    sessions = [session("busy", calls=90, last_activity=1), session("fresh", calls=2)]
    view = view_of(sessions=sessions)

    def first() -> str:
        shown = text(view)
        return "busy" if shown.index("busy") < shown.index("fresh") else "fresh"

    assert first() == "fresh"
    view.press("r")
    assert first() == "busy"
    for key in "rss":
        view.press(key)
    assert (first(), "(by calls)" in text(view)) == ("busy", True)


def test_a_narrow_terminal_has_fewer_columns_and_no_cut_ones() -> None:
    view = view_of(engines=[engine("a-name-of-some-length-0")])
    titles = [line.split() for line in text(view, 40).splitlines() if line[:2].isupper()]
    assert titles[0] == ["ENGINE", "STATE", "BATCH", "WAIT", "KV"]
    assert not [word for line in titles for word in line[1:] if "…" in word]
    assert "TOK/S" in text(view, 100)


@settings(max_examples=25)
@given(
    width=st.integers(20, 120),
    height=st.integers(3, 60),
    names=st.lists(st.text(max_size=60), max_size=12),
    count=st.integers(0, 12),
)
def test_it_fits_any_terminal(width: int, height: int, names: list[str], count: int) -> None:
    view = view_of(
        engines=[engine(f"engine-{number}" * 9) for number in range(count)],
        sessions=[session(name, id=str(number)) for number, name in enumerate(names)],
    )
    lines = view.lines(width, height)
    assert len(lines) == height
    assert max(line.cell_len for line in lines) <= width
    assert all("\x1b" not in line.plain and "\n" not in line.plain for line in lines)
    # A pipe gets all of it.
    assert len(view.lines(1000, None)) == 12 + count + len(names)


def test_a_usual_terminal_cuts_no_figure() -> None:
    names = [f"Qwen/Qwen3-30B-A3B-Instruct-{number}-12ab34cd" for number in range(20)]
    shown = text(view_of(engines=[engine(name) for name in names]), 80, 24)
    assert shown.count("3,456") + int(shown.partition("… and ")[2].partition(" more")[0]) == 20
    assert shown.splitlines()[-1].startswith("q quit")


def test_a_pipe_gets_one_picture(relay: GatewayProcess) -> None:
    done = CliRunner().invoke(app, ["top"], env={"OPENAI_BASE_URL": relay.base_url})
    assert done.exit_code == 0, done.output
    assert "Parrot Gateway " in done.stdout
    assert "ENGINE " in done.stdout
    assert "TENANT " in done.stdout
    assert "\x1b" not in done.stdout


def test_a_gateway_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["top", "--base-url", "http://127.0.0.1:1"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert "No gateway answers" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_is_kept_up_to_date_until_a_key_ends_it(relay: GatewayProcess) -> None:
    ours, theirs = pty.openpty()
    seen = bytearray()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "parrot_gateway", "top"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=clean_environment(
                {"OPENAI_BASE_URL": relay.base_url, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
            ),
            start_new_session=True,
        )
        os.close(theirs)

        def shows(wanted: bytes) -> bool:
            # Once the other end is closed, there is an error in the place of an end.
            with suppress(OSError):
                if select.select([ours], [], [], 0)[0]:
                    seen.extend(os.read(ours, 65536))
            return wanted in seen

        wait_until(lambda: shows(b"(by activity)"), "the first picture")
        os.write(ours, b"s")
        wait_until(lambda: shows(b"(by running)"), "sessions sorted otherwise")
        os.write(ours, b"q")
        # What it writes has to be read, or it waits for that.
        wait_until(lambda: shows(b"") and process.poll() is not None, "the end")
        assert process.wait(DEADLINE_S) == 0, seen.decode(errors="replace")
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        os.close(ours)
