"""Keeps web pages from using a gateway that takes calls without a key.

Any page that a browser of this machine shows may send requests to a loopback address. Those that
need no preflight are told by their content type or their `Origin`; those of a page whose name was
bound to this address meanwhile (DNS rebinding), which the browser takes for the page's own server,
by their `Host`. Pages that may use the gateway are named in the settings (CORS).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import TypeAlias

from parrot_gateway.exceptions import ForbiddenError, UnsupportedMediaTypeError
from parrot_gateway.settings.sources import is_loopback

_FORM = b"application/x-www-form-urlencoded"
#: Content types that a page may send without a preflight, beside multipart forms.
_PAGE_TYPES = (b"text/plain", _FORM)
#: Senders that are remembered as accepted.
_MAX_ACCEPTED = 64

#: What is known of who sent a request: its headers `Host`, `Origin` and `Content-Type`.
Sender: TypeAlias = tuple[bytes | None, bytes | None, bytes | None]


class WebPageGuard:
    """Refuses what a web page must not send.

    Args:
        hosts: names by which the gateway is reached, beside loopback's and addresses; `*` is any.
        origins: of pages that may use the gateway, as in CORS; `*` is any.
    """

    def __init__(self, hosts: Sequence[str] = (), origins: Sequence[str] = ()) -> None:
        #: Senders that passed `check` on a route that takes JSON alone, and pass on any route.
        self.accepted: set[Sender] = set()
        self._hosts = frozenset(host.lower() for host in hosts)
        self._origins = frozenset(origins)

    def check(self, sender: Sender, *, json_only: bool) -> None:
        """Check the name by which the gateway was called, and the page; raises as these."""
        self.check_host(sender[0])
        self.check_page(sender, json_only=json_only)
        if json_only and len(self.accepted) < _MAX_ACCEPTED:
            self.accepted.add(sender)

    def check_host(self, host: bytes | None) -> None:
        """Check the name by which the gateway was called.

        Raises:
            ForbiddenError: a page's own server may have this name.
        """
        if host is None:
            return
        name = _name_of(host.decode("latin-1"))
        if not ("*" in self._hosts or name in self._hosts or _is_local(name)):
            raise ForbiddenError(
                f"This gateway has no key and does not answer to the name '{name[:80]}', which a "
                "web page may have bound to its address. Use 127.0.0.1 or localhost, add the name "
                "to the setting server.allowed_hosts, or set a key.",
                code="host_not_allowed",
            )

    def check_page(self, sender: Sender, *, json_only: bool) -> None:
        """Check that no page sent this request, or one that may.

        Args:
            json_only: the route takes JSON alone.

        Raises:
            ForbiddenError: it comes from a page of another server.
            UnsupportedMediaTypeError: its body is no JSON.
        """
        host, origin, content_type = sender
        if origin is not None:
            self._check_origin(origin.decode("latin-1"), (host or b"").decode("latin-1").lower())
        if content_type is not None and content_type != b"application/json":
            _check_content_type(content_type, json_only)

    def _check_origin(self, origin: str, host: str) -> None:
        if origin in self._origins or "*" in self._origins:
            return
        _, _, authority = origin.lower().partition("://")
        if authority and (authority == host or is_loopback(_name_of(authority))):
            return
        raise ForbiddenError(
            f"This gateway has no key and takes no calls of the web page '{origin[:80]}'. Add its "
            "origin to the setting server.cors_origins to let it.",
            code="origin_not_allowed",
        )


def preflight_advice(headers: Mapping[bytes, bytes]) -> str:
    """Return what to add to the refusal of a web page's preflight; empty for other requests.

    Args:
        headers: of the request, names in lower case.
    """
    if b"access-control-request-method" not in headers:
        return ""
    origin = headers.get(b"origin", b"").decode("latin-1")[:80]
    return (
        f" A web page of '{origin}' asks whether it may: add its origin to the setting "
        "server.cors_origins to let it."
    )


def _check_content_type(content_type: bytes, json_only: bool) -> None:
    media = content_type.partition(b";")[0].strip().lower()
    if media == b"application/json" or media.endswith(b"+json"):
        return
    if not json_only and media not in _PAGE_TYPES:
        return
    advice = ""
    if media == _FORM:
        advice = ", which curl and web forms send by themselves"
    raise UnsupportedMediaTypeError(
        f"The content type of this body is '{media.decode('latin-1')[:80]}'{advice}; a gateway "
        "without a key takes JSON only, so that no web page can use it unasked. Send "
        "'Content-Type: application/json'."
    )


def _name_of(authority: str) -> str:
    """The name in a `Host` header or an origin, without its port."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].rstrip(".").lower()


def _is_local(name: str) -> bool:
    """Tell if no stranger's page can have this name: an address, which nothing is bound to, or a
    name that the public DNS does not have."""
    if "." not in name or name.endswith((".localhost", ".internal")):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
