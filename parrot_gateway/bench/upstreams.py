"""`parrot-gateway bench upstreams`: sessions on several upstream servers, by policy of placement.

Sessions of several kinds of agents, each kind with a system prompt of its own, are all live at once
and interleave; each goes on once it has its answer and some time has passed. The servers are
simulated (`caching_upstream`); gateway and client are real. All policies get the same calls, and
take turns.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from parrot_gateway.bench.caching_upstream import MODEL, Speed, Statistics
from parrot_gateway.bench.report import (
    JsonFile,
    load_average,
    print_table,
    run_with_progress,
    write_json,
)
from parrot_gateway.bench.servers import BenchmarkError, Server, start_gateway

if TYPE_CHECKING:
    import aiohttp

POLICIES = ("parrot", "lmetric", "session-affinity", "least-loaded", "round-robin")
_WORDS = ("the", "heron", "stood", "in", "shallow", "water", "and", "waited", "for", "a", "fish")
_KINDS = 4
_SYSTEM_WORDS = 400
_FIRST_WORDS = (100, 500)
_NEXT_WORDS = (20, 120)
_ANSWER_TOKENS = (20, 120)
_TURNS = (3, 8)
_MEAN_PAUSE_S = 0.4
#: Seconds between the beginnings of two sessions.
_ARRIVAL_S = 0.04
_TIMEOUT_S = 300.0


class Plan(msgspec.Struct, frozen=True):
    servers: int
    sessions: int
    policies: tuple[str, ...]
    rounds: int
    seed: int
    slow: float

    def speeds(self) -> list[Speed]:
        """Of the servers; the first may be slower."""
        usual = Speed()
        first = msgspec.structs.replace(
            usual,
            step_s=usual.step_s * self.slow,
            sequence_s=usual.sequence_s * self.slow,
            prefill_token_s=usual.prefill_token_s * self.slow,
        )
        return [first, *[usual] * (self.servers - 1)]


class Turn(msgspec.Struct, frozen=True):
    question: str
    max_tokens: int
    pause_s: float


class Session(msgspec.Struct, frozen=True):
    begins_s: float
    system: str
    turns: list[Turn]


class Times(msgspec.Struct, frozen=True):
    """Of each call, in seconds."""

    #: To the first bytes of text.
    first_s: list[float] = []
    #: To the end.
    call_s: list[float] = []


class Round(msgspec.Struct, frozen=True):
    """What one policy made of all sessions once."""

    times: Times
    #: Of all sessions.
    took_s: float
    gateway_cpu_s: float
    servers: list[Statistics]

    @property
    def hit_rate(self) -> float:
        prompt = sum(each.prompt_tokens for each in self.servers)
        return sum(each.cached_tokens for each in self.servers) / max(1, prompt)


def sessions_of(plan: Plan) -> list[Session]:
    """The sessions, the same for each policy."""
    rng = random.Random(plan.seed)  # noqa: S311 - a workload

    def words(count: int) -> str:
        return " ".join(f"{rng.choice(_WORDS)}{rng.randrange(100)}" for _ in range(count))

    systems = [words(_SYSTEM_WORDS) for _ in range(_KINDS)]
    found = []
    for _ in range(plan.sessions):
        turns = [
            Turn(
                words(rng.randint(*(_NEXT_WORDS if number else _FIRST_WORDS))),
                rng.randint(*_ANSWER_TOKENS),
                rng.expovariate(1 / _MEAN_PAUSE_S),
            )
            for number in range(rng.randint(*_TURNS))
        ]
        begins_s = rng.uniform(0, _ARRIVAL_S * plan.sessions)
        found.append(Session(begins_s, rng.choice(systems), turns))
    return found


async def compare(plan: Plan, progress: Callable[[str], None]) -> dict[str, list[Round]]:
    """Rounds by policy.

    Raises:
        BenchmarkError: a server did not start, or a call failed.
    """
    command = [sys.executable, "-m", "parrot_gateway.bench.caching_upstream"]
    command.append(msgspec.json.encode(plan.speeds()).decode())
    servers = await Server.start("the simulated servers", command, r"servers at (.+)")
    urls, found = servers.url.split(), {policy: list[Round]() for policy in plan.policies}
    flags = [flag for url in urls for flag in ("--upstream", f"sim={url}")]
    sessions = sessions_of(plan)
    try:
        for number in range(plan.rounds):
            turn = number % len(plan.policies)
            for policy in (*plan.policies[turn:], *plan.policies[:turn]):
                progress(f"{policy}, round {number + 1} of {plan.rounds}")
                gateway = await start_gateway("--policy", policy, *flags)
                try:
                    found[policy].append(await _run(sessions, gateway, urls))
                finally:
                    await gateway.stop()
    finally:
        await servers.stop()
    return found


async def play(sessions: Sequence[Session], http: aiohttp.ClientSession, base_url: str) -> Times:
    """Let all sessions call a gateway, each call after the other.

    Raises:
        ExceptionGroup: of `BenchmarkError`: a call failed.
    """
    times = Times()
    async with asyncio.TaskGroup() as tasks:
        for session in sessions:
            tasks.create_task(_play(session, http, base_url, times))
    return times


async def _run(sessions: Sequence[Session], gateway: Server, urls: Sequence[str]) -> Round:
    # The command line must not wait for an HTTP client to be imported.
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        for url in urls:
            await http.get(f"{url}/reset")
        cpu_s, began = gateway.cpu_s(), time.perf_counter()
        try:
            times = await play(sessions, http, gateway.url)
        except* BenchmarkError as errors:
            raise BenchmarkError(str(errors.exceptions[0])) from None
        took_s, cpu_s = time.perf_counter() - began, gateway.cpu_s() - cpu_s
        statistics = []
        for url in urls:
            async with http.get(f"{url}/statistics") as answer:
                statistics.append(msgspec.json.decode(await answer.read(), type=Statistics))
    return Round(times, took_s, cpu_s, statistics)


async def _play(session: Session, http: aiohttp.ClientSession, base_url: str, times: Times) -> None:
    await asyncio.sleep(session.begins_s)
    messages = [{"role": "system", "content": session.system}]
    for turn in session.turns:
        messages.append({"role": "user", "content": turn.question})
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        text = ""
        async with http.post(f"{base_url}/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise BenchmarkError(f"a call failed: {(await answer.text())[:200]}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                if not text:
                    times.first_s.append(time.perf_counter() - began)
                for choice in msgspec.json.decode(line[6:])["choices"]:
                    text += choice["delta"].get("content", "")
        times.call_s.append(time.perf_counter() - began)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(turn.pause_s)


def show(plan: Plan, found: dict[str, list[Round]]) -> None:
    from rich.table import Table

    title = f"{plan.sessions} sessions on {plan.servers} servers, means of {plan.rounds} rounds"
    table = Table(title=title)
    for heading in (
        "policy", "found in caches", "first text, s", "p99", "a call, s", "p99", "all, s",
        "calls of a server", "gateway CPU a call, ms",
    ):  # fmt: skip
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for policy, rounds in found.items():
        first = [value for each in rounds for value in each.times.first_s]
        calls = [value for each in rounds for value in each.times.call_s]
        by_server = [server.calls for each in rounds for server in each.servers]
        table.add_row(
            policy,
            f"{fmean(each.hit_rate for each in rounds):.1%}",
            f"{fmean(first):.3f}",
            f"{quantiles(first, n=100)[98]:.3f}",
            f"{fmean(calls):.3f}",
            f"{quantiles(calls, n=100)[98]:.3f}",
            f"{fmean(each.took_s for each in rounds):.1f}",
            f"{min(by_server)} to {max(by_server)}",
            f"{1000 * sum(each.gateway_cpu_s for each in rounds) / len(calls):.2f}",
        )
    print_table(table, [f"load average {load_average()}"])


def upstreams_command(
    servers: Annotated[int, typer.Option(min=2, max=64, help="Simulated servers.")] = 4,
    sessions: Annotated[int, typer.Option(min=1, help="Sessions, all live at once.")] = 200,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A policy of placement, as `serve --policy` takes it; repeatable.",
            show_default=", ".join(POLICIES),
        ),
    ] = None,
    slow: Annotated[
        float, typer.Option(min=1, help="The first server is so many times slower.")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the sessions.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Place sessions on several upstream servers, by policy: cache hits and latency."""
    from parrot_scheduler.config import PRESETS

    policies = tuple(dict.fromkeys(policy or POLICIES))
    for name in policies:
        if name not in PRESETS:
            known = ", ".join(sorted(PRESETS))
            raise typer.BadParameter(f"there are {known}", param_hint="--policy")
    plan = Plan(servers, sessions, policies, rounds, seed, slow)
    found = run_with_progress(lambda progress: asyncio.run(compare(plan, progress)))
    show(plan, found)
    if json_file is not None:
        content: dict[str, Any] = {
            "plan": msgspec.to_builtins(plan),
            "policies": msgspec.to_builtins(found),
        }
        write_json(json_file, "upstreams", content)
