"""Deferral inside LangChain's compositions: planned, run, and resolved at their borders.

`defer=True` acts where the readers of an answer are known: inside a `RunnableSequence` or
`RunnableParallel`. A composition is planned from its end. A call is deferred if its text becomes
only part of other calls' prompts; its answer is then a reference, which the gateway replaces. Steps
that only pass values on (branches, `assign`, `pick`, `itemgetter`, `JoinTexts`, `StrOutputParser`,
f-string templates before a model) pass references on. Before all other steps (lambdas, tools, other
parsers and models, retries, fallbacks, the user's runnables), and at the end, references are
replaced by their texts. Runs observed by callbacks defer nothing, nor do models with tools, a
response format or a cache.

Importing this wraps the run methods of both classes, once.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import string
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from langchain_core.callbacks import CallbackManager
from langchain_core.globals import get_llm_cache
from langchain_core.messages import BaseMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import (
    Runnable,
    RunnableBinding,
    RunnableBranch,
    RunnableConfig,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableSerializable,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEach
from langchain_core.runnables.config import ensure_config
from langchain_core.runnables.passthrough import RunnableAssign

from langchain_parrot._base import PLANNED, ParrotModel
from langchain_parrot.deferred import DeferredText, GraphRun, current_run, entered
from langchain_parrot.exceptions import DeferredError
from langchain_parrot.linking import RunTree

#: Fields of a call whose answer is more than its text, or is read immediately.
_NEEDS_ANSWER = frozenset({"tools", "functions", "response_format", "logprobs"})


class JoinTexts(RunnableSerializable[Sequence[str], str]):
    """Joins a list of texts, or the values of a dict, without waiting for deferred ones.

    Attributes:
        separator: text between two texts.
    """

    separator: str = "\n"

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> str:
        """Return the joined text."""
        return self._call_with_config(self._join, input, config)

    def _join(self, texts: Any) -> str:
        return self.separator.join(texts.values() if isinstance(texts, dict) else texts)


# -- the plan ------------------------------------------------------------------------------------


class Demand(IntEnum):
    """Use of a step's output: it is read, passed on as a text, or becomes a model's prompt."""

    READ = 0
    TEXT = 1
    PROMPT = 2


class _Model(NamedTuple):
    """A model of this package with the arguments that bindings give it."""

    model: ParrotModel
    arguments: dict[str, Any]

    @property
    def is_observed(self) -> bool:
        """Return true if something sees its prompts or keeps its answers."""
        cache = getattr(self.model, "cache", None)
        has_cache = get_llm_cache() is not None if cache is None else cache is not False
        return (
            bool(getattr(self.model, "callbacks", None))
            or getattr(self.model, "verbose", False)
            or has_cache
        )

    def may_defer(self, every: bool) -> bool:
        """Return true if its answer may be a reference; `every` acts like `defer=True`."""
        given = {**self.model._default_params, **self.arguments}
        return (
            (every or bool(self.arguments.get("defer", self.model.defer)))
            and not any(given.get(name) for name in _NEEDS_ANSWER)
            and given.get("n") in (None, 1)
            and not self.is_observed
        )


def _kind(step: Any) -> Any:
    """Return the class of a step, without type arguments of pydantic's generic classes."""
    kind = type(step)
    metadata = getattr(kind, "__pydantic_generic_metadata__", None) or {}
    return metadata.get("origin") or kind


def _model_of(step: Any) -> _Model | None:
    arguments: dict[str, Any] = {}
    while _kind(step) is RunnableBinding and _is_plain(step):
        arguments = {**step.kwargs, **arguments}
        step = step.bound
    if isinstance(step, ParrotModel):
        return _Model(step, arguments)
    return None


def _is_plain(binding: Any) -> bool:
    """Return true if a binding has no callbacks, and makes no configuration by code."""
    return not binding.config_factories and not binding.config.get("callbacks")


def _passes_texts(step: Any) -> bool:
    """Return true if a step only passes on or joins its input."""
    if _kind(step) is RunnablePassthrough:
        return step.func is None and step.afunc is None
    if _kind(step) is RunnableLambda:
        getter = getattr(step, "func", None)
        # An index or slice could apply to a text.
        return isinstance(getter, operator.itemgetter) and isinstance(
            getter.__reduce__()[1][0], str
        )
    return _kind(step) in (StrOutputParser, RunnablePick, JoinTexts)


def _copies_texts(template: Any) -> bool:
    """Return true if a prompt template inserts its inputs unchanged."""
    # NOTE: this import loads jinja2, which programs without templates do not need.
    from langchain_core import prompts

    if _kind(template) is prompts.ChatPromptTemplate:
        return all(
            isinstance(message, BaseMessage | prompts.MessagesPlaceholder)
            or (_kind(message) in _message_templates() and _copies_texts(message.prompt))
            for message in template.messages
        )
    if _kind(template) is not prompts.PromptTemplate or template.template_format != "f-string":
        return False
    fields = string.Formatter().parse(template.template)
    return not any(spec or conversion for _, name, spec, conversion in fields if name is not None)


