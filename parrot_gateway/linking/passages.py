"""Finds who wrote the passages of a prompt.

Candidates share fingerprints with a text; each is verified by the real overlap. They compete: a
stretch of text is credited to one of them, so that of several calls that wrote the same only the
most plausible gets a link. What stood in the prompt of the call that wrote it, in the history of
the reader, or in the prompts of unrelated calls, proves nothing.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.call_store import CallStore, Output, StoredCall, contains
from parrot_gateway.linking.fingerprints import (
    RUN,
    WINDOW,
    Hashes,
    NormalisedText,
    PassageCounts,
    Positions,
)
from parrot_gateway.linking.links import Evidence, LinkedSession
from parrot_gateway.linking.prompt import Prompt

#: Candidates that are verified, of one text.
_MAX_CANDIDATES = 24
#: Outputs that share a single fingerprint with a text are looked at when there are no more.
_MAX_SINGLE = 48
#: A passage that stood in the prompts of this many calls is nobody's.
COMMON = 3
#: Normalised bytes that a candidate must be credited with: within one session; to join a call to
#: the session of another; the same when only a smaller part of the answer was used; to merge two
#: sessions of several calls.
_WITHIN = 24
_JOIN = 40
_JOIN_PART = 120
_MERGE = 200
#: Share of the shared fingerprints that no other session and no common text has, to join sessions.
_OWN = 0.5
#: The same where all of a long answer stands in one piece.
_OWN_OF_ALL = 0.15
#: Share of an answer that makes a shorter passage do, and that is all of it but for its ends.
_MOST = 0.6
_VERBATIM = 0.95
#: Candidates that share such a part of what the best one shares are compared in full, so many.
_NEARLY = 0.9
_MAX_NEAR = 4
#: Stretches that lie no farther apart, about as far in the text as in the answer, are one passage.
_GAP = 160
#: Different words in passages that join sessions.
_MIN_WORDS = 7
_WORD = re.compile(r"[^\W\d_]{3,}")
#: Where writing has no spaces each sign counts.
_WORDS_AND_SIGNS = re.compile(r"[^\W\d_\u3000-\U0010ffff]{3,}|[\u3000-\U0010ffff]")
#: A text that is a whole answer is found by equality: least length where only one session wrote
#: it, and where several did.
_WHOLE = 20
_WHOLE_EQUAL = 40


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
        return len(writers) == 1 and len(self.normalised.content) >= _WHOLE_EQUAL


class Producer(NamedTuple):
    """Who wrote a passage."""

    output: Output
    confidence: float
    evidence: Evidence


class Explanation(NamedTuple):
    """What is known of a text.

    Attributes:
        rest: fingerprints that nobody explains.
        is_answer: most of it comes from answers, so that it is no common text however many prompts
            hold it.
    """

    producers: list[Producer]
    rest: Hashes
    is_answer: bool


class _Span(NamedTuple):
    start: int
    end: int
    source_start: int


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

    @property
    def is_established(self) -> bool:
        """The reader's session has several calls."""
        return self.session is not None and self.session.current.calls > 1


def find_producers(
    store: CallStore, counts: PassageCounts, text: NewText, reader: Reader
) -> Explanation:
    """Who wrote what stands in a text."""
    whole = [output for output in text.whole if _is_possible(output, text, reader)]
    shared = _Shared(store, text, reader, whole)
    candidates = shared.candidates()
    if not candidates:
        return Explanation([], text.hashes, False)
    common = counts.of(text.hashes) >= COMMON
    matcher = _Matcher(text, shared, common, reader)
    producers = matcher.match(candidates, set(whole))
    rest = text.hashes[~matcher.is_explained()]
    is_answer = bool(whole) or (bool(producers) and 2 * len(rest) <= len(text.hashes))
    return Explanation(producers, rest, is_answer)


