"""Finds the outputs that a text of a prompt may come from: those that share fingerprints with it.

A text shares fingerprints with many outputs, mostly by accident; only a few are worth a full
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parrot_gateway.linking.linker.call_store import CallStore, Output, StoredCall, contains
from parrot_gateway.linking.linker.fingerprints import PARTS_FROM, Hashes, NormalisedText, runs
from parrot_gateway.linking.linker.links import LinkedSession
from parrot_gateway.linking.linker.parts import Positions
from parrot_gateway.linking.linker.prompt import Prompt

#: Maximum candidates compared per text.
_MAX_CANDIDATES = 24
#: Above this many matches, outputs that share a single fingerprint with a text are ignored.
_MAX_SINGLE = 48
#: Equality finds texts that are whole answers; minimum length if several calls wrote it.
WHOLE_EQUAL = 40
#: Outputs with at most this many fingerprints count even with a single shared one.
_SHORT = 4
_NO_SIZES = np.zeros(0, np.int32)
_NONE = np.zeros(0, np.bool_)


class NewText(NamedTuple):
    """A text of a prompt that the prompt's history does not explain.

    Attributes:
        message: its index in the prompt.
        text: its original form.
        is_system: true for an instruction, which most calls of a program share.
        first_seen: seconds, when a prompt of the tenant first had this exact message; None
            if this is the first.
        whole: the outputs equal to it.
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
        """Return true if exactly one session wrote it without copying it."""
        writers = {
            output.call.session.current
            for output in self.whole
            if 2 * len(output.copied) < len(self.hashes)
        }
        return len(writers) == 1 and len(self.normalised.content) >= WHOLE_EQUAL


def new_text(
    prompt: Prompt, index: int, history: Hashes, first_seen: float | None, whole: list[Output]
) -> NewText:
    """Build a text without the passages that its prompt's history contains."""
    hashes, positions = prompt.passages(index)
    if len(history) and len(hashes):
        is_new = ~contains(history, hashes)
        hashes, positions = hashes[is_new], positions[is_new]
    message, normalised = prompt.messages[index], prompt.normalised(index)
    is_system = message.role == "system"
    return NewText(index, message.text, is_system, normalised, hashes, positions, first_seen, whole)


@dataclass(eq=False)
class Reader:
    """The call whose prompt is examined.

    Attributes:
        parent: the call that it continues.
        session: its session as far as known; None for a call that stands alone.
        peer: address of its client, if known.
        found: sessions of the producers found so far.
    """

    parent: StoredCall | None
    session: LinkedSession | None
    now: float
    horizon_s: float
    peer: str = ""
    found: set[LinkedSession] = field(default_factory=set)

    def is_home(self, call: StoredCall) -> bool:
        """Return true if a call is in the reader's session."""
        session = call.session.current
        return session in self.found or (
            self.session is not None and session is self.session.current
        )

    def home(self) -> set[int]:
        """Return the numbers of the reader's sessions."""
        numbers = {session.current.number for session in self.found}
        if self.session is not None:
            numbers.add(self.session.current.number)
        return numbers

    @property
    def is_established(self) -> bool:
        """Return true if the reader's session has several calls."""
        return self.session is not None and self.session.current.calls > 1


@dataclass(slots=True, eq=False)
class Candidates:
    """The outputs that a text may come from, as arrays, because most are rejected by their numbers
    alone.

    Attributes:
        numbers: of the outputs, ascending; those without a shared fingerprint come last. [k]
        sessions: numbers of their sessions, [k].
        sizes: their fingerprint counts, [k].
        counts: number of them that the text shares, [k].
        is_whole: the output is equal to the text, [k] bool.
        rows: shared fingerprints of the text, in order of the candidates; [p].
        owners: index of the candidate that shares each; [p].
        is_own: the fingerprint is neither common nor written by another session, [p] bool.
    """

    numbers: Positions
    sessions: Positions
    sizes: NDArray[np.int32]
    counts: Positions
    is_whole: np.ndarray
    rows: Positions
    owners: Positions
    is_own: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)


def find_candidates(
    store: CallStore, text: NewText, is_common: np.ndarray, reader: Reader
) -> Candidates | None:
    """Return the outputs that a text can come from: all that equal it, and those that share most,
    newest first. None if there are none.

    Args:
        is_common: its fingerprints that too many calls share, [n] bool.
    """
    whole = list(dict.fromkeys(each for each in text.whole if _is_possible(each, text, reader)))
    equal = sorted(each.number for each in whole)
    found = _sharing(store, text, is_common, equal, reader)
    if not len(found) and not whole:
        return None
    if whole:
        shared = set(found.numbers.tolist())
        _add_unshared(store, found, [each for each in equal if each not in shared])
    return found


