"""No retention: an engine's own cache policy decides."""

from __future__ import annotations

from parrot_scheduler.policy import RetentionPolicy


class NoRetention(RetentionPolicy):
    """Every context is treated as any other, and nothing is dropped early."""

    name = "none"
