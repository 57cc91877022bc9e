"""The ends of prompts, which identify an agent that keeps its history in one message.

Such a prompt begins like the previous one, and contains its end followed by its answer.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.linker.call_store import StoredCall
from parrot_gateway.linking.linker.fingerprints import (
    COMMON,
    RUN,
    FingerprintIndex,
    Hashes,
    PassageCounts,
    distinct,
    runs,
)
from parrot_gateway.linking.linker.parts import Positions
from parrot_gateway.linking.linker.prompt import Prompt

#: Fingerprints of a prompt's end: the most kept, the fewest usable, and the share that must match.
#: Then the normalised bytes behind the end within which the answer begins.
_MAX_TAIL = 16
_MIN_TAIL = 3
_MOST_OF_TAIL = 0.6
_BEHIND = 512
#: Normalised bytes kept of an end. Its last run may reach into the common ending of a program's
#: prompts, so it is searched for without that run too.
_ENDING = 3 * RUN
_MAX_PLACES = 8
#: Number of fingerprints that represent a prompt in comparisons.
_MAX_SKETCH = 32
#: Above this number, the smallest fingerprints are found without a full sort.
_MANY = 1024


class _Tail(NamedTuple):
    """The end of a prompt, or of its part before a common ending.

    Attributes:
        hashes: its fingerprints, 4 bytes each.
        ending: its last normalised bytes.
        earlier: first position of these bytes in the prompt, if it has them before.
        foot: the last normalised bytes of the prompt, if this is not its very end.
    """

    call: StoredCall
    hashes: bytes
    ending: bytes
    earlier: int
    foot: bytes

    @property
    def beginning(self) -> int:
        """Return the hash of the context before the message and of the message's beginning."""
        return hash((self.call.seed, self.call.head))

    @property
    def size(self) -> int:
        """Return the number of its distinct fingerprints."""
        return len(distinct(np.frombuffer(self.hashes, np.uint32)))


class FoundEnd(NamedTuple):
    """A call whose prompt's end, followed by its answer, is in a text.

    Attributes:
        end: position in the normalised text at which the prompt ends.
        share: share of a sample of that prompt's fingerprints that the text contains.
    """

    call: StoredCall
    end: int
    share: float