class _Shared:
    """Which outputs share which fingerprints with a text. A long text shares some with thousands,
    of which few are looked at."""

    def __init__(
        self, store: CallStore, text: NewText, reader: Reader, whole: list[Output]
    ) -> None:
        self._store = store
        self._whole = whole
        rows, owners = _without_accidents(store, *store.index.find(text.hashes))
        first, end = store.numbers(reader.now - reader.horizon_s, text.first_seen)
        is_possible = (owners >= first) & (owners < end)
        if whole:
            is_possible |= np.isin(owners, [each.number for each in whole])
        #: Pairs of row, ascending, and owner's number.
        self._rows, self._owners = rows[is_possible], owners[is_possible]
        self._lists: tuple[list[int], list[int]] | None = None
        self._writers: dict[int, LinkedSession | None] = {}

    def candidates(self) -> dict[Output, list[int]]:
        """Outputs that the text can come from, and the rows that they share: all that are equal to
        it, and of the others those that share most, newest first."""
        found = list(self._whole)
        if len(self._rows):
            numbers, counts = np.unique(self._owners, return_counts=True)
            for number in numbers[np.lexsort((numbers, counts))[::-1]].tolist():
                output = self._store.outputs.get(number)
                if output is not None and output not in found:
                    found.append(output)
                    if len(found) >= len(self._whole) + _MAX_CANDIDATES:
                        break
        return {each: self._rows[self._owners == each.number].tolist() for each in found}

    def writer(self, row: int) -> LinkedSession | None:
        """The session of all outputs that share a fingerprint; None for those of several."""
        if row not in self._writers:
            if self._lists is None:
                self._lists = self._rows.tolist(), self._owners.tolist()
            rows, owners = self._lists
            numbers = owners[bisect_left(rows, row) : bisect_right(rows, row)]
            found = (self._store.outputs.get(number) for number in numbers)
            sessions = {each.call.session.current for each in found if each is not None}
            self._writers[row] = sessions.pop() if len(sessions) == 1 else None
        return self._writers[row]


def _without_accidents(
    store: CallStore, rows: Positions, owners: Hashes
) -> tuple[Positions, Hashes]:
    """Pairs of row and owner; of a text that resembles many outputs in one place each, only the
    rows of those that it resembles in several, or that have few."""
    if len(owners) <= _MAX_SINGLE:
        return rows, owners
    places = np.unique(owners, return_inverse=True)[1]
    counts = np.bincount(places)[places]
    kept = np.zeros(int(rows[-1]) + 1, np.bool_)
    kept[rows[(counts > 1) | store.are_short(owners)]] = True
    is_kept = kept[rows]
    return rows[is_kept], owners[is_kept]


def _is_possible(output: Output, text: NewText, reader: Reader) -> bool:
    """Whether a text can come from an output that is equal to it: prompts may not have held it
    before, unless it is long or of the reader's session."""
    call = output.call
    if call.ended is None or reader.now - call.ended > reader.horizon_s:
        return False
    if text.first_seen is None or text.first_seen >= call.ended:
        return True
    return reader.is_home(call) or len(text.normalised.content) >= _WHOLE_EQUAL


