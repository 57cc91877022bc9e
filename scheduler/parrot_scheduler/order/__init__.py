"""Order: which queued task is placed next? One small file for each policy."""

from __future__ import annotations

from parrot_scheduler.order.fcfs import Fcfs
from parrot_scheduler.policy import OrderFactory

POLICIES: dict[str, OrderFactory] = {
    "fcfs": lambda config, rng: Fcfs(),
}
