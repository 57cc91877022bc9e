"""The scheduling state of one model as plain data, for APIs and metrics."""

from __future__ import annotations

from typing import Any

from parrot_scheduler.engines.pool import EnginePool
from parrot_scheduler.model_scheduler import ModelScheduler
from parrot_scheduler.task import BlockHash


def queue_of(model: ModelScheduler, now: float) -> dict[str, float]:
    """Count waiting tasks and the oldest wait; takes a pass over held applications."""
    oldest = model.waiting.oldest()
    held = model.admission_queue.held
    return {
        "queued": len(model.order),
        "queued_fills": len(model.fills),
        "held": sum(len(each.tasks) for each in held.values()),
        "held_applications": len(held),
        "oldest_wait_s": now - oldest.submitted_at if oldest is not None else 0.0,
        "active_applications": model.applications.num_active,
        "memory_needed": model.pool.memory_needed,
    }


def snapshot_of(model: ModelScheduler, now: float) -> dict[str, Any]:
    """Return dicts, lists, numbers and words; takes a pass over held applications and engines."""
    queue = queue_of(model, now)
    held_applications = model.admission_queue.held.values()
    return {
        **{name: queue[name] for name in ("queued", "queued_fills", "held", "oldest_wait_s")},
        "reserved": None
        if model.reserved is None
        else {
            "task_id": model.reserved[0].task.id,
            "engine_id": model.pool.table.ids[model.reserved[1]],
        },
        "applications": len(model.applications),
        "held_applications": [
            {
                "application": held.application.id,
                "tenant": held.application.tenant,
                "since": held.since,
                "reason": held.reason,
                "returning": held.returning,
                "tasks": len(held.tasks),
            }
            for held in held_applications
        ],
        "tenants": model.order.service_by_tenant(),
        "engines": [_engine(model.pool, row) for row in model.pool.placed],
    }


def shared_prefixes(model: ModelScheduler, row: int, limit: int = 8) -> list[tuple[int, int]]:
    """Return the longest common prefixes of tasks placed on an engine, as tokens and number of
    tasks, the largest product first.
    """
    pool = model.pool
    block = int(pool.table.block_tokens[row])
    families: dict[BlockHash, list[tuple[BlockHash, ...]]] = {}
    for state in pool.placed[row].values():
        if state.task.prefix:
            families.setdefault(state.task.prefix[0], []).append(state.task.prefix)
    # The common prefix of sorted chains is that of the first and the last.
    found = [
        (block * _num_equal(min(each), max(each)), len(each))
        for each in families.values()
        if len(each) > 1
    ]
    return sorted(found, key=lambda each: -each[0] * each[1])[:limit]


def _num_equal(one: tuple[BlockHash, ...], other: tuple[BlockHash, ...]) -> int:
    """Count the equal leading blocks."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _engine(pool: EnginePool, row: int) -> dict[str, Any]:
    table, report = pool.table, pool.reports.get(row)
    limit_s = float(table.step_limit_s[row])
    return {
        "engine_id": table.ids[row],
        "takes_work": pool.takes_work(row),
        "tasks": len(pool.placed[row]),
        "capacity_tokens": int(table.capacity[row]),
        "max_batch": int(table.max_batch[row]),
        "batch": int(table.batch[row]),
        "latency_batch": int(table.latency_batch[row]),
        "pending_prefill_tokens": int(table.pending_prefill[row]),
        "working_set_tokens": int(table.working_set[row]),
        "kept_tokens": int(table.retained[row]),
        "step_limit_s": None if limit_s == float("inf") else limit_s,
        "reported": None
        if report is None
        else {
            "running": report.running,
            "waiting": report.waiting,
            "used_tokens": report.used_tokens,
        },
    }
