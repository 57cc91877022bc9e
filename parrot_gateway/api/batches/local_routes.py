"""The base of the routes of files and of batches.

Some objects are kept here, others by an upstream; the id of each says where.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ClassVar, TypeAlias, TypeVar

from parrot_gateway.batches.service import BatchService
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import Query
from parrot_gateway.routing.model_directory import ModelDirectory

_Routes = TypeVar("_Routes", bound="LocalRoutes")
_Handler: TypeAlias = Callable[[_Routes, Exchange, str], Awaitable[None]]


@dataclass(frozen=True)
class LocalRoutes:
    """Routes of objects that this gateway keeps, beside those that upstreams keep."""

    service: BatchService
    models: ModelDirectory
    #: Answers what is an upstream's; takes the body if that has been read.
    passthrough: Callable[[Exchange, bytes | None], Awaitable[None]]
    #: Of a request that may have to be passed on, which is read whole.
    max_body_bytes: int
    #: How ids of ours begin.
    mark: ClassVar[str]

    def is_foreign_list(self, found: Sequence[Any], query: Query) -> bool:
        """Return whether an upstream answers: there are none of ours, or `after` is none."""
        after = query.text("after")
        is_foreign = not found or bool(after and not after.startswith(self.mark))
        return bool(self.models.upstreams) and is_foreign


def ours(handler: _Handler[_Routes]) -> _Handler[_Routes]:
    """Call a handler for ids of ours only; other ids are an upstream's, if there is one."""

    @wraps(handler)
    async def answer(routes: _Routes, exchange: Exchange, object_id: str) -> None:
        if routes.models.upstreams and not object_id.startswith(routes.mark):
            await routes.passthrough(exchange, None)
        else:
            await handler(routes, exchange, object_id)

    return answer
