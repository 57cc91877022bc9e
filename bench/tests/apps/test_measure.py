"""The applications' benchmark: its workloads are the paper's, and both ways give the same texts."""

from __future__ import annotations

import pytest
from harness.processes import API_KEY, DEMO_MODEL, GatewayProcess
from harness.scripted_upstream import ScriptedUpstream
from parrot_bench.applications.description import Application, Call, Output
from parrot_bench.apps import book
from parrot_bench.apps.measure import characters_per_token
from parrot_bench.apps.recipes import BY_WAY as RECIPES
from parrot_bench.apps.runner import GatewayClient, run_workload
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


# -- running them -------------------------------------------------------------------------


@pytest.mark.parametrize(("app", "count"), [("chain", 4), ("map-reduce", 3), ("multi-agent", 2)])
async def test_all_ways_give_the_same_texts(demo: GatewayProcess, app: str, count: int) -> None:
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        assert 3 < await characters_per_token(client) < 5
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


async def test_a_failed_call_is_named(demo: GatewayProcess) -> None:
    """It ends the run, whatever waits for its text."""
    calls = (
        Call("good", ("Once",), 2, seed=0),
        Call("long", ("word " * 3000,), 2, seed=0),
        Call("last", ("After ", Output("good"), Output("long")), 2, seed=0),
    )
    workload = Workload("broken", (Application("broken", "broken", calls, ("last",)),))
    async with GatewayClient(demo.base_url, DEMO_MODEL, API_KEY) as client:
        for way in ("one by one", "parallel", SEMANTIC):
            with pytest.raises(BenchmarkError, match=r"context_length|tokens"):
                await run_workload(client, workload, way, "bench-broken")


@pytest.mark.parametrize(
    ("way", "complaint"),
    [("one by one", "ignore_eos"), (SEMANTIC, "does not know semantic variables")],
)
async def test_a_server_that_ignores_what_it_is_asked_is_found_out(
    way: str, complaint: str
) -> None:
    with ScriptedUpstream() as fake:
        async with GatewayClient(fake.base_url, "fake:size=8") as client:
            with pytest.raises(BenchmarkError, match=complaint):
                await run_workload(client, build("chain", 1), way, "bench")
