"""Counts of all parts of a gateway under their metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace as Stub
from typing import Any, cast

import pytest
from parrot_engine.protocol import EngineInfo, EngineStats
from prometheus_client.parser import text_string_to_metric_families

from parrot_gateway import __version__
from parrot_gateway.telemetry.call_record import CallRecords
from parrot_gateway.telemetry.metrics import gauges
from parrot_gateway.telemetry.metrics.gauges import Parts
from parrot_gateway.telemetry.metrics.page import Metrics


def engine(
    name: str, first: int, *, lost: bool = False, takes_calls: bool = True, **info: int
) -> Stub:
    """Its counts are `first` and the numbers before it."""
    made = {"max_context_tokens": 1, "vocab_size": 1, "eos_token_ids": [], **info}
    return Stub(
        id=f"id-{name}", name=name, lost=lost, takes_calls=takes_calls, queued_tokens=first + 20,
        stats=EngineStats(*range(first, first - 17, -1)), stats_age_s=first + 21,
        info=EngineInfo("m", "builtin", "a", "cpu", "f", **cast(Any, made)),
    )  # fmt: skip


def parts(linking: Any, **changed: Any) -> Parts:
    """Parts whose counts are all different."""
    usage = {"prompt_tokens": 506, "cached_tokens": 507, "completion_tokens": 508}
    server = Stub(
        name="up",
        statistics=lambda: {
            "ready": False, "breaker": "half_open", "breaker_openings": 501, "running": 502,
            "waiting": 503, "retries": 504, "failures": 505, "usage": usage,
        },
    )  # fmt: skip
    queue = {
        "queued": 601, "held": 602, "active_applications": 603, "held_applications": 604,
        "oldest_wait_s": 605, "memory_needed": 0.5,
    }  # fmt: skip
    engines = (
        engine("a", 100, num_blocks=1000, block_size=16, host_blocks=50),
        engine("b", 200, takes_calls=False, num_blocks=150, block_size=8),
        engine("c", 300, lost=True),
    )
    processes = [
        Stub(model=Stub(served_name="m"), state="running", restarts=401),
        Stub(model=Stub(served_name="m"), state="starting", restarts=10),
    ]
    semantic = {
        "sessions": {"sessions": 701, "created": 702, "closed": 703, "evicted": 704,
                     "expired": 705, "variables": 706, "value_bytes": 707},
        "readers": 708,
        "calls": {"waiting": 709, "in_line": 710, "running": 711, "done": 712, "failed": 713,
                  "cancelled": 714, "deduplicated": 715, "retries": 716, "started_by_inputs": 717,
                  "head_start_s": 718},
        "recorded_calls": {"recorded": 719, "skipped": 720},
        "fill_ahead": {"held_tokens": 721, "fills": 722, "cut_off": 723, "filled_tokens": 724,
                       "cached_tokens": 725},
    }  # fmt: skip
    given = {
        "is_ready": lambda: True,
        "requests": Stub(is_draining=False, running=801, accepted=802, refused=803),
        "calls": CallRecords(),
        "registry": Stub(
            joined={each.id: each for each in engines}, losses={("m", "silent"): 412}
        ),
        "supervisor": Stub(processes=processes),
        "upstreams": {"up": Stub(upstreams=lambda: [server], settings=Stub(servers=["up"]))},
        "scheduling": Stub(
            queues=lambda: {"m": queue}, held=606, grouped=607, placements={"load": 608},
            refusals={"full": 609},
            shared_prefixes=lambda: [("id-a", [(40, 3), (10, 2)]), ("gone", [(7, 7)])],
        ),
        "responses": Stub(statistics=lambda: Stub(entries=804)),
        "semantic": lambda: semantic,
        "batches": lambda: {"running_batches": 805, "running_lines": 806},
        "linking": linking,
    }  # fmt: skip
    return Parts(**cast(Any, {**given, **changed}))


async def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Every sample of a count by name and values of its labels, without the process's."""
    text = (await metrics.page()).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type != "histogram" and not family.name.startswith(("process_", "python_"))
    }


