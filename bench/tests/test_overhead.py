"""The benchmark tells the truth: its counts, its verdicts, and that it runs at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from harness.scripted_upstream import ScriptedUpstream
from parrot_bench import overhead
from parrot_bench.load import LoadPlan, LoadResult, Spread, drive, run_load
from parrot_bench.report import Row, machine, write_json
from parrot_bench.servers import BenchmarkError, start_bare_proxy, start_litellm

from parrot_gateway.settings.sources import load_settings


async def measure(model: str, *, stream: bool = False, **plan: float) -> LoadResult:
    body = msgspec.json.encode({"model": model, "stream": stream}).decode()
    with ScriptedUpstream() as fake:
        return await drive(LoadPlan(url=fake.base_url, body=body, **plan))  # type: ignore[arg-type]


async def test_requests_and_chunks_are_counted() -> None:
    result = await measure(
        "fake:chunks=7,delay_ms=2", stream=True, concurrency=3, requests=10, warmup=3
    )
    assert (result.requests, result.errors) == (10, 0)
    assert result.chunks == 10 * (7 + 3)
    assert 0 < result.ttft_ms.p50 < result.latency_ms.p50
    assert result.latency_ms.p50 > 9 * 2
    assert result.stalls == 0


async def test_a_slow_answer_shows() -> None:
    result = await measure("fake:first_ms=50", requests=3)
    assert result.latency_ms.p50 >= 50
    assert result.ttft_ms.p99 >= 50


async def test_stalls_are_noticed() -> None:
    result = await measure(
        "fake:chunks=3,delay_ms=30", stream=True, requests=2, concurrency=2, stall_ms=20
    )
    assert result.stalled_streams == 2
    assert result.stalls >= 6


@pytest.mark.parametrize(
    ("script", "stream"),
    [("status=500", False), ("fault=reset", False), ("fault=drop", True), ("fault=garbage", False)],
)
async def test_failures_are_errors_not_answers(script: str, stream: bool) -> None:
    result = await measure(f"fake:{script}", stream=stream, requests=2, concurrency=2)
    assert result.requests == 0
    assert result.errors == 2
    assert result.first_error


async def test_what_is_not_answered_in_time_has_failed() -> None:
    result = await measure("fake:fault=stall", requests=1, timeout_s=0.2)
    assert (result.requests, result.errors) == (0, 1)


async def test_the_generator_runs_as_a_process() -> None:
    with ScriptedUpstream() as fake:
        result = await run_load(LoadPlan(url=fake.base_url, body='{"model":"fake"}', requests=5))
        assert result.requests == 5
        assert len(fake.received) == 5


def test_percentiles() -> None:
    spread = Spread.of([n / 1000 for n in range(1, 101)])
    assert (spread.p50, spread.p90, spread.p99, spread.max) == (51, 91, 100, 100)
    assert Spread.of([]) == Spread()


def test_verdicts() -> None:
    added = Row("x", "ms", 5.0, direct=4.0, at_most=2.0, aims_at_added=True)
    assert (added.added, added.met) == (1.0, True)
    assert Row("x", "ms", 5.0, direct=1.0, at_most=2.0, aims_at_added=True).met is False
    assert Row("x", "MB", 101.0, at_most=100.0).met is False
    assert Row("x", "calls/s", 4000.0, at_least=4000.0).met is True
    assert Row("x", "ms", 1.0).met is None
    assert Row("x", "ms", 3.0, direct=2.0).to_dict()["ratio"] == 1.5


def measured(p50_ms: float, calls_per_s: float) -> overhead.Measured:
    """A run in which all figures of a kind are the same."""
    latency = Spread.of([p50_ms / 1000])
    result = LoadResult(
        requests=100, errors=0, seconds=1.0, requests_per_s=calls_per_s, latency_ms=latency,
        ttft_ms=latency, chunks=1000, chunks_per_s=10 * calls_per_s, gap_ms=latency, stalls=0,
        stalled_streams=0, bytes=1, cpu_s=0.1,
    )  # fmt: skip
    runs = {"one": [result], "many": [result], "stream_many": [result]}
    return overhead.Measured(runs, {"many": 100 / calls_per_s}, {})


def test_telemetry_is_set_beside_the_gateway_without() -> None:
    runs = {"gateway": measured(0.25, 95.0), "unobserved": measured(0.2, 100.0)}
    rows = {row.name: row for row in overhead.telemetry_rows(runs)}
    assert rows["metrics, share of 32 calls"].gateway == pytest.approx(0.95)
    assert rows["metrics, CPU per call"].added == pytest.approx(1e6 / 95 - 1e6 / 100)
    assert rows["metrics, 1 call p50"].met is True
    runs["observed"] = measured(0.5, 80.0)
    rows = {row.name: row for row in overhead.telemetry_rows(runs)}
    assert rows["metrics, log, traces, share of 32 streams"].met is False
    assert rows["metrics, log, traces, 1 call p50"].added == pytest.approx(0.3)
    assert rows["metrics, log, traces, 1 call p50"].met is False
    assert overhead.telemetry_rows({"gateway": runs["gateway"]}) == []


def test_variants_of_the_gateway_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, variables in overhead.VARIANTS.items():
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            found[name] = load_settings({})
    assert not found["unlinked"].linking.enabled
    assert not found["unobserved"].telemetry.metrics
    observed = found["observed"]
    assert (observed.server.access_log, observed.telemetry.log_format) == (True, "json")
    assert observed.telemetry.metrics


def test_the_machine_is_described() -> None:
    described = machine()
    assert described["cores"] >= 1
    assert described["packages"]["aiohttp"][0].isdigit()


async def test_a_missing_peer_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match=r"litellm\[proxy\]"):
        await start_litellm(tmp_path / "python", "http://127.0.0.1:1/v1", ["fake"])


async def test_the_bare_proxy_passes_on_what_the_upstream_says() -> None:
    with ScriptedUpstream() as fake:
        proxy = await start_bare_proxy(fake.base_url)
        try:
            body = '{"model":"fake:chunks=7;size=3","stream":true}'
            for url in (fake.base_url, proxy.url):
                result = await run_load(LoadPlan(url=url, body=body, requests=3))
                assert (result.requests, result.chunks) == (3, 3 * 10)
            refused = LoadPlan(url=proxy.url, body='{"model":"fake:status=503"}', requests=1)
            assert (await run_load(refused)).errors == 1
        finally:
            await proxy.stop()


def test_a_table_in_a_pipe_is_not_cut() -> None:
    program = (
        "from parrot_bench.report import Row, show\n"
        "show('t', [Row('n' * 60, 'calls/s', 123456.0, direct=234567.0,"
        " peers={'bare': 345678.0, 'litellm': 456789.0}, at_least=1.0)])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True,
        env={**os.environ, "COLUMNS": "80"},
    ).stdout  # fmt: skip
    for figure in ("n" * 60, "123,456", "234,567", "345,678", "456,789", "yes"):
        assert figure in shown


def test_the_whole_benchmark_runs(tmp_path: Path) -> None:
    seen: list[str] = []
    options = overhead.Options(rounds=1, scale=0.01, streams=4, peers=("bare", "unlinked"))
    outcome = overhead.run(options, seen.append)
    names = [row.name for row in outcome.rows]
    assert len(names) == len(set(names)) >= 15
    gateway = {row.name: row.gateway for row in outcome.rows}
    assert gateway["32 calls"] > 0
    assert gateway["4 paced, stalled"] <= 4
    assert set(outcome.details["runs"]) == {"direct", "gateway", "bare", "unlinked"}
    bare = {row.name: row.peers.get("bare") for row in outcome.rows}
    assert bare["32 calls"]
    assert gateway["32 calls, share of bare"] == gateway["32 calls"] / bare["32 calls"]
    unlinked = {row.name: row.peers.get("unlinked") for row in outcome.rows}
    assert gateway["32 calls, share of unlinked"] == gateway["32 calls"] / unlinked["32 calls"]
    assert gateway["linking, memory"] > 0
    assert gateway["linking, skipped"] == 0
    assert len(seen) >= len(overhead.scenarios(options))
    path = tmp_path / "out" / "overhead.json"
    write_json(path, "overhead", outcome.to_dict())
    written = msgspec.json.decode(path.read_bytes())
    assert written["machine"]["python"].split(".")[:2] == [
        str(number) for number in sys.version_info[:2]
    ]
    assert len(written["rows"]) == len(outcome.rows)
