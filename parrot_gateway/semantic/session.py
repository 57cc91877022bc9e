"""A session: one run of an application, with its variables, its graph and its named contexts.

The session owns them and limits them, and frees everything when it is closed. `sessions` keeps all
sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import KW_ONLY, InitVar, dataclass, field

from parrot_gateway.exceptions import (
    ConflictError,
    InvalidRequestError,
    SessionFullError,
    SessionNotFoundError,
    VariableNotFoundError,
)
from parrot_gateway.semantic.graph.graph import Graph, GraphShape
from parrot_gateway.semantic.variable import Failure, Variable
from parrot_gateway.settings.model import SessionSettings

#: Maximum characters of a session's or variable's name.
MAX_NAME = 256


def check_name(name: str, param: str) -> str:
    """Return the name without surrounding blanks.

    Raises:
        InvalidRequestError: the name is empty, too long, or has unprintable characters.
    """
    plain = name.strip()
    if not plain or len(plain) > MAX_NAME or not plain.isprintable():
        raise InvalidRequestError(
            f"The name given as {param} must have 1 to {MAX_NAME} printable characters.",
            param=param,
            code="invalid_value",
        )
    return plain


def _unlimited(session: Session, delta: int) -> None:
    """Account for nothing: used by a session outside a store."""


@dataclass(eq=False, repr=False)
class Session:
    #: Opaque and unguessable.
    id: str
    name: str
    tenant: str
    _: KW_ONLY
    #: Seconds on the caller's clock.
    now: InitVar[float]
    limits: SessionSettings
    #: Makes unguessable ids.
    mint_variable_id: Callable[[], str]
    #: The store's variables by id; this session's are added to it.
    index: MutableMapping[str, Variable] = field(default_factory=dict)
    #: Called with the bytes by which its values are about to grow (negative: shrank), and likewise
    #: for its number of variables; may refuse growth by raising.
    account_bytes: Callable[[Session, int], None] = _unlimited
    account_variables: Callable[[Session, int], None] = _unlimited

    def __post_init__(self, now: float) -> None:
        self.created = self.last_used = now
        self.is_closed = False
        #: Shape of its graph once it is closed.
        self.final_shape = GraphShape(0, 0, 0)
        #: Further names, see `SessionStore.add_alias`.
        self.aliases: deque[str] = deque()
        #: Bytes of all values and named contexts.
        self.value_bytes = 0
        #: Named contexts; `keep_context` limits them.
        self.contexts: dict[str, object] = {}
        self._by_id: dict[str, Variable] = {}
        self._by_name: dict[str, Variable] = {}
        self._pins = 0
        self.graph = Graph(
            self.name,
            self._by_id,
            max_unfinished=self.limits.max_calls,
            max_finished=self.limits.max_finished_calls,
        )

    def __iter__(self) -> Iterator[Variable]:
        """Iterate over its variables, oldest first."""
        return iter(list(self._by_id.values()))

    @property
    def num_variables(self) -> int:
        """Return the number of variables; there is no `len`, because an empty session would be
        false.
        """
        return len(self._by_id)

    @property
    def is_idle(self) -> bool:
        """Return true if it may be forgotten: it has no unfinished calls and no pins."""
        return self._pins == 0 and self.graph.num_unfinished == 0

    def pin(self) -> None:
        """Prevent it from being forgotten; pair with `unpin`."""
        self._pins += 1

    def unpin(self) -> None:
        if self._pins == 0:
            raise ValueError("unpin without pin")
        self._pins -= 1

    def variable(self, name: str, param: str = "variable") -> Variable:
        """Return the variable of that name, created if needed.

        Raises:
            InvalidRequestError: the name is not valid.
            SessionFullError: too many variables, and none can be forgotten.
            SessionNotFoundError: the session was closed.
        """
        name = check_name(name, param)
        found = self._by_name.get(name)
        return found if found is not None else self._make(name)

    def anonymous_variable(self, prefix: str = "output") -> Variable:
        """Create a variable whose name is `prefix-` and the end of its id; raises like
        `variable`.
        """
        return self._make(None, prefix)

    def find(self, name: str) -> Variable | None:
        """Return the variable of that name, or None."""
        return self._by_name.get(name.strip())

    def get(self, variable_id: str) -> Variable | None:
        return self._by_id.get(variable_id)

    def lookup(self, variable_id: str, param: str = "variable") -> Variable:
        """Return the variable of that id.

        Raises:
            VariableNotFoundError: it is not in this session.
        """
        found = self._by_id.get(variable_id)
        if found is None:
            raise VariableNotFoundError(variable_id, param=param)
        return found

    def delete(self, variable_id: str) -> None:
        """Cancel and forget a variable, and forget the finished calls around it.

        Raises:
            VariableNotFoundError: it is not in this session.
            ConflictError: an unfinished call reads or writes it.
        """
        variable = self.lookup(variable_id)
        if not self.graph.forget(variable_id):
            raise ConflictError(
                f"Variable '{variable.name}' is read or written by a call that has not finished; "
                "cancel that call first.",
                param="variable",
                code="variable_in_use",
            )
        try:
            self._cancel(variable, "it was deleted")
        finally:
            self._drop(variable)

    def keep_context(self, name: str, context: object) -> None:
        """Keep a context under a name.

        Raises:
            InvalidRequestError: the name is not valid.
            SessionFullError: too many contexts.
            SessionNotFoundError: the session was closed.
        """
        self._check_open()
        name = check_name(name, "context")
        if name not in self.contexts and len(self.contexts) >= self.limits.max_contexts:
            raise SessionFullError(self.name, f"{len(self.contexts)} contexts", "max_contexts")
        self.contexts[name] = context

    def drop_context(self, name: str) -> object | None:
        """Drop a named context and return it, if there is one."""
        return self.contexts.pop(name.strip(), None)

    def close(self) -> None:
        """Cancel and forget all variables, clear the graph. A second close does nothing.

        The caller must end running calls and free contexts.
        """
        if self.is_closed:
            return
        self.is_closed = True
        first: Exception | None = None
        # NOTE: listeners may still read the graph, so it is cleared after the last one.
        for variable in self:
            try:
                self._cancel(variable, "its session was closed")
            except Exception as error:
                first = first or error
        self.final_shape = self.graph.shape()
        self.graph.clear()
        for variable in self:
            self._drop(variable)
        if first is not None:
            raise first

    def _make(self, name: str | None, prefix: str = "") -> Variable:
        self._check_open()
        if len(self._by_id) >= self.limits.max_variables:
            # Drop an eighth at a time, so that one scan frees many.
            self._evict(to_count=self.limits.max_variables - self.limits.max_variables // 8 - 1)
        if len(self._by_id) >= self.limits.max_variables:
            raise SessionFullError(self.name, f"{len(self._by_id)} variables", "max_variables")
        variable_id = self.mint_variable_id()
        if variable_id in self.index:
            raise ValueError("minted an id that is in use")
        self.account_variables(self, 1)
        variable = Variable(
            variable_id,
            name if name is not None else self._free_name(prefix, variable_id),
            self.id,
            max_value_bytes=self.limits.max_value_bytes,
            account=self.account,
        )
        self._by_id[variable_id] = variable
        self._by_name[variable.name] = variable
        self.index[variable_id] = variable
        return variable

    def _free_name(self, prefix: str, variable_id: str) -> str:
        """Return the prefix with as much of the id's end as makes it unique."""
        names = (f"{prefix}-{variable_id[-n:]}" for n in range(6, len(variable_id)))
        return next((n for n in names if n not in self._by_name), f"{prefix}-{variable_id}")

    def _check_open(self) -> None:
        if self.is_closed:
            raise SessionNotFoundError(self.name)

    def account(self, delta: int) -> None:
        """Account for a growth of its values and contexts by `delta` bytes (negative: shrank).

        Raises:
            SessionFullError, OverloadedError: no room, and nothing can be forgotten.
        """
        limit = self.limits.max_session_bytes
        if delta > 0 and self.value_bytes + delta > limit:
            self._evict(to_bytes=limit - limit // 8 - delta)
            if self.value_bytes + delta > limit:
                raise SessionFullError(
                    self.name, f"{self.value_bytes} bytes of values", "max_session_bytes"
                )
        self.account_bytes(self, delta)
        self.value_bytes += delta

    def _evict(self, *, to_count: int | None = None, to_bytes: int | None = None) -> None:
        """Drop final variables that no unfinished call reads, oldest first."""
        for variable in self:
            if (to_count is None or len(self._by_id) <= to_count) and (
                to_bytes is None or self.value_bytes <= max(0, to_bytes)
            ):
                return
            if to_bytes is not None and variable.size_bytes == 0:
                continue
            if variable.is_final and self.graph.forget(variable.id):
                self._drop(variable)

    def _cancel(self, variable: Variable, why: str) -> None:
        if not variable.is_final:
            variable.cancel(Failure("cancelled", why, variable.name, variable.producer))

    def _drop(self, variable: Variable) -> None:
        if self._by_id.pop(variable.id, None) is not None:
            self._by_name.pop(variable.name)
            self.index.pop(variable.id, None)
            self.account_variables(self, -1)
            variable.release()