class _Matcher:
    """Credits the stretches of one text to the outputs that explain them."""

    def __init__(self, text: NewText, shared: _Shared, common: np.ndarray, reader: Reader) -> None:
        self._text = text
        self._shared = shared
        #: Which fingerprints are; a byte each, as single bits of arrays are slow to read.
        self._common = common.tobytes()
        self._reader = reader
        self._content = text.normalised.content.tobytes()
        #: Normalised bytes that have been credited.
        self._covered = bytearray(len(self._content))
        self._positions: list[int] = text.positions.tolist()

    def is_explained(self) -> np.ndarray:
        """Which fingerprints of the text start in a credited stretch; [m] bool."""
        return np.frombuffer(self._covered, np.bool_)[self._text.positions]

    def match(self, candidates: dict[Output, list[int]], whole: set[Output]) -> list[Producer]:
        producers: list[Producer] = []
        rejected: dict[Output, list[int]] = {}
        reader = self._reader

        def ranked() -> list[Output]:
            """The candidates, the best one last."""
            by_rank = sorted(
                candidates, key=lambda each: self._rank(each, candidates[each], whole), reverse=True
            )
            return by_rank[::-1]

        order = ranked()
        while order:
            best = order[-1]
            if best not in whole:
                best = self._closest(best, order[: -_MAX_NEAR - 1 : -1], candidates)
            order.remove(best)
            rows = self._uncovered(candidates.pop(best))
            if best not in whole and not self._can_join(best, rows):
                rejected[best] = rows
                continue
            if best in whole and 1 not in self._covered:
                spans = [_Span(0, len(self._content), 0)]
            elif rows:
                spans = self._spans(best, rows)
            else:
                continue
            if best.call.is_ancestor_of(reader.parent):
                # The history of the reader holds it already.
                self._cover(spans)
                continue
            confidence = self._judge(best, spans, rows, whole, candidates)
            if confidence:
                self._cover(spans)
                producers.append(Producer(best, confidence, self._evidence(best, spans)))
                is_home = reader.is_home(best.call)
                reader.found.add(best.call.session.current)
                if not is_home:
                    # Less is asked of others of this session.
                    for each in [each for each in rejected if reader.is_home(each.call)]:
                        candidates[each] = rejected.pop(each)
                    order = ranked()
                continue
            rejected[best] = rows
            if best in whole:
                # The others wrote the same, and are less likely.
                candidates = {each: rows for each, rows in candidates.items() if each not in whole}
                order = [each for each in order if each not in whole]
        return producers

    def _closest(
        self, best: Output, others: Iterable[Output], candidates: dict[Output, list[int]]
    ) -> Output:
        """Of candidates that are there about as fully as the best one, that which explains the
        longest passage, then that of which most is there: a revised file is mostly the old one."""
        reader = self._reader
        if best.call.is_ancestor_of(reader.parent) or len(candidates[best]) < _MOST * best.size:
            return best
        is_home = reader.is_home(best.call)
        rows = {best: self._uncovered(candidates[best])}
        for each in others:
            if (
                len(candidates[each]) >= _MOST * each.size
                and reader.is_home(each.call) is is_home
                and len(left := self._uncovered(candidates[each])) >= _NEARLY * len(rows[best])
            ):
                rows[each] = left
        if len(rows) == 1:
            return best

        def closeness(output: Output) -> tuple[int, float, bool]:
            passages = _passages(self._spans(output, rows[output]))
            longest = max((sum(s.end - s.start for s in each) for each in passages), default=0)
            return longest, longest / len(output.normalised().content), output is best

        return max(rows, key=closeness)

    def _uncovered(self, rows: list[int]) -> list[int]:
        """Rows that stand in what has not been credited."""
        return [row for row in rows if not self._covered[self._positions[row]]]

    def _rank(
        self, output: Output, rows: list[int], whole: set[Output]
    ) -> tuple[bool, bool, bool, bool, int, int, int, bool, float]:
        reader = self._reader
        call = output.call
        is_whole = output in whole
        return (
            call.is_ancestor_of(reader.parent),
            is_whole,
            reader.is_home(call),
            is_whole and output.text.strip() == self._text.text.strip(),
            0 if is_whole else len(rows),
            0 if is_whole else -len(output.copied),
            -output.readers,
            bool(call.peer) and call.peer == reader.peer,
            by_age(call, reader.now),
        )

    def _judge(
        self,
        output: Output,
        spans: list[_Span],
        rows: list[int],
        whole: set[Output],
        others: Iterable[Output],
    ) -> float:
        """Confidence that the reader read this output; 0 for an accident."""
        reader = self._reader
        length = len(self._content)
        is_home = reader.is_home(output.call)
        session = output.call.session.current
        is_merge = not is_home and reader.is_established
        is_strange = not is_home and bool(reader.found) and session.calls > 1
        if output in whole:
            # One that nobody has read yet is likelier than those that have been.
            rivals = {
                each.call.session.current
                for each in others
                if each in whole and each.readers <= output.readers
            } - {session}
            if is_home:
                return 0.98 if length >= _WHOLE else 0.9
            if length < (_WHOLE_EQUAL if rivals else _WHOLE):
                return 0.0
            if is_merge and length < _JOIN_PART:
                return 0.0
            if rows and all(int(self._text.hashes[row]) in output.copied for row in rows):
                return 0.0
            return 0.8 if rivals else 0.95
        own = self._own(output, rows)
        minted = [row for row in own if int(self._text.hashes[row]) not in output.copied]
        if output.copied:
            minted = [row for row in minted if self._is_inside(row, spans)]
        credited = sum(span.end - span.start for span in spans)
        share = _size_in_source(spans) / max(1, len(output.normalised().content))
        if self._text.is_system and credited < _MERGE:
            return 0.0
        if is_home:
            return 0.9 if credited >= _WITHIN and (minted or share >= _MOST) else 0.0
        is_all = len(spans) == 1 and share >= _VERBATIM and credited >= _MERGE
        if not minted or len(own) < (_OWN_OF_ALL if is_all else _OWN) * len(rows):
            return 0.0
        if share >= _VERBATIM and credited >= _JOIN and not is_merge:
            return 0.9
        # A stretch in which the output says nothing of its own proves nothing, and what other
        # sessions say too does not count.
        positions = self._positions
        proof = 0.0
        for passage in _passages(spans):
            part = 0.0
            for span in passage:
                within = [row for row in rows if span.start <= positions[row] < span.end]
                if not set(minted).isdisjoint(within):
                    part += (span.end - span.start) * len(set(own) & set(within)) / len(within)
            proof = max(proof, part)
        is_merge = is_merge or (is_strange and share < _MOST)
        needed = _MERGE if is_merge else _JOIN if share >= _MOST else _JOIN_PART
        if proof < needed or (is_merge and share < 0.5) or self._num_words(spans) < _MIN_WORDS:
            return 0.0
        return 0.85 if is_merge else 0.9

    def _own(self, output: Output, rows: list[int]) -> list[int]:
        """Of the rows that an output shares those that are not common and no other session has."""
        session = output.call.session.current
        return [
            row for row in rows if not self._common[row] and self._shared.writer(row) is session
        ]

    def _can_join(self, output: Output, rows: list[int]) -> bool:
        """Whether it is worth while to look where an output and the text are equal."""
        if not rows:
            return False
        call = output.call
        if self._reader.is_home(call) or call.is_ancestor_of(self._reader.parent):
            return True
        share = _OWN_OF_ALL if len(rows) >= _MOST * output.size else _OWN
        return len(self._own(output, rows)) >= max(1, share * len(rows))

    def _is_inside(self, row: int, spans: list[_Span]) -> bool:
        """Whether a run stands off the ends of a stretch, where the fingerprints that are kept
        depend on what stands beyond."""
        place = self._positions[row]
        return any(span.start + WINDOW <= place <= span.end - RUN - WINDOW for span in spans)

    def _num_words(self, spans: list[_Span]) -> int:
        """Different words in the stretches; records of databases and code have few."""
        words: set[str] = set()
        for span in spans:
            start, end = self._text.normalised.character_span(span.start, span.end)
            part = self._text.text[start:end]
            words.update(_WORD.findall(part) if part.isascii() else _WORDS_AND_SIGNS.findall(part))
        return len(words)

    def _spans(self, output: Output, rows: list[int]) -> list[_Span]:
        """The stretches that text and output share, around the fingerprints that they share."""
        source = output.normalised().content.tobytes()
        content, positions = self._content, self._positions
        spans: list[_Span] = []
        end = 0
        for row in rows:
            place = positions[row]
            if place < end:
                continue
            found = source.find(content[place : place + RUN])
            if found < 0:
                continue
            before = _common_suffix(content[end:place], source[:found])
            after = _common_prefix(content[place:], source[found:])
            start, end = place - before, place + after
            spans.append(_Span(start, end, found - before))
        return spans

    def _cover(self, spans: list[_Span]) -> None:
        for span in spans:
            self._covered[span.start : span.end] = b"\1" * (span.end - span.start)

    def _evidence(self, output: Output, spans: list[_Span]) -> Evidence:
        span = max(spans, key=lambda each: each.end - each.start)
        start, end = self._text.normalised.character_span(span.start, span.end)
        source_end = span.source_start + span.end - span.start
        source = output.normalised().character_span(span.source_start, source_end)
        return Evidence(self._text.message, start, end, *source)


