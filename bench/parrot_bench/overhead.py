"""The overhead of the gateway: the same load straight to an upstream and through the gateway.

Upstream, gateway (and peer) and load generator are processes of their own; all runs alternate, and
each figure is the median over the rounds. The upstream is scripted and answers at once, so that
what is left over is the gateway.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args

import msgspec
import typer

from parrot_bench.load import LoadPlan, LoadResult, run_load
from parrot_bench.report import JsonFile, Row, run_with_progress, show, write_json
from parrot_bench.servers import (
    BenchmarkError,
    Server,
    cpu_s,
    rss_mb,
    start_bare_proxy,
    start_fake_upstream,
    start_gateway,
    start_litellm,
)
from parrot_bench.upstream import TRACES_PATH

KIB = 1024
#: Model names are scripts of the fake upstream; without commas, at which LiteLLM splits names.
ANSWER = "fake:size=1024"
STREAM = "fake:chunks=100;size=16"
PACED = "fake:chunks=100;size=16;delay_ms=20"
MODELS = (ANSWER, STREAM, PACED)
#: Chunks in a stream of these scripts, the role, the finish reason and [DONE] included.
STREAM_CHUNKS = 103


Peer = Literal["bare", "fleet", "litellm", "observed", "unlinked", "unobserved"]
#: The gateway itself with other settings, by variables of its environment.
VARIANTS: dict[Peer, dict[str, str]] = {
    "unlinked": {"PARROT_LINKING_ENABLED": "false"},
    "observed": {"PARROT_SERVER_ACCESS_LOG": "true", "PARROT_TELEMETRY_LOG_FORMAT": "json"},
    "unobserved": {"PARROT_TELEMETRY_METRICS": "false"},
}


class Options(msgspec.Struct, frozen=True):
    rounds: int = 5
    #: Multiplies the number of requests in a run.
    scale: float = 1.0
    streams: int = 128
    soak: int = 0
    #: Other proxies in the same run.
    peers: tuple[Peer, ...] = ()
    #: Of the environment that has LiteLLM.
    peer_python: Path | None = None


class Scenario(NamedTuple):
    name: str
    model: str
    concurrency: int
    requests: int
    prompt_bytes: int = KIB
    streamed: bool = False

    def plan(self, url: str, options: Options) -> LoadPlan:
        requests = max(self.concurrency, int(self.requests * options.scale))
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": "x" * self.prompt_bytes}],
        }
        if self.streamed:
            body["stream"] = True
        return LoadPlan(
            url=url,
            body=json.dumps(body),
            concurrency=self.concurrency,
            requests=requests,
            warmup=0 if self.model == PACED else min(requests, max(50, self.concurrency * 4)),
        )


def scenarios(options: Options) -> list[Scenario]:
    return [
        Scenario("one", ANSWER, 1, 1500),
        Scenario("one_64k", ANSWER, 1, 300, prompt_bytes=64 * KIB),
        Scenario("many", ANSWER, 32, 10_000),
        Scenario("stream_one", STREAM, 1, 200, streamed=True),
        Scenario("stream_many", STREAM, 32, 1500, streamed=True),
        Scenario("paced", PACED, options.streams, options.streams, streamed=True),
    ]


class Measured(NamedTuple):
    results: dict[str, list[LoadResult]]
    #: Processor seconds of the server for each scenario, over all rounds.
    cpu_s: dict[str, float]
    #: The same of its linking process, which has then worked off what it was sent.
    linking_cpu_s: dict[str, float]

    def figure(self, scenario: str, pick: Callable[[LoadResult], float]) -> float:
        """The median over the rounds; not a number when a round had errors."""
        results = self.results[scenario]
        if any(result.errors for result in results):
            return math.nan
        return median(pick(result) for result in results)

    def cpu_ms_per(
        self, scenario: str, pick: Callable[[LoadResult], float], *, of_linking: bool = False
    ) -> float:
        """Processor milliseconds per request or chunk, of the server or of its linking process; as
        `figure` for errors."""
        done = sum(map(pick, self.results[scenario]))
        if not done or any(result.errors for result in self.results[scenario]):
            return math.nan
        used = self.linking_cpu_s if of_linking else self.cpu_s
        return used[scenario] * 1000 / done


class Outcome(NamedTuple):
    rows: list[Row]
    notes: list[str]
    details: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        rows = [row.to_dict() for row in self.rows]
        return {"rows": rows, "notes": self.notes, **self.details}


def run(options: Options, progress: Callable[[str], None] = lambda _: None) -> Outcome:
    """Run the benchmark.

    Args:
        options: what to run.
        progress: called with the name of what is being measured.

    Raises:
        BenchmarkError: a server did not start or answered with errors.
    """
    return asyncio.run(_run(options, progress))


async def _run(options: Options, progress: Callable[[str], None]) -> Outcome:
    async with AsyncExitStack() as stack:

        async def started(starting: Awaitable[Server]) -> Server:
            server = await starting
            stack.push_async_callback(server.stop)
            return server

        fake = await started(start_fake_upstream(MODELS))
        gateway = await started(start_gateway("--upstream", f"fake={fake.url}"))
        peers: dict[str, Server] = {}
        for name in options.peers:
            progress(f"starting {name}")
            peers[name] = await started(_start_peer(name, options, fake.url))
        idle_mb = gateway.rss_mb()
        linking = await asyncio.to_thread(gateway.linking)
        measured = await _measure(options, {"direct": fake, "gateway": gateway, **peers}, progress)
        rows = _rows(options, measured)
        peers_mb = {name: server.rss_mb() for name, server in peers.items()}
        rows += [
            Row("memory, idle", "MB", idle_mb, at_most=100),
            Row("memory, at the end", "MB", gateway.rss_mb(), peers=peers_mb, at_most=100),
            Row("start until ready", "s", gateway.start_s, at_most=1.5),
            *telemetry_rows(measured),
            *_linking_rows(measured, linking, await asyncio.to_thread(gateway.linking)),
        ]
        if options.soak:
            rows.append(await _soak(options, gateway, progress))
    details = {
        "options": {"rounds": options.rounds, "scale": options.scale, "streams": options.streams},
        "runs": {server: msgspec.to_builtins(each.results) for server, each in measured.items()},
    }
    return Outcome(rows, _notes(measured), details)


async def _start_peer(name: Peer, options: Options, upstream_url: str) -> Server:
    if name == "bare":
        return await start_bare_proxy(upstream_url)
    if name in VARIANTS:
        env = VARIANTS[name]
        if name == "observed" and has_tracing():
            traces = upstream_url.removesuffix("/v1") + TRACES_PATH
            env = {**env, "PARROT_TELEMETRY_TRACES_ENDPOINT": traces,
                   "PARROT_TELEMETRY_TRACES_SAMPLE_RATIO": "0.01"}  # fmt: skip
        return await start_gateway(
            "--upstream", f"fake={upstream_url}", name=f"the gateway, {name}", env=env
        )
    if name == "fleet":
        # Two names of one server.
        other = upstream_url.replace("127.0.0.1", "localhost")
        return await start_gateway(
            "--upstream", f"fake={upstream_url}", "--upstream", f"fake={other}",
            name="the gateway before two servers",
        )  # fmt: skip
    if options.peer_python is None:
        raise BenchmarkError(
            "Name the Python of the environment that has LiteLLM: --peer-python ENV/bin/python"
        )
    return await start_litellm(options.peer_python, upstream_url, MODELS)


async def _measure(
    options: Options, servers: dict[str, Server], progress: Callable[[str], None]
) -> dict[str, Measured]:
    measured = {
        name: Measured(defaultdict(list), defaultdict(float), defaultdict(float))
        for name in servers
    }
    linking_pid = (await asyncio.to_thread(servers["gateway"].linking))["pid"]
    for scenario in scenarios(options):
        rounds = options.rounds if scenario.model != PACED else min(options.rounds, 2)
        for number in range(rounds):
            progress(f"{scenario.name}, round {number + 1} of {rounds}")
            for name, server in servers.items():
                plan = scenario.plan(server.url, options)
                if name == "litellm":
                    plan = _fewer(scenario, plan)
                linking_before = cpu_s(linking_pid) if name == "gateway" else 0.0
                before = server.cpu_s()
                result = await run_load(plan)
                used = server.cpu_s() - before
                linking_used = 0.0
                if name == "gateway":
                    await asyncio.to_thread(server.linking)
                    linking_used = cpu_s(linking_pid) - linking_before
                if result.errors and name not in options.peers:
                    raise BenchmarkError(
                        f"{scenario.name}: {result.errors} of {plan.requests} requests to "
                        f"{server.name} failed: {result.first_error}"
                    )
                each = measured[name]
                each.results[scenario.name].append(result)
                # The warm-up is part of the processor time.
                share = result.requests / max(1, result.requests + plan.warmup)
                each.cpu_s[scenario.name] += used * share
                each.linking_cpu_s[scenario.name] += linking_used * share
    return measured


def _fewer(scenario: Scenario, plan: LoadPlan) -> LoadPlan:
    """Fewer requests after the same warm-up: a proxy of a hundredth of the speed needs no more."""
    if scenario.model == PACED:
        return plan
    return msgspec.structs.replace(plan, requests=max(plan.concurrency * 2, plan.requests // 20))


def _rows(options: Options, measured: dict[str, Measured]) -> list[Row]:
    def row(
        name: str, unit: str, scenario: str, pick: Callable[[LoadResult], float], **aim: Any
    ) -> Row:
        figures = {who: each.figure(scenario, pick) for who, each in measured.items()}
        direct, gateway = figures.pop("direct"), figures.pop("gateway")
        return Row(name, unit, gateway, direct=direct, peers=figures, **aim)

    def cpu_row(name: str, unit: str, scenario: str, pick: Callable[[LoadResult], float]) -> Row:
        factor = 1000 if unit == "us" else 1
        figures = {who: each.cpu_ms_per(scenario, pick) * factor for who, each in measured.items()}
        del figures["direct"]
        return Row(name, unit, figures.pop("gateway"), peers=figures)

    def share_rows(name: str, scenario: str, pick: Callable[[LoadResult], float]) -> list[Row]:
        """The gateway's rate in parts of the bare proxy's, and of its own with less to do."""
        rate = measured["gateway"].figure(scenario, pick)
        return [
            Row(f"{name}, share of {peer}", "x", rate / measured[peer].figure(scenario, pick),
                at_least=at_least)
            for peer, at_least in (("bare", 0.85), ("unlinked", 0.9)) if peer in measured
        ]  # fmt: skip

    def per_chunk_us(result: LoadResult) -> float:
        streaming = result.latency_ms.p50 - result.ttft_ms.p50
        return streaming * 1000 / STREAM_CHUNKS

    paced = f"{options.streams} paced"
    return [
        row("1 call, p50", "ms", "one", lambda r: r.latency_ms.p50,
            at_most=0.4, aims_at_added=True),
        row("1 call, p99", "ms", "one", lambda r: r.latency_ms.p99,
            at_most=2.0, aims_at_added=True),
        row("1 call of 64 KiB, p50", "ms", "one_64k", lambda r: r.latency_ms.p50),
        row("32 calls", "calls/s", "many", lambda r: r.requests_per_s, at_least=4000),
        row("32 calls, p50", "ms", "many", lambda r: r.latency_ms.p50),
        row("32 calls, p99", "ms", "many", lambda r: r.latency_ms.p99),
        *share_rows("32 calls", "many", lambda r: r.requests_per_s),
        cpu_row("32 calls, CPU per call", "ms", "many", lambda r: r.requests),
        row("stream, first chunk p50", "ms", "stream_one", lambda r: r.ttft_ms.p50,
            at_most=1.0, aims_at_added=True),
        row("stream, first chunk p99", "ms", "stream_one", lambda r: r.ttft_ms.p99,
            at_most=3.0, aims_at_added=True),
        row("stream, per chunk", "us", "stream_one", per_chunk_us),
        row("32 streams", "chunks/s", "stream_many", lambda r: r.chunks_per_s,
            at_least=100_000),
        *share_rows("32 streams", "stream_many", lambda r: r.chunks_per_s),
        cpu_row("32 streams, CPU per chunk", "us", "stream_many", lambda r: r.chunks),
        row(f"{paced}, stalled", "streams", "paced", lambda r: r.stalled_streams,
            at_most=0),
        row(f"{paced}, first chunk p99", "ms", "paced", lambda r: r.ttft_ms.p99),
        row(f"{paced}, gap p99", "ms", "paced", lambda r: r.gap_ms.p99),
        cpu_row(f"{paced}, CPU per chunk", "us", "paced", lambda r: r.chunks),
    ]  # fmt: skip


def telemetry_rows(measured: dict[str, Measured]) -> list[Row]:
    """The cost of metrics, and of all telemetry (metrics, a line of JSON, traces), beside the
    gateway without; none where that was not measured."""
    without = measured.get("unobserved")
    rows: list[Row] = []
    for name, who in (("metrics", "gateway"), ("metrics, log, traces", "observed")):
        each = measured.get(who)
        if each is None or without is None:
            continue
        for what, scenario, pick in (
            ("32 calls", "many", lambda r: r.requests_per_s),
            ("32 streams", "stream_many", lambda r: r.chunks_per_s),
        ):
            share = each.figure(scenario, pick) / without.figure(scenario, pick)
            rows.append(Row(f"{name}, share of {what}", "x", share, at_least=0.9))
        cpu_us, cpu_without_us = (
            1000 * one.cpu_ms_per("many", lambda r: r.requests) for one in (each, without)
        )
        rows.append(Row(f"{name}, CPU per call", "us", cpu_us, direct=cpu_without_us))
        p50, p50_without = (
            one.figure("one", lambda r: r.latency_ms.p50) for one in (each, without)
        )
        rows.append(Row(f"{name}, 1 call p50", "ms", p50, direct=p50_without, at_most=0.1,
                        aims_at_added=True))  # fmt: skip
    return rows


def has_tracing() -> bool:
    """True if traces can be made: OpenTelemetry is an optional extra."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def _linking_rows(
    measured: dict[str, Measured], before: dict[str, Any], after: dict[str, Any]
) -> list[Row]:
    """The time that linking adds to a call, and the cost of its process."""
    gateway = measured["gateway"]
    rows: list[Row] = []
    if "unlinked" in measured:
        p50, without = (
            measured[name].figure("one", lambda r: r.latency_ms.p50)
            for name in ("gateway", "unlinked")
        )
        rows.append(Row("linking, 1 call p50", "ms", p50, direct=without, at_most=0.1,
                        aims_at_added=True))  # fmt: skip
    skipped = after["skipped"] - before["skipped"]

    def cpu_us(scenario: str) -> float:
        return 1000 * gateway.cpu_ms_per(scenario, lambda r: r.requests, of_linking=True)

    return [
        *rows,
        Row("linking, CPU per call", "us", cpu_us("many")),
        Row("linking, CPU per stream", "us", cpu_us("stream_many")),
        Row("linking, memory", "MB", rss_mb(after["pid"])),
        Row("linking, skipped", "messages", skipped),
    ]


