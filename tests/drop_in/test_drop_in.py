"""Programs of this folder whose libraries this environment has; `make drop-in` runs them all."""

from __future__ import annotations

import sys

import pytest
from drop_in.compatibility import HERE, fault_of, programs, run, table
from harness.clever_engine import FACTS, REPORT
from harness.gateway.serving import Service

#: What `make test` needs for other tests anyway.
HERE_TOO = ("p_openai_chat", "p_openai_responses", "p_langgraph")


@pytest.mark.parametrize("name", HERE_TOO)
async def test_a_program_works_by_its_base_url_alone(clever: Service, name: str) -> None:
    program = HERE / "programs" / f"{name}.py"
    outcome = await run(program, sys.executable, f"{clever.root}/v1", "clever", True)
    assert outcome.fault == "", outcome.details
    assert outcome.version


async def test_a_program_that_breaks_is_told_of(clever: Service) -> None:
    program = HERE / "programs" / "p_openai_chat.py"
    outcome = await run(program, sys.executable, f"{clever.root}/v0", "clever", True)
    assert outcome.fault.startswith("openai.NotFoundError")
    assert "unknown_route" in outcome.details


RIGHT = {"called": ["Paris"], "text": f"Sure. {REPORT}", "structured": FACTS}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"called": []}, "calls of the tool"),
        ({"called": ["Paris", "Rome"]}, "calls of the tool"),
        ({"text": "Sunny."}, "text: "),
        ({"structured": None}, "structured output"),
        ({"structured": {"city": "Paris", "temperature": "21"}}, "structured output"),
        ({"structured": {"city": "Rome", "temperature": 21}}, "structured output"),
    ],
)
def test_what_counts_as_working(change: dict[str, object], fault: str) -> None:
    found = fault_of({**RIGHT, **change}, clever=True)
    assert found.startswith(fault)
    assert bool(found) == bool(fault)


def test_any_document_of_the_schema_does_for_a_model_that_follows_nothing() -> None:
    seen = {**RIGHT, "called": [], "text": "", "structured": {"city": "", "temperature": -1}}
    assert fault_of(seen, clever=False) == ""
    assert fault_of({**seen, "structured": {"city": ""}}, clever=False)


def test_every_program_has_a_line_in_the_table() -> None:
    found = programs()
    assert len(found) >= 20
    written = (HERE.parents[1] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for row in table(found, []).splitlines()[2:]:
        assert row.rpartition(" | ")[0] in written
