"""Output parsers and deferred texts.

Parsers use `re`, `csv` and other C code that would see the reference: a callback fetches the value
before a parser reads it. `StrOutputParser` only hands the text on, and leaves it deferred.

Nothing of this is in effect before a program has made its first deferred text.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import Generation
from langchain_core.tracers.context import register_configure_hook

from langchain_parrot._inline import ignore_events
from langchain_parrot.deferred import DeferredText, anything_pending, resolve_message


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
        """Never interested."""
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
            else:
                resolve_message(inputs)
        except BaseException:
            # LangChain tells nobody the end of a run whose beginning failed.
            from langchain_parrot.linking import run_tree

            run_tree.forget(run["run_id"])
            raise


_HANDLER = ParserHandler()
_handler: ContextVar[ParserHandler | None] = ContextVar(
    "langchain_parrot_parsers", default=_HANDLER
)


def prepare() -> None:
    """Take effect; called once."""
    register_configure_hook(_handler, inheritable=True)
    _keep_in_generations()


def _keep_in_generations() -> None:
    """Let `Generation(text=deferred)` hold the deferred text.

    LangChain's parsers make one of a plain text, and pydantic copies the characters of a subclass
    of `str`: `llm | StrOutputParser()` would return the bare reference of a text model's answer.
    LangChain offers no place for it, so its constructor is wrapped.
    """
    ordinary = Generation.__init__

    @functools.wraps(ordinary)
    def keep(self: Generation, *arguments: Any, **fields: Any) -> None:
        ordinary(self, *arguments, **fields)
        text = fields.get("text")
        if type(text) is DeferredText:
            # A parser before which the value was fetched is to have the value.
            self.text = text.get() if text.is_resolved else text

    Generation.__init__ = keep  # type: ignore[method-assign]
