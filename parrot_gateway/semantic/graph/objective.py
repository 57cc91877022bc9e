"""Objectives as clients write them."""

from __future__ import annotations

from parrot_scheduler.task import Objective

from parrot_gateway.exceptions import InvalidRequestError


def parse_objective(text: str, param: str = "objective") -> Objective:
    """Read `latency`, `throughput`, `ttft=200ms`, `tpot=50ms` or `deadline=2s`.

    Raises:
        InvalidRequestError: anything else: see `Objective.parse`.
    """
    try:
        return Objective.parse(text)
    except ValueError as error:
        raise InvalidRequestError(str(error), param=param, code="invalid_value") from None
