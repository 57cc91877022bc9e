"""Order: which queued task is placed next?"""

from __future__ import annotations

from parrot_scheduler.order.baselines import ApplicationFifo, Atlas, Fcfs, Plas
from parrot_scheduler.order.fair import Fair
from parrot_scheduler.policy import OrderFactory

POLICIES: dict[str, OrderFactory] = {
    "fcfs": lambda config, rng: Fcfs(),
    "plas": lambda config, rng: Plas(config),
    "atlas": lambda config, rng: Atlas(config),
    "application-fifo": lambda config, rng: ApplicationFifo(),
    "fair": lambda config, rng: Fair(config),
}
