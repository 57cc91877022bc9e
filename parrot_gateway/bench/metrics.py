"""`parrot-gateway bench metrics`: what the page at `/metrics` costs, and a call that is counted.

A gateway in this process with engines that have joined and sent heartbeats, and calls of several
tenants that have ended; all without a network. While a page is written, another task of the event
loop counts its turns: the longest one is what a stream would have to wait.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer
from parrot_engine.link.wire import Register
from parrot_engine.protocol import EngineInfo, EngineStats
from parrot_engine.text import TextAssets

from parrot_gateway.bench.report import JsonFile, Row, show, write_json
from parrot_gateway.bench.servers import loop_runner
from parrot_gateway.server.gateway import Gateway
from parrot_gateway.settings.model import LinkingSettings, Settings
from parrot_gateway.telemetry.call_record import CallRecord

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
_RECORDS = 20_000


class Measured(NamedTuple):
    """Of one page: its size, and times in seconds, by the clock and of this thread's processor."""

    size: int
    samples: int
    took_s: float
    cpu_s: float
    longest_turn_s: float
    longest_turn_cpu_s: float


def metrics_command(
    engines: Annotated[int, typer.Option(min=1, help="Engines that have joined.")] = 200,
    models: Annotated[int, typer.Option(min=1, help="Models that they serve.")] = 20,
    tenants: Annotated[int, typer.Option(min=1, help="Tenants that have made calls.")] = 50,
    rounds: Annotated[int, typer.Option(min=1, help="Pages.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Measure the page of metrics, and what counting a call costs."""
    with loop_runner() as runner:
        pages, record_us = runner.run(_measure(engines, models, tenants, rounds))
    last = pages[-1]
    rows = [
        Row("a page, p50", "ms", 1000 * median(page.took_s for page in pages), at_most=50),
        Row("a page, CPU p50", "ms", 1000 * median(page.cpu_s for page in pages)),
        Row(
            "longest turn of the event loop, p50",
            "ms",
            1000 * median(page.longest_turn_s for page in pages),
            at_most=5,
        ),
        Row(
            "longest turn of the event loop, worst page",
            "ms",
            1000 * max(page.longest_turn_s for page in pages),
        ),
        Row(
            "longest turn, CPU, worst page",
            "ms",
            1000 * max(page.longest_turn_cpu_s for page in pages),
            at_most=5,
        ),
        Row("size", "kB", last.size / 1000),
        Row("samples", "", last.samples),
        Row("counting a call, CPU", "us", record_us),
    ]
    notes = [
        f"{engines} engines of {models} models, {tenants} tenants, {rounds} pages. Wall times "
        "include whatever else the machine does; CPU times are those of the event loop's thread."
    ]
    show("The page of metrics", rows, notes)
    if json_file is not None:
        content: dict[str, Any] = {
            "options": {"engines": engines, "models": models, "tenants": tenants},
            "rows": [row.to_dict() for row in rows],
            "pages": [page._asdict() for page in pages],
        }
        write_json(json_file, "metrics", content)


async def _measure(
    engines: int, models: int, tenants: int, rounds: int
) -> tuple[list[Measured], float]:
    gateway = Gateway(Settings(linking=LinkingSettings(enabled=False)))
    _add_engines(gateway, engines, models)
    # The scheduler has been told of them when the next turn ends.
    await asyncio.sleep(0)
    records = _records(engines, models, tenants)
    gateway.metrics.calls.count(records)
    began = time.thread_time()
    counted = 0
    while counted < _RECORDS:
        gateway.metrics.calls.count(records)
        counted += len(records)
    record_us = (time.thread_time() - began) / counted * 1e6
    pages = [await _page(gateway) for _ in range(rounds)]
    await gateway.close()
    return pages, record_us


def _add_engines(gateway: Gateway, engines: int, models: int) -> None:
    for number in range(engines):
        info = EngineInfo(
            model=f"organisation/model-{number % models}-instruct",
            kind="builtin",
            architecture="Llama",
            device="cuda:0",
            dtype="bfloat16",
            max_context_tokens=32_768,
            vocab_size=32_000,
            eos_token_ids=[2],
            max_batch_size=256,
            block_size=16,
            num_blocks=30_000,
            host_blocks=10_000,
        )
        engine = gateway.registry.add(
            Register(f"host-{number}:40{number:03}", info, TextAssets("{}"))
        )
        engine.note_stats(
            EngineStats(
                running=number,
                waiting=3,
                free_blocks=10_000 + number,
                cached_blocks=5_000,
                steps=1_000_000 + number,
                filled_tokens=500_000_000 + number,
                cached_tokens=300_000_000,
                generated_tokens=90_000_000,
                busy_s=86_400.125 + number,
            )
        )


def _records(engines: int, models: int, tenants: int) -> list[CallRecord]:
    """A call of each tenant to some models, and one to each engine."""
    now = time.perf_counter()
    return [
        CallRecord(
            f"req_{number}",
            f"call_{number}",
            now - 2.0,
            path=_PATHS[number % len(_PATHS)],
            tenant=f"tenant-{number % tenants}",
            served_model=f"organisation/model-{number % models}-instruct",
            engine=f"host-{number % engines}:40{number % engines:03}",
            submitted=now - 1.99,
            placed=now - 1.9,
            first_token=now - 1.5,
            ended=now - 0.01 * (number % 50),
            queued_s=0.09,
            prompt_tokens=number * 7,
            cached_tokens=number * 3,
            output_tokens=2 + number % 400,
            status=200 if number % 20 else 503,
            error_code=None if number % 20 else "overloaded",
            finish_reason="stop",
            streamed=True,
        )
        for number in range(max(engines, tenants * 4))
    ]


async def _page(gateway: Gateway) -> Measured:
    longest = longest_cpu = 0.0

    async def watch() -> None:
        nonlocal longest, longest_cpu
        before, cpu_before = time.perf_counter(), time.thread_time()
        while True:
            await asyncio.sleep(0)
            now, cpu = time.perf_counter(), time.thread_time()
            longest, longest_cpu = max(longest, now - before), max(longest_cpu, cpu - cpu_before)
            before, cpu_before = now, cpu

    watching = asyncio.create_task(watch(), name="watch")
    await asyncio.sleep(0)
    began, cpu_began = time.perf_counter(), time.thread_time()
    page = await gateway.metrics.page()
    took_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
    watching.cancel()
    samples = sum(not line.startswith(b"#") for line in page.splitlines())
    return Measured(len(page), samples, took_s, cpu_s, longest, longest_cpu)
