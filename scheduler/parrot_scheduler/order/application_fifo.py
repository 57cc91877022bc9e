"""The Parrot paper's order: applications by arrival."""

from __future__ import annotations

from parrot_scheduler.application import Application
from parrot_scheduler.order.ranked import ApplicationOrder


class ApplicationFifo(ApplicationOrder):
    """A ready task of an application that came earlier goes before all tasks of later ones.

    Within an application tasks go in order of submission, which is topological, as published
    (arXiv 2405.19888, sections 5.2 and 5.4).
    """

    name = "application-fifo"

    def rank(self, application: Application) -> tuple[float, ...]:
        """By arrival."""
        return (application.arrived_at, application.sequence)
