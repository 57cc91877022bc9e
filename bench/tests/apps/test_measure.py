"""The applications' benchmark: its workloads are the paper's, and both ways give the same texts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from harness.fake_upstream import FakeUpstream
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess, run_cli
from parrot_bench.applications.description import Application, Call, Output
from parrot_bench.apps import book, measure
from parrot_bench.apps.recipes import BY_WAY as RECIPES
from parrot_bench.apps.runner import GatewayClient, JobResult, RunResult, run_workload
from parrot_bench.apps.workload import SEMANTIC, Size, Workload
from parrot_bench.servers import BenchmarkError

SALT = "Copy 000000000001."


def build(app: str, count: int | None = None, scale: float = 1.0) -> Workload:
    recipe = RECIPES[app]
    return recipe.build(Size(count or recipe.count, scale), SALT)


# -- the book -----------------------------------------------------------------------------


def test_the_book_is_long_enough_for_the_papers_documents() -> None:
    assert len(book.text()) > 20 * 1024 * 3.6


def test_chunks_follow_each_other_and_hold_whole_words() -> None:
    chunks = book.chunks(20, 1000)
    words = set(book.text().split())
    assert all(980 < len(chunk) <= 1000 for chunk in chunks)
    assert all(set(chunk.split()) <= words for chunk in chunks)
    assert book.text().startswith(chunks[0])
    assert len(set(chunks)) == 20


def test_behind_its_end_the_book_begins_again() -> None:
    whole = book.text()
    assert book.passage(100, len(whole) + 5000) == book.passage(100, 5000)
    assert len(book.passage(3 * len(whole))) > 2.99 * len(whole)


# -- aims ---------------------------------------------------------------------------------


def test_aims() -> None:
    assert measure.aim("chain", "one by one", 250, 20) == 3.0
    assert measure.aim("chain", "one by one", 50, 20) is None
    assert measure.aim("chain", "one by one", 250, 10) is None
    assert measure.aim("map-reduce", "one by one", 250, 16) == 2.0
    assert measure.aim("map-reduce", "parallel", 250, 16) is None
    assert measure.aim("chat", "parallel", 0, 3) == 0.98


@asynccontextmanager
async def fake_upstream() -> AsyncIterator[str]:
    """The base URL of a server that answers anything with the same few bytes."""
    fake = FakeUpstream()
    await fake.start()
    try:
        yield fake.url
    finally:
        await fake.close()


# -- running them -------------------------------------------------------------------------


@pytest.mark.parametrize(("app", "count"), [("chain", 4), ("map-reduce", 3), ("multi-agent", 2)])
async def test_all_ways_give_the_same_texts(demo: GatewayProcess, app: str, count: int) -> None:
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        workload = build(app, count, 0.02)
        results = [
            await run_workload(client, workload, way, f"bench-{app}-{way}")
            for way in ("one by one", "parallel", SEMANTIC)
        ]
    reference = results[0]
    assert [job.texts for job in results[1].jobs] == [job.texts for job in reference.jobs]
    assert [job.texts for job in results[2].jobs] == [job.texts for job in reference.jobs]
    assert all(len(text) > 0 for text in reference.jobs[0].texts)
    assert {result.requests for result in results} == {len(workload.calls)}


async def test_the_network_is_simulated_alike(demo: GatewayProcess) -> None:
    """A client pays for each round trip, semantic variables for one."""
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        workload = build("chain", 4, 0.02)
        client.round_trip_s = 0.1
        one_by_one = await run_workload(client, workload, "one by one", "")
        semantic = await run_workload(client, workload, SEMANTIC, "bench-network")
    assert one_by_one.jobs[0].seconds >= 0.4
    assert semantic.jobs[0].seconds >= 0.1


async def test_a_comparison(demo: GatewayProcess) -> None:
    seen: list[str] = []
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        density = await measure.characters_per_token(client)
        assert 3 < density < 5
        outcome = await measure.measure(
            client, "chat", Size(3, 0.04, density), [0, 20], 1, seen.append
        )
    assert outcome.same_texts, outcome.differences
    assert outcome.requests == {"parallel": 3 + 17, SEMANTIC: 3 + 17}
    told = {(each.kind, each.delay_ms): each for each in outcome.comparisons}
    assert set(told) == {(kind, ms) for kind in ("chat", "map-reduce") for ms in (0, 20)}
    for each in outcome.comparisons:
        # One round: its ratio is that of the medians.
        assert each.speedup == pytest.approx(each.client_p50 / each.semantic_p50)
        assert each.client_p50 <= each.client_p99
    assert told["map-reduce", 20].client_round_trips == 2
    assert told["map-reduce", 20].semantic_round_trips == 1
    assert told["map-reduce", 0].at_least == 0.98
    plain = measure.to_dict(outcome)
    assert plain["comparisons"][0]["met"] in (True, False)
    assert len(seen) == 2 + 2 * 2


async def test_different_texts_are_told() -> None:
    """The check can fail."""
    (job,) = build("chain", 2).jobs
    results = {
        way: RunResult((JobResult(job, 1.0, (text,)),), 2)
        for way, text in (("one by one", "a"), (SEMANTIC, "b"))
    }
    (difference,) = measure.differences(results)
    assert "step_1" in difference
    assert "'b'" in difference


async def test_a_failed_call_is_named(demo: GatewayProcess) -> None:
    """It ends the run, whatever waits for its text."""
    calls = (
        Call("good", ("Once",), 2, seed=0),
        Call("long", ("word " * 3000,), 2, seed=0),
        Call("last", ("After ", Output("good"), Output("long")), 2, seed=0),
    )
    workload = Workload(
        "broken", (Application("broken", "broken", calls, ("last",)),), ("parallel",)
    )
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        for way in (*workload.clients, SEMANTIC):
            with pytest.raises(BenchmarkError, match=r"context_length|tokens"):
                await run_workload(client, workload, way, "bench-broken")


async def test_a_server_that_ignores_forced_lengths_is_found_out() -> None:
    async with fake_upstream() as url, GatewayClient(url, "fake:size=8") as client:
        with pytest.raises(BenchmarkError, match="ignore_eos"):
            await run_workload(client, build("chain", 1), "one by one", "")


async def test_a_server_without_semantic_variables_is_found_out() -> None:
    async with fake_upstream() as url, GatewayClient(url, "fake:size=8") as client:
        with pytest.raises(BenchmarkError, match="does not know semantic variables"):
            await run_workload(client, build("chain", 1), SEMANTIC, "bench-none")


def test_the_command(demo: GatewayProcess, tmp_path: Path) -> None:
    path = tmp_path / "apps.json"
    run = run_cli(
        *("bench", "apps", "--app", "chain", "--count", "3", "--scale", "0.04"),
        *("--network-delay", "0", "--rounds", "1", "--json", str(path)),
        *("--base-url", demo.base_url, "--api-key", "env:DEMO_KEY"),
        environment={"DEMO_KEY": API_KEY, "COLUMNS": "80"},
    )
    assert run.returncode == 0, run.stderr
    assert "chain" in run.stdout
    assert "3→1" in run.stdout
    assert "…" not in run.stdout, "a table that is cut"
    assert "the same" in run.stdout
    written = path.read_bytes()
    assert API_KEY.encode() not in written
    content = msgspec.json.decode(written)
    assert content["machine"]["cores"] >= 1
    assert content["apps"][0]["comparisons"][0]["client_round_trips"] == 3


def test_what_the_command_refuses(demo: GatewayProcess) -> None:
    unknown = run_cli("bench", "apps", "--app", "chains")
    assert unknown.returncode == 2
    assert "map-reduce" in unknown.stderr
    nowhere = run_cli("bench", "apps", "--base-url", "http://127.0.0.1:1/v1")
    assert nowhere.returncode == 1
    assert "http://127.0.0.1:1" in nowhere.stderr
    literal = run_cli("bench", "apps", "--api-key", "sk-secret", "--base-url", demo.base_url)
    assert literal.returncode == 1
    assert "sk-secret" not in literal.stderr
    for run in (unknown, nowhere, literal):
        assert "Traceback" not in run.stderr
