"""Routes of the operator, behind a key of their own: `server.admin_key`.

Every route given to `AdminRoutes` is behind the key; handlers need no check. The gateway's own key
does not open them, nor does a gateway without a key, and callers of its own host are no exception.
"""

from __future__ import annotations

from parrot_gateway.exceptions import AuthenticationError, ForbiddenError
from parrot_gateway.http.dispatch import KeyCheck
from parrot_gateway.http.exchange import Exchange
from parrot_gateway.http.route_table import RouteTable


class AdminRoutes(RouteTable):
    """A table of routes, and the check of the operator's key before each.

    Args:
        keys: checks the admin key; one that requires none turns the routes off.
        objects: those whose methods were marked by `route`.
    """

    def __init__(self, keys: KeyCheck, *objects: object) -> None:
        super().__init__(*objects, check=self.check)
        self._keys = keys

    def check(self, exchange: Exchange) -> None:
        """Check the caller's key, in `Authorization: Bearer …` or `x-api-key`.

        Raises:
            ForbiddenError: no key is set.
            AuthenticationError: none was sent, or the wrong one.
        """
        if not self._keys.required:
            raise ForbiddenError(
                "Admin routes are off, as this gateway has no key for them. Set PARROT_ADMIN_KEY, "
                "or name the variable that holds the key in server.admin_key.",
                code="admin_routes_off",
            )
        headers = exchange.headers
        try:
            self._keys.check(headers.get(b"authorization"), headers.get(b"x-api-key"))
        except AuthenticationError:
            raise AuthenticationError(
                "This route takes the admin key (server.admin_key), as 'Authorization: Bearer "
                "KEY'; the key of calls does not open it.",
                code="invalid_admin_key",
            ) from None
