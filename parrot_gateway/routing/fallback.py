"""Lets the backends of a call answer one after the other: the only loop over fallbacks.

A backend that fails before anything of its answer was passed on is followed by the `fallback` of
its upstream. Each upstream is tried once. Engines of our own have no fallback.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from parrot_gateway.backends.upstreams.failure import FailedAttempt
from parrot_gateway.exceptions import GatewayError
from parrot_gateway.routing.model_directory import ModelDirectory, Target


class Attempts(Protocol):
    """Answers one call with either kind of backend."""

    def on_engine(self, model: str) -> Awaitable[None]:
        """Answer with engines of our own.

        Raises:
            GatewayError: nothing has been passed on.
        """

    async def on_upstream(
        self, upstream: str, model: str, *, may_fall_back: bool
    ) -> FailedAttempt | None:
        """Answer with an upstream.

        Args:
            upstream: its name.
            model: as it knows it.
            may_fall_back: another backend follows.

        Returns:
            None once the call is answered; a failure only if `may_fall_back`.

        Raises:
            GatewayError: nothing has been passed on, and no other backend shall answer.
        """


async def answer_with_fallbacks(models: ModelDirectory, target: Target, attempts: Attempts) -> None:
    """Let the backends of a call try, beginning with `target`, until one answers.

    Raises:
        GatewayError: none has; nothing has been passed on.
    """
    tried = set[str]()
    while target.upstream is not None:
        tried.add(target.upstream)
        following = _following(models, target.upstream, tried)
        failure = await attempts.on_upstream(
            target.upstream, target.model, may_fall_back=following is not None
        )
        if failure is None:
            return
        if following is None:
            raise failure.error
        target = following
    await attempts.on_engine(target.model)


def _following(models: ModelDirectory, upstream: str, tried: set[str]) -> Target | None:
    """Find the backend that is tried after an upstream."""
    name = models.upstreams[upstream].settings.fallback
    if name is None:
        return None
    try:
        target = models.resolve(name)
    except GatewayError:
        return None
    return None if target.upstream in tried else target
