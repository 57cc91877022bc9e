"""The tree of LangChain's runs: sessions, labels and fan-outs, kept while a run is going on.

**Fan-outs** are the branches of a `RunnableParallel`, the inputs of a batch, and the tasks of one
step of a LangGraph graph. They may be nested, and a branch may have several stages, of which one
needs the other. Calls get the same group exactly if they are in the same outermost fan-out and at
the same **position** in their branches of it: everything that begins in a branch (a call, an inner
fan-out) takes the next number there, and the position is the path of these numbers. Two calls of
one branch differ in it, so that no group has a call that needs another one of it. Where branches
are alike, the n-th stage of all of them is one group.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage

from langchain_parrot._batches import Batch, current_batch
from langchain_parrot._inline import Inline, ignore_events

#: Runs that are remembered at once; beyond that the oldest are forgotten, which only unlinks calls.
MAX_RUNS = 100_000
#: Fan-outs that are remembered in one branch.
_MAX_SLOTS = 1000
#: How LangChain and LangGraph mark the branches of a fan-out.
_BRANCH_TAG = "map:key:"
_STEP_TAG = "graph:step:"
#: How references begin.
_REFERENCE = "[[parrot:"
#: Beginnings of names that the frameworks give by themselves and that tell nobody anything.
_GENERIC = ("Runnable", "LangGraph", "Pregel")


class Branch:
    """One branch of a fan-out. Numbers what begins in it."""

    __slots__ = ("_lock", "_numbers", "_slots", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._numbers = itertools.count()
        self._slots: dict[str, int] = {}
        self._lock = threading.Lock()

    def next_position(self) -> str:
        """Of a call that begins in it."""
        return f"{self.prefix}:{next(self._numbers)}"

    def branch_of(self, fan_out: str) -> Branch:
        """A branch of a fan-out that is inside of this one; all of them share one number."""
        with self._lock:
            number = self._slots.get(fan_out)
            if number is None:
                if len(self._slots) >= _MAX_SLOTS:
                    del self._slots[next(iter(self._slots))]
                number = self._slots[fan_out] = next(self._numbers)
        return Branch(f"{self.prefix}:{number}")


class Step:
    """A run that is going on.

    Attributes:
        session: what it is part of, if nobody named a session; empty for a call whose prompt refers
            to texts of others: it belongs to their session, which the gateway knows.
        label: what a person would call it; empty if there is nothing to call it.
        own_name: of a call of a model, when the user gave it one.
        branch: the innermost branch that it is in, if any.
        batch: the innermost batch that it or a run around it was started by.
        parent: id of the run around it.
        metadata: of the run.
        has_thread: whether the session is a conversation that the user named.
        group: of a call of a model: which calls it belongs together with.
    """

    __slots__ = (
        "batch",
        "branch",
        "group",
        "has_thread",
        "label",
        "metadata",
        "own_name",
        "parent",
        "session",
    )

    def __init__(
        self,
        session: str,
        label: str,
        branch: Branch | None,
        batch: Batch | None,
        parent: str | None,
        metadata: Mapping[str, Any] | None,
    ) -> None:
        self.metadata = metadata or {}
        self.session = session
        self.label = label
        self.branch = branch
        self.batch = batch
        self.parent = parent
        self.group: str | None = None
        self.own_name = ""
        self.has_thread = False


class Place:
    """Where a run was about to begin; `run_id` is that of a model's run which did."""

    __slots__ = ("run_id",)

    def __init__(self) -> None:
        self.run_id: UUID | None = None


