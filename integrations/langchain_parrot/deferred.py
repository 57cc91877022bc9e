"""Texts whose value arrives when they are looked at, and what LangChain does with them.

A deferred call answers at once with a reference. `DeferredText` is a `str` of it: where it is put
into another text, the reference goes there, and the gateway fills in the value; where it is looked
at, it waits for the value and acts as that.

Python calls methods of a subclass in most places, and there it is safe. Where C code reads the
characters of a string by itself, it sees the reference: the `re` module, `json.dumps` and
`json.loads`, `"".join`, `x in "plain"`, `io.StringIO`, `file.write`, `csv`, and pydantic, which
makes plain strings of it. Give those `str(text)`. docs/langchain.md has the table.

With the first deferred text of a program, LangChain's output parsers are prepared for them.
"""

from __future__ import annotations

import functools
import operator
import urllib.parse
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, SupportsIndex

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import Generation
from langchain_core.tracers.context import register_configure_hook
from parrot_client.connection import OpenAIClients
from pydantic import field_serializer

from langchain_parrot._callbacks import ignore_events
from langchain_parrot.exceptions import DeferredError, timed_out
from langchain_parrot.linking import run_tree

#: The wait of a look at a deferred text, in seconds: as long as a gateway lets a call run.
DEFAULT_TIMEOUT_S = 600.0
#: How much longer than the gateway the client waits, so that the gateway ends the wait; seconds.
_GRACE_S = 10.0


class Resolver(Protocol):
    """Where values come from; both raise a `DeferredError` when there is none."""

    def get(self, reference: str, timeout: float) -> str:
        """The value of a reference; blocks for up to `timeout` seconds."""

    async def aget(self, reference: str, timeout: float) -> str:
        """The same without blocking the event loop."""


