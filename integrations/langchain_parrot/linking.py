"""Reads LangChain's run tree for the fields of a request that link it.

Importing this starts following the program's runs: one entry per active run.

**Fan-outs** are the branches of a `RunnableParallel`, the inputs of a batch, and the tasks of one
step of a LangGraph graph. They may be nested, and a branch may have several stages that depend on
each other. Calls get the same group exactly if they are in the same outermost fan-out and at the
same **position** in its branches. Everything that begins in a branch (a call, an inner fan-out)
takes the next number there, and the position is the path of these numbers. Two calls of one branch
have different positions, so no call of a group needs another one of it. If branches are alike,
their n-th stages form one group.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook
from parrot_client.fields import MAX_CHARACTERS, REFERENCE_START

from langchain_parrot._batches import Batch, current_batch, watch_batches
from langchain_parrot._callbacks import Inline, ignore_events
from langchain_parrot.program import NOBODY, Caller, caller_here, named_session, program_session

if TYPE_CHECKING:
    from langchain_core.callbacks.manager import BaseRunManager

#: Maximum runs remembered; beyond it the oldest are forgotten, which only leaves calls unlinked.
MAX_RUNS = 100_000
#: Maximum fan-outs remembered in one branch.
_MAX_SLOTS = 1000
#: LangChain's and LangGraph's mark of a fan-out's branches.
_BRANCH_TAG = "map:key:"
_STEP_TAG = "graph:step:"
#: Prefixes of names that the frameworks generate.
_GENERIC = ("Runnable", "LangGraph", "Pregel")
#: Configuration key with which a user or LangGraph names a run's conversation.
_THREAD = "thread_id"


class Branch:
    """One branch of a fan-out. It numbers everything that begins in it."""

    __slots__ = ("_lock", "_numbers", "_slots", "prefix")

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._numbers = itertools.count()
        self._slots: dict[str, int] = {}
        self._lock = threading.Lock()

    def next_position(self) -> str:
        """Return the position of a call that begins here."""
        return f"{self.prefix}:{next(self._numbers)}"

    def branch_of(self, fan_out: str) -> Branch:
        """Return the branch of a fan-out inside this one; all its branches share one number."""
        with self._lock:
            number = self._slots.get(fan_out)
            if number is None:
                if len(self._slots) >= _MAX_SLOTS:
                    del self._slots[next(iter(self._slots))]
                number = self._slots[fan_out] = next(self._numbers)
        return Branch(f"{self.prefix}:{number}")


@dataclass(slots=True)
class RunNode:
    """An active run.

    Attributes:
        session: its session, unless the user names one; empty for a call whose prompt refers to
            other calls' texts, as it belongs to their session, which the gateway knows.
        label: its name for people; empty if there is none.
        branch: the innermost branch around it.
        batch: the innermost batch that started it or a run around it.
        parent: id of the run around it.
        has_thread: true if the user named the session.
        place: the code that began the outermost run, see `Caller`.
        own_name: for a model's call, the name that the user gave it.
        group: for a model's call, its task group.
    """

    session: str
    label: str
    branch: Branch | None
    batch: Batch | None
    parent: str | None
    metadata: Mapping[str, Any]
    has_thread: bool
    place: str
    own_name: str = ""
    group: str | None = None


class RunStart(NamedTuple):
    """LangChain's report when a run starts."""

    run_id: UUID
    parent_id: UUID | None
    tags: Sequence[str] | None
    metadata: Mapping[str, Any] | None
    name: str | None = None

    @classmethod
    def of(cls, run: Mapping[str, Any], name: str | None) -> Self:
        """Build it from the arguments of a callback."""
        parent_id, tags, metadata = map(run.get, ("parent_run_id", "tags", "metadata"))
        return cls(run["run_id"], parent_id, tags, metadata, name)


class RunSlot:
    """Place where a run is about to begin; the model's run that begins there sets `run_id`.

    Args:
        caller: the code that starts it, unless it is inside another run.
    """

    __slots__ = ("caller", "run_id")

    def __init__(self, caller: Caller | None) -> None:
        self.caller = caller
        self.run_id: UUID | None = None