async def _soak(options: Options, gateway: Server, progress: Callable[[str], None]) -> Row:
    """Memory after `soak` calls, less what it was after a tenth of them."""
    scenario = Scenario("soak", ANSWER, 32, 1)
    plan = scenario.plan(gateway.url, options)
    done = tenth = max(32, options.soak // 10)
    await run_load(msgspec.structs.replace(plan, requests=tenth, warmup=0))
    before = gateway.rss_mb()
    while done < options.soak:
        count = min(20_000, options.soak - done)
        await run_load(msgspec.structs.replace(plan, requests=count, warmup=0))
        done += count
        progress(f"soak, {done:,} of {options.soak:,} calls")
    name = f"growth, {options.soak - tenth:,} calls"
    return Row(name, "MB", gateway.rss_mb() - before, at_most=2.0)


def _notes(measured: dict[str, Measured]) -> list[str]:
    notes = ["Medians over alternating rounds; load generator, upstream and gateway share one "
             "machine. Paced streams send a chunk every 20 ms; a gap over 100 ms is a stall. "
             "'+≤' concerns what the gateway adds."]  # fmt: skip
    for who, each in measured.items():
        for name, results in each.results.items():
            share = max(result.cpu_s / result.seconds for result in results)
            failed = [result for result in results if result.errors]
            if who == "direct" and share > 0.9:
                notes.append(
                    f"Direct, {name}: the load generator used {share:.0%} of a core, so the "
                    "upstream alone could do more."
                )
            elif who == "gateway" and share > 0.9:
                notes.append(
                    f"Gateway, {name}: the load generator was the bottleneck ({share:.0%})."
                )
            elif failed:
                count = sum(result.errors for result in failed)
                notes.append(f"{who}, {name}: {count} requests failed: {failed[0].first_error}")
    return notes


def overhead_command(
    quick: Annotated[bool, typer.Option("--quick", help="A rough answer in 20 seconds.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians.")] = 5,
    streams: Annotated[int, typer.Option(min=1, help="Paced streams at once.")] = 128,
    soak: Annotated[
        int, typer.Option(min=0, metavar="CALLS", help="Also watch memory over so many calls.")
    ] = 0,
    json_file: JsonFile = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Measure another proxy in the same run: bare (the least that Python can do) or "
            "litellm; unlinked is the gateway itself without linking, unobserved without metrics, "
            "observed with a line of JSON in the log for each call and 1 % of traces, fleet "
            "before an upstream of two servers. May be repeated.",
        ),
    ] = None,
    peer_python: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", help="Python of the environment that has the peer."),
    ] = None,
) -> None:
    """Measure what the gateway adds to an upstream that answers at once."""
    peers = tuple(dict.fromkeys(peer or ()))
    if not set(peers) <= set(get_args(Peer)):
        raise typer.BadParameter(f"there are {', '.join(get_args(Peer))}", param_hint="--peer")
    if "litellm" in peers and peer_python is None:
        raise typer.BadParameter(
            "name the Python of the environment that has LiteLLM: --peer-python ENV/bin/python",
            param_hint="--peer",
        )
    options = Options(
        rounds=min(rounds, 2) if quick else rounds,
        scale=0.25 if quick else 1.0,
        streams=streams,
        soak=soak,
        peers=cast("tuple[Peer, ...]", peers),
        peer_python=peer_python,
    )
    outcome = run_with_progress(lambda progress: run(options, progress))
    show("Overhead of the gateway", outcome.rows, outcome.notes)
    if json_file is not None:
        write_json(json_file, "overhead", outcome.to_dict())
