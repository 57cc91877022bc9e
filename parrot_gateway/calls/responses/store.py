"""Responses and conversations that were made here: kept for a while, bounded, each tenant's own.

Pure: the time is passed in. A response that was forgotten does not cut the histories that build on
it: they keep what they need of it. Another tenant's entries look like ones that do not exist.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from parrot_gateway.calls.event_log import EventLog
from parrot_gateway.calls.fifo_lock import FifoLock
from parrot_gateway.calls.responses.items import Item, Turn, history_of
from parrot_gateway.exceptions import InvalidRequestError
from parrot_gateway.settings.model import ResponseSettings

#: A conversation may take this part of the room for all.
_CONVERSATION_SHARE = 8


class Cut(NamedTuple):
    """One delta of a stream, as numbers of characters and log-probabilities of an item."""

    characters: int
    logprobs: int
    #: Its place in the output.
    item: int = 0


@dataclass(slots=True)
class StoredResponse:
    """A response that has ended, or one that is made in the background."""

    id: str
    #: The JSON answer.
    answer: bytes
    #: Its input and output, behind the history it was given.
    turn: Turn
    #: The deltas that its output came in, to replay the stream.
    cuts: Sequence[Cut] = ()
    last_used: float = 0.0
    #: The events themselves, of one that was made in the background.
    log: EventLog | None = None
    #: Cancels the making of it, as long as that goes on.
    cancel: Callable[[], object] | None = None
    #: Of the log, when the response was last updated.
    log_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        return len(self.answer) + 24 * len(self.cuts) + self.log_bytes

    @property
    def input_items(self) -> list[Item]:
        """The items that the model was given; instructions are not among them."""
        return history_of(self.turn.parent) + list(self.turn.input)


@dataclass(slots=True)
class Conversation:
    """Items that responses read and add to."""

    id: str
    created: float
    metadata: dict[str, str] = field(default_factory=dict)
    turn: Turn | None = None
    last_used: float = 0.0
    #: Calls on it go one after the other.
    lock: FifoLock = field(default_factory=FifoLock)

    @property
    def size_bytes(self) -> int:
        return 1024

    @property
    def items(self) -> list[Item]:
        return history_of(self.turn)


Entry: TypeAlias = StoredResponse | Conversation


class _Tenant:
    __slots__ = ("entries", "items", "size_bytes")

    def __init__(self) -> None:
        #: Those of all turns that are held, by id, and in how many of them each is.
        self.items: dict[str, tuple[Item, int]] = {}
        #: Longest unused first.
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self.size_bytes = 0


class ResponseStatistics(NamedTuple):
    entries: int
    size_bytes: int


class ResponseStore:
    """All that is kept.

    Args:
        limits: how much, and for how long.
    """

    def __init__(self, limits: ResponseSettings) -> None:
        self._limits = limits
        self._tenants: dict[str, _Tenant] = {}
        self._count = 0

    def response(self, tenant: str, response_id: str, now: float) -> StoredResponse | None:
        """The tenant's response of that id; used now."""
        found = self._find(tenant, response_id, now)
        return found if isinstance(found, StoredResponse) else None

    def peek(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The same, which is not used by that."""
        held = self._tenants.get(tenant)
        found = None if held is None else held.entries.get(response_id)
        return found if isinstance(found, StoredResponse) else None

    def conversation(self, tenant: str, conversation_id: str, now: float) -> Conversation | None:
        """The tenant's conversation of that id; used now."""
        found = self._find(tenant, conversation_id, now)
        return found if isinstance(found, Conversation) else None

    def item(self, tenant: str, item_id: str) -> Item | None:
        """The tenant's item of that id, in whatever response or conversation it is kept."""
        held = self._tenants.get(tenant)
        found = None if held is None else held.items.get(item_id)
        return None if found is None else found[0]

    def keep(self, tenant: str, entry: Entry, now: float) -> None:
        """Keep a new response or conversation; the least recently used make room."""
        self.sweep(now)
        held = self._tenants.setdefault(tenant, _Tenant())
        entry.last_used = now
        held.entries[entry.id] = entry
        held.size_bytes += entry.size_bytes
        self._count += 1
        self._hold(held, entry.turn)
        self._make_room()

    def update(
        self, tenant: str, response: StoredResponse, answer: bytes, turn: Turn | None = None
    ) -> None:
        """A response that is made in the background has come further.

        Args:
            turn: with its output, once that is whole.
        """
        held = self._tenants.get(tenant)
        before, old = response.size_bytes, response.turn
        response.answer, response.turn = answer, turn or old
        if response.log is not None:
            response.log_bytes = response.log.size_bytes
        if held is None or held.entries.get(response.id) is not response:
            return
        held.size_bytes += response.size_bytes - before
        self._hold(held, response.turn)
        self._release(held, old)
        self._make_room()

    def extend(
        self,
        tenant: str,
        conversation: Conversation,
        input: Sequence[Item],
        output: Sequence[Item] = (),
    ) -> Turn:
        """Add a turn to a conversation, in the place that its newest one had.

        Returns:
            the turn. A conversation that was forgotten meanwhile takes it all the same, unseen.

        Raises:
            InvalidRequestError: the conversation would be too large; it stays as it was.
        """
        turn = Turn(conversation.turn, input, output)
        self.check_fits(conversation, turn.size_bytes)
        self.replace(tenant, conversation, turn)
        return turn

    def check_fits(self, conversation: Conversation, extra_bytes: int) -> None:
        """Refuse what a conversation has no room for.

        Raises:
            InvalidRequestError: it would be too large.
        """
        size = extra_bytes + sum(item.size_bytes for item in conversation.items)
        limit = self._limits.max_bytes // _CONVERSATION_SHARE
        if size > limit:
            raise InvalidRequestError(
                f"The conversation would come to {size} bytes; one may have {limit}, an eighth of "
                "setting responses.max_bytes. Begin another one.",
                param="conversation",
                code="conversation_too_large",
            )

    def replace(self, tenant: str, conversation: Conversation, turn: Turn | None) -> None:
        """Give a conversation another chain of turns."""
        held = self._tenants.get(tenant)
        old, conversation.turn = conversation.turn, turn
        if held is None or held.entries.get(conversation.id) is not conversation:
            return
        self._hold(held, turn)
        self._release(held, old)
        self._make_room()

    def delete(self, tenant: str, entry_id: str) -> None:
        """Forget a response or a conversation; histories that build on it keep what they need."""
        held = self._tenants.get(tenant)
        if held is not None and entry_id in held.entries:
            self._drop(tenant, held, entry_id)

    def sweep(self, now: float) -> None:
        """Forget what was unused for longer than the limit."""
        for tenant, held in list(self._tenants.items()):
            while held.entries:
                entry_id, oldest = next(iter(held.entries.items()))
                if now - oldest.last_used <= self._limits.ttl_s:
                    break
                self._drop(tenant, held, entry_id)

    def statistics(self) -> ResponseStatistics:
        sizes = (held.size_bytes for held in self._tenants.values())
        return ResponseStatistics(self._count, sum(sizes))

    def _find(self, tenant: str, entry_id: str, now: float) -> Entry | None:
        self.sweep(now)
        held = self._tenants.get(tenant)
        entry = held.entries.get(entry_id) if held is not None else None
        if held is None or entry is None:
            return None
        entry.last_used = now
        held.entries.move_to_end(entry_id)
        return entry

    def _make_room(self) -> None:
        """Drop entries of the tenant that holds most."""
        while self._count > self._limits.max_stored:
            self._drop_oldest(max(self._tenants, key=lambda t: len(self._tenants[t].entries)))
        while self.statistics().size_bytes > self._limits.max_bytes:
            self._drop_oldest(max(self._tenants, key=lambda t: self._tenants[t].size_bytes))

    def _drop_oldest(self, tenant: str) -> None:
        held = self._tenants[tenant]
        self._drop(tenant, held, next(iter(held.entries)))

    def _drop(self, tenant: str, held: _Tenant, entry_id: str) -> None:
        entry = held.entries.pop(entry_id)
        held.size_bytes -= entry.size_bytes
        self._count -= 1
        if isinstance(entry, StoredResponse) and entry.cancel is not None:
            entry.cancel()
        self._release(held, entry.turn)
        if not held.entries:
            del self._tenants[tenant]

    def _hold(self, held: _Tenant, turn: Turn | None) -> None:
        """Count one more holder of a turn; a turn without one before holds its parent."""
        while turn is not None:
            turn.refs += 1
            if turn.refs > 1:
                return
            held.size_bytes += turn.size_bytes
            for item in turn.items:
                _, count = held.items.get(item.id, (item, 0))
                held.items[item.id] = (item, count + 1)
            turn = turn.parent

    def _release(self, held: _Tenant, turn: Turn | None) -> None:
        while turn is not None:
            turn.refs -= 1
            if turn.refs > 0:
                return
            held.size_bytes -= turn.size_bytes
            for item in turn.items:
                _, count = held.items.pop(item.id)
                if count > 1:
                    held.items[item.id] = (item, count - 1)
            turn = turn.parent
