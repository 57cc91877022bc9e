"""The oracle: every kind of loss is seen, and a whole answer is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy

import pytest
from parrot_bench.chaos.answers import Answer, Choice
from parrot_bench.chaos.load import Phase, pauses
from parrot_bench.chaos.mix import KINDS, TOOL, Request, requests
from parrot_bench.chaos.oracle import Oracle, Verdict

MIX = {request.kind: request for request in requests("m", len(KINDS), 64)}


def answer(kind: str, **choice: object) -> Answer:
    """A whole answer of a kind."""
    request = MIX[kind]
    made = Choice(content="A story.", finish_reason="length", roles=1)
    if kind == "schema":
        made.content = '{"title": "x", "tags": ["old"], "pages": 3}'
    elif kind == "tools":
        made.content, made.tool, made.arguments = "", TOOL, '{"city": "Rome", "days": 2}'
        made.finish_reason = "tool_calls"
    elif kind == "logprobs":
        made.tokens = ["A", " story", "."]
    for name, value in choice.items():
        setattr(made, name, value)
    choices = [deepcopy(made) for _ in range(request.choices)]
    return Answer(request, 0.0, 1.0, choices, [0.1, 0.9], usage=(7, 3))


def judge(found: Answer) -> Verdict:
    return Oracle([answer(kind) for kind in KINDS]).judge([found])


def test_the_kinds_take_turns_and_each_call_is_another() -> None:
    mix = requests("m", 3 * len(KINDS), 64)
    assert [request.kind for request in mix[: len(KINDS)]] == list(KINDS)
    assert len({json.dumps(request.body) for request in mix}) == len(mix)
    assert {request.kind for request in mix if not request.is_repeatable} == {"chat"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_is_no_loss(kind: str) -> None:
    verdict = judge(answer(kind))
    assert (verdict.calls, verdict.lost, verdict.different) == (1, 0, 0)
    assert verdict.compared == (kind != "chat")


@pytest.mark.parametrize(
    ("kind", "content", "reason"),
    [
        ("greedy", "A story", "greedy: bytes missing at the end"),
        ("seeded", "A story. More", "seeded: bytes too many at the end"),
        ("n=4", "A stor story.", "n=4: other bytes"),
    ],
)
def test_other_bytes_are_differences(kind: str, content: str, reason: str) -> None:
    verdict = judge(answer(kind, content=content))
    assert (verdict.different, dict(verdict.reasons)) == (1, {reason: 1})


def test_another_end_is_a_difference() -> None:
    assert judge(answer("greedy", finish_reason="stop")).different == 1


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("schema", {"content": '{"title": "x", "tags": ["old"]'}),
        ("schema", {"content": '{"title": "x", "tags": [], "pages": 0}'}),
        ("tools", {"arguments": '{"city": "Rome", "days": 12}'}),
        ("tools", {"content": "Well, "}),
        ("tools", {"tool": "other"}),
    ],
)
def test_violations_of_grammars(kind: str, changes: dict[str, str]) -> None:
    assert judge(answer(kind, **changes)).violations == 1


def test_tokens_of_half_a_character_are_no_loss() -> None:
    found = answer("logprobs", content="A é", tokens=["A ", "\ufffd", "\ufffd"])
    assert (judge(found).usage, judge(found).different) == (0, 1)


def test_a_special_token_is_no_part_of_the_text() -> None:
    tokens = ["A", "<|endoftext|>", " story"]
    assert judge(answer("logprobs", content="A story", tokens=tokens)).usage == 0
    assert judge(answer("logprobs", content="A story", tokens=["A", "more", " story"])).usage == 1


def usage(found: Answer) -> None:
    found.usage = (7, 4)


def twice(found: Answer) -> None:
    found.choices[0].tokens.insert(1, " story")


def prompt(found: Answer) -> None:
    found.usage = (10, 3)


def none(found: Answer) -> None:
    found.usage = (7, 0)


@pytest.mark.parametrize(
    ("kind", "change"),
    [("logprobs", usage), ("logprobs", twice), ("seeded", usage), ("whole", prompt),
     ("chat", prompt), ("chat", none)],
)  # fmt: skip
def test_usage_must_be_what_was_delivered(kind: str, change: Callable[[Answer], None]) -> None:
    found = answer(kind)
    change(found)
    verdict = judge(found)
    assert (verdict.usage, verdict.lost) == (1, 1)


def test_failures_and_broken_streams_are_counted_with_their_reason() -> None:
    failed, broken = answer("chat"), answer("chat")
    failed.failure, failed.hung = "503 engine_lost", True
    broken.faults.append("2 roles of a candidate")
    verdict = Oracle([]).judge([failed, broken])
    assert (verdict.failed, verdict.hung, verdict.protocol, verdict.lost) == (1, 1, 1, 2)
    assert dict(verdict.reasons) == {"chat: 503 engine_lost": 1, "chat: 2 roles of a candidate": 1}


def test_pauses_are_those_of_streams_under_way() -> None:
    request = Request("chat", 0, {}, is_repeatable=False)

    def stream(*arrivals: float, failure: str = "") -> Answer:
        return Answer(request, 0.0, 9.0, arrivals=list(arrivals), failure=failure)

    phase = Phase("x")
    phase.answers = [
        stream(1.0, 1.1, 1.2, 3.2, 3.3),
        stream(1.0, 1.5, 2.0),
        stream(2.0, 2.1),
        stream(0.5, 1.0),
        stream(1.0, 9.0, failure="lost"),
    ]
    (found,) = pauses(phase, [1.25], 0.5)
    assert found == [pytest.approx(2.0), pytest.approx(0.5)]
    assert pauses(phase, [7.0], 0.5) == [[]]
