"""What LangChain's run tree says of a call, as fields of a request to the gateway.

Importing this follows the runs of the program from then on (see `_run_tree` and `_batches`).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.tracers.context import register_configure_hook

from langchain_parrot._batches import watch_batches
from langchain_parrot._run_tree import RunTree, Step

if TYPE_CHECKING:
    from langchain_core.callbacks.manager import BaseRunManager

#: Where a user or LangGraph says which conversation a run belongs to.
_THREAD = "thread_id"
#: Characters of a name, session or id that a gateway takes.
_MAX_CHARACTERS = 256

run_tree = RunTree()
register_configure_hook(cast("ContextVar[Any]", run_tree), inheritable=True)
watch_batches()


def fields_of_run(run_manager: BaseRunManager | None) -> dict[str, str]:
    """What the run tree says of a model's run.

    Args:
        run_manager: what LangChain gives to `_generate` and `_stream`.

    Returns:
        Of the fields of the body's `parrot` object: `session` (the LangGraph thread, else the root
        run, or the batch where an application's outermost step is one), `run`, `parent`, `name`
        and `group`; those that are not known are left out. Empty without a run.
    """
    if run_manager is None:
        return {}
    run_id, parent_id = run_manager.run_id, run_manager.parent_run_id
    step = run_tree.step(run_id) or run_tree.new_call(
        run_id, parent_id, run_manager.tags, run_manager.metadata, None
    )
    return _fields(step, str(run_id))


def fields_here() -> dict[str, str]:
    """The same of a request that is sent here: by a model's run, or by code inside another run."""
    place = run_tree.place.get()
    if place is not None and place.run_id is not None:
        step = run_tree.step(place.run_id)
        if step is not None:
            return _fields(step, str(place.run_id))
    config = var_child_runnable_config.get() or {}
    around = getattr(config.get("callbacks"), "parent_run_id", None)
    if around is None or run_tree.step(around) is None:
        return {}
    return _fields(run_tree.new_call(around, around, None, config.get("metadata"), None), None)


def _fields(step: Step, run: str | None) -> dict[str, str]:
    fields = {
        "session": _text(ensure_config().get("configurable", {}).get(_THREAD))
        or _text(step.metadata.get(_THREAD))
        or step.session,
        "run": run,
        "parent": step.parent,
        "name": _text(step.own_name)
        or _text(step.metadata.get("langgraph_node"))
        or _text(step.label),
        "group": step.group,
    }
    return {name: value for name, value in fields.items() if value}


def _text(value: Any) -> str:
    """As a gateway takes it; empty if it does not."""
    text = str(value).strip() if isinstance(value, str | int) else ""
    return text[:_MAX_CHARACTERS] if text.isprintable() else ""