class RunTree(BaseCallbackHandler):
    """Follows all runs of the program with one dictionary entry per active run.

    It is its own configuration hook. LangChain calls `get` whenever a run is about to begin, in the
    context in which the run continues, whereas it may report starts in another task. So `get` makes
    a slot there, a starting model fills it, and requests within the run find it.
    """

    def __init__(self, max_runs: int = MAX_RUNS) -> None:
        self._max_runs = max_runs
        self._nodes: dict[UUID, RunNode] = {}
        self.slot: ContextVar[RunSlot | None] = ContextVar("langchain_parrot_slot", default=None)
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
        """Return the handler, because LangChain reads a hook like a context variable."""
        config = var_child_runnable_config.get() or {}
        is_inner = getattr(config.get("callbacks"), "parent_run_id", None) is not None
        self.slot.set(RunSlot(None if is_inner else caller_here()))
        return self

    @property
    def num_runs(self) -> int:
        """Return the number of active runs."""
        return len(self._nodes)

    def node(self, run_id: UUID | None) -> RunNode | None:
        """Return an active run."""
        return None if run_id is None else self._nodes.get(run_id)

    def new_node(self, start: RunStart) -> RunNode:
        """Build a node from a run's start without remembering it."""
        run_id, parent_id, tags, metadata, name = start
        parent = self.node(parent_id)
        batch = current_batch()
        if parent is not None:
            session, label, branch = parent.session, parent.label, parent.branch
            starts_batch = batch is not None and batch is not parent.batch
            has_thread, place = parent.has_thread, parent.place
        else:
            slot, named = self.slot.get(), named_session()
            caller = batch.caller if batch else (slot and slot.caller) or NOBODY
            session = named or str(parent_id or (batch.outermost if batch else run_id))
            if named is None and parent_id is None and caller.is_program:
                session = program_session()
            label, branch, starts_batch = "", None, batch is not None
            has_thread, place = named is not None, caller.place
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
        return RunNode(
            session, label, branch, batch, parent_text, metadata or {}, has_thread, place
        )

    def new_call(self, start: RunStart) -> RunNode:
        """Build a node of a model's call, which takes a number in its branch."""
        node = self.new_node(start)
        node.own_name = start.name or ""
        if node.branch is not None:
            node.group = node.branch.next_position()
        return node

    def _started(self, serialized: Any, _: Any, /, *, name: str | None = None, **run: Any) -> None:
        if name is None and isinstance(serialized, dict):
            # Tools have their name there.
            name = serialized.get("name")
        self._remember(run["run_id"], self.new_node(RunStart.of(run, name)))

    def _called(self, _: Any, prompts: Any, /, *, name: str | None = None, **run: Any) -> None:
        node = self.new_call(RunStart.of(run, name))
        if not node.has_thread and any(map(_refers, prompts)):
            node.session = ""
        self._remember(run["run_id"], node)
        slot = self.slot.get()
        if slot is not None:
            slot.run_id = run["run_id"]

    def _remember(self, run_id: UUID, node: RunNode) -> None:
        nodes = self._nodes
        while len(nodes) >= self._max_runs:
            try:
                del nodes[next(iter(nodes))]
            except (KeyError, RuntimeError, StopIteration):
                # Another thread removed it meanwhile.
                continue
        nodes[run_id] = node

    def forget(self, run_id: UUID) -> None:
        """Forget a run whose end LangChain does not report."""
        self._nodes.pop(run_id, None)

    def _ended(self, *_: Any, run_id: UUID, **__: Any) -> None:
        self._nodes.pop(run_id, None)


def _is_called_task(metadata: Mapping[str, Any] | None) -> bool:
    """Return true if a LangGraph task is a function that another task of the same step called.

    Such functions may run one after another; this is unknown.
    """
    path: Any = (metadata or {}).get("langgraph_path") or ()
    return len(path) > 1 and isinstance(path[1], tuple | list)


def _refers(prompt: Any) -> bool:
    """Return true if a text, a message, its content or a list of them has a reference."""
    if isinstance(prompt, str):
        return REFERENCE_START in prompt
    if isinstance(prompt, list | tuple):
        return any(map(_refers, prompt))
    if isinstance(prompt, dict):
        return _refers(prompt.get("text"))
    return _refers(prompt.content) if isinstance(prompt, BaseMessage) else False


run_tree = RunTree()
register_configure_hook(cast("ContextVar[Any]", run_tree), inheritable=True)
watch_batches()


def fields_of_run(run_manager: BaseRunManager | None) -> dict[str, str]:
    """Return the body's `parrot` fields for a model's run, from the run tree.

    Args:
        run_manager: the manager that LangChain passes to `_generate` and `_stream`.

    Returns:
        `session` (the first known of: the LangGraph thread, the name given to `program.session`,
        the program if it began the run itself, the root run or outermost batch), `run`, `parent`,
        `name` (by default the place in the program that began the run) and `group`. Unknown ones
        are left out. Empty without a run.
    """
    if run_manager is None:
        return {}
    run_id, parent_id = run_manager.run_id, run_manager.parent_run_id
    node = run_tree.node(run_id) or run_tree.new_call(
        RunStart(run_id, parent_id, run_manager.tags, run_manager.metadata)
    )
    return _fields(node, str(run_id))


def fields_here() -> dict[str, str]:
    """Return the fields of a request sent here by a model's run, or by code inside another run."""
    slot = run_tree.slot.get()
    if slot is not None and slot.run_id is not None:
        node = run_tree.node(slot.run_id)
        if node is not None:
            return _fields(node, str(slot.run_id))
    config = var_child_runnable_config.get() or {}
    around = getattr(config.get("callbacks"), "parent_run_id", None)
    if around is None or run_tree.node(around) is None:
        return {}
    start = RunStart(around, around, None, config.get("metadata"))
    return _fields(run_tree.new_call(start), None)


def _fields(node: RunNode, run: str | None) -> dict[str, str]:
    fields = {
        "session": _text(ensure_config().get("configurable", {}).get(_THREAD))
        or _text(node.metadata.get(_THREAD))
        or node.session,
        "run": run,
        "parent": node.parent,
        "name": _text(node.own_name)
        or _text(node.metadata.get("langgraph_node"))
        or _text(node.label)
        or _text(node.place),
        "group": node.group,
    }
    return {name: value for name, value in fields.items() if value}


def _text(value: Any) -> str:
    """Return the value in a form that a gateway accepts; empty if impossible."""
    text = str(value).strip() if isinstance(value, str | int) else ""
    return text[:MAX_CHARACTERS] if text.isprintable() else ""
