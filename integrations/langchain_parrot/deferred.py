"""Texts that are not written yet: the user's handles, and the references of one run.

A deferred call answers at once with a reference, which the gateway replaces by the text in any
prompt. References live only inside compositions (`composition`). A program gets a text or a
`DeferredText`, which `isinstance` takes for a `str`; code that needs a real one raises a TypeError.
"""

from __future__ import annotations

import copy
import operator
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, SupportsIndex

from langchain_core.messages import BaseMessage
from langchain_core.prompt_values import ChatPromptValue, StringPromptValue
from parrot_client.connection import OpenAIClients
from parrot_client.fields import REFERENCE, REFERENCE_START

from langchain_parrot.exceptions import DeferredError, timed_out

#: Limit of the wait for a deferred text, in seconds: a gateway lets a call run as long.
DEFAULT_TIMEOUT_S = 600.0
#: Seconds that the client waits beyond the gateway, so that the gateway ends the wait.
_GRACE_S = 10.0


class GatewayResolver:
    """Reads variables by `GET /v1/variables/{reference}`, which waits for the value.

    Raises a `DeferredError` if there is none. It uses the `openai` client's own `get`, which is the
    same in openai 2.x and 3.x, and so has its base URL, key, proxies and retries.
    """

    def __init__(self, clients: OpenAIClients) -> None:
        self._clients = clients

    def get(self, reference: str, timeout: float) -> str:
        with self._translated(reference, timeout):
            answer = self._clients.sync().get(**_read_request(reference, timeout))
        return _value_of(answer, reference, timeout)

    async def aget(self, reference: str, timeout: float) -> str:
        with self._translated(reference, timeout):
            answer = await self._clients.of_running_loop().get(**_read_request(reference, timeout))
        return _value_of(answer, reference, timeout)

    def get_all(self, references: list[str], timeout: float) -> list[str]:
        with self._translated(", ".join(references), timeout):
            answer = self._clients.sync().post(**_read_all_request(references, timeout))
        return _values_of(answer, references)

    async def aget_all(self, references: list[str], timeout: float) -> list[str]:
        with self._translated(", ".join(references), timeout):
            client = self._clients.of_running_loop()
            answer = await client.post(**_read_all_request(references, timeout))
        return _values_of(answer, references)

    @contextmanager
    def _translated(self, reference: str, timeout: float) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            from langchain_parrot._openai_errors import from_read

            deferred_error = from_read(error, reference, timeout, self._clients.connection.base_url)
            if deferred_error is error:
                raise
            raise deferred_error from error


def _read_request(reference: str, timeout: float) -> dict[str, Any]:
    options = {"params": {"timeout": f"{timeout:g}"}, "timeout": timeout + _GRACE_S}
    path = f"/variables/{urllib.parse.quote(reference, safe='')}"
    return {"path": path, "cast_to": object, "options": options}


def _read_all_request(references: list[str], timeout: float) -> dict[str, Any]:
    # No retries: a failure is final, and the gateway has waited already.
    options = {"timeout": timeout + _GRACE_S, "max_retries": 0}
    body = {"value": references, "timeout": timeout}
    return {"path": "/resolve", "cast_to": object, "body": body, "options": options}


def _values_of(answer: Any, references: list[str]) -> list[str]:
    values = answer.get("value") if isinstance(answer, dict) else None
    if not isinstance(values, list) or len(values) != len(references):
        raise _no_gateway(references[0])
    return values


def _no_gateway(reference: str) -> DeferredError:
    return DeferredError(
        f"The answer for {reference} is not one of Parrot Gateway. Does base_url end in "
        "/v1, and does a gateway stand there?",
        reference=reference,
    )


def _value_of(variable: Any, reference: str, timeout: float) -> str:
    if not isinstance(variable, dict) or variable.get("object") != "variable":
        raise _no_gateway(reference)
    value = variable.get("value")
    if not isinstance(value, str):
        raise timed_out(reference, timeout)
    return value


