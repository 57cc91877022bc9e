"""Unmodified programs that know the gateway by `OPENAI_BASE_URL` alone: their graphs are inferred.

Edges are exact, kinds included, on the demo model and on an upstream; `graph --live` shows them.
The Agents SDK runs where it is installed: here, or where `PARROT_AGENTS_PYTHON` says.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from harness.gateway.serving import serving
from harness.interpreter import run_python
from harness.inventive_engine import InventiveEngine
from harness.processes import (
    DEMO_MODEL,
    GatewayProcess,
    ServerProcess,
    clean_environment,
    upstream_settings,
)

PROGRAMS = Path(__file__).parent / "linked"
AGENTS_PYTHON = os.environ.get("PARROT_AGENTS_PYTHON", sys.executable)
has_agents = "PARROT_AGENTS_PYTHON" in os.environ or importlib.util.find_spec("agents") is not None
needs_agents = pytest.mark.skipif(not has_agents, reason="openai-agents is not installed")
TIMEOUT_S = 120.0
#: What a line says besides of why a call ran where it did.
_EXPLANATION = re.compile(r" · Ran on .*$", re.MULTILINE)
_CONFIDENCE = re.compile(r" [01]\.\d\d(?:-[01]\.\d\d)?(?=\))")

LOOP = {(number, number + 1, "continues") for number in (1, 2, 3)}
MAP_REDUCE = {(number, 5, "output") for number in (1, 2, 3, 4)}
TWO_TOOLS = {(number, number + 1, kind) for number in (1, 2) for kind in ("continues", "tool")}
AGENT_AS_TOOL = {
    (1, 2, "spawned"),
    (2, 3, "continues"),
    (2, 3, "tool"),
    (1, 4, "continues"),
    (1, 4, "tool"),
    (3, 4, "output"),
}


@pytest.fixture(scope="module")
def own_model() -> Iterator[GatewayProcess]:
    with GatewayProcess(config={"models": [DEMO_MODEL]}) as gateway:
        yield gateway


@pytest.fixture
async def relayed() -> AsyncIterator[GatewayProcess]:
    """A gateway before a server whose model calls tools."""
    async with serving(InventiveEngine(), call_timeout_s=60) as service:
        config = {"upstreams": [upstream_settings("server", f"{service.root}/v1")]}
        gateway = await asyncio.to_thread(GatewayProcess, config=config)
        try:
            yield gateway
        finally:
            await asyncio.to_thread(gateway.close)


async def run(
    gateway: GatewayProcess, model: str, program: str, *arguments: str, python: str = sys.executable
) -> dict[str, Any]:
    """The graph of the one session that a program's calls are."""
    before = {each["id"] for each in (await get(gateway, "/v1/sessions"))["data"]}
    variables = {"OPENAI_BASE_URL": gateway.base_url, "OPENAI_API_KEY": "none"}
    environment = clean_environment({**variables, "DROP_IN_MODEL": model})
    script = PROGRAMS / program
    if python == sys.executable:
        with TemporaryDirectory() as folder:
            await asyncio.to_thread(run_python, script, arguments, environment, Path(folder))
    else:
        await asyncio.to_thread(
            subprocess.run,
            [python, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            timeout=TIMEOUT_S,
            check=True,
        )
    sessions = [e for e in (await get(gateway, "/v1/sessions"))["data"] if e["id"] not in before]
    assert len(sessions) == 1, sessions
    assert sessions[0]["inferred"]
    graph: dict[str, Any] = await get(gateway, f"/v1/sessions/{sessions[0]['id']}/graph")
    return graph


async def get(gateway: GatewayProcess, path: str) -> Any:
    return await asyncio.to_thread(gateway.get, path)


def edges(graph: dict[str, Any]) -> set[tuple[int, int, str]]:
    """Edges between calls by their number."""
    numbers = {call["id"]: number for number, call in enumerate(graph["calls"], 1)}
    return {(numbers[e["from"]], numbers[e["to"]], e["kind"]) for e in graph["links"]}


async def check_live(gateway: GatewayProcess, graph: dict[str, Any], *lines: str) -> None:
    """`graph --live` writes these ends of lines below the session's, in a pipe as in a terminal.

    Confidences and explanations are left out of them.
    """
    arguments = ["-m", "parrot_gateway", "graph", "--live", "--base-url", gateway.base_url]
    title = f"inferred session {graph['session']['id']} "

    def follow() -> None:
        with ServerProcess(arguments, {"COLUMNS": "120"}) as live:
            whole = re.compile(re.escape(title) + r"(?:.+\n)+\n")
            drawn = live.wait_for_output(whole, TIMEOUT_S)[0]
            drawn = _EXPLANATION.sub("", _CONFIDENCE.sub("", drawn))
            for line in lines:
                assert any(each.endswith(line) for each in drawn.splitlines()), drawn

    await asyncio.to_thread(follow)


async def test_a_plain_loop_on_an_own_model(own_model: GatewayProcess) -> None:
    graph = await run(own_model, DEMO_MODEL, "plain_loop.py")
    assert edges(graph) == LOOP
    assert [call["stage"] for call in graph["calls"]] == [0, 1, 2, 3]
    await check_live(own_model, graph, "⇠ chat 3 (continues)")


async def test_a_map_reduce_on_an_own_model(own_model: GatewayProcess) -> None:
    graph = await run(own_model, DEMO_MODEL, "map_reduce.py")
    assert edges(graph) == MAP_REDUCE
    await check_live(own_model, graph, "⇠ chat 1-4 (output)")


async def test_loop_and_map_reduce_on_an_upstream(relayed: GatewayProcess) -> None:
    assert edges(await run(relayed, "any", "plain_loop.py")) == LOOP
    assert edges(await run(relayed, "any", "map_reduce.py")) == MAP_REDUCE


async def test_langgraph(relayed: GatewayProcess) -> None:
    graph = await run(relayed, "any", "langgraph_agent.py")
    assert edges(graph) == TWO_TOOLS
    assert [call["tools"] for call in graph["calls"]] == [["get_weather"], ["get_time"], []]
    await check_live(
        relayed,
        graph,
        "calls get_weather",
        "⇠ chat 1 (continues, tool) calls get_time",
        "⇠ chat 2 (continues, tool)",
    )


@needs_agents
async def test_a_handoff_of_the_agents_sdk(relayed: GatewayProcess) -> None:
    graph = await run(relayed, "any", "openai_agents.py", python=AGENTS_PYTHON)
    assert edges(graph) == TWO_TOOLS
    await check_live(
        relayed,
        graph,
        "calls transfer_to_meteorologist",
        "⇠ responses 1 (continues, tool) calls get_weather",
        "⇠ responses 2 (continues, tool)",
    )


@needs_agents
async def test_an_agent_as_a_tool_of_the_agents_sdk(relayed: GatewayProcess) -> None:
    graph = await run(relayed, "any", "openai_agents.py", "tool", python=AGENTS_PYTHON)
    assert edges(graph) == AGENT_AS_TOOL
    await check_live(
        relayed, graph, "calls ask_meteorologist", "⇠ responses 1 (spawned) calls get_weather"
    )
