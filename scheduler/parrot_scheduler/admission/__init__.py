"""Admission: may an application run now, or is it held?"""

from __future__ import annotations

from parrot_scheduler.admission.open import Open
from parrot_scheduler.admission.working_set import WorkingSet
from parrot_scheduler.policy import AdmissionFactory

POLICIES: dict[str, AdmissionFactory] = {
    "open": lambda config, rng: Open(),
    "working-set": lambda config, rng: WorkingSet(config),
}
