"""`/admin/v1/config`: the settings of the running gateway, shown and replaced whole."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from parrot_gateway.exceptions import PreconditionRequiredError
from parrot_gateway.http.exchange import JSON, Exchange
from parrot_gateway.http.route_table import route

_MAX_BODY_BYTES = 1024 * 1024


class Configuration(Protocol):
    """The settings, and their exchange for others."""

    @property
    def etag(self) -> str:
        """Names the present settings."""

    def describe(self) -> dict[str, Any]:
        """The present settings, with origins."""

    async def put(self, body: bytes, if_match: str) -> list[str]:
        """Take over others; names of what has changed."""


class ConfigRoutes:
    """The routes.

    Args:
        configuration: the settings.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration

    @route("GET", "/admin/v1/config")
    async def get(self, exchange: Exchange) -> None:
        """Show the settings, where each comes from, and which of them change at run time."""
        await self._answer(exchange, self.configuration.describe())

    @route("PUT", "/admin/v1/config")
    async def put(self, exchange: Exchange) -> None:
        """Replace all settings, at once or not at all, until the next restart or SIGHUP."""
        body = await exchange.body(_MAX_BODY_BYTES)
        if_match = exchange.headers.get(b"if-match", b"").decode("latin-1").strip()
        if not if_match:
            raise PreconditionRequiredError(
                "Send the ETag of the settings that yours replace as 'If-Match', so that nobody's "
                "are overwritten unseen; '*' stands for any."
            )
        changed = await self.configuration.put(body, if_match)
        await self._answer(exchange, {"changed": changed, **self.configuration.describe()})

    async def _answer(self, exchange: Exchange, value: dict[str, Any]) -> None:
        headers = [JSON, (b"etag", self.configuration.etag.encode())]
        await exchange.respond(200, msgspec.json.encode(value), headers)