class RunTree(BaseCallbackHandler):
    """Follows all runs of the program; one dictionary entry for each that is going on.

    It is its own configuration hook: `get` is asked whenever a run is about to begin, in the
    context in which that goes on, whereas starts may be told in another task. So the place that is
    made there is filled when a model starts, and what is sent within its run finds it.
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._steps: dict[UUID, Step] = {}
        self.place: ContextVar[Place | None] = ContextVar("langchain_parrot_place", default=None)
        ignore_events(self)
        started, called, ended = Inline(self._started), Inline(self._called), Inline(self._ended)
        for kind in ("chain", "tool", "retriever"):
            setattr(self, f"on_{kind}_start", started)
            setattr(self, f"on_{kind}_end", ended)
            setattr(self, f"on_{kind}_error", ended)
        for name in ("on_llm_start", "on_chat_model_start"):
            setattr(self, name, called)
        for name in ("on_llm_end", "on_llm_error"):
            setattr(self, name, ended)

    def get(self) -> RunTree:
        """What LangChain asks a hook for, as of a context variable: the handler."""
        self.place.set(Place())
        return self

    @property
    def num_runs(self) -> int:
        """Runs that are going on."""
        return len(self._steps)

    def step(self, run_id: UUID | None) -> Step | None:
        """A run that is going on."""
        return None if run_id is None else self._steps.get(run_id)

    def new_step(
        self,
        run_id: UUID,
        parent_id: UUID | None,
        tags: Sequence[str] | None,
        metadata: Mapping[str, Any] | None,
        name: str | None,
    ) -> Step:
        """What the beginning of a run tells; not remembered."""
        parent = None if parent_id is None else self._steps.get(parent_id)
        batch = current_batch()
        if parent is not None:
            session, label, branch = parent.session, parent.label, parent.branch
            starts_batch = batch is not None and batch is not parent.batch
        else:
            session = str(parent_id or (batch.outermost if batch else run_id))
            label, branch, starts_batch = "", None, batch is not None
        has_thread = parent is not None and parent.has_thread
        if starts_batch and batch is not None and batch.thread is not None:
            session, has_thread = batch.thread, True
        fan_out, key = None, ""
        for tag in tags or ():
            if tag.startswith(_BRANCH_TAG):
                fan_out, key = str(parent_id), tag[len(_BRANCH_TAG) :]
            elif tag.startswith(_STEP_TAG) and not _is_called_task(metadata):
                fan_out = f"{parent_id}/{tag[len(_STEP_TAG) :]}"
        if fan_out is None and batch is not None and starts_batch:
            fan_out = batch.id
        if fan_out is not None:
            branch = Branch(fan_out) if branch is None else branch.branch_of(fan_out)
        if name and not name.startswith(_GENERIC):
            label = name
        elif key:
            label = key
        parent_text = None if parent_id is None else str(parent_id)
        step = Step(session, label, branch, batch, parent_text, metadata)
        step.has_thread = has_thread
        return step

    def new_call(
        self,
        run_id: UUID,
        parent_id: UUID | None,
        tags: Sequence[str] | None,
        metadata: Mapping[str, Any] | None,
        name: str | None,
    ) -> Step:
        """The same for a call of a model, which takes a number in its branch."""
        step = self.new_step(run_id, parent_id, tags, metadata, name)
        step.own_name = name or ""
        if step.branch is not None:
            step.group = step.branch.next_position()
        return step

    def _started(
        self,
        serialized: Any,
        _: Any,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        **__: Any,
    ) -> None:
        if name is None and isinstance(serialized, dict):
            # Of a tool, which has its name there.
            name = serialized.get("name")
        self._remember(run_id, self.new_step(run_id, parent_run_id, tags, metadata, name))

    def _called(
        self,
        serialized: Any,
        prompts: Any,
        /,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        metadata: dict[str, Any] | None = None,
        name: str | None = None,
        **__: Any,
    ) -> None:
        step = self.new_call(run_id, parent_run_id, tags, metadata, name)
        if not step.has_thread and any(map(_refers, prompts)):
            step.session = ""
        self._remember(run_id, step)
        place = self.place.get()
        if place is not None:
            place.run_id = run_id

    def _remember(self, run_id: UUID, step: Step) -> None:
        steps = self._steps
        while len(steps) >= self._max_runs:
            try:
                del steps[next(iter(steps))]
            except (KeyError, RuntimeError, StopIteration):
                # Another thread was at it too.
                continue
        steps[run_id] = step

    def forget(self, run_id: UUID) -> None:
        """Of a run whose end nobody will tell."""
        self._steps.pop(run_id, None)

    def _ended(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self._steps.pop(run_id, None)


def _is_called_task(metadata: Mapping[str, Any] | None) -> bool:
    """Whether a LangGraph task is a function called by another task, in the same step.

    Of those it is not known whether they run one after another.
    """
    path: Any = (metadata or {}).get("langgraph_path") or ()
    return len(path) > 1 and isinstance(path[1], tuple | list)


def _refers(prompt: Any) -> bool:
    """Whether a text, a message, its content or a list of them has a reference; waits for none."""
    if isinstance(prompt, str):
        # NOTE: not `in`, which waits for a deferred text.
        return str.__contains__(prompt, _REFERENCE)
    if isinstance(prompt, list | tuple):
        return any(map(_refers, prompt))
    if isinstance(prompt, dict):
        return _refers(prompt.get("text"))
    return _refers(prompt.content) if isinstance(prompt, BaseMessage) else False
