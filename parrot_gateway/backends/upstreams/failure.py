"""The outcome of a call that an upstream could not answer, while nothing had been passed on."""

from __future__ import annotations

from typing import NamedTuple

from parrot_gateway.exceptions import GatewayError


class FailedAttempt(NamedTuple):
    """One upstream could not answer, and another backend may."""

    #: For the client, if no other backend answers.
    error: GatewayError
