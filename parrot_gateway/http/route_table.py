"""The gateway's own routes that wait or stream: a table, on the thin HTTP layer.

They go before the pass-through to upstreams. Segments of a path are matched one by one and decoded
afterwards, so that a name may hold a slash written as `%2F`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar
from urllib.parse import parse_qs, unquote

from parrot_gateway.exceptions import InvalidRequestError, MethodNotAllowedError, invalid_value
from parrot_gateway.http.exchange import Exchange

#: Answers an exchange; gets the variable segments of the path.
RouteHandler: TypeAlias = Callable[..., Awaitable[None]]
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]

_Handler = TypeVar("_Handler", bound=RouteHandler)


def route(method: str, pattern: str) -> Callable[[_Handler], _Handler]:
    """Let a method of a class answer `method` of a path such as `/v1/variables/{id}`.

    The first paragraph of its docstring is the route's summary.
    """

    def mark(handler: _Handler) -> _Handler:
        vars(handler)["route"] = (method, pattern)
        return handler

    return mark


class RouteTable:
    """Routes by the number and the constant segments of their paths.

    Args:
        objects: those whose methods were marked by `route`.
        check: raises for a caller who may not use these routes, before a handler is called.
    """

    def __init__(
        self, *objects: object, check: Callable[[Exchange], None] = lambda exchange: None
    ) -> None:
        self._check = check
        self._routes: list[tuple[str, tuple[str | None, ...], RouteHandler]] = []
        #: Method, pattern and summary of each route, for the description of the API.
        self.described: list[tuple[str, str, str]] = []
        #: First two segments of the paths, as in `/v1/files`: one look-up rules others out.
        self._beginnings: set[str] = set()
        for each in objects:
            for name, member in vars(type(each)).items():
                marked: tuple[str, str] | None = getattr(member, "route", None)
                if marked is not None:
                    self._add(*marked, getattr(each, name))

    def _add(self, method: str, pattern: str, handler: RouteHandler) -> None:
        segments = tuple(
            None if part.startswith("{") else part for part in pattern.strip("/").split("/")
        )
        self._routes.append((method, segments, handler))
        self._beginnings.add(f"/{segments[0]}/{segments[1]}")
        summary = (handler.__doc__ or "").split("\n\n")[0].strip().rstrip(".")
        self.described.append((method, pattern, summary))

    def find(self, exchange: Exchange) -> Handler | None:
        """Find the handler of a path; one that refuses, where only the method is wrong."""
        path = exchange.path
        end = path.find("/", path.find("/", 1) + 1)
        if (path if end < 0 else path[:end]) not in self._beginnings:
            return None
        raw = exchange.scope.get("raw_path") or path.encode()
        segments = [unquote(part) for part in raw.decode("latin-1").strip("/").split("/")]
        allowed: list[str] = []
        for method, pattern, handler in self._routes:
            if _matches(pattern, segments):
                if method == exchange.method:
                    return self._bound(handler, pattern, segments)
                allowed.append(method)
        if not allowed:
            return None

        async def refuse(exchange: Exchange) -> None:
            self._check(exchange)
            raise MethodNotAllowedError(
                f"{exchange.path} takes {' or '.join(allowed)}, not {exchange.method}."
            )

        return refuse

    def _bound(
        self, handler: RouteHandler, pattern: Sequence[str | None], segments: Sequence[str]
    ) -> Handler:
        given = [text for name, text in zip(pattern, segments, strict=True) if name is None]

        async def answer(exchange: Exchange) -> None:
            self._check(exchange)
            await handler(exchange, *given)

        return answer


def _matches(pattern: Sequence[str | None], segments: Sequence[str]) -> bool:
    return len(pattern) == len(segments) and all(
        segment is None or segment == given
        for segment, given in zip(pattern, segments, strict=True)
    )


class Query:
    """The query of a request.

    Args:
        exchange: the request.
        known: the parameters that there are.

    Raises:
        InvalidRequestError: it has another one, or one of them twice.
    """

    def __init__(self, exchange: Exchange, *known: str) -> None:
        raw = exchange.scope.get("query_string", b"").decode("latin-1")
        try:
            found = parse_qs(raw, keep_blank_values=True, max_num_fields=64)
        except ValueError:
            raise InvalidRequestError("The query has too many parameters.") from None
        self._values: dict[str, str] = {}
        for name, values in found.items():
            if name not in known:
                raise InvalidRequestError(
                    f"Unknown query parameter '{name[:80]}'. There are: {', '.join(known)}.",
                    param=name[:80],
                    code="unknown_parameter",
                )
            if len(values) > 1:
                raise InvalidRequestError(f"'{name}' is given twice.", param=name)
            self._values[name] = values[0]

    def text(self, name: str) -> str | None:
        """A parameter; None when it is not given."""
        return self._values.get(name)

    def seconds(self, name: str, limit: float) -> float | None:
        """A time of at most `limit`; a longer one is cut.

        Raises:
            InvalidRequestError: it is no number, or negative.
        """
        text = self._values.get(name)
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not seconds >= 0:
            raise invalid_value(name, "expected a time in seconds.")
        return min(seconds, limit)
