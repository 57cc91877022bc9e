"""How a scheduler stands, as plain data for APIs and metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parrot_scheduler.queue.model_queue import ModelQueue

if TYPE_CHECKING:
    from parrot_scheduler.scheduler import Scheduler


def snapshot_of(scheduler: Scheduler) -> dict[str, Any]:
    """Dicts, lists, numbers and words; costs a pass over held applications and engines."""
    return {
        "now": scheduler.now,
        "policies": {
            name: getattr(scheduler.config, name)
            for name in ("admission", "order", "place", "keep")
        },
        "actions": dict(scheduler.counts),
        "ignored": dict(scheduler.ignored),
        "models": {name: _model(queue, scheduler.now) for name, queue in scheduler.models.items()},
    }


def _model(queue: ModelQueue, now: float) -> dict[str, Any]:
    oldest = next(iter(queue.waiting.values()), None)
    num_held = sum(len(held.entries) for held in queue.door.held.values())
    return {
        "queued": len(queue.order),
        "queued_fills": len(queue.fills),
        "held": num_held,
        "oldest_wait_s": now - oldest.submitted_at if oldest is not None else 0.0,
        "reserved": None
        if queue.reserved is None
        else {
            "task_id": queue.reserved[0].task.id,
            "engine_id": queue.pool.table.ids[queue.reserved[1]],
        },
        "applications": len(queue.applications),
        "held_applications": [
            {
                "application": held.application.id,
                "tenant": held.application.tenant,
                "since": held.since,
                "reason": held.reason,
                "returning": held.returning,
                "tasks": len(held.entries),
            }
            for held in queue.door.held.values()
        ],
        "tenants": queue.order.shares(),
        "engines": [_engine(queue, row) for row in queue.pool.placed],
    }


def _engine(queue: ModelQueue, row: int) -> dict[str, Any]:
    table, report = queue.pool.table, queue.pool.reports.get(row)
    limit_s = float(table.step_limit_s[row])
    return {
        "engine_id": table.ids[row],
        "takes_work": queue.pool.takes_work(row),
        "tasks": len(queue.pool.placed[row]),
        "capacity_tokens": int(table.capacity[row]),
        "max_batch": int(table.max_batch[row]),
        "batch": int(table.batch[row]),
        "latency_batch": int(table.latency_batch[row]),
        "pending_prefill_tokens": int(table.pending_prefill[row]),
        "working_set_tokens": int(table.working_set[row]),
        "kept_tokens": int(table.kept[row]),
        "step_limit_s": None if limit_s == float("inf") else limit_s,
        "reported": None
        if report is None
        else {
            "running": report.running,
            "waiting": report.waiting,
            "used_tokens": report.used_tokens,
        },
    }
