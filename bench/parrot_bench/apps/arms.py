"""Arms of a comparison: a gateway with engines of its own and one kind of client each."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from parrot_bench.apps.runner import GatewayClient, RunResult, run_workload
from parrot_bench.apps.workload import Way, Workload
from parrot_bench.policies import PATHS
from parrot_bench.servers import START_TIMEOUT_S, BenchmarkError, Server, start_gateway
from parrot_gateway.settings import DEMO_MODEL

#: Engines report so often: each run waits for a report.
_HEARTBEAT_S = 0.5
#: To load other models than the demo model, for all arms at once.
_LOAD_TIMEOUT_S = 900.0
#: Longest wait for the counters that come with heartbeats.
_STATS_TIMEOUT_S = 15.0
#: Memory of a process of the demo model.
_ENGINE_BYTES = 350 * 1024 * 1024


class Work(msgspec.Struct, frozen=True):
    """The work of a gateway's engines, by their own counters."""

    #: Prompt tokens, and of these those found in a cache; tokens that were computed again after
    #: a preemption count anew.
    filled_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    #: Seconds that engines spent in steps, all together.
    busy_s: float
    #: Steps of all engines.
    steps: int

    @property
    def prefilled_tokens(self) -> int:
        """Prompt tokens whose KV had to be computed."""
        return self.filled_tokens - self.cached_tokens


@dataclass(frozen=True, slots=True)
class Arm:
    """One gateway and one kind of client."""

    name: str
    way: Way
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "parrot"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The engines of each arm.

    Attributes:
        model: a folder, a hub id, or the demo model.
        engines: how many.
        settings: of the model, as in a gateway's `models`.
    """

    model: str
    engines: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The model's name for clients."""
        return self.model if self.model == DEMO_MODEL else Path(self.model).name

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV of all engines together, where that is given; else 0."""
        blocks, size = self.settings.get("num_blocks"), self.settings.get("block_size")
        return self.engines * int(blocks or 0) * int(size or 0)


async def start_arms(
    stack: AsyncExitStack, arms: Sequence[Arm], fleet: Fleet
) -> dict[str, GatewayClient]:
    """Gateways of all arms, started together, by the arms' names; `stack` ends them.

    Raises:
        BenchmarkError: one did not start.
    """
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-apps-")))
    model = {"model": fleet.model, "name": fleet.name, "engines": fleet.engines, **fleet.settings}
    timeout_s = START_TIMEOUT_S if fleet.model == DEMO_MODEL else _LOAD_TIMEOUT_S

    async def start(arm: Arm) -> Server:
        config = folder / f"{arm.name}.yaml"
        settings = {"models": [model], "engines": {"heartbeat_s": _HEARTBEAT_S}, **arm.settings}
        # JSON is YAML too.
        config.write_bytes(msgspec.json.encode(settings))
        arguments = ("--config", str(config), "--policy", PATHS.get(arm.policy, arm.policy))
        server = await start_gateway(*arguments, name=arm.name, env=arm.env, timeout_s=timeout_s)
        stack.push_async_callback(server.stop)
        return server

    started = await asyncio.gather(*map(start, arms), return_exceptions=True)
    clients = {}
    for arm, server in zip(arms, started, strict=True):
        if isinstance(server, BaseException):
            raise server
        client = GatewayClient(server.url, fleet.name)
        clients[arm.name] = await stack.enter_async_context(client)
    return clients


async def run_counted(
    client: GatewayClient, workload: Workload, way: Way
) -> tuple[RunResult, Work]:
    """Run a workload, a session for each job where the way has sessions, and count the work.

    Each session is deleted at the end of its job.

    Raises:
        BenchmarkError: a call failed, or the engines send no counters.
    """
    session = f"bench-{secrets.token_hex(8)}"
    before = await _counters(client)
    result = await run_workload(client, workload, way, session, own_sessions=True)
    after = await _counters(client)
    return result, Work(**{name: after[name] - before[name] for name in after})


async def _counters(client: GatewayClient) -> dict[str, Any]:
    """By the fields of `Work`: sums over all engines, of counters younger than this call."""
    began = time.monotonic()
    while True:
        engines = (await client.health())["engines"]
        elapsed_s = time.monotonic() - began
        if all(engine["stats_age_s"] < elapsed_s for engine in engines):
            return {
                name: sum(engine["stats"][name] for engine in engines)
                for name in Work.__struct_fields__
            }
        if elapsed_s > _STATS_TIMEOUT_S:
            raise BenchmarkError(f"{client.base_url}: its engines send no counters.")
        await asyncio.sleep(0.1)


def check_memory(engines: int) -> None:
    """Refuse to start more engines than there is memory for.

    Raises:
        BenchmarkError: there is too little.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    sizes = {name: int(rest.split()[0]) for name, _, rest in (x.partition(":") for x in lines)}
    free = sizes.get("MemAvailable", 0) * 1024
    if free and free < engines * _ENGINE_BYTES:
        raise BenchmarkError(
            f"{engines} engines take about {engines * _ENGINE_BYTES >> 20:,} MiB, and "
            f"{free >> 20:,} MiB of memory are available: take fewer engines or policies."
        )
