"""Sessions on simulated servers, through the whole gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp
import pytest
from scripted_remote import ScriptedRemoteEngine
from serving import serving

from parrot_gateway.bench.caching_upstream import MODEL, CachingServer, Speed, listen
from parrot_gateway.bench.upstreams import Plan, Session, Times, Turn, play, sessions_of
from parrot_gateway.settings.model import SchedulerSettings, UpstreamSettings

FAST = Speed(step_s=5e-4, sequence_s=0.0, prefill_token_s=2e-6, cached_tokens=20_000)


async def run(
    engine: ScriptedRemoteEngine,
    sessions: Sequence[Session],
    policy: str,
    speeds: Sequence[Speed],
    at_once: int = 1000,
) -> list[CachingServer]:
    """The servers after all sessions have ended, of which so many go on at once."""
    servers = [CachingServer(speed) for speed in speeds]
    async with AsyncExitStack() as stack:
        urls = []
        for server in servers:
            listening, url = await listen(server)
            stack.callback(listening.close)
            urls.append(url)
        entry = UpstreamSettings(name="sim", urls=urls, models=[MODEL])
        scheduler = SchedulerSettings(policy=policy)
        service = await stack.enter_async_context(
            serving(engine, upstreams=[entry], scheduler=scheduler)
        )
        upstream = service.gateway.upstreams["sim"]
        await upstream.start()
        stack.push_async_callback(upstream.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        room = asyncio.Semaphore(at_once)

        async def one(session: Session) -> Times:
            async with room:
                return await play([session], http, f"{service.root}/v1")

        async with asyncio.timeout(60):
            times = await asyncio.gather(*map(one, sessions))
        calls = sum(len(session.turns) for session in sessions)
        assert sum(len(each.call_s) for each in times) == calls
        assert sum(len(each.first_s) for each in times) == calls
        assert sum(server.statistics.calls for server in servers) == calls
    return servers


def hit_rate(servers: Sequence[CachingServer]) -> float:
    prompt = sum(each.statistics.prompt_tokens for each in servers)
    return sum(each.statistics.cached_tokens for each in servers) / prompt


def conversations(count: int, turns: int) -> list[Session]:
    """Sessions that begin at once, each about something else."""
    return [
        Session(
            0.0,
            f"You know everything about {number}. " * 100,
            [Turn(f"Tell me more, {turn}. " * 20, 4, 0.001) for turn in range(turns)],
        )
        for number in range(count)
    ]


async def test_sessions_find_their_contexts_again(engine: ScriptedRemoteEngine) -> None:
    # No multiple of the servers, or turns in step would find theirs again by going round.
    sessions = conversations(13, 5)
    ours = await run(engine, sessions, "parrot", [FAST] * 4)
    round_robin = await run(engine, sessions, "round-robin", [FAST] * 4)
    assert hit_rate(ours) > 0.6
    assert hit_rate(ours) > hit_rate(round_robin) + 0.15
    assert all(server.statistics.calls for server in ours)


@pytest.mark.parametrize("policy", ["parrot", "lmetric"])
async def test_a_slow_server_gets_fewer_calls(engine: ScriptedRemoteEngine, policy: str) -> None:
    """Of calls that begin when others end, whatever else the machine does."""
    slow = Speed(step_s=5e-2, prefill_token_s=1e-4)
    sessions = [Session(0.0, "", [Turn(f"{number}. " * 60, 8, 0.0)]) for number in range(40)]
    servers = await run(engine, sessions, policy, [slow, FAST], at_once=6)
    slow_calls, fast_calls = (server.statistics.calls for server in servers)
    assert slow_calls < fast_calls


def test_sessions_are_the_same_for_each_policy() -> None:
    plan = Plan(4, 10, ("parrot",), 1, 7, 1.0)
    assert sessions_of(plan) == sessions_of(plan)
    assert len({session.system for session in sessions_of(plan)}) > 1