def _passages(spans: list[_Span]) -> list[list[_Span]]:
    """Stretches grouped where they follow each other, but for a few signs, in text and answer."""
    passages: list[list[_Span]] = []
    for span in spans:
        if passages:
            before = passages[-1][-1]
            gap = span.start - before.end
            gap_in_source = span.source_start - before.source_start - before.end + before.start
            if (
                gap <= _GAP
                and 0 <= gap_in_source <= _GAP
                and abs(gap - gap_in_source) <= WINDOW + max(gap, gap_in_source) // 4
            ):
                passages[-1].append(span)
                continue
        passages.append([span])
    return passages


def _size_in_source(spans: list[_Span]) -> int:
    """Normalised bytes of an answer that stretches show, each once."""
    size = end = 0
    for start, length in sorted((span.source_start, span.end - span.start) for span in spans):
        size += max(0, start + length - max(start, end))
        end = max(end, start + length)
    return size


def by_age(call: StoredCall, now: float) -> float:
    """Of calls whose answers came at about the same time the first counts, else the last."""
    age = now - (call.ended or now)
    return age if age < 2.0 else -age


def _common_prefix(first: bytes, second: bytes) -> int:
    return _equal(min(len(first), len(second)), lambda n: first[:n] == second[:n])


def _common_suffix(first: bytes, second: bytes) -> int:
    size = min(len(first), len(second))
    return _equal(size, lambda n: first[len(first) - n :] == second[len(second) - n :])


def _equal(size: int, is_equal: Callable[[int], bool]) -> int:
    """The largest n up to `size` for which `is_equal(n)`, which holds up to some n."""
    if is_equal(size):
        return size
    low, high = 0, min(size, 64)
    while high < size and is_equal(high):
        low, high = high, min(size, high * 4)
    while high - low > 1:
        middle = (low + high) // 2
        if is_equal(middle):
            low = middle
        else:
            high = middle
    return low


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
