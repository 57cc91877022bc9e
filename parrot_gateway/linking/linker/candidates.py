"""Finds the outputs that a text of a prompt may come from: those that share fingerprints with it.

A text shares some with many outputs, most of them by accident; few are worth comparing in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parrot_gateway.linking.linker.call_store import CallStore, Output, StoredCall, contains
from parrot_gateway.linking.linker.fingerprints import Hashes, NormalisedText, Positions, runs
from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.linker.prompt import Prompt

#: Candidates that are compared, of one text.
_MAX_CANDIDATES = 24
#: Outputs that share a single fingerprint with a text are looked at when there are no more.
_MAX_SINGLE = 48
#: A text that is a whole answer is found by equality: its least length where several wrote it.
WHOLE_EQUAL = 40
_NUMBER_BITS = np.uint64(32)
_ROW_MASK = np.uint64(2**32 - 1)


class NewText(NamedTuple):
    """A text of a prompt that its history does not explain.

    Attributes:
        message: its index in the prompt.
        text: as it is there.
        is_system: it is an instruction, which most calls of a program share.
        first_seen: seconds, when any prompt of the tenant first held this very message; None if
            this is the first.
        whole: the outputs that are equal to it.
    """

    message: int
    text: str
    is_system: bool
    normalised: NormalisedText
    hashes: Hashes
    positions: Positions
    first_seen: float | None
    whole: list[Output]

    @property
    def is_unmistakable(self) -> bool:
        """One session alone has written it, and has not copied it."""
        writers = {
            output.call.session.current
            for output in self.whole
            if 2 * len(output.copied) < len(self.hashes)
        }
        return len(writers) == 1 and len(self.normalised.content) >= WHOLE_EQUAL


def new_text(
    prompt: Prompt, index: int, history: Hashes, first_seen: float | None, whole: list[Output]
) -> NewText:
    """A text less the passages that the history of its prompt holds."""
    hashes, positions = prompt.fingerprints(index)
    if len(history) and len(hashes):
        is_new = ~contains(history, hashes)
        hashes, positions = hashes[is_new], positions[is_new]
    message, normalised = prompt.messages[index], prompt.normalised(index)
    is_system = message.role == "system"
    return NewText(index, message.text, is_system, normalised, hashes, positions, first_seen, whole)


@dataclass(eq=False)
class Reader:
    """The call whose prompt is looked at.

    Attributes:
        parent: the call that it continues.
        session: it belongs there by what is known so far; None for a call that stands alone.
        peer: address of its client, as far as it is known.
        found: sessions of the producers found so far.
    """

    parent: StoredCall | None
    session: LinkedSession | None
    now: float
    horizon_s: float
    peer: str = ""
    found: set[LinkedSession] = field(default_factory=set)

    def is_home(self, call: StoredCall) -> bool:
        """Whether a call is of the reader's session."""
        session = call.session.current
        return session in self.found or (
            self.session is not None and session is self.session.current
        )

    def home(self) -> set[int]:
        """The numbers of the sessions that are the reader's."""
        numbers = {session.current.number for session in self.found}
        if self.session is not None:
            numbers.add(self.session.current.number)
        return numbers

    @property
    def is_established(self) -> bool:
        """The reader's session has several calls."""
        return self.session is not None and self.session.current.calls > 1


@dataclass(slots=True, eq=False)
class Candidate:
    """An output that a text may come from.

    Attributes:
        number: of the output.
        session: number of its session.
        is_whole: the output is equal to the text.
        rows: of the text's fingerprints those that it shares, ascending.
        own: those of these rows that are not common and that no other session has written.
        rank: what tells candidates apart at once; the best one has the highest.
    """

    outputs: Mapping[int, Output]
    number: int
    session: int
    is_whole: bool
    rows: list[int]
    own: list[int]
    rank: tuple[bool, bool, bool, bool, int] = (False, False, False, False, 0)

    @property
    def output(self) -> Output:
        """Looked up when it is needed: most candidates are told by their numbers."""
        return self.outputs[self.number]


class _Pairs:
    """Which outputs share which fingerprints: pairs in order of output and row.

    Args:
        rows: of the text, [n].
        owners: numbers of outputs, [n].

    Attributes:
        numbers: each owner once, ascending, [m].
        bounds: where each owner's pairs begin, and where the last one's end, [m + 1].
        counts: of each owner's pairs, [m].
    """

    __slots__ = ("bounds", "counts", "numbers", "owners", "rows")

    def __init__(self, rows: Positions, owners: Hashes) -> None:
        self.rows = rows
        self.owners = owners
        self.bounds = runs(owners)
        self.counts: Positions = self.bounds[1:] - self.bounds[:-1]
        self.numbers = owners.take(self.bounds[:-1])