def of_engine(name: str, first: int, shared: int = 0) -> dict[tuple[str, ...], float]:
    """Samples that every engine has."""
    values = {
        "vllm:num_requests_running": first,
        "vllm:num_requests_waiting": first - 1,
        "parrot_engine_steps_total": first - 5,
        "vllm:prefix_cache_queries_total": first - 6,
        "vllm:gpu_prefix_cache_queries_total": first - 6,
        "vllm:prefix_cache_hits_total": first - 7,
        "vllm:gpu_prefix_cache_hits_total": first - 7,
        "parrot_engine_generated_tokens_total": first - 8,
        "vllm:num_preemptions_total": first - 9,
        "vllm:spec_decode_num_draft_tokens_total": first - 10,
        "vllm:spec_decode_num_accepted_tokens_total": first - 11,
        "parrot_engine_busy_seconds_total": first - 15,
        "parrot_engine_read_once_tokens_total": first - 16,
        "parrot_engine_queued_tokens": first + 20,
        "parrot_engine_heartbeat_age_seconds": first + 21,
        "parrot_engine_shared_prompt_tokens": shared,
    }
    return {
        **{(metric, "m", name): value for metric, value in values.items()},
        ("parrot_engine_prompt_tokens_total", "m", name, "computed"): 1,
        ("parrot_engine_prompt_tokens_total", "m", name, "reused"): first - 7,
    }


OF_PARTS: dict[tuple[str, ...], float] = {
    ("parrot_gateway_info", __version__): 1,
    ("parrot_gateway_ready",): 1,
    ("parrot_gateway_draining",): 0,
    ("parrot_requests_running",): 801,
    ("parrot_requests_accepted_total",): 802,
    ("parrot_requests_refused_total",): 803,
    ("parrot_calls_abandoned_total",): 0,
    ("parrot_deferred_calls_total",): 0,
    ("parrot_engines", "m", "builtin", "ready"): 1,
    ("parrot_engines", "m", "builtin", "draining"): 1,
    ("parrot_engines", "m", "builtin", "lost"): 1,
    ("vllm:kv_cache_usage_perc", "m", "a"): 0.903,
    ("vllm:gpu_cache_usage_perc", "m", "a"): 0.903,
    ("vllm:cache_config_info", "m", "a", "16", "1000"): 1,
    ("parrot_engine_kv_blocks", "m", "a", "used"): 903,
    ("parrot_engine_kv_blocks", "m", "a", "cached"): 96,
    ("parrot_engine_kv_blocks", "m", "a", "empty"): 1,
    ("parrot_engine_kv_blocks", "m", "a", "host"): 88,
    ("parrot_engine_host_blocks_moved_total", "m", "a", "out"): 87,
    ("parrot_engine_host_blocks_moved_total", "m", "a", "in"): 86,
    # More free blocks than it says it has: just joined.
    ("vllm:kv_cache_usage_perc", "m", "b"): 0,
    ("vllm:gpu_cache_usage_perc", "m", "b"): 0,
    ("vllm:cache_config_info", "m", "b", "8", "150"): 1,
    ("parrot_engine_kv_blocks", "m", "b", "used"): 0,
    ("parrot_engine_kv_blocks", "m", "b", "cached"): 196,
    ("parrot_engine_kv_blocks", "m", "b", "empty"): 1,
    ("parrot_engine_processes", "m", "running"): 1,
    ("parrot_engine_processes", "m", "starting"): 1,
    ("parrot_engine_process_restarts_total", "m"): 411,
    ("parrot_engines_lost_total", "m", "silent"): 412,
    ("parrot_upstream_ready", "up"): 0,
    ("parrot_upstream_breaker_open", "up"): 0.5,
    ("parrot_upstream_breaker_openings_total", "up"): 501,
    ("parrot_upstream_requests_running", "up"): 502,
    ("parrot_upstream_requests_waiting", "up"): 503,
    ("parrot_upstream_retries_total", "up"): 504,
    ("parrot_upstream_failures_total", "up"): 505,
    ("parrot_upstream_tokens_total", "up", "prompt"): 506,
    ("parrot_upstream_tokens_total", "up", "cached"): 507,
    ("parrot_upstream_tokens_total", "up", "output"): 508,
    ("vllm:num_requests_waiting", "m", "gateway"): 601 + 602,
    ("parrot_scheduler_queued_calls", "m"): 601,
    ("parrot_scheduler_held_calls", "m"): 602,
    ("parrot_scheduler_applications", "m"): 603,
    ("parrot_scheduler_held_applications", "m"): 604,
    ("parrot_scheduler_oldest_wait_seconds", "m"): 605,
    ("parrot_scheduler_memory_needed_ratio", "m"): 0.5,
    ("parrot_scheduler_holds_total",): 606,
    ("parrot_scheduler_grouped_calls_total",): 607,
    ("parrot_scheduler_placements_total", "load"): 608,
    ("parrot_scheduler_refusals_total", "full"): 609,
    ("parrot_sessions",): 701,
    ("parrot_sessions_created_total",): 702,
    ("parrot_sessions_ended_total", "closed"): 703,
    ("parrot_sessions_ended_total", "evicted"): 704,
    ("parrot_sessions_ended_total", "expired"): 705,
    ("parrot_session_variables",): 706,
    ("parrot_session_value_bytes",): 707,
    ("parrot_session_readers",): 708,
    ("parrot_graph_calls_unfinished", "waiting"): 709,
    ("parrot_graph_calls_unfinished", "in_line"): 710,
    ("parrot_graph_calls_unfinished", "running"): 711,
    ("parrot_graph_calls_total", "done"): 712,
    ("parrot_graph_calls_total", "failed"): 713,
    ("parrot_graph_calls_total", "cancelled"): 714,
    ("parrot_deferred_calls_deduplicated_total",): 715,
    ("parrot_deferred_call_retries_total",): 716,
    ("parrot_deferred_round_trips_saved_total",): 717,
    ("parrot_deferred_head_start_seconds_total",): 718,
    ("parrot_recorded_calls_total", "recorded"): 719,
    ("parrot_recorded_calls_total", "skipped"): 720,
    ("parrot_fill_ahead_held_tokens",): 721,
    ("parrot_fill_ahead_fills_total", "done"): 722,
    ("parrot_fill_ahead_fills_total", "cut_off"): 723,
    ("parrot_fill_ahead_tokens_total",): 724,
    ("parrot_fill_ahead_cached_tokens_total",): 725,
    ("parrot_stored_responses",): 804,
    ("parrot_batches_running",): 805,
    ("parrot_batch_lines_running",): 806,
}
OF_LINKING: dict[tuple[str, ...], float] = {
    ("parrot_linking_calls_total",): 901,
    ("parrot_linking_sessions",): 902,
    ("parrot_linking_skipped_total",): 903,
    ("parrot_linking_behind_seconds",): 904,
    ("parrot_linking_bytes",): 905,
    ("parrot_linking_restarts_total",): 906,
    ("parrot_linking_late_sessions_total",): 907,
    ("parrot_linking_templates",): 908,
    ("parrot_linking_edges_total", "output"): 909,
}


