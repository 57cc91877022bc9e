"""Task groups foretold: calls whose answers will be read together, by what calls of their kind did.

Nobody has declared the group. Which calls belong together is guessed from when they come, so that a
wrong guess mixes groups of one kind, and never different kinds.
"""

from __future__ import annotations

from collections import OrderedDict

from parrot_scheduler.task import LATENCY, GroupRef

#: Share of a kind's calls whose answers are read together with others, from which on they are taken
#: for throughput work of a group; otherwise somebody waits for each.
FAN_IN_SHARE = 0.7
#: Calls behind a share before it is believed.
ENOUGH_CALLS = 4.0
#: What is expected where nothing is known: enough to take a call for the first of a session, too
#: little to retain its KV.
UNKNOWN_RETURNS = 0.5
#: Members of a group at most; of a larger one these are several.
MAX_SIZE = 1024


def feeds_group(share: float, calls: float, siblings: float) -> bool:
    """Return true if a call is taken for a member of a group.

    Args:
        share: of the calls of its kind whose answers were read together with others.
        calls: behind that share.
        siblings: mean number of calls of its kind among these.
    """
    return share >= FAN_IN_SHARE and calls >= ENOUGH_CALLS and siblings > 1.0


def expected_returns(share: float, calls: float) -> float:
    """The chance that a call goes on, for `Task.returns`.

    Args:
        share: of the calls of its kind that another one went on from.
        calls: behind that share.
    """
    return share if calls >= ENOUGH_CALLS else UNKNOWN_RETURNS


class ForetoldGroups:
    """The groups that calls of each kind form now.

    Calls of one kind are members of one group until it has as many as such groups have, or none
    has come for `gap_s`.

    Args:
        gap_s: seconds.
        max_kinds: remembered; the one that was quiet longest is forgotten.
    """

    def __init__(self, gap_s: float, max_kinds: int = 1000) -> None:
        self._gap_s = gap_s
        self._max_kinds = max_kinds
        #: By kind: number of its group, members so far, and when the last of them came.
        self._open: OrderedDict[str, tuple[int, int, float]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Kinds that are remembered."""
        return len(self._open)

    def join(self, kind: str, siblings: float, now: float) -> GroupRef:
        """The group of a call that comes now.

        Args:
            kind: of the call; different tenants' are different.
            siblings: members that groups of this kind have, on average.
            now: seconds; a time before the last one counts as that.
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