def _sharing(
    store: CallStore, text: NewText, is_common: np.ndarray, equal: list[int], reader: Reader
) -> Candidates:
    """Return the candidates that share fingerprints with a text.

    Args:
        equal: numbers of outputs equal to the text, ascending.
    """
    rows, owners = store.index.find(text.hashes)
    if not len(rows):
        return Candidates(owners, owners, _NO_SIZES, owners, _NONE, rows, owners, _NONE)
    bounds = runs(owners)
    starts = bounds[:-1]
    counts = bounds[1:] - starts
    numbers = owners.take(starts)
    sessions, sizes = store.sessions_and_sizes(numbers)
    is_possible = _are_possible(store, text, numbers, sessions, equal, reader)
    is_whole = _are_among(numbers, equal)
    most = len(equal) + _MAX_CANDIDATES
    if not is_possible.all() or np.count_nonzero(counts > 1) < most:
        is_kept = is_possible.repeat(counts)
        if len(rows) > _MAX_SINGLE:
            # If the text resembles many outputs in one place each, keep only parts and the rows of
            # outputs that it resembles in several places or that are short.
            are_good = (sizes <= _SHORT) | (counts > 1)
            is_telling = text.hashes >= PARTS_FROM
            is_telling[rows[are_good.repeat(counts)]] = True
            is_kept &= is_telling.take(rows)
        counts = np.add.reduceat(is_kept, starts, dtype=np.int64)
        rows = rows[is_kept]
    is_own_row = _own_rows(rows, sessions.repeat(counts), is_common)
    chosen = counts.nonzero()[0]
    if len(chosen) > most:
        # Of equally similar outputs the newest.
        order = counts.argsort(kind="stable")
        if equal:
            order = order[~is_whole.take(order)]
        is_chosen = is_whole & (counts > 0)
        is_chosen[order[-_MAX_CANDIDATES:]] = True
        rows = rows[is_chosen.repeat(counts)]
        chosen = is_chosen.nonzero()[0]
    counts = counts.take(chosen)
    return Candidates(
        numbers.take(chosen),
        sessions.take(chosen),
        sizes.take(chosen),
        counts,
        is_whole.take(chosen),
        rows,
        np.arange(len(chosen)).repeat(counts),
        is_own_row.take(rows),
    )


def _are_among(numbers: Positions, some: list[int]) -> np.ndarray:
    """Flag each of the ascending `numbers` that is among `some`, a short list; [n] bool."""
    found = np.zeros(len(numbers), np.bool_)
    for each in some if len(numbers) else ():
        place = min(int(numbers.searchsorted(each)), len(numbers) - 1)
        found[place] |= bool(numbers[place] == each)
    return found


def _add_unshared(store: CallStore, found: Candidates, missing: list[int]) -> None:
    """Add outputs equal to the text whose fingerprints are not indexed or are all explained by its
    history.
    """
    if not missing:
        return
    numbers = np.array(missing, np.int64)
    sessions, sizes = store.sessions_and_sizes(numbers)
    found.numbers = np.concatenate((found.numbers, numbers))
    found.sessions = np.concatenate((found.sessions, sessions))
    found.sizes = np.concatenate((found.sizes, sizes))
    found.counts = np.concatenate((found.counts, np.zeros(len(numbers), np.int64)))
    found.is_whole = np.concatenate((found.is_whole, np.ones(len(numbers), np.bool_)))


def _is_possible(output: Output, text: NewText, reader: Reader) -> bool:
    """Return true if a text can come from an output equal to it: no earlier prompt had it, or it is
    long or of the reader's session.
    """
    call = output.call
    if call.ended is None or reader.now - call.ended > reader.horizon_s:
        return False
    if text.first_seen is None or text.first_seen >= call.ended:
        return True
    return reader.is_home(call) or len(text.normalised.content) >= WHOLE_EQUAL


def _are_possible(
    store: CallStore,
    text: NewText,
    numbers: Positions,
    sessions: Positions,
    equal: list[int],
    reader: Reader,
) -> np.ndarray:
    """Flag each output that was written early enough for the text to come from it; [m] bool.

    Args:
        numbers: of the outputs, ascending, [m].
        sessions: numbers of their sessions, 0 if forgotten, [m].
        equal: numbers of outputs equal to the text, ascending.
    """
    first, end = store.numbers(reader.now - reader.horizon_s, text.first_seen)
    is_possible: np.ndarray = sessions > 0
    if numbers[0] < first or numbers[-1] >= end:
        is_timely = (numbers >= first) & (numbers < end)
        is_possible &= is_timely | _are_among(numbers, equal)
    return is_possible


def _own_rows(rows: Positions, writers: Positions, is_common: np.ndarray) -> np.ndarray:
    """Flag each row that is not common and was written by one session only; [n] bool.

    Args:
        rows: shared rows, [p].
        writers: the sessions that wrote them, [p].
        is_common: [n] bool.
    """
    # Of several sessions that wrote a row one remains here; the others differ from it.
    last = np.zeros(len(is_common), np.int64)
    last[rows] = writers
    is_own: np.ndarray = ~is_common
    is_own[rows[last.take(rows) != writers]] = False
    return is_own
