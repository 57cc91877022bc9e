"""Lists of files and batches, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from parrot_gateway.exceptions import InvalidRequestError, invalid_value
from parrot_gateway.http.route_table import Query

_T = TypeVar("_T")


def page_of(
    items: Sequence[_T],
    query: Query,
    *,
    id_of: Callable[[_T], str],
    shape: Callable[[_T], dict[str, Any]],
    default_limit: int,
    max_limit: int,
) -> dict[str, Any]:
    """One page of a list, as the query asks for: `limit`, `after`, `order`.

    Args:
        items: all, newest first.
        id_of: the id of one, which `after` names.
        shape: one as it is shown.

    Raises:
        InvalidRequestError: a parameter is wrong.
    """
    limit = _limit_of(query.text("limit"), default_limit, max_limit)
    order = query.text("order") or "desc"
    if order not in ("asc", "desc"):
        raise invalid_value("order", "expected 'asc' or 'desc'.")
    ordered = list(items) if order == "desc" else list(reversed(items))
    after = query.text("after")
    if after is not None:
        at = next((n for n, item in enumerate(ordered) if id_of(item) == after), None)
        if at is None:
            raise InvalidRequestError(
                f"There is nothing with the id '{after[:80]}' in this list.", param="after"
            )
        ordered = ordered[at + 1 :]
    shown = ordered[:limit]
    return {
        "object": "list",
        "data": [shape(item) for item in shown],
        "first_id": id_of(shown[0]) if shown else None,
        "last_id": id_of(shown[-1]) if shown else None,
        "has_more": len(ordered) > limit,
    }


def _limit_of(text: str | None, default: int, largest: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= largest):
        raise invalid_value("limit", f"expected an integer from 1 to {largest}.")
    return int(text)
