"""The ends of prompts, by which an agent is recognised that keeps its history in one message.

Such a prompt begins like the one before it, and holds that one's end with the answer behind it.
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

#: Fingerprints of the end of a prompt by which it is found: most, least, and how many of them have
#: to be there. Normalised bytes behind it within which its answer begins.
_MAX_TAIL = 16
_MIN_TAIL = 3
_MOST_OF_TAIL = 0.6
_BEHIND = 512
#: Normalised bytes that are kept of an end. Its last run may reach into what all prompts of a
#: program end with, so that it is looked for without it too.
_ENDING = 3 * RUN
_MAX_PLACES = 8
#: Fingerprints of a prompt by which it is compared with others.
_MAX_SKETCH = 32
#: Above so many, fingerprints are not all brought in order to find the least of them.
_MANY = 1024


class _Tail(NamedTuple):
    """The end of a prompt, or of what is its own of it.

    Attributes:
        hashes: its fingerprints, 4 bytes each.
        ending: its last normalised bytes.
        earlier: where the prompt holds them for the first time, if it does so before.
        foot: the last normalised bytes of the prompt, where this is not its very end.
    """

    call: StoredCall
    hashes: bytes
    ending: bytes
    earlier: int
    foot: bytes

    @property
    def beginning(self) -> int:
        """Hash of what stands before the message, and of how that begins."""
        return hash((self.call.seed, self.call.head))

    @property
    def size(self) -> int:
        """Number of its fingerprints, each once."""
        return len(distinct(np.frombuffer(self.hashes, np.uint32)))


class FoundEnd(NamedTuple):
    """A call whose prompt's end, and its answer behind it, stand in a text.

    Attributes:
        end: where the prompt ends in the normalised text.
        share: of some fingerprints of that prompt, how many the text holds.
    """

    call: StoredCall
    end: int
    share: float


class PromptEnds:
    """The ends of the last messages of prompts, the oldest of which make room.

    Most prompts begin like no other, so that nobody asks for their ends: these are not indexed.

    Args:
        max_ends: kept.
        max_fingerprints: of them in the index, a power of two.
    """

    def __init__(self, max_ends: int, max_fingerprints: int) -> None:
        self._max_ends = max_ends
        self._index = FingerprintIndex(max_fingerprints)
        self._tails: OrderedDict[int, _Tail] = OrderedDict()
        self._sizes = np.zeros(max_ends, np.uint8)
        self._numbers = 0
        #: Numbers of those that are not in the index, by their beginning.
        self._unindexed: dict[int, list[int]] = {}
        #: How many are in the index, by their beginning.
        self._indexed: Counter[int] = Counter()

    @property
    def size_bytes(self) -> int:
        """Bytes of the index."""
        return self._index.size_bytes

    def file(self, call: StoredCall, prompt: Prompt, counts: PassageCounts) -> None:
        """Let a call be found by texts that hold the end of its prompt, and its answer behind it.

        Args:
            counts: in how many prompts passages stood.
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
        # What all prompts of a program end with says nothing.
        is_rare = counts.of(hashes) < COMMON
        if np.count_nonzero(is_rare) >= _MIN_TAIL:
            end = int(positions[is_rare][-1]) + RUN
            self._add(call, hashes[is_rare][-_MAX_TAIL:], content, end)

    def find(self, prompt: Prompt) -> Iterator[FoundEnd]:
        """The calls whose prompt begins like the last message of this one, which holds that
        prompt's end with its answer behind it; newest first."""
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
        # Most prompts share some fingerprints with many ends, by accident.
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
    """Where in a normalised text the prompt of a call ends, with its answer soon behind; None where
    that is not there.

    Args:
        shared: places of the fingerprints that the text shares with the prompt's end, ascending.
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
            # An instruction may stand before and behind a text.
            if end >= len(ending) and tail.earlier not in (end, end + RUN):
                first, last = np.searchsorted(shared, (end - RUN * _MAX_TAIL, end)).tolist()
                if last - first >= _MOST_OF_TAIL * tail.size:
                    return end
        place += len(said) - 1
    return None


def _least(hashes: Hashes) -> Hashes:
    """The least `_MAX_SKETCH` of some fingerprints, each once, ascending."""
    # Of several prompts the same ones: to compare those, that is better than some from all of it.
    least = hashes
    if len(hashes) > _MANY:
        least = np.partition(hashes, _MAX_SKETCH)[:_MAX_SKETCH]
    found = np.sort(least)[:_MAX_SKETCH].copy()
    if (found[1:] == found[:-1]).any():
        return distinct(hashes)[:_MAX_SKETCH].copy()
    return found