async def test_each_count_of_each_part_has_its_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauges, "_LINKING_WAIT_S", 0.0)
    answers: list[asyncio.Future[dict[str, Any]]] = []

    def linking() -> asyncio.Future[dict[str, Any]]:
        answers.append(asyncio.get_running_loop().create_future())
        return answers[-1]

    metrics = Metrics(parts(linking))
    here = {
        **of_engine("a", 100, 80 + 10),
        **of_engine("b", 200),
        **of_engine("c", 300),
        **OF_PARTS,
    }
    # The linking process is slow: the page goes without, and it is not asked again meanwhile.
    assert await samples(metrics) == here
    assert await samples(metrics) == here
    (answer,) = answers
    answer.set_result(
        {"linked": 901, "sessions": 902, "skipped": 903, "behind_s": 904, "bytes": 905,
         "restarts": 906, "late": 907, "templates": 908, "links_by_kind": {"output": 909}}
    )  # fmt: skip
    assert await samples(metrics) == {**here, **OF_LINKING}
    # Its last figures stand while it is slow again.
    assert await samples(metrics) == {**here, **OF_LINKING}
    assert len(answers) == 2
    answers[1].cancel()


def test_a_model_is_served_by_an_engine_a_process_or_an_upstream() -> None:
    made = parts(
        None, registry=Stub(serving={"joined"}), supervisor=Stub(served={"starting"}),
        upstreams={name: Stub(models=lambda name=name: [name]) for name in ("one", "two")},
    )  # fmt: skip
    names = ("joined", "starting", "one", "two", "none")
    assert [made.serves(name) for name in names] == [True, True, True, True, False]
