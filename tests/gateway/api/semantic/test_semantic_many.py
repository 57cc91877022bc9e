"""Graphs of many calls over HTTP, deferred and attended, with clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from harness.gateway.scripted_remote import ScriptedRemoteEngine
from harness.gateway.semantic_tools import COMPLETIONS, Http, body_of, http_of
from harness.waiting import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


async def run_many(
    graph: dict[int, list[int]], failing: set[int], leaving: set[int], deferred: set[int]
) -> None:
    """A graph over HTTP: deferred and attended calls, streams, clients that leave."""
    engine = ScriptedRemoteEngine(max_context_tokens=4096, tokens_per_step=64)
    async with http_of(engine) as http:
        names = {node: f"v{node}" for node in graph}

        def submission(node: int) -> dict[str, Any]:
            inputs = {f"i{i}": names[i] for i in graph[node]}
            prompt = f"{node}" + "".join(f"{{{{{name}}}}}" for name in inputs)
            parrot: dict[str, Any] = {"session": "s", "output": names[node], "inputs": inputs}
            if node in deferred:
                parrot["defer"] = True
            if node in failing:
                parrot["transform"] = "json(/no)"
            # Tokens that are cut off keep the values short.
            return body_of(COMPLETIONS, prompt, max_tokens=6, stream=node % 3 == 0, parrot=parrot)

        async def attend(node: int) -> None:
            body = submission(node)
            if node in leaving:
                _, writer = await http.service.send(COMPLETIONS, json.dumps(body).encode())
                await until(lambda: names[node] in known(http))
                writer.transport.abort()
                return
            response = await http.post(COMPLETIONS, json=body, timeout=60)
            assert response.status_code in (200, 424), response.text

        tasks = []
        for node in graph:
            if node in deferred:
                assert (await http.post(COMPLETIONS, json=submission(node))).status_code == 200
            else:
                tasks.append(asyncio.create_task(attend(node)))
        await asyncio.gather(*tasks)
        await http.settled()
        session = http.service.gateway.semantic.sessions.find("default", "s")
        values: dict[int, str] = {}
        for node, inputs in graph.items():
            variable = session.find(names[node])
            assert variable is not None
            bad = [i for i in inputs if i not in values]
            if variable.value is not None:
                prompt = f"{node}" + "".join(values[i] for i in inputs)
                assert variable.value == f"<{prompt}>"[: len(variable.value)]
                assert len(variable.value) >= min(6, len(prompt))
                assert not bad
                assert node not in failing
                values[node] = variable.value
            else:
                assert bad or node in failing | leaving
                assert variable.is_final


def known(http: Http) -> set[str]:
    """Names of the variables that have a producer."""
    sessions = http.service.gateway.semantic.sessions.of_tenant("default")
    return {v.name for session in sessions for v in session if v.producer is not None}


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_random_graphs_over_http(size: int, seed: int) -> None:
    chance = random.Random(seed)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(4)))) for n in range(size)}
    nodes = range(size)
    failing = set(chance.sample(nodes, min(size, chance.randrange(3))))
    leaving = set(chance.sample(nodes, min(size, chance.randrange(4))))
    deferred = {n for n in nodes if chance.random() < 0.7} - leaving
    asyncio.run(run_many(graph, failing, leaving, deferred))


def test_a_thousand_calls_over_http() -> None:
    chance = random.Random(3)
    graph = {n: sorted(chance.sample(range(n), min(n, chance.randrange(4)))) for n in range(1000)}
    leaving = set(chance.sample(range(500, 1000), 10))
    deferred = {n for n in range(1000) if n % 20} - leaving
    asyncio.run(run_many(graph, {900}, leaving, deferred))