class GatewayResolver:
    """Reads variables by `GET /v1/variables/{reference}`, which waits for the value.

    Goes through the `openai` client's own `get`, which is the same in openai 2.x and 3.x, and so
    has its base URL, key, proxies and retries.
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


def _value_of(variable: Any, reference: str, timeout: float) -> str:
    if not isinstance(variable, dict) or variable.get("object") != "variable":
        raise DeferredError(
            f"The answer for {reference} is not one of Parrot Gateway. Does base_url end in "
            "/v1, and does a gateway stand there?",
            reference=reference,
        )
    value = variable.get("value")
    if not isinstance(value, str):
        raise timed_out(reference, timeout)
    return value


#: Deferred texts that are alive and not resolved, by id. A string's own hash would resolve it.
_pending: dict[int, weakref.ref[DeferredText]] = {}


def anything_pending() -> bool:
    """Whether some deferred text is alive whose value is not known yet."""
    return bool(_pending)


class DeferredText(str):
    """A text that may not be written yet: a reference until it is looked at.

    Formatting (`format`, f-strings, `+`, `join`, prompt templates, message contents) carries the
    reference, always. `str(text)`, `print`, `len`, comparison, hashing, slicing, iteration, truth,
    all methods of strings, `int` and `float`, and pickling resolve it and then act on the value.
    `repr` and copying never wait.

    In an event loop, `await text.aget()` first: a look blocks.

    Args:
        reference: stands for it in other texts.
        resolver: where the value comes from.
        timeout: how long a look waits, in seconds.

    Raises:
        DeferredError: by everything that looks, when there is no value.
    """

    __slots__ = ("__weakref__", "_failure", "_resolver", "_timeout", "_value")

    _resolver: Resolver
    _timeout: float
    _value: str | None
    _failure: DeferredError | None

    def __new__(
        cls, reference: str, resolver: Resolver, *, timeout: float = DEFAULT_TIMEOUT_S
    ) -> DeferredText:
        text = super().__new__(cls, reference)
        text._resolver = resolver
        text._timeout = timeout
        text._value = None
        text._failure = None
        key = id(text)
        _pending[key] = weakref.ref(text, lambda _: _pending.pop(key, None))
        _prepare_parsers()
        return text

    @property
    def reference(self) -> str:
        """The reference as a plain string."""
        return super().__str__()

    @property
    def is_resolved(self) -> bool:
        """Whether the value is here already."""
        return self._value is not None

    def get(self, timeout: float | None = None) -> str:
        """The value as a plain string; blocks for up to `timeout` seconds.

        Raises:
            DeferredError: it failed, was cancelled or expired, or is not here in time.
        """
        if self._value is None:
            limit = self._begin(timeout)
            try:
                self._value = self._resolver.get(self.reference, limit)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
        return self._value

    async def aget(self, timeout: float | None = None) -> str:
        """The same without blocking the event loop."""
        if self._value is None:
            limit = self._begin(timeout)
            try:
                self._value = await self._resolver.aget(self.reference, limit)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
        return self._value

    def _begin(self, timeout: float | None) -> float:
        if self._failure is not None:
            raise self._failure
        limit = self._timeout if timeout is None else timeout
        if limit < 0:
            raise timed_out(self.reference, limit)
        return limit

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, DeferredError) and error.is_final:
            self._failure = error
        if error is None or self._failure is not None:
            _pending.pop(id(self), None)

    # -- formatting carries the reference --------------------------------------------------

    def __format__(self, spec: str) -> str:
        # A width or a precision is about the value.
        return format(self.get(), spec) if spec else self.reference

    def __add__(self, other: str) -> str:
        return self.reference + other

    def __radd__(self, other: str) -> str:
        return other + self.reference

    def __rmod__(self, template: str) -> str:
        return template % self.reference

    def __repr__(self) -> str:
        # Debuggers, logs and tracebacks show objects: none of them may wait for a model.
        value = self._value
        return f"<deferred {self.reference}>" if value is None else repr(value)

    def __copy__(self) -> DeferredText:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeferredText:
        return self

    # -- what looks, and is no ordinary method of strings -------------------------------------

    def __str__(self) -> str:
        return self.get()

    def __bool__(self) -> bool:
        return bool(self.get())

    def __hash__(self) -> int:
        return hash(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type[str], tuple[str]]:
        return str, (self.get(),)


def _plain(argument: Any) -> Any:
    """An argument of a string method, which C code would read by its characters."""
    if type(argument) is DeferredText:
        return argument.get()
    if type(argument) is tuple:
        return tuple(map(_plain, argument))
    return argument


def _looking_method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def look(self: DeferredText, *arguments: Any, **named: Any) -> Any:
        named = {key: _plain(value) for key, value in named.items()}
        return method(self.get(), *map(_plain, arguments), **named)

    look.__name__, look.__qualname__ = name, f"DeferredText.{name}"
    look.__doc__ = f"`str.{name}` of the value."
    return look


def _looking_operator(name: str) -> Callable[[DeferredText, Any], Any]:
    operate = getattr(operator, name)

    def look(self: DeferredText, other: Any) -> Any:
        return operate(self.get(), _plain(other))

    look.__name__, look.__qualname__ = name, f"DeferredText.{name}"
    return look


# Methods that a later Python adds to strings are covered too.
for _name in dir(str):
    if not _name.startswith("_") and _name != "maketrans":
        setattr(DeferredText, _name, _looking_method(_name))
for _name in ("__len__", "__iter__", "__getitem__", "__contains__", "__mul__", "__rmul__"):
    setattr(DeferredText, _name, _looking_method(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__mod__"):
    setattr(DeferredText, _name, _looking_operator(_name))


# -- messages and generations ----------------------------------------------------------------


class _DeferredMessage(AIMessage):
    """An AIMessage whose content may be a deferred text.

    Two things in the ordinary class would look at it: `text`, which copies, and dumps.
    """

    @property
    def text(self) -> Any:
        """The deferred text itself, so that parsers which only pass it on need not wait."""
        return self.content if type(self.content) is DeferredText else super().text

    @property
    def content_blocks(self) -> Any:
        """Blocks are for looking at: of the value."""
        return self._ordinary().content_blocks

    def pretty_repr(self, html: bool = False) -> str:
        """For people, so with the value."""
        return self._ordinary().pretty_repr(html)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _DeferredMessage):
            other = other._ordinary()
        return self._ordinary() == other

    # As of every message.
    __hash__ = None  # type: ignore[assignment]

    def _ordinary(self) -> AIMessage:
        """The same with the value, which it waits for."""
        message = AIMessage.model_construct()
        message.__setstate__(
            self.model_copy(update={"content": _plain(self.content)}).__getstate__()
        )
        return message

    @field_serializer("content")
    def _dump_content(self, content: Any) -> Any:
        # A dump outlives the gateway's memory: a checkpoint, a history in a file.
        return _plain(content)

    def __repr_args__(self) -> Any:
        # The ordinary one asks whether the content is empty.
        shown = self.model_copy(update={"content": "."})
        for name, value in AIMessage.__repr_args__(shown):
            yield name, self.content if name == "content" else value

    def __reduce__(self) -> tuple[Any, ...]:
        return AIMessage.model_construct, (), self._ordinary().__getstate__()


# It is an implementation detail that must not get into stored messages: they name the class.
_DeferredMessage.__name__ = _DeferredMessage.__qualname__ = "AIMessage"
_DeferredMessage.__module__ = AIMessage.__module__


def deferred_message(text: DeferredText, **metadata: Any) -> AIMessage:
    """A message whose content is the deferred text itself.

    Args:
        text: the content.
        metadata: further fields of AIMessage, for instance `response_metadata`.
    """
    message = _DeferredMessage(content="", **metadata)
    # Validation would have made a plain string of it.
    message.content = text
    return message


def deferred_generation(
    text: DeferredText, generation_info: dict[str, Any] | None = None
) -> Generation:
    """A generation whose text is the deferred text itself."""
    generation = Generation(text="", generation_info=generation_info)
    generation.text = text
    return generation


# -- output parsers --------------------------------------------------------------------------
#
# Parsers use `re`, `csv` and other C code that sees the reference: a callback fetches the value
# before a parser reads it. `StrOutputParser` only hands the text on, and leaves it deferred.


class ParserHandler(BaseCallbackHandler):
    """Sees runs begin; while no deferred text is alive, LangChain does not call it at all.

    It is not `run_inline`: asynchronous chains run it in a thread, so that it may block there.
    """

    #: A text without a value is an error of the chain.
    raise_error = True

    def __init__(self) -> None:
        ignore_events(self)
        vars(self).pop("on_chain_start")

    @property
    def ignore_chain(self) -> bool:
        """Whether there is nothing that a parser could be given."""
        return not anything_pending()

    @property
    def ignore_llm(self) -> bool:
        """True: only chains are of interest."""
        return True

    ignore_chat_model = ignore_agent = ignore_retriever = ignore_retry = ignore_llm
    ignore_custom_event = ignore_llm

    def on_chain_start(self, serialized: Any, inputs: Any, **run: Any) -> None:
        """Fetch the value of what a parser was given, and put it there if it is a message."""
        if run.get("run_type") != "parser" or run.get("name") == StrOutputParser.__name__:
            return
        try:
            if type(inputs) is DeferredText:
                inputs.get()
            elif type(getattr(inputs, "content", None)) is DeferredText:
                inputs.content = inputs.content.get()
        except BaseException:
            # LangChain reports no end of a run whose start failed.
            run_tree.forget(run["run_id"])
            raise


_HANDLER = ParserHandler()
_handler: ContextVar[ParserHandler | None] = ContextVar(
    "langchain_parrot_parsers", default=_HANDLER
)


@functools.cache
def _prepare_parsers() -> None:
    """Register the handler, and let `Generation(text=deferred)` hold the deferred text; once.

    LangChain's parsers make one of a plain text, and pydantic copies the characters of a subclass
    of `str`: `llm | StrOutputParser()` would return the bare reference of a text model's answer.
    LangChain offers no place for it, so its constructor is wrapped.
    """
    register_configure_hook(_handler, inheritable=True)
    ordinary = Generation.__init__

    @functools.wraps(ordinary)
    def keep(self: Generation, *arguments: Any, **fields: Any) -> None:
        ordinary(self, *arguments, **fields)
        text = fields.get("text")
        if type(text) is DeferredText:
            # A parser before which the value was fetched is to have the value.
            self.text = text.get() if text.is_resolved else text

    Generation.__init__ = keep  # type: ignore[method-assign]
