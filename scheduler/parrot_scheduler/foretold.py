"""Predicted task groups: calls whose answers will be read together, judged by earlier calls of
their kind.

Nobody has declared the group. Arrival times decide which calls belong together, so a wrong guess
mixes groups of one kind but never different kinds.
"""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.task import LATENCY, GroupRef

#: If at least this share of a kind's answers is read together with others, its calls are throughput
#: work of a group; otherwise a user is assumed to wait for each.
FAN_IN_SHARE = 0.7
#: Number of calls needed before a share is trusted.
ENOUGH_CALLS = 4.0
#: Assumed when nothing is known: enough to treat a call as the first of a session, too little to
#: retain its KV.
UNKNOWN_RETURNS = 0.5
#: Maximum members of a group; a larger one is split.
MAX_SIZE = 1024


def feeds_group(share: float, calls: float, siblings: float) -> bool:
    """Return true if a call is assumed to be a member of a group.

    Args:
        share: of the calls of its kind whose answers were read together with others.
        calls: that the share is based on.
        siblings: mean number of calls of its kind that are read together.
    """
    return share >= FAN_IN_SHARE and calls >= ENOUGH_CALLS and siblings > 1.0


def expected_returns(share: float, calls: float) -> float:
    """Return the probability that a call is continued, for `Task.returns`.

    Args:
        share: of the calls of its kind that a later call continued.
        calls: that the share is based on.
    """
    return share if calls >= ENOUGH_CALLS else UNKNOWN_RETURNS


class ForetoldGroups:
    """The open group of each kind of call.

    Calls of one kind join one group until it has the usual size of such groups, or until no call
    has come for `gap_s`.

    Args:
        gap_s: seconds.
        max_kinds: number remembered; the longest idle one is forgotten.
    """

    def __init__(self, gap_s: float, max_kinds: int = 1000) -> None:
        self._gap_s = gap_s
        self._max_kinds = max_kinds
        #: By kind: number of its group, members so far, and arrival of the last one.
        self._open: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Return the number of remembered kinds."""
        return len(self._open)

    def join(self, kind: str, siblings: float, now: float) -> GroupRef:
        """Return the group of a call that arrives now.

        Args:
            kind: of the call; kinds of different tenants differ.
            siblings: members that groups of this kind have, on average.
            now: seconds; an earlier time than the last one counts as the last one.
        """
        size = min(max(2, round(siblings)), MAX_SIZE)
        number, members, last = self._open.pop(kind, (0, size, now))
        if members >= size or now - last > self._gap_s:
            self._count += 1
            number, members = self._count, 0
        self._open[kind] = (number, members + 1, max(now, last))
        if len(self._open) > self._max_kinds:
            self._open.popitem(last=False)
        return GroupRef(f"{kind}/{number}", size, LATENCY)