def find_candidates(
    store: CallStore, text: NewText, is_common: np.ndarray, reader: Reader
) -> list[Candidate]:
    """The outputs that a text can come from: all that are equal to it, and of the others those
    that share most, newest first.

    Args:
        is_common: which of its fingerprints are nobody's, [n] bool.
    """
    whole = [output for output in text.whole if _is_possible(output, text, reader)]
    pairs = _possible_pairs(store, text, whole, reader)
    equal = [output.number for output in whole]
    if pairs is None:
        return [
            Candidate(store.outputs, number, session, True, [], [])
            for number, session in zip(equal, _sessions(store, equal), strict=True)
        ]
    sessions = store.sessions_of(pairs.numbers)
    groups = _largest(pairs, sessions, equal)
    is_own = _own(pairs, sessions, is_common)
    bounds = pairs.bounds.tolist()
    candidates: list[Candidate] = []
    for (number, group), session in zip(
        groups.items(), _sessions(store, list(groups)), strict=True
    ):
        part = slice(bounds[group], bounds[group + 1]) if group >= 0 else slice(0)
        rows = pairs.rows[part]
        own = rows[is_own[part]].tolist()
        is_whole = len(candidates) < len(whole)
        candidates.append(Candidate(store.outputs, number, session, is_whole, rows.tolist(), own))
    return candidates


def _sessions(store: CallStore, numbers: list[int]) -> list[int]:
    found: list[int] = store.sessions_of(np.array(numbers, np.uint32)).tolist()
    return found


def _is_possible(output: Output, text: NewText, reader: Reader) -> bool:
    """Whether a text can come from an output that is equal to it: prompts may not have held it
    before, unless it is long or of the reader's session."""
    call = output.call
    if call.ended is None or reader.now - call.ended > reader.horizon_s:
        return False
    if text.first_seen is None or text.first_seen >= call.ended:
        return True
    return reader.is_home(call) or len(text.normalised.content) >= WHOLE_EQUAL


def _possible_pairs(
    store: CallStore, text: NewText, whole: list[Output], reader: Reader
) -> _Pairs | None:
    """The pairs of outputs that the text can come from; None for none.

    Of a text that resembles many outputs in one place each, only the rows of those that it
    resembles in several, or that have few.
    """
    rows, owners = store.index.find(text.hashes)
    if not len(rows):
        return None
    ordered = np.sort((owners.astype(np.uint64) << _NUMBER_BITS) | rows.view(np.uint64))
    owners = (ordered >> _NUMBER_BITS).astype(np.uint32)
    rows = (ordered & _ROW_MASK).view(np.int64)
    first, end = store.numbers(reader.now - reader.horizon_s, text.first_seen)
    is_kept = (owners >= first) & (owners < end)
    if whole:
        is_kept |= np.isin(owners, [each.number for each in whole])
    if len(owners) > _MAX_SINGLE:
        counts = _Pairs(rows, owners).counts
        is_telling = np.zeros(len(text.hashes), np.bool_)
        is_telling[rows[np.repeat(counts > 1, counts) | store.are_short(owners)]] = True
        is_kept &= is_telling.take(rows)
    if not is_kept.all():
        rows, owners = rows[is_kept], owners[is_kept]
    return _Pairs(rows, owners) if len(rows) else None


def _largest(pairs: _Pairs, sessions: NDArray[np.int64], equal: Sequence[int]) -> dict[int, int]:
    """The numbers of the outputs that are candidates, those that are equal first, and their places
    in `pairs.numbers`; -1 where they share nothing.

    Args:
        sessions: of `pairs.numbers`, see `CallStore.sessions_of`.
        equal: numbers of outputs that are.
    """
    found: dict[int, int] = {}
    for number in equal:
        place = int(np.searchsorted(pairs.numbers, number))
        is_there = place < len(pairs.numbers) and pairs.numbers[place] == number
        found[number] = place if is_there else -1
    order = np.argsort((pairs.counts.astype(np.uint64) << _NUMBER_BITS) | pairs.numbers)[::-1]
    order = order[sessions.take(order) > 0][: len(equal) + _MAX_CANDIDATES]
    for group, number in zip(order.tolist(), pairs.numbers.take(order).tolist(), strict=True):
        if number not in found:
            found[number] = group
            if len(found) >= len(equal) + _MAX_CANDIDATES:
                break
    return found


def _own(pairs: _Pairs, sessions: NDArray[np.int64], is_common: np.ndarray) -> np.ndarray:
    """Which pairs are of rows that are not common and that no other session than the owner's has
    written; [n] bool.

    Args:
        sessions: of `pairs.numbers`, see `CallStore.sessions_of`.
    """
    rows = pairs.rows
    sessions = np.repeat(sessions, pairs.counts)
    is_known = sessions > 0
    # Of several sessions that wrote a row one stays, from which the others differ.
    writers = np.zeros(len(is_common), np.int64)
    writers[rows[is_known]] = sessions[is_known]
    is_own = ~is_common
    is_own[rows[is_known & (writers.take(rows) != sessions)]] = False
    own: np.ndarray = is_known & is_own.take(rows)
    return own