def _message_templates() -> tuple[type, ...]:
    from langchain_core import prompts

    return (
        prompts.AIMessagePromptTemplate,
        prompts.HumanMessagePromptTemplate,
        prompts.SystemMessagePromptTemplate,
    )


#: The steps that a composition runs, in order. A branch's conditions are not included, because
#: their output goes nowhere.
_PARTS: dict[Any, Callable[[Any], list[Any]]] = {
    RunnableSequence: lambda step: list(step.steps),
    RunnableParallel: lambda step: list(step.steps__.values()),
    RunnableAssign: lambda step: [step.mapper],
    RunnableBranch: lambda step: [*(inner for _, inner in step.branches), step.default],
    RunnableEach: lambda step: [step.bound],
    RunnableBinding: lambda step: [step.bound],
}


def _parts(step: Any) -> list[Any] | None:
    """Return the steps that a composition runs; None for any other step."""
    kind = _kind(step)
    if kind not in _PARTS or (kind is RunnableBinding and not _is_plain(step)):
        return None
    return _PARTS[kind](step)


def _demand(step: Any, after: Demand) -> Demand:
    """Derive the use of a step's input from that of its output."""
    model = _model_of(step)
    if model is not None:
        return Demand.READ if model.is_observed else Demand.PROMPT
    parts = _parts(step)
    if parts is None:
        if _passes_texts(step):
            return after
        copies = after is Demand.PROMPT and _copies_texts(step)
        return Demand.TEXT if copies else Demand.READ
    if _kind(step) is RunnableSequence:
        return functools.reduce(lambda demand, part: _demand(part, demand), reversed(parts), after)
    demands = [_demand(part, after) for part in parts]
    if _kind(step) is RunnableAssign:
        demands.append(after)
    return max(demands, default=Demand.READ)


class _Built(NamedTuple):
    """A step as it is run; true if its output may have references; true if it defers a call."""

    step: Any
    holds: bool
    defers: bool = False


def _build(step: Any, after: Demand, holds: bool, every: bool) -> _Built:
    """Build a step that defers where possible, and reads texts where necessary.

    Args:
        step: the user's step; it is not changed.
        after: use of its output.
        holds: true if its input may have references.
        every: true: all models defer, not only those with `defer=True`.
    """
    model = _model_of(step)
    if model is not None and not model.is_observed:
        if after is not Demand.READ and model.may_defer(every):
            # NOTE: with `stream`, LangChain would look for a handler that wants tokens.
            planned = RunnableBinding(bound=step, kwargs={"defer": PLANNED, "stream": False})
            return _Built(planned, True, True)
        return _Built(step, False)
    parts = _parts(step)
    if parts is None:
        if _passes_texts(step) or (after is Demand.PROMPT and _copies_texts(step)):
            return _Built(step, holds)
        return _Built(_border(step, holds), False)
    if _kind(step) is RunnableSequence:
        return _build_sequence(step, after, holds, every)
    built = [_build(part, after, holds, every) for part in parts]
    return _Built(
        _with_parts(step, [part.step for part in built], holds),
        # `assign` also outputs its input.
        any(part.holds for part in built) or (holds and _kind(step) is RunnableAssign),
        any(part.defers for part in built),
    )


def _with_parts(step: Any, parts: list[Any], holds: bool) -> Any:
    """Copy a composition with these parts; conditions of a branch read texts."""
    kind = _kind(step)
    if kind is RunnableParallel:
        steps = dict(zip(step.steps__, parts, strict=True))
        return _mark(step.model_copy(update={"steps__": steps}))
    if kind is RunnableAssign:
        return step.model_copy(update={"mapper": parts[0]})
    if kind is RunnableBranch:
        conditions = (_border(condition, holds) for condition, _ in step.branches)
        branches = list(zip(conditions, parts[:-1], strict=True))
        return step.model_copy(update={"branches": branches, "default": parts[-1]})
    return step.model_copy(update={"bound": parts[0]})


def _build_sequence(
    sequence: RunnableSequence[Any, Any], after: Demand, holds: bool, every: bool
) -> _Built:
    demands = [after]
    for step in reversed(sequence.steps[1:]):
        demands.append(_demand(step, demands[-1]))
    built: list[_Built] = []
    for step, demand in zip(sequence.steps, reversed(demands), strict=True):
        built.append(_build(step, demand, built[-1].holds if built else holds, every))
    first, *middle, last = (part.step for part in built)
    copy = sequence.model_copy(update={"first": first, "middle": middle, "last": last})
    return _Built(_mark(copy), built[-1].holds, any(part.defers for part in built))


