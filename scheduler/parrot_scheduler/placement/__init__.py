"""Placement: on which engine does a task run?"""

from __future__ import annotations

from parrot_scheduler.placement.parrot import Parrot
from parrot_scheduler.policy import PlacementFactory

POLICIES: dict[str, PlacementFactory] = {"parrot": Parrot.make}
