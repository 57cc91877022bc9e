"""Linkers that know the truth, or say too much, get the figures that they deserve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from parrot_bench.linking.adversarial import ADVERSARIAL, TOGETHER, adversarial
from parrot_bench.linking.applications import applications
from parrot_bench.linking.schedule import schedule
from parrot_bench.linking.score import GatewayLinker, compare, pairwise_f1, run
from parrot_bench.linking.script import Script

from parrot_gateway.linking.linker.links import Link

LONG = "An answer that is long enough to be recognised."


class KnowingLinker:
    """Says all true edges and sessions; as much about neutral ones."""

    def __init__(self, scripts: Iterable[Script]) -> None:
        self._calls = {call.id: call for script in scripts for call in script.calls.values()}

    def request(self, tenant: str, call: str, body: bytes, path: str, now: float) -> Sequence[Link]:
        truth = self._calls[call]
        asked = [Link(source, kind, 1.0) for source, kinds in truth.edges.items() for kind in kinds]
        return asked + [Link(source, "output", 0.5) for source in sorted(truth.neutral)]

    def answer(self, tenant: str, call: str, body: bytes, now: float) -> None: ...

    def session_of(self, tenant: str, call: str) -> str:
        return self._calls[call].session


@pytest.mark.parametrize("name", ["applications", *ADVERSARIAL])
def test_the_truth_is_perfect(name: str) -> None:
    scripts = applications(18, 0) if name == "applications" else adversarial(name, range(12))
    score = run(schedule(scripts), scripts, KnowingLinker(scripts))
    assert (score.precision, score.recall, score.f1, score.across) == (1, 1, 1, 0)
    assert score.calls == sum(len(script.calls) for script in scripts)
    kinds = score.to_dict()["kinds"].values()
    assert {kind["recall"] for kind in kinds} == {1.0}


def test_edges_are_counted_by_what_they_are() -> None:
    script, other = Script("s"), Script("t", tenant="other")
    first = script.ask("One?", LONG)
    second = script.ask(LONG, LONG, reads=[first])
    third = script.ask("Three", LONG, reads=[second])
    foreign = other.ask("Foreign?", LONG)
    calls = [*script.calls.values(), *other.calls.values()]
    score = compare(calls, {third: {first: {"output"}, foreign: {"continues"}}})
    assert (score.right, score.wrong, score.missed) == (0, 2, 2)
    assert (score.ancestors, score.across) == (1, 1)
    assert score.precision == score.recall == 0
    assert score.ancestor_precision == 0.5
    assert [fault[0] for fault in score.faults].count("missed") == 2


def test_a_source_that_nothing_tells_from_the_true_one_is_equal() -> None:
    script, twin = Script("s"), Script("t")
    first, same = script.ask("One?", LONG), twin.ask("One?", LONG)
    second = script.ask(LONG, LONG, reads=[first])
    calls = [*script.calls.values(), *twin.calls.values()]
    score = compare(calls, {second: {same: {"output"}}})
    assert (score.precision, score.equal_precision) == (0, 1)


def test_kinds_are_judged_one_by_one() -> None:
    script = Script("s")
    first = script.ask("One?", LONG)
    second = script.ask(LONG, LONG, reads=[first])
    score = compare(list(script.calls.values()), {second: {first: {"output", "tool"}}})
    kinds = score.to_dict()["kinds"]
    assert kinds["output"]["precision"] == kinds["output"]["recall"] == 1
    assert kinds["tool"]["precision"] == 0
    assert score.precision == 1


@pytest.mark.parametrize(
    ("labels", "f1"),
    [
        ([("a", "1"), ("a", "1"), ("b", "2")], 1.0),
        ([("a", "1"), ("a", "2"), ("b", "3")], 0.0),
        ([("a", "1"), ("a", "1"), ("b", "1")], 0.5),
        ([("a", "1"), ("b", "2")], 1.0),
    ],
)
def test_f1_of_pairs_of_calls(labels: list[tuple[str, str]], f1: float) -> None:
    assert pairwise_f1(labels) == f1


def test_the_gateways_linker_finds_nearly_all_and_nothing_else() -> None:
    scripts = applications(18, 0)
    score = run(schedule(scripts), scripts, GatewayLinker())
    assert min(score.precision, score.recall, score.f1) > 0.98
    assert score.microseconds(99) >= score.microseconds(50) > 0


@pytest.mark.parametrize("name", TOGETHER)
def test_the_gateways_linker_never_crosses_tenants(name: str) -> None:
    scripts = adversarial(name, range(10))
    assert run(schedule(scripts, start="tasks"), scripts, GatewayLinker()).across == 0
