"""Session, run, parent, name and group of a call, from LlamaIndex's instrumentation.

LlamaIndex opens a span around every step (`ClassName.method-uuid`) and keeps the innermost one's id
in a context variable. A span handler on the root dispatcher remembers how they nest. The body's
`parrot` fields follow from that, without a change in the program.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections import OrderedDict
from typing import Any

from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.span import BaseSpan, active_span_id
from llama_index.core.instrumentation.span_handlers import BaseSpanHandler
from llama_index.core.types import BasePydanticProgram
from llama_index_instrumentation import get_dispatcher
from parrot_client.fields import MAX_CHARACTERS

#: Maximum spans remembered; the oldest are forgotten first.
MAX_SPANS = 10_000
#: Maximum steps followed from a call to its root.
MAX_DEPTH = 64


class Span:
    """One step of a program.

    Attributes:
        id: LlamaIndex's id.
        parent: the step around it.
        root_id: id of the outermost step.
        label: its name for display; empty for models and programs, which say nothing about the
            application.
        task: the task or thread in which it runs.
        owner: the nearest step around it in another task, of which it is a branch.
        branches: ids of steps that run now in other tasks, directly below this one.
    """

    __slots__ = ("branches", "id", "label", "owner", "parent", "root_id", "task")

    def __init__(self, id: str, instance: object, parent: Span | None, parent_id: str | None):
        self.id = id
        self.parent = parent
        self.root_id: str = parent.root_id if parent is not None else parent_id or id
        self.label = _label(id, instance)
        self.task = _task_or_thread()
        self.branches: set[str] = set()
        self.owner: Span | None = None
        if parent is not None:
            is_branch = parent.task != self.task
            self.owner = parent if is_branch else parent.owner


class LinkingSpanHandler(BaseSpanHandler[BaseSpan]):
    """Remembers how spans nest, within `MAX_SPANS`; thread-safe.

    NOTE: spans are kept beyond their end, because a stream, or a task that nobody waited for, may
    still make calls.
    """

    _spans: OrderedDict[str, Span] = PrivateAttr(default_factory=OrderedDict)
    _guard: threading.Lock = PrivateAttr(default_factory=threading.Lock)

    def __init__(self) -> None:
        super().__init__(open_spans={}, completed_spans=[], dropped_spans=[], current_span_ids={})

    @classmethod
    def class_name(cls) -> str:
        return "LinkingSpanHandler"

    def span_enter(
        self,
        id_: str,
        bound_args: inspect.BoundArguments,
        instance: Any | None = None,
        parent_id: str | None = None,
        tags: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        with self._guard:
            parent = self._spans.get(parent_id) if parent_id is not None else None
            span = Span(id_, instance, parent, parent_id)
            if parent is not None:
                self._spans.move_to_end(parent.id)
                if span.owner is parent:
                    parent.branches.add(id_)
            self._spans[id_] = span
            while len(self._spans) > MAX_SPANS:
                _, oldest = self._spans.popitem(last=False)
                # Otherwise a chain of steps, each begun by the previous one, would never be freed.
                oldest.parent = oldest.owner = None

    def span_exit(self, id_: str, *args: Any, **kwargs: Any) -> None:
        self._ended(id_)

    def span_drop(self, id_: str, *args: Any, **kwargs: Any) -> None:
        self._ended(id_)

    def _ended(self, id_: str) -> None:
        with self._guard:
            span = self._spans.get(id_)
            if span is not None and span.owner is not None:
                span.owner.branches.discard(id_)

    def new_span(self, *args: Any, **kwargs: Any) -> BaseSpan | None:
        """Return None: this handler keeps its own spans."""
        return None

    def prepare_to_exit_span(self, *args: Any, **kwargs: Any) -> BaseSpan | None:
        return None

    def prepare_to_drop_span(self, *args: Any, **kwargs: Any) -> BaseSpan | None:
        return None

    def fields_of(self, span_id: str) -> dict[str, str]:
        """Return the fields of a call made within a span."""
        with self._guard:
            call = self._spans.get(span_id)
            step = call
            for _ in range(MAX_DEPTH):
                if step is None or step.label:
                    break
                step = step.parent
            if call is None or step is None or not step.label:
                return {}
            fields = {
                "session": call.root_id,
                "run": call.id,
                "parent": step.id,
                "name": step.label,
            }
            if call.owner is not None and len(call.owner.branches) > 1:
                fields["group"] = call.owner.id
            # The unique part of an id is its end.
            return {name: text[-MAX_CHARACTERS:] for name, text in fields.items()}


_handler: LinkingSpanHandler | None = None
_installing = threading.Lock()


def install() -> LinkingSpanHandler:
    """Return the handler; the first call adds it to the root dispatcher."""
    global _handler
    with _installing:
        if _handler is None:
            _handler = LinkingSpanHandler()
            get_dispatcher().add_span_handler(_handler)
        return _handler


def fields_of_call() -> dict[str, str]:
    """Return the body's `parrot` fields for the call being made, from its spans.

    Returns:
        `session` (the root span), `run` (the model's span), `parent` (the nearest step around it
        that is no model or program), `name` (the class of that step, or the function), `group`
        (the step that runs several branches at once, including this one). Empty for a call
        outside any span.
    """
    span_id = active_span_id.get()
    return install().fields_of(span_id) if span_id is not None else {}


async def siblings_begun() -> None:
    """Let tasks created together with this one reach their own calls.

    `asyncio.gather` starts its tasks one after the other; each runs until it waits. After this
    yield all of them have entered their spans, so the first one knows that it is a branch.
    """
    await asyncio.sleep(0)


def _task_or_thread() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.get_ident() if task is None else ("task", id(task))


def _label(span_id: str, instance: object) -> str:
    if isinstance(instance, BaseLLM | BasePydanticProgram):
        return ""
    if instance is not None:
        return type(instance).__name__
    # `module.<locals>.function-uuid`: the function itself.
    return span_id[:-37].rpartition("<locals>.")[2]
