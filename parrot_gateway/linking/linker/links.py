"""Links between calls, and the sessions that they connect: the linker's results."""

from __future__ import annotations

from itertools import count
from typing import Literal, NamedTuple, TypeAlias

#: `continues`: the prompt continues another call's prompt and answer. `output`: the prompt has a
#: passage of an answer. `tool`: the prompt repeats the id of a tool call. `spawned`: an argument of
#: a tool call is this call's first message.
LinkKind: TypeAlias = Literal["continues", "output", "tool", "spawned"]


class Evidence(NamedTuple):
    """Position of the shared passage in characters, without its text.

    Attributes:
        message: index of the message in the prompt.
        start, end: in the text of that message.
        source_start, source_end: in the answer's text, or in an argument of its tool call.
    """

    message: int
    start: int
    end: int
    source_start: int
    source_end: int


class Link(NamedTuple):
    """One edge of an inferred graph.

    Attributes:
        source: id of the earlier call.
        confidence: from 0 to 1.
        evidence: None if whole messages or ids are equal.
    """

    source: str
    kind: LinkKind
    confidence: float
    evidence: Evidence | None = None


_numbers = count(1)


class LinkedSession:
    """A set of connected calls; sets that prove to be one are merged.

    Args:
        id: the id that clients see.
        started: seconds.
        is_explicit: true if a client named it.

    Attributes:
        number: unique number, from 1 upward.
    """

    __slots__ = ("_merged_into", "calls", "id", "is_explicit", "number", "started")

    def __init__(self, id: str, started: float, is_explicit: bool) -> None:
        self.id = id
        self.started = started
        self.is_explicit = is_explicit
        self.number = next(_numbers)
        #: Calls linked so far.
        self.calls = 0
        self._merged_into: LinkedSession | None = None

    @property
    def current(self) -> LinkedSession:
        """Return the session that this one was merged into, or itself."""
        session = self
        while session._merged_into is not None:
            above = session._merged_into
            if above._merged_into is not None:
                session._merged_into = above._merged_into
            session = above
        return session

    def merge(self, other: LinkedSession) -> LinkedSession | None:
        """Merge two sessions. A session named by a client keeps its id; otherwise the older one
        does.

        Returns:
            The session that is no longer current; None if nothing changed, because they are
            one already or a client named both.
        """
        first, second = self.current, other.current
        if first is second or (first.is_explicit and second.is_explicit):
            return None
        if (second.is_explicit, -second.started) > (first.is_explicit, -first.started):
            first, second = second, first
        second._merged_into = first
        first.calls += second.calls
        return second
