"""Order: which queued task is placed next?"""

from __future__ import annotations

from parrot_scheduler.order.baselines import ApplicationFifo, Atlas, Fcfs, Plas
from parrot_scheduler.order.fair import Fair
from parrot_scheduler.policy import OrderFactory

POLICIES: dict[str, OrderFactory] = {
    "fcfs": lambda config, rng: Fcfs(),
    "plas": Plas.make,
    "atlas": Atlas.make,
    "application-fifo": lambda config, rng: ApplicationFifo(),
    "fair": Fair.make,
}
