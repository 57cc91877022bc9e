"""Linking for `ChatOpenAI`, `OpenAI` and plain `openai` clients that point at a gateway.

After `install()`, requests that such clients send inside a LangChain run carry the facts that
`linking` knows, as `X-Parrot-…` headers (non-ASCII values in the body). The hook is the client's
own `_prepare_options`. Every request passes it: synchronous or not, streamed or not, with any HTTP
library.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from langchain_parrot.linking import fields_here

if TYPE_CHECKING:
    import openai

    _Owner = type[openai.OpenAI] | type[openai.AsyncOpenAI]

#: Variables searched for a gateway's address if none is given.
_VARIABLES = ("PARROT_BASE_URL", "OPENAI_BASE_URL", "OPENAI_API_BASE")
#: Routes that take the headers.
_ROUTES = ("/chat/completions", "/completions")
_SEAM = "_prepare_options"

_lock = threading.Lock()
#: Scheme, host, port and path of the gateways.
_gateways: frozenset[tuple[str, str, int | None, str]] = frozenset()
#: Original methods of the wrapped classes.
_wrapped: dict[_Owner, Callable[..., Any]] = {}


class InstallError(RuntimeError):
    """`install()` does not work here."""


def install(base_url: str | Iterable[str] | None = None) -> None:
    """Link the calls of all `openai` clients that point at a gateway, those of ChatOpenAI included.

    Calling it again changes the addresses. Headers set by a request or its client win.

    Args:
        base_url: URL of one or several gateways, as the clients use it; by default
            PARROT_BASE_URL, OPENAI_BASE_URL or OPENAI_API_BASE.

    Raises:
        InstallError: the address is unknown or invalid, or the installed `openai` lacks the hook.
    """
    if base_url is None:
        given = [text for name in _VARIABLES if (text := os.environ.get(name, "").strip())][:1]
        if not given:
            raise InstallError(
                "Which gateway? Give install(base_url=…), or set PARROT_BASE_URL or "
                "OPENAI_BASE_URL, for instance to http://127.0.0.1:8000/v1."
            )
    else:
        given = [base_url] if isinstance(base_url, str) else list(base_url)
    addresses = frozenset(_address_of(url) for url in given)
    import openai

    with _lock:
        global _gateways
        if not _wrapped:
            owners: tuple[_Owner, ...] = (openai.OpenAI, openai.AsyncOpenAI)
            found = {owner: _seam_of(owner) for owner in owners}
            for owner, method in found.items():
                wrap = _wrap_async if owner is openai.AsyncOpenAI else _wrap
                setattr(owner, _SEAM, wrap(method))
            _wrapped.update(found)
        _gateways = addresses


def uninstall() -> None:
    """Undo `install()`; does nothing if it was not called."""
    with _lock:
        global _gateways
        _gateways = frozenset()
        for owner, method in _wrapped.items():
            setattr(owner, _SEAM, method)
        _wrapped.clear()


def _seam_of(owner: _Owner) -> Callable[..., Any]:
    """Return the method to wrap.

    Raises:
        InstallError: the method is missing or has changed.
    """
    import openai

    method = vars(owner).get(_SEAM)
    is_async = owner is openai.AsyncOpenAI
    if (
        not inspect.isfunction(method)
        or list(inspect.signature(method).parameters) != ["self", "options"]
        or inspect.iscoroutinefunction(method) is not is_async
    ):
        raise InstallError(
            f"openai {openai.__version__} prepares its requests in another way than 2.45 to 3.54 "
            "do, so that install() cannot link them. Use langchain_parrot.ChatParrot, another "
            "version of openai, or send the X-Parrot-… headers yourself."
        )
    return method


def _wrap(method: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_options(self: Any, options: Any) -> Any:
        return _link(self, method(self, options))

    return _prepare_options


def _wrap_async(method: Callable[..., Any]) -> Callable[..., Any]:
    async def _prepare_options(self: Any, options: Any) -> Any:
        return _link(self, await method(self, options))

    return _prepare_options


def _link(client: Any, options: Any) -> Any:
    """Add headers to the options of one attempt of a request; the attempt owns them."""
    route = str(options.url)
    # An absolute URL overrides the client's own.
    if not route.startswith("/") or not route.endswith(_ROUTES):
        return options
    if _address_of(str(client.base_url)) not in _gateways:
        return options
    fields = fields_here()
    if not fields:
        return options
    headers = dict(options.headers or {})
    present = {name.lower() for name in (*headers, *client.default_headers)}
    in_body: dict[str, str] = {}
    for name, value in fields.items():
        header = f"X-Parrot-{name.title()}"
        if header.lower() in present:
            continue
        if value.isascii():
            headers[header] = value
        else:
            # HTTP libraries refuse the value in a header.
            in_body[name] = value
    if in_body:
        extra = dict(options.extra_json or {})
        body = options.json_data if isinstance(options.json_data, dict) else {}
        extra["parrot"] = {**in_body, **(body.get("parrot") or {}), **(extra.get("parrot") or {})}
        options.extra_json = extra
    options.headers = headers
    return options


def _address_of(url: str) -> tuple[str, str, int | None, str]:
    """Return scheme, host, port and path, which are equal for equal addresses.

    Raises:
        InstallError: the URL is no address.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise InstallError(f"base_url {url!r} is no address: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise InstallError(f"base_url {url!r} is no address like http://127.0.0.1:8000/v1.")
    return parts.scheme, parts.hostname, port, parts.path.rstrip("/")