class PromptEnds:
    """The ends of prompts' last messages; the oldest make room.

    Most prompts begin like no other, so no later prompt asks for their ends: these are not indexed.

    Args:
        max_ends: maximum number.
        max_fingerprints: maximum in the index, a power of two.
    """

    def __init__(self, max_ends: int, max_fingerprints: int) -> None:
        self._max_ends = max_ends
        self._index = FingerprintIndex(max_fingerprints)
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._sizes = np.zeros(max_ends, np.uint8)
        self._numbers = 0
        #: Numbers of ends that are not indexed, by beginning.
        self._unindexed: dict[int, list[int]] = {}
        #: Number of indexed ends, by beginning.
        self._indexed: Counter[int] = Counter()

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the index."""
        return self._index.size_bytes

    def file(self, call: StoredCall, prompt: Prompt, counts: PassageCounts) -> None:
        """Index a call for texts that contain the end of its prompt followed by its answer.

        Args:
            counts: number of prompts with each passage.
        """
        index = len(prompt.messages) - 1
        hashes, positions = prompt.fingerprints(index)
        if len(hashes) < _MIN_TAIL:
            return
        content = prompt.normalised(index).content.tobytes()
        call.seed, call.head, call.text = prompt.text_seed, prompt.head, prompt.texts[-1]
        call.sketch = _least(hashes)
        self._add(call, hashes[-_MAX_TAIL:], content, len(content))
        if not counts.are_common(hashes[-_MIN_TAIL:]):
            return
        # An ending common to a program's prompts identifies nothing.
        is_rare = counts.of(hashes) < COMMON
        if np.count_nonzero(is_rare) >= _MIN_TAIL:
            end = int(positions[is_rare][-1]) + RUN
            self._add(call, hashes[is_rare][-_MAX_TAIL:], content, end)

    def find(self, prompt: Prompt) -> Iterator[FoundEnd]:
        """Yield the calls whose prompt begins like this one's last message, if the message contains
        that prompt's end and answer; newest first.
        """
        beginning = hash((prompt.text_seed, prompt.head))
        for number in self._unindexed.get(beginning, ()):
            hashes = np.frombuffer(self._tails[number].hashes, np.uint32)
            self._add_to_index(hashes, number, beginning)
        self._unindexed.pop(beginning, None)
        if beginning not in self._indexed:
            return
        index = len(prompt.messages) - 1
        hashes, positions = prompt.fingerprints(index)
        rows, owners = self._index.find(hashes)
        if not len(owners):
            return
        bounds = runs(owners)
        numbers = owners.take(bounds[:-1])
        sizes = self._sizes.take(numbers % self._max_ends)
        # Most prompts share some fingerprints with many ends by accident.
        are_most = bounds[1:] - bounds[:-1] >= _MOST_OF_TAIL * sizes
        if not are_most.any():
            return
        content = prompt.normalised(index).content.tobytes()
        known: Hashes | None = None
        for group in np.flatnonzero(are_most)[::-1].tolist():
            tail = self._tails.get(int(numbers[group]))
            if tail is None or tail.call.ended is None or tail.beginning != beginning:
                continue
            shared = rows[bounds[group] : bounds[group + 1]]
            end = _end_of(tail, content, positions[shared])
            sketch = tail.call.sketch
            if end is not None and sketch is not None:
                known = distinct(hashes) if known is None else known
                places = np.minimum(np.searchsorted(known, sketch), len(known) - 1)
                yield FoundEnd(tail.call, end, float((known[places] == sketch).mean()))

    def _add(self, call: StoredCall, hashes: Hashes, content: bytes, end: int) -> None:
        ending = content[max(0, end - _ENDING) : end]
        foot = content[max(end, len(content) - RUN) :]
        earlier = content.find(ending[-2 * RUN :], 0, end - 1) + 2 * RUN
        self._numbers += 1
        number = self._numbers
        tail = self._tails[number] = _Tail(call, hashes.tobytes(), ending, earlier, foot)
        beginning = tail.beginning
        if beginning in self._indexed:
            self._add_to_index(hashes, number, beginning)
        else:
            self._unindexed.setdefault(beginning, []).append(number)
        while len(self._tails) > self._max_ends:
            self._forget(*self._tails.popitem(last=False))

    def _add_to_index(self, hashes: Hashes, number: int, beginning: int) -> None:
        hashes = distinct(hashes)
        self._index.add(hashes, number)
        self._sizes[number % self._max_ends] = len(hashes)
        self._indexed[beginning] += 1

    def _forget(self, number: int, tail: _Tail) -> None:
        beginning = tail.beginning
        numbers = self._unindexed.get(beginning)
        if numbers is None:
            self._indexed[beginning] -= 1
            if not self._indexed[beginning]:
                del self._indexed[beginning]
        else:
            numbers.remove(number)
            if not numbers:
                del self._unindexed[beginning]


def _end_of(tail: _Tail, content: bytes, shared: Positions) -> int | None:
    """Return the position in a normalised text where a call's prompt ends with its answer soon
    behind; None if there is none.

    Args:
        shared: positions of fingerprints that the text shares with the prompt's end, ascending.
    """
    said = tail.call.said
    endings = [tail.ending[-2 * RUN :]]
    if tail.foot and content.endswith(tail.foot):
        endings.append(tail.ending[:-RUN])
    place = len(content)
    for _ in range(_MAX_PLACES if said else 0):
        place = content.rfind(said, 0, place)
        if place < 0:
            return None
        for ending in endings:
            end = content.rfind(ending, max(0, place - _BEHIND), place)
            end += len(ending)
            # An instruction may occur before and after a text.
            if end >= len(ending) and tail.earlier not in (end, end + RUN):
                first, last = np.searchsorted(shared, (end - RUN * _MAX_TAIL, end)).tolist()
                if last - first >= _MOST_OF_TAIL * tail.size:
                    return end
        place += len(said) - 1
    return None


def _least(hashes: Hashes) -> Hashes:
    """Return the `_MAX_SKETCH` smallest fingerprints, unique and ascending."""
    # Minima select the same fingerprints in similar prompts, which makes the samples comparable.
    least = hashes
    if len(hashes) > _MANY:
        least = np.partition(hashes, _MAX_SKETCH)[:_MAX_SKETCH]
    found = np.sort(least)[:_MAX_SKETCH].copy()
    if (found[1:] == found[:-1]).any():
        return distinct(hashes)[:_MAX_SKETCH].copy()
    return found