class _Border(RunnableBindingBase[Any, Any]):
    """A step before which references are replaced by their texts."""

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.bound.invoke(_read(input), config, **kwargs)

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return await self.bound.ainvoke(await _aread(input), config, **kwargs)

    def batch(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.bound.batch(_read(inputs), config, **kwargs)

    async def abatch(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        return await self.bound.abatch(await _aread(inputs), config, **kwargs)

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        return self.bound.stream(_read(input), config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        async for chunk in self.bound.astream(await _aread(input), config, **kwargs):
            yield chunk

    def transform(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
        whole = functools.reduce(operator.add, input)
        return self.stream(whole, config, **kwargs)

    async def atransform(
        self, input: Any, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        chunks = [chunk async for chunk in input]
        async for chunk in self.astream(functools.reduce(operator.add, chunks), config, **kwargs):
            yield chunk


def _border(step: Any, holds: bool) -> Runnable[Any, Any]:
    return _Border(bound=step) if holds else step


def _read(value: Any) -> Any:
    run = current_run()
    return value if run is None else run.resolve(value)


async def _aread(value: Any) -> Any:
    run = current_run()
    return value if run is None else await run.aresolve(value)


# -- running -------------------------------------------------------------------------------------

_MARK = "_langchain_parrot_is_planned"


def _mark(step: Any) -> Any:
    """Mark a composition as planned: it no longer begins a graph."""
    vars(step)[_MARK] = True
    return step


def _servers(step: Any, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the addresses and keys of all models of this package in a composition."""
    model = _model_of(step)
    if model is not None:
        key = model.model.api_key
        found.add((model.model.base_url, "" if key is None else key.get_secret_value()))
        return found
    parts = _parts(step)
    if parts is None and isinstance(step, RunnableBindingBase | RunnableEach):
        parts = [step.bound]
    for part in parts or ():
        _servers(part, found)
    return found


_plans: dict[tuple[int, Demand, bool, bool], tuple[weakref.ref[Any], _Built | None]] = {}


def _plan(step: Any, after: Demand, holds: bool, *, every: bool = False) -> _Built | None:
    """Return the planned composition; None if it defers nothing and gets nothing deferred.

    Kept as long as the composition lives, which should not change after its first run.
    """
    key = (id(step), after, holds, every)
    known = _plans.get(key)
    if known is not None and known[0]() is step:
        return known[1]
    built: _Built | None = None
    # One gateway does not know another one's references.
    if len(_servers(step, set())) == 1:
        built = _build(step, after, holds, every)
        if not built.defers and not holds:
            built = None
    elif holds:
        built = _Built(_border(step, True), False)
    # At the interpreter's end the step may outlive this module's globals.
    drop = _plans.pop
    _plans[key] = (weakref.ref(step, lambda _: drop(key, None)), built)
    return built


def _is_observed(config: Any) -> bool:
    """Return true if others' callbacks see the run: they must see texts, not references."""
    handlers = CallbackManager.configure(ensure_config(config).get("callbacks")).handlers
    return any(not isinstance(handler, RunTree) for handler in handlers)


class _Start(NamedTuple):
    """A run of a composition that is about to begin.

    Attributes:
        run: the references of the run.
        step: the step that runs instead of the composition.
        given: the input, with references in place of deferred texts.
    """

    run: GraphRun
    step: Any
    given: Any


def _start(composition: Any, given: Any, config: Any, plan: Callable[..., Any]) -> _Start | None:
    """Plan a composition's run; None if it runs unchanged.

    Args:
        composition: the user's composition.
        given: its input.
        config: one configuration, or a list of them.
        plan: plans the composition, given whether its input has references.
    """
    run = GraphRun()
    if DeferredText.exist:
        given = run.refer(given)
    configs = config if isinstance(config, list) else [config]
    built = plan(run.has_references)
    if built is not None and not any(map(_is_observed, configs)):
        return _Start(run, built.step, given)
    # Run unchanged, with texts as its input.
    return _Start(run, _Border(bound=composition), given) if run.has_read else None


def _begin(composition: Any, given: Any, config: Any) -> _Start | None:
    if vars(composition).get(_MARK):
        return None
    return _start(composition, given, config, lambda holds: _plan(composition, Demand.READ, holds))


def _wrap(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, input: Any, config: Any = None, **kwargs: Any) -> Any:
        start = _begin(self, input, config)
        if start is None:
            return method(self, input, config, **kwargs)
        with entered(start.run):
            answer = getattr(start.step, method.__name__)(start.given, config, **kwargs)
        if not kwargs.get("return_exceptions"):
            return start.run.resolve(answer)
        return [_read_or_error(start.run, one) for one in answer]

    return run


def _wrap_async(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def arun(self: Any, input: Any, config: Any = None, **kwargs: Any) -> Any:
        start = _begin(self, input, config)
        if start is None:
            return await method(self, input, config, **kwargs)
        with entered(start.run):
            answer = await getattr(start.step, method.__name__)(start.given, config, **kwargs)
        if not kwargs.get("return_exceptions"):
            return await start.run.aresolve(answer)
        reading = (_aread_or_error(start.run, one) for one in answer)
        return list(await asyncio.gather(*reading))

    return arun


def _wrap_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def transform(self: Any, input: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
        given = list(input) if DeferredText.exist else []
        start = _begin(self, given, config)
        chunks = iter(start.given if start else given) if DeferredText.exist else input
        if start is None:
            yield from method(self, chunks, config, **kwargs)
            return
        pieces = start.step.transform(chunks, config, **kwargs)
        # After the first chunk, each step runs in a copy of the context at that time.
        with entered(start.run):
            first = next(pieces, pieces)
        if first is not pieces:
            yield start.run.resolve(first)
            for piece in pieces:
                yield start.run.resolve(piece)

    return transform


def _wrap_async_stream(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    async def atransform(
        self: Any, input: Any, config: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        given = [chunk async for chunk in input] if DeferredText.exist else []
        start = _begin(self, given, config)
        chunks = _each(start.given if start else given) if DeferredText.exist else input
        if start is None:
            async for piece in method(self, chunks, config, **kwargs):
                yield piece
            return
        pieces = start.step.atransform(chunks, config, **kwargs)
        with entered(start.run):
            first = await anext(pieces, pieces)
        if first is not pieces:
            yield await start.run.aresolve(first)
            async for piece in pieces:
                yield await start.run.aresolve(piece)

    return atransform


async def _each(chunks: Sequence[Any]) -> AsyncIterator[Any]:
    for chunk in chunks:
        yield chunk


def _read_or_error(run: GraphRun, answer: Any) -> Any:
    try:
        return run.resolve(answer)
    except DeferredError as error:
        return error


async def _aread_or_error(run: GraphRun, answer: Any) -> Any:
    try:
        return await run.aresolve(answer)
    except DeferredError as error:
        return error


_WRAPPERS = {
    "invoke": _wrap,
    "ainvoke": _wrap_async,
    "batch": _wrap,
    "abatch": _wrap_async,
    "transform": _wrap_stream,
    "atransform": _wrap_async_stream,
}


@functools.cache
def plan_compositions() -> None:
    """Wrap the run methods of LangChain's compositions, once."""
    for owner in (RunnableSequence, RunnableParallel):
        for name, wrap in _WRAPPERS.items():
            if name in vars(owner):
                setattr(owner, name, wrap(vars(owner)[name]))


plan_compositions()


# -- graphs in plain Python ----------------------------------------------------------------------


def submit(
    runnable: Runnable[Any, Any], input: Any, config: RunnableConfig | None = None, **kwargs: Any
) -> DeferredText:
    """Start a call, or a composition that ends in a text, without waiting for the text.

    An application that is no composition (a loop, a LangGraph graph) chains calls by passing each
    answer to the next call, which does not wait for it either::

        summary = submit(begin, {"part": first})
        for part in others:
            summary = submit(refine, {"part": part, "summary": summary})
        print(summary)

    Args:
        runnable: a model of this package, or a composition whose result is a text or a message.
            All its models defer.
        input: may contain deferred texts.
        config: configuration of the run.
        **kwargs: further arguments of the call.

    Raises:
        TypeError: the result is neither a text nor a message.
    """
    start = _submission(runnable, input, config)
    if start is None:
        return _handle(GraphRun(), runnable.invoke(input, config, **kwargs))
    with entered(start.run):
        answer = start.step.invoke(start.given, config, **kwargs)
    return _handle(start.run, answer)


async def asubmit(
    runnable: Runnable[Any, Any], input: Any, config: RunnableConfig | None = None, **kwargs: Any
) -> DeferredText:
    """Do the same as `submit` without blocking the event loop."""
    start = _submission(runnable, input, config)
    if start is None:
        return _handle(GraphRun(), await runnable.ainvoke(input, config, **kwargs))
    with entered(start.run):
        answer = await start.step.ainvoke(start.given, config, **kwargs)
    return _handle(start.run, answer)


def _submission(runnable: Runnable[Any, Any], given: Any, config: Any) -> _Start | None:
    return _start(
        runnable, given, config, lambda holds: _plan(runnable, Demand.TEXT, holds, every=True)
    )


def _handle(run: GraphRun, answer: Any) -> DeferredText:
    text = answer.text if isinstance(answer, BaseMessage) else answer
    if not isinstance(text, str):
        raise TypeError(
            f"submit() is for models and compositions that end in a text; this one ends in "
            f"{type(answer).__name__}."
        )
    return run.handle(str(text))
