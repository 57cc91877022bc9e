"""Lets the backends of a call answer one after the other: the only loop over fallbacks.

A backend that fails before anything of its answer was passed on is followed by the `fallback` of
its upstream. Each upstream is tried once. Engines of our own have no fallback.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from parrot_gateway.backends.upstreams.failure import (
    FailedAttempt,
    Returned,
    error_to_tell,
    reason_of_error,
)
from parrot_gateway.exceptions import DeadlineError, GatewayError, InvalidRequestError
from parrot_gateway.routing.model_directory import ModelDirectory, Target


class Attempts(Protocol):
    """Answers one call with either kind of backend."""

    def on_engine(self, model: str) -> Awaitable[None]:
        """Answer with engines of our own.

        Raises:
            GatewayError: nothing has been passed on.
        """

    async def on_upstream(
        self, upstream: str, model: str, *, returned: Returned
    ) -> FailedAttempt | None:
        """Answer with an upstream.

        Args:
            upstream: its name.
            model: as it knows it.
            returned: the failures to return, so that another backend can answer.

        Returns:
            None once the call is answered.

        Raises:
            InvalidRequestError: the upstream cannot be sent such a request.
            GatewayError: no other backend shall answer; the answer may have begun.
        """


async def answer_with_fallbacks(models: ModelDirectory, target: Target, attempts: Attempts) -> None:
    """Let the backends of a call try, beginning with `target`, until one answers.

    Raises:
        GatewayError: none has; see `error_to_tell`.
    """
    tried = set[str]()
    failures: list[FailedAttempt] = []
    while target.upstream is not None:
        tried.add(target.upstream)
        following = _following(models, target.upstream, tried)
        returned: Returned = "nothing" if following is None else "failures"
        try:
            failure = await attempts.on_upstream(
                target.upstream, target.model, returned="all" if failures else returned
            )
        except InvalidRequestError as error:
            if not failures:
                raise
            failure = FailedAttempt(error, "refused")
        if failure is None:
            return
        failures.append(failure)
        if following is None:
            raise error_to_tell(failures)
        target = following
    if not failures:
        await attempts.on_engine(target.model)
        return
    try:
        await attempts.on_engine(target.model)
    except DeadlineError:
        raise
    except GatewayError as error:
        failures.append(FailedAttempt(error, reason_of_error(error)))
        raise error_to_tell(failures) from None


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
