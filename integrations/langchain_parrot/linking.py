"""What LangChain's run tree says of a call, as fields of a request to the gateway.

Importing this follows the runs of the program from then on (see `_run_tree` and `_batches`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import ensure_config
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
_hook: ContextVar[RunTree | None] = ContextVar("langchain_parrot_run_tree", default=run_tree)
register_configure_hook(_hook, inheritable=True)
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
    return fields_of_step(step, run_manager.metadata, run=str(run_id))


def fields_of_step(
    step: Step, metadata: Mapping[str, Any] | None, *, run: str | None
) -> dict[str, str]:
    """The same of a run that is known; for `run` None, of a call that is no run of its own."""
    told = metadata or {}
    fields = {
        "session": _text(ensure_config().get("configurable", {}).get(_THREAD))
        or _text(told.get(_THREAD))
        or step.session,
        "run": run,
        "parent": step.parent,
        "name": step.own_name or _text(told.get("langgraph_node")) or step.label,
        "group": step.group,
    }
    return {name: value[:_MAX_CHARACTERS] for name, value in fields.items() if value}


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str | int) else ""
