"""Finds who wrote the passages of a prompt.

Candidates share fingerprints with a text; each is verified by the real overlap. They compete: a
stretch of text is credited to one of them, so that of several calls that wrote the same only the
most plausible gets a link. What stood in the prompt of the call that wrote it, in the history of
the reader, or in the prompts of unrelated calls, proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.linker.call_store import CallStore, Output, by_age
from parrot_gateway.linking.linker.candidates import (
    WHOLE_EQUAL,
    Candidates,
    NewText,
    Reader,
    find_candidates,
)
from parrot_gateway.linking.linker.fingerprints import (
    COMMON,
    PARTS_FROM,
    RUN,
    WINDOW,
    Hashes,
    NormalisedText,
    PassageCounts,
)
from parrot_gateway.linking.linker.links import Evidence
from parrot_gateway.linking.linker.overlap import (
    Span,
    passages_of,
    shared_spans,
    size_in_source,
    size_in_text,
)
from parrot_gateway.linking.linker.parts import LEAST_PART

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
#: Different words in passages that join sessions.
_MIN_WORDS = 7
#: The same where parts of an answer that stand by themselves are parts of the text too.
_MIN_PART_WORDS = 4
_WORD = re.compile(r"[^\W\d_]{3,}")
#: Where writing has no spaces each sign counts.
_WORDS_AND_SIGNS = re.compile(r"[^\W\d_\u3000-\U0010ffff]{3,}|[\u3000-\U0010ffff]")
#: A text that is a whole answer is found by equality: its least length where one session wrote it.
_WHOLE = 20
#: Ranks of candidates: one whose text the reader's history holds counts before one that is all of
#: the text, that before one of the reader's session, and that before one that shares more.
_ANCESTOR_RANK, _WHOLE_RANK, _HOME_RANK = 1 << 42, 1 << 41, 1 << 40


class Producer(NamedTuple):
    """The output that a passage comes from."""

    output: Output
    confidence: float
    evidence: Evidence


class Explanation(NamedTuple):
    """The producers of a text, and what is left of it.

    Attributes:
        rest: fingerprints that nobody explains.
        is_answer: most of it comes from answers, so that it is no common text however many prompts
            hold it.
    """

    producers: list[Producer]
    rest: Hashes
    is_answer: bool


def find_producers(
    store: CallStore, counts: PassageCounts, text: NewText, reader: Reader
) -> Explanation:
    """Find the outputs that the passages of a text come from."""
    is_common = counts.of(text.hashes) >= COMMON
    candidates = find_candidates(store, text, is_common, reader)
    if candidates is None:
        return Explanation([], text.hashes, False)
    matcher = _Matcher(store, text, reader, candidates)
    producers = matcher.match()
    rest = matcher.unexplained()
    is_equal = bool(candidates.is_whole.any())
    is_answer = is_equal or (bool(producers) and 2 * len(rest) <= len(text.hashes))
    return Explanation(producers, rest, is_answer)


@dataclass(slots=True, eq=False)
class _Candidate:
    """A candidate that is looked at.

    Attributes:
        rows: of the text's fingerprints those that it shares and that are not credited, ascending.
        own: those of these rows that are not common and that no other session has written.
    """

    output: Output
    is_whole: bool
    rows: list[int]
    own: list[int]


class _Matcher:
    """Credits the stretches of one text to the outputs that explain them.

    Candidates are meant by their places in `Candidates`; most are turned down by numbers alone.
    """

    def __init__(
        self, store: CallStore, text: NewText, reader: Reader, candidates: Candidates
    ) -> None:
        self._store = store
        self._text = text
        self._reader = reader
        self._candidates = candidates
        self._content = text.normalised.content.tobytes()
        #: Normalised bytes that have been credited, and of each fingerprint whether its run starts
        #: in them; None while there are none.
        self._covered: bytearray | None = None
        self._is_covered: np.ndarray | None = None
        #: Of what the candidates share that which has not been credited; None while that is all.
        self._is_left: np.ndarray | None = None
        self._sources: dict[Output, NormalisedText] = {}
        self._is_whole: list[bool] = candidates.is_whole.tolist()
        self._is_ancestor = [False] * len(candidates)
        if reader.parent is not None:
            calls = (store.outputs[each].call for each in candidates.numbers.tolist())
            self._is_ancestor = [each.is_ancestor_of(reader.parent) for each in calls]
        #: What tells candidates apart at once; the best one has the highest.
        self._rank: list[int] = []
        #: Ranks within which the order is known already.
        self._settled: set[int] = set()
        #: Fingerprints that each shares, of one that was rejected as many as were left then.
        self._counts: list[int] = candidates.counts.tolist()
        self._sessions: list[int] = candidates.sessions.tolist()
        self._most: list[float] = (_MOST * candidates.sizes).tolist()
        self._update()

    def unexplained(self) -> Hashes:
        """Fingerprints of the text that start in no credited stretch."""
        hashes = self._text.hashes
        return hashes if self._is_covered is None else hashes[~self._is_covered]

    def match(self) -> list[Producer]:
        """Find the output that each stretch comes from."""
        producers: list[Producer] = []
        rejected: list[int] = []
        reader = self._reader
        if all(self._is_hopeless):
            return producers
        left = list(range(len(self._candidates)))
        order = self._ranked(left)
        while order:
            for each in self._skip_hopeless(order):
                left.remove(each)
                rejected.append(each)
            if not order:
                break
            self._settle(order, 1)
            best = order[-1]
            is_whole = self._is_whole[best]
            if not is_whole:
                best = self._closest(order)
            order.remove(best)
            left.remove(best)
            self._counts[best] = self._num_rows[best]
            if not is_whole and not self._can_join[best]:
                rejected.append(best)
                continue
            candidate = self._candidate(best)
            call = candidate.output.call
            if is_whole and self._covered is None:
                spans = [Span(0, len(self._content), 0)]
            elif candidate.rows:
                spans = self._spans(candidate)
            else:
                continue
            if call.is_ancestor_of(reader.parent):
                # The history of the reader holds it already.
                self._credit(spans)
                self._update()
                continue
            others = (self._output(each) for each in left if self._is_whole[each])
            confidence = self._judge(candidate, spans, others)
            if confidence:
                place = best if is_whole else self._repeated(best, candidate, rejected + left)
                if place != best:
                    candidate = self._candidate(place)
                    call, spans = candidate.output.call, self._spans(candidate)
                evidence = self._evidence(candidate.output, spans)
                producers.append(Producer(candidate.output, confidence, evidence))
                is_home = reader.is_home(call)
                reader.found.add(call.session.current)
                self._credit(spans)
                if not self._may_win(left if is_home else left + rejected):
                    break
                self._update()
                if not is_home:
                    # Less is asked of others of this session.
                    again = [each for each in rejected if self._is_home[each]]
                    rejected = [each for each in rejected if not self._is_home[each]]
                    left += again
                # Most others have no more than what has been credited now.
                left = [each for each in left if self._is_whole[each] or self._num_rows[each]]
                kept = set(left)
                order = [each for each in order if each in kept] if is_home else self._ranked(left)
                continue
            rejected.append(best)
            if is_whole:
                # The others wrote the same, and are less likely.
                left = [each for each in left if not self._is_whole[each]]
                order = [each for each in order if not self._is_whole[each]]
        return producers

    def _update(self) -> None:
        """Count what each candidate shares of what has not been credited, and see for which it is
        worth while to look where it and the text are equal."""
        found = self._candidates
        num, owners, is_own = len(found), found.owners, found.is_own
        rows = found.counts
        if self._is_left is not None:
            owners, is_own = owners[self._is_left], is_own[self._is_left]
            rows = np.bincount(owners, minlength=num)
        #: Of each candidate how many are left, and how many of these are its own.
        self._num_rows: list[int] = rows.tolist()
        self._num_own: list[int] = np.bincount(owners[is_own], minlength=num).tolist()
        home = self._reader.home()
        self._is_home = [each in home for each in self._sessions] if home else [False] * num
        # A loop: so few are told faster one by one than as arrays.
        self._can_join = [
            num_rows > 0
            if home and (not num_rows or is_home or is_ancestor)
            else num_own > 0 and self._may_join(place)
            for place, (num_rows, num_own, is_home, is_ancestor) in enumerate(
                zip(self._num_rows, self._num_own, self._is_home, self._is_ancestor, strict=True)
            )
        ]
        self._is_hopeless = [
            not (can_join or is_whole or count >= most)
            for can_join, is_whole, count, most in zip(
                self._can_join, self._is_whole, self._counts, self._most, strict=True
            )
        ]

    def _may_join(self, candidate: int) -> bool:
        """True if what is left of a candidate of another session, some of it its own, may be enough
        to link to it."""
        rows, own = self._num_rows[candidate], self._num_own[candidate]
        share = _OWN_OF_ALL if rows >= self._most[candidate] else _OWN
        if own >= share * rows:
            return True
        # What stood in its own prompt does not count.
        output = self._output(candidate)
        if not output.copied:
            return False
        return own >= share * len(self._not_copied(output, self._candidate(candidate).rows))

    def _may_win(self, candidates: list[int]) -> bool:
        """True if one of some candidates may still win after more has been credited: what they had
        of their own does not grow, but they may be of a session that has been found."""
        if self._is_left is not None and not self._is_left.any():
            return any(self._is_whole[each] for each in candidates)
        home = self._reader.home()
        return any(
            self._num_own[each] or not self._is_hopeless[each] or self._sessions[each] in home
            for each in candidates
        )

    def _ranked(self, candidates: list[int]) -> list[int]:
        """The candidates, the best one last; those of one rank are not told apart yet."""
        self._settled.clear()
        self._rank = self._counts.copy()
        if any(self._is_whole):
            text = self._text.text.strip()
            for each in self._candidates.is_whole.nonzero()[0].tolist():
                self._rank[each] = _WHOLE_RANK + (self._output(each).text.strip() == text)
        for bonus, has_it in ((_HOME_RANK, self._is_home), (_ANCESTOR_RANK, self._is_ancestor)):
            if any(has_it):
                self._rank = [
                    rank + bonus * has for rank, has in zip(self._rank, has_it, strict=True)
                ]
        return sorted(sorted(candidates), key=self._rank.__getitem__)

    def _skip_hopeless(self, order: list[int]) -> list[int]:
        """Take those off some ranked candidates that nothing will come of, as far as they are the
        best: whole ranks, as the order within them is not known."""
        end = len(order)
        while end:
            first = self._first_of_rank(order, end - 1)
            if not all(self._is_hopeless[each] for each in order[first:end]):
                break
            end = first
        hopeless = order[end:]
        del order[end:]
        for each in hopeless:
            self._counts[each] = self._num_rows[each]
        return hopeless

    def _first_of_rank(self, order: list[int], place: int) -> int:
        """The first place in the order that has the same rank as `place`."""
        rank = self._rank[order[place]]
        while place > 0 and self._rank[order[place - 1]] == rank:
            place -= 1
        return place

    def _settle(self, order: list[int], num: int) -> None:
        """Tell the last `num` of some ranked candidates apart."""
        first = max(0, len(order) - num)
        if all(self._rank[each] in self._settled for each in order[first:]):
            return
        first = self._first_of_rank(order, first)
        self._settled.update(self._rank[each] for each in order[first:])
        if first < len(order) - 1:
            order[first:] = sorted(
                order[first:], key=lambda each: (self._rank[each], self._preference(each))
            )

    def _preference(self, candidate: int) -> tuple[int, int, bool, float]:
        """Among candidates of one rank the one that has it highest is likelier."""
        reader, output = self._reader, self._output(candidate)
        call = output.call
        return (
            0 if self._is_whole[candidate] else -len(output.copied),
            -output.readers,
            bool(call.peer) and call.peer == reader.peer,
            by_age(call, reader.now),
        )

    def _closest(self, order: list[int]) -> int:
        """The candidate with the longest passage, then the one of which most is there, among those
        that are there about as fully as the best: a revised file is mostly the old one."""
        best, counts, most = order[-1], self._counts, self._most
        if self._is_ancestor[best] or counts[best] < most[best] or len(order) == 1:
            return best
        is_home = self._is_home[best]
        least = _NEARLY * self._num_rows[best]
        if max(map(counts.__getitem__, order[:-1])) < least:
            return best
        self._settle(order, _MAX_NEAR)
        near = [
            each
            for each in order[: -_MAX_NEAR - 1 : -1]
            if self._is_home[each] is is_home
            and self._num_rows[each] >= least
            and counts[each] >= most[each]
        ]
        if near == [best]:
            return best

        def closeness(place: int) -> tuple[int, float, bool]:
            candidate = self._candidate(place)
            spans = self._spans(candidate)
            longest = max((size_in_text(each) for each in passages_of(spans)), default=0)
            size = len(self._source(candidate.output).content)
            return longest, longest / size, place == best

        return max(near, key=closeness)

    def _output(self, candidate: int) -> Output:
        return self._store.outputs[int(self._candidates.numbers[candidate])]

    def _candidate(self, place: int) -> _Candidate:
        """A candidate with what it shares of what has not been credited."""
        found = self._candidates
        first, last = found.owners.searchsorted((place, place + 1)).tolist()
        rows, is_own = found.rows[first:last], found.is_own[first:last]
        if self._is_left is not None:
            is_left = self._is_left[first:last]
            rows, is_own = rows[is_left], is_own[is_left]
        own = rows[is_own].tolist()
        return _Candidate(self._output(place), self._is_whole[place], rows.tolist(), own)

    def _judge(self, candidate: _Candidate, spans: list[Span], others: Iterable[Output]) -> float:
        """Confidence that the reader read this output; 0 for an accident.

        Args:
            others: those that are equal to the text too, if this one is.
        """
        reader = self._reader
        output, rows, own = candidate.output, candidate.rows, candidate.own
        length = len(self._content)
        is_home = reader.is_home(output.call)
        session = output.call.session.current
        is_merge = not is_home and reader.is_established
        is_strange = not is_home and bool(reader.found) and session.calls > 1
        if candidate.is_whole:
            # One that nobody has read yet is likelier than those that have been.
            rivals = {
                each.call.session.current for each in others if each.readers <= output.readers
            } - {session}
            if is_home:
                return 0.98 if length >= _WHOLE else 0.9
            if length < (WHOLE_EQUAL if rivals else _WHOLE):
                return 0.0
            if is_merge and length < _JOIN_PART:
                return 0.0
            if rows and not self._not_copied(output, rows):
                return 0.0
            return 0.8 if rivals else 0.95
        minted = self._not_copied(output, own)
        if output.copied:
            minted = [row for row in minted if self._is_part(row) or self._is_inside(row, spans)]
        credited = size_in_text(spans)
        share = size_in_source(spans) / max(1, len(self._source(output).content))
        is_part = any(map(self._is_part, minted))
        if self._text.is_system and credited < _MERGE and not is_part:
            return 0.0
        if is_home:
            least = LEAST_PART if is_part else _WITHIN
            return 0.9 if credited >= least and (minted or share >= _MOST) else 0.0
        is_all = len(spans) == 1 and share >= _VERBATIM and credited >= _MERGE
        written = self._not_copied(output, rows)
        if not minted or len(own) < (_OWN_OF_ALL if is_all else _OWN) * len(written):
            return 0.0
        if share >= _VERBATIM and credited >= _JOIN and not is_merge:
            return 0.9
        # A stretch in which the output says nothing of its own proves nothing, and what other
        # sessions say too does not count.
        positions = dict(zip(rows, self._text.positions[rows].tolist(), strict=True))
        proof, parts = 0.0, 0
        for passage in passages_of(spans):
            part = 0.0
            for span in passage:
                within = [row for row in rows if span.start <= positions[row] < span.end]
                proving = set(minted).intersection(within)
                if proving:
                    part += (span.end - span.start) * len(set(own) & set(within)) / len(within)
                    parts += (span.end - span.start) * any(map(self._is_part, proving))
            proof = max(proof, part)
        num_words = self._num_words(spans)
        if parts >= LEAST_PART and num_words >= _MIN_PART_WORDS and not (is_merge or is_strange):
            return 0.9 if parts >= _JOIN else 0.8
        is_merge = is_merge or (is_strange and share < _MOST)
        needed = _JOIN_PART
        if is_merge:
            needed = _MERGE
        elif share >= _MOST:
            needed = _JOIN
        if proof < needed or (is_merge and share < 0.5) or num_words < _MIN_WORDS:
            return 0.0
        return 0.85 if is_merge else 0.9

    def _repeated(self, best: int, candidate: _Candidate, others: list[int]) -> int:
        """The last call of its session that has repeated what a text shares with an output, and
        little else: who reads a revised text reads the reviser."""
        session, num = self._sessions[best], len(candidate.rows)
        if self._sessions.count(session) == 1:
            return best
        later = [
            each
            for each in others
            if each > best
            and self._sessions[each] == session
            and self._counts[each] >= max(num, self._most[each])
        ]
        if not later:
            return best
        rows = set(candidate.rows)
        hashes = frozenset(self._text.hashes[candidate.rows].tolist())
        for each in sorted(later):
            if len(hashes & self._output(each).copied) >= _MOST * len(hashes) and rows.issubset(
                self._candidate(each).rows
            ):
                best = each
        return best

    def _not_copied(self, output: Output, rows: list[int]) -> list[int]:
        """Rows that an output shares and that its own prompt did not hold."""
        if not output.copied:
            return rows
        hashes = self._text.hashes[rows].tolist()
        return [row for row, each in zip(rows, hashes, strict=True) if each not in output.copied]

    def _is_part(self, row: int) -> bool:
        """True if a fingerprint of the text is that of a part."""
        return bool(self._text.hashes[row] >= PARTS_FROM)

    def _is_inside(self, row: int, spans: list[Span]) -> bool:
        """True if a run stands off the ends of a stretch, where the fingerprints that are kept
        depend on what stands beyond."""
        place = int(self._text.positions[row])
        return any(span.start + WINDOW <= place <= span.end - RUN - WINDOW for span in spans)

    def _num_words(self, spans: list[Span]) -> int:
        """Different words in the stretches; records of databases and code have few."""
        words: set[str] = set()
        for span in spans:
            start, end = self._text.normalised.character_span(span.start, span.end)
            part = self._text.text[start:end]
            words.update(_WORD.findall(part) if part.isascii() else _WORDS_AND_SIGNS.findall(part))
        return len(words)

    def _source(self, output: Output) -> NormalisedText:
        found = self._sources.get(output)
        if found is None:
            found = self._sources[output] = output.normalised()
        return found

    def _spans(self, candidate: _Candidate) -> list[Span]:
        """The stretches that text and output share, around those of the fingerprints that they
        share that are not credited yet."""
        source = self._source(candidate.output).content.tobytes()
        places = self._text.positions[candidate.rows].tolist()
        spans = shared_spans(self._content, source, places)
        for span in spans:
            # What stands in one piece has been taken from there, and not bits of it elsewhere.
            if span.end - span.start >= _VERBATIM * len(source):
                return [span]
        return spans

    def _credit(self, spans: list[Span]) -> None:
        if spans:
            covered = self._covered = self._covered or bytearray(len(self._content))
            for span in spans:
                covered[span.start : span.end] = b"\1" * (span.end - span.start)
            self._is_covered = np.frombuffer(covered, np.bool_).take(self._text.positions)
            self._is_left = ~self._is_covered.take(self._candidates.rows)

    def _evidence(self, output: Output, spans: list[Span]) -> Evidence:
        span = max(spans, key=lambda each: each.end - each.start)
        start, end = self._text.normalised.character_span(span.start, span.end)
        source_end = span.source_start + span.end - span.start
        source = self._source(output).character_span(span.source_start, source_end)
        return Evidence(self._text.message, start, end, *source)