class DeferredText:
    """A text that may not be written yet; it behaves like the text, and waits when it is read.

    `isinstance` and `match` take it for a `str`. Code in C that insists on one (`re`, `json`,
    `"".join`, pydantic) raises a TypeError or similar, as does a loop over its characters; pass
    `str(text)` instead, and to pandas, which takes anything else for an object or for missing.
    As an input of a composition or `submit`, or as one of a call's `inputs`, nothing waits for it.

    `str`, formatting, `print`, `len`, comparison, hashing, slicing, truth, all string methods,
    `int`, `float` and pickling wait for the text and then act on it. `repr` and copying never wait.
    In an event loop, `await text.aget()` first, because reading blocks.

    Args:
        reference: stands for it in prompts; None for a text that is known.
        resolver: source of the text.
        timeout: longest wait of a reader, in seconds.
        text: the text, if already known.

    Raises:
        DeferredError: by everything that reads, when there is no text.
    """

    __slots__ = ("_failure", "_resolver", "_text", "_timeout", "reference")

    #: True once the program has made one; only then do compositions search their inputs for them.
    exist = False

    def __init__(
        self,
        reference: str | None,
        resolver: GatewayResolver | None,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        text: str | None = None,
    ) -> None:
        self.reference = reference
        self._resolver = resolver
        self._timeout = timeout
        self._text = text
        self._failure: DeferredError | None = None
        DeferredText.exist = True

    @property
    def is_resolved(self) -> bool:
        """Return true if the text is here already."""
        return self._text is not None

    def get(self, timeout: float | None = None) -> str:
        """Return the text; blocks for up to `timeout` seconds.

        Raises:
            DeferredError: the text failed, was cancelled or expired, or is late.
        """
        if self._text is None:
            resolver, reference, limit = self._begin(timeout)
            with self._remembered():
                self._text = resolver.get(reference, limit)
        return self._text

    async def aget(self, timeout: float | None = None) -> str:
        """Return the text without blocking the event loop."""
        if self._text is None:
            resolver, reference, limit = self._begin(timeout)
            with self._remembered():
                self._text = await resolver.aget(reference, limit)
        return self._text

    def _begin(self, timeout: float | None) -> tuple[GatewayResolver, str, float]:
        if self._failure is not None:
            raise self._failure
        assert self._resolver is not None
        assert self.reference is not None
        limit = self._timeout if timeout is None else timeout
        if limit < 0:
            raise timed_out(self.reference, limit)
        return self._resolver, self.reference, limit

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except DeferredError as error:
            if error.is_final:
                self._failure = error
            raise

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return `str`, because `isinstance` and `match` treat other types differently."""
        return str

    def __repr__(self) -> str:
        # Debuggers, logs and tracebacks show objects, and must not wait for a model.
        return "<DeferredText, not read yet>" if self._text is None else repr(self._text)

    def __copy__(self) -> DeferredText:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredText:
        return self

    def __str__(self) -> str:
        return self.get()

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    def __bool__(self) -> bool:
        return bool(self.get())

    def __hash__(self) -> int:
        return hash(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __fspath__(self) -> str:
        return self.get()

    def __conform__(self, protocol: object) -> str:
        """Return the text, for `sqlite3`."""
        return self.get()

    #: Otherwise pydantic would take it for a list of characters.
    __iter__ = None

    def __radd__(self, other: str) -> str:
        return other + self.get()

    def __rmod__(self, template: str) -> str:
        return template % self.get()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self.get(),)


def _plain(argument: Any) -> Any:
    """Convert an argument of a string method, which requires strings."""
    if type(argument) is DeferredText:
        return argument.get()
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    return argument


def _reading_method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def read(self: DeferredText, *arguments: Any, **named: Any) -> Any:
        named = {key: _plain(value) for key, value in named.items()}
        return method(self.get(), *map(_plain, arguments), **named)

    read.__name__, read.__qualname__ = name, f"DeferredText.{name}"
    read.__doc__ = f"`str.{name}` of the text."
    return read


def _reading_operator(name: str) -> Callable[[DeferredText, Any], Any]:
    operate = getattr(operator, name)

    def read(self: DeferredText, other: Any) -> Any:
        return operate(self.get(), _plain(other))

    read.__name__, read.__qualname__ = name, f"DeferredText.{name}"
    return read


# This also covers string methods of later Python versions.
for _name in dir(str):
    if not _name.startswith("_") and _name != "maketrans":
        setattr(DeferredText, _name, _reading_method(_name))
for _name in ("__len__", "__getitem__", "__contains__", "__mul__", "__rmul__"):
    setattr(DeferredText, _name, _reading_method(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__"):
    setattr(DeferredText, _name, _reading_operator(_name))
setattr(DeferredText, "__add__", _reading_operator("__add__"))  # noqa: B010


class GraphRun:
    """One run of a composition: references of its deferred calls, and the sources of their
    texts.
    """

    def __init__(self) -> None:
        #: Resolver and time limit in seconds, by reference.
        self._sources: dict[str, tuple[GatewayResolver, float]] = {}
        #: True once `refer` has found a deferred text.
        self.has_read = False

    @property
    def has_references(self) -> bool:
        """Return true if there are references with unknown texts."""
        return bool(self._sources)

    def add(self, reference: str, resolver: GatewayResolver, timeout: float) -> None:
        """Register a reference."""
        self._sources[reference] = (resolver, timeout)

    def refer(self, value: Any) -> Any:
        """Copy a value with references of this run in place of deferred texts."""
        if type(value) is DeferredText:
            self.has_read = True
            if value.reference is None or value.is_resolved or value._resolver is None:
                return value.get()
            self.add(value.reference, value._resolver, value._timeout)
            return value.reference
        return _rebuilt(value, self.refer)

    def handle(self, text: str) -> DeferredText:
        """Return the deferred text of a reference of this run, or of any other text, resolved."""
        source = self._sources.get(text)
        if source is None:
            return DeferredText(None, None, text=self.resolve(text))
        resolver, timeout = source
        return DeferredText(text, resolver, timeout=timeout)

    def resolve(self, value: Any) -> Any:
        """Copy a value with texts in place of this run's references; blocks.

        Raises:
            DeferredError: one of them has no text.
        """
        texts: dict[str, str] = {}
        for resolver, references, timeout in self._wanted(value):
            if len(references) == 1:
                texts[references[0]] = resolver.get(references[0], timeout)
            else:
                values = resolver.get_all(references, timeout)
                texts.update(zip(references, values, strict=True))
        return _substituted(value, texts) if texts else value

    async def aresolve(self, value: Any) -> Any:
        """Do the same as `resolve` without blocking the event loop."""
        texts: dict[str, str] = {}
        for resolver, references, timeout in self._wanted(value):
            if len(references) == 1:
                texts[references[0]] = await resolver.aget(references[0], timeout)
            else:
                values = await resolver.aget_all(references, timeout)
                texts.update(zip(references, values, strict=True))
        return _substituted(value, texts) if texts else value

    def _wanted(self, value: Any) -> Iterable[tuple[GatewayResolver, list[str], float]]:
        """Group the references in a value by the source of their texts."""
        if not self._sources:
            return ()
        found: dict[str, None] = {}
        _collect(value, found)
        by_resolver: dict[int, tuple[GatewayResolver, list[str], float]] = {}
        for reference in found:
            source = self._sources.get(reference)
            if source is not None:
                entry = by_resolver.setdefault(id(source[0]), (source[0], [], source[1]))
                entry[1].append(reference)
        return by_resolver.values()


_run: ContextVar[GraphRun | None] = ContextVar("langchain_parrot_graph_run", default=None)


def current_run() -> GraphRun | None:
    """Return the innermost run of a planned composition in this context."""
    return _run.get()


@contextmanager
def entered(run: GraphRun) -> Iterator[None]:
    """Make `run` the current one inside."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a container or message with each part changed; return anything else unchanged."""
    if isinstance(value, dict):
        rebuilt = copy.copy(value)
        rebuilt.update({key: change(part) for key, part in value.items()})
        return rebuilt
    if type(value) in (list, tuple):
        return type(value)(map(change, value))
    if isinstance(value, BaseMessage):
        content = change(value.content)
        same = content is value.content or content == value.content
        return value if same else value.model_copy(update={"content": content})
    if isinstance(value, StringPromptValue):
        return value.model_copy(update={"text": change(value.text)})
    if isinstance(value, ChatPromptValue):
        return value.model_copy(update={"messages": change(list(value.messages))})
    return value


def _collect(value: Any, found: dict[str, None]) -> Any:
    """Collect all references in a value into `found`."""
    if isinstance(value, str):
        if REFERENCE_START in value:
            found.update(dict.fromkeys(REFERENCE.findall(value)))
        return value
    return _rebuilt(value, lambda part: _collect(part, found))


def _substituted(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        if REFERENCE_START not in value:
            return value
        return REFERENCE.sub(lambda match: texts.get(match[0], match[0]), value)
    return _rebuilt(value, lambda part: _substituted(part, texts))
