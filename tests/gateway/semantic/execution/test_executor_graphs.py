"""Random graphs on the executor: every value is the right one, or the right failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest
from harness.gateway.scripted_runner import ScriptedRunner, check_quiet, session_of, spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.semantic.execution.job import Job
from parrot_gateway.semantic.templates.reference import reference_of
from parrot_gateway.semantic.variable import Variable


@st.composite
def graphs(draw: st.DrawFn, most: int = 200) -> dict[int, list[int]]:
    """By node the nodes whose outputs it reads; smaller numbers only."""
    size = draw(st.integers(1, most))
    seed = draw(st.integers(0, 2**32 - 1))
    chance = random.Random(seed)
    width = draw(st.integers(1, 8))
    return {
        node: sorted(chance.sample(range(node), min(node, chance.randrange(width))))
        for node in range(size)
    }


def expected_values(graph: Mapping[int, list[int]]) -> dict[int, str]:
    """Compute each node's text when nothing goes wrong: short, and different for each."""
    values: dict[int, str] = {}
    for node, inputs in graph.items():
        values[node] = short(f"{node}: " + "".join(values[i] for i in inputs))
    return values


def short(prompt: str) -> str:
    """The runner's answer to a prompt."""
    return f"<{abs(hash(prompt)) % 10**12}>"


async def run_graph(
    graph: dict[int, list[int]], order: list[int], failing: set[int], cancelled: set[int]
) -> None:
    """Submit a graph in any order, let some calls fail and cancel others in mid-flight."""
    runner = ScriptedRunner()
    chance = random.Random(len(graph))

    async def act(job: Job, prompt: str) -> None:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        if int(prompt.split(":")[0]) in failing:
            raise InvalidRequestError(f"node {prompt.split(':')[0]} fails")
        text = short(prompt)
        job.append(text[:2], 0.0)
        await asyncio.sleep(0)
        job.append(text[2:], 0.0)

    runner.act = act
    async with session_of(runner, max_running_calls=32) as (service, session):
        outputs = {node: session.variable(f"v{node}") for node in graph}
        for count, node in enumerate(order):
            prompt = f"{node}: " + "".join(reference_of(outputs[i].id) for i in graph[node])
            service.submit(session, spec(prompt, outputs[node]))
            if count % 7 == 0:
                await asyncio.sleep(0)
        for node in sorted(cancelled):
            producer = outputs[node].producer
            assert producer is not None
            service.cancel_call("t", producer)
            await asyncio.sleep(0)
        for node in graph:
            await service.readers.wait(outputs[node], 10)
        check_outcome(graph, outputs, failing, cancelled)
        await service.executor.drain(5)
        check_quiet(service)


def check_outcome(
    graph: Mapping[int, list[int]],
    outputs: Mapping[int, Variable],
    failing: set[int],
    cancelled: set[int],
) -> None:
    expected = expected_values(graph)
    for node, output in outputs.items():
        bad = [i for i in graph[node] if outputs[i].state != "ready"]
        if output.state == "ready":
            assert not bad
            assert node not in failing
            assert output.value == expected[node]
            continue
        failure = output.failure
        assert failure is not None
        assert bad or node in failing or node in cancelled, f"node {node} ended without a reason"
        origin = int((failure.origin.variable_name or "v-1")[1:])
        assert origin in failing | cancelled
        if output.state == "cancelled":
            assert node in cancelled


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_graphs_end_right(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    order = data.draw(st.permutations(range(len(graph))))
    nodes = st.sets(st.integers(0, len(graph) - 1), max_size=5)
    failing, cancelled = data.draw(nodes), data.draw(nodes)
    asyncio.run(run_graph(graph, list(order), failing, cancelled))


@pytest.mark.parametrize(("failing", "cancelled"), [(0, 0), (3, 3)])
def test_a_thousand_calls(failing: int, cancelled: int) -> None:
    chance = random.Random(7)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(5)))) for n in range(1000)}
    order = list(graph)
    chance.shuffle(order)
    bad = chance.sample(range(500, 1000), failing + cancelled)
    asyncio.run(run_graph(graph, order, set(bad[:failing]), set(bad[failing:])))


def test_the_check_of_outcomes_finds_a_wrong_value() -> None:
    """The check itself can fail."""
    graph: dict[int, list[int]] = {0: []}
    variable = Variable("i", "v0", "s", max_value_bytes=100)
    variable.set("wrong")
    with pytest.raises(AssertionError):
        check_outcome(graph, {0: variable}, set(), set())
