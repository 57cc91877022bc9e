"""Generations that wait for their grammar to be compiled.

A context waits from when such a generation comes to the head of its queue; until then what is in
front of it is computed. Its KV may be taken meanwhile, as that of an idle one. A grammar that
cannot be compiled fails its context at once, wherever in the queue it stands.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import NamedTuple

from parrot_engine.engine.context_store import ContextStore
from parrot_engine.engine.contexts import Context, PendingGenerate
from parrot_engine.engine.grammar import COMPILE_TIMEOUT_S, CompiledGrammar, GrammarCompiler
from parrot_engine.exceptions import PrimitiveError
from parrot_engine.protocol import Generate

_log = logging.getLogger(__name__)

#: Seconds that a step waits for a grammar when there is nothing else to do: as long as new work may
#: have to wait for it.
_WAIT_S = 0.002


class _Pending(NamedTuple):
    context: Context
    generate: PendingGenerate
    compiled: Future[CompiledGrammar]
    #: `time.monotonic()` at which it is given up.
    deadline: float


class PendingGrammars:
    """The generations of a store that wait for their grammars. One thread drives it."""

    def __init__(self, store: ContextStore, compiler: GrammarCompiler) -> None:
        self._store = store
        self._compiler = compiler
        #: Generations that wait for their grammars.
        self.pending: list[_Pending] = []

    def submit(self, primitive: Generate, *, seed: int, end_token_ids: frozenset[int]) -> None:
        """Queue a validated Generate that has a grammar.

        Raises:
            PrimitiveError: it cannot be queued; give its context up.
        """
        assert primitive.sampling.grammar is not None
        compiled = self._compiler.compile(primitive.sampling.grammar)
        context, generate = self._store.submit_generate(
            primitive, seed=seed, end_token_ids=end_token_ids, awaits_grammar=True
        )
        pending = _Pending(context, generate, compiled, time.monotonic() + COMPILE_TIMEOUT_S)
        if not self._try_release(pending):
            self.pending.append(pending)

    def release(self) -> None:
        """Let generations go on whose grammar is ready; those whose grammar failed fail."""
        self.pending = [pending for pending in self.pending if not self._try_release(pending)]

    def wait(self) -> None:
        wait([pending.compiled for pending in self.pending], _WAIT_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Stop waiting, and end the compiler."""
        self.pending.clear()
        self._compiler.close()

    def _try_release(self, pending: _Pending) -> bool:
        """Return True if there is nothing to wait for any more."""
        context, generate, compiled, deadline = pending
        if context.state == "gone" or generate not in context.pending:
            return True
        if not compiled.done():
            if time.monotonic() < deadline:
                return False
            problem = f"grammar: it was not compiled within {COMPILE_TIMEOUT_S:g} s"
            self._store.fail(context, "invalid_request", problem)
            return True
        error = compiled.exception()
        if error is None:
            new_matcher = partial(
                compiled.result().matcher,
                min_tokens=generate.sampling.min_tokens,
                max_tokens=generate.sampling.max_tokens,
                ends=tuple(generate.end_token_ids),
            )
            self._store.release(context, generate, new_matcher)
        elif isinstance(error, PrimitiveError):
            self._store.fail(context, error.code, error.message)
        else:
            _log.error("compiling a grammar failed", exc_info=error)
            self._store.fail(context, "engine_error", "the engine failed to compile the grammar")
        return True
