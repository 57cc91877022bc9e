"""Whose request it is. There is one tenant so far; this is the one place that decides."""

from __future__ import annotations

from parrot_gateway.generation.placement import DEFAULT_TENANT
from parrot_gateway.http.exchange import Exchange


def tenant_of(exchange: Exchange) -> str:
    """The tenant of a request that has passed the key check."""
    return DEFAULT_TENANT
