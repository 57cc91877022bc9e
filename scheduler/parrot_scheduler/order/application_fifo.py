"""The Parrot paper's order: applications by arrival, the calls of the earliest one first."""

from __future__ import annotations

from parrot_scheduler.order.application_order import ByApplication
from parrot_scheduler.policy import Application


class ApplicationFifo(ByApplication):
    """A ready call of an application that came earlier goes before all calls of later ones.

    Within an application calls go in order of submission, which is topological, as published
    (arXiv 2405.19888, sections 5.2 and 5.4).
    """

    name = "application-fifo"

    def __init__(self) -> None:
        super().__init__(aging=None)

    def rank(self, application: Application) -> tuple[float, int]:
        """By arrival."""
        return (application.arrived_at, application.sequence)
