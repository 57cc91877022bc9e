"""Lists in OpenAI's shape, a page at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from parrot_gateway.calls.requests.field_checks import check_choice
from parrot_gateway.exceptions import invalid_value


class Identified(Protocol):
    @property
    def id(self) -> str: ...


_T = TypeVar("_T", bound=Identified)


def page_of(
    items: Sequence[_T],
    parameter: Callable[[str], str | None],
    shape: Callable[[_T], dict[str, Any]],
    *,
    default_limit: int,
    max_limit: int,
    no_id: str | None = None,
) -> dict[str, Any]:
    """One page of a list, by the parameters `limit`, `order` and `after` of a query.

    Args:
        items: all, newest first.
        parameter: the text of a parameter of the query.
        shape: one as it is shown, with its `id`.
        no_id: as of `list_of`.

    Raises:
        InvalidRequestError: a parameter is wrong.
    """
    limit = _limit_of(parameter("limit"), default_limit, max_limit)
    order = parameter("order") or "desc"
    check_choice("order", order, ("asc", "desc"))
    ordered = items if order == "desc" else items[::-1]
    after = parameter("after")
    if after:
        ids = [item.id for item in ordered]
        if after not in ids:
            raise invalid_value("after", f"this list has nothing with the id '{after[:80]}'.")
        ordered = ordered[ids.index(after) + 1 :]
    has_more = len(ordered) > limit
    return list_of([shape(item) for item in ordered[:limit]], has_more=has_more, no_id=no_id)


def list_of(
    shown: Sequence[dict[str, Any]], *, has_more: bool = False, no_id: str | None = None
) -> dict[str, Any]:
    """A list with the ids of its ends; `no_id` in their place where it is empty."""
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else no_id,
        "last_id": shown[-1]["id"] if shown else no_id,
        "has_more": has_more,
    }


def _limit_of(text: str | None, default: int, largest: int) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= largest):
        raise invalid_value("limit", f"expected an integer from 1 to {largest}.")
    return int(text)
