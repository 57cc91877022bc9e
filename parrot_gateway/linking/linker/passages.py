"""Finds the writers of a prompt's passages.

Candidates share fingerprints with a text and are verified by their real overlap. They compete: each
stretch of text is credited to one candidate, so that only the most plausible of several equal
writers gets a link. A passage is no evidence if the writer's own prompt, the reader's history or
the prompts of unrelated calls contained it.
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
#: another session; to join when only a smaller part of the answer was used; to merge two sessions
#: of several calls.
_WITHIN = 24
_JOIN = 40
_JOIN_PART = 120
_MERGE = 200
#: Minimum share of the shared fingerprints that are in no other session and no common text, to join
#: sessions.
_OWN = 0.5
#: The same minimum if all of a long answer is in one piece.
_OWN_OF_ALL = 0.15
#: Share of an answer above which a shorter passage is enough, and share that counts as the whole
#: answer.
_MOST = 0.6
_VERBATIM = 0.95
#: Candidates that share at least this fraction of the best one's fingerprints are compared in full,
#: up to this many.
_NEARLY = 0.9
_MAX_NEAR = 4
#: Minimum number of different words in passages that join sessions.
_MIN_WORDS = 7
#: The same minimum if self-contained parts of an answer are parts of the text too.
_MIN_PART_WORDS = 4
_WORD = re.compile(r"[^\W\d_]{3,}")
#: In scripts without spaces each character counts.
_WORDS_AND_SIGNS = re.compile(r"[^\W\d_\u3000-\U0010ffff]{3,}|[\u3000-\U0010ffff]")
#: Equality finds texts that are whole answers; minimum length if one session wrote it.
_WHOLE = 20
#: Rank bonuses, highest first: the reader's history contains the output; the output equals the
#: text; the output is of the reader's session. Shared fingerprints count below these.
_ANCESTOR_RANK, _WHOLE_RANK, _HOME_RANK = 1 << 42, 1 << 41, 1 << 40


class Producer(NamedTuple):
    """The output that a passage comes from."""

    output: Output
    confidence: float
    evidence: Evidence


class Explanation(NamedTuple):
    """The producers of a text, and its unexplained rest.

    Attributes:
        rest: fingerprints that no output explains.
        is_answer: true if most of it comes from answers; it is then no common text, however
            many prompts contain it.
    """

    producers: list[Producer]
    rest: Hashes
    is_answer: bool


def find_producers(
    store: CallStore, counts: PassageCounts, text: NewText, reader: Reader
) -> Explanation:
    """Find the outputs that a text's passages come from."""
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
    """A candidate that is examined.

    Attributes:
        rows: the text's uncredited fingerprints that it shares, ascending.
        own: those rows that are neither common nor written by another session.
    """

    output: Output
    is_whole: bool
    rows: list[int]
    own: list[int]


class _Matcher:
    """Credits the stretches of one text to the outputs that explain them.

    Candidates are identified by their index in `Candidates`; most are rejected by numbers alone.
    """

    def __init__(
        self, store: CallStore, text: NewText, reader: Reader, candidates: Candidates
    ) -> None:
        self._store = store
        self._text = text
        self._reader = reader
        self._candidates = candidates
        self._content = text.normalised.content.tobytes()
        #: Credited normalised bytes, and a flag per fingerprint whose run starts in them; None
        #: while nothing is credited.
        self._covered: bytearray | None = None
        self._is_covered: np.ndarray | None = None
        #: Flags of the candidates' shared fingerprints that are not credited; None while that is
        #: all of them.
        self._is_left: np.ndarray | None = None
        self._sources: dict[Output, NormalisedText] = {}
        self._is_whole: list[bool] = candidates.is_whole.tolist()
        self._is_ancestor = [False] * len(candidates)
        if reader.parent is not None:
            calls = (store.outputs[each].call for each in candidates.numbers.tolist())
            self._is_ancestor = [each.is_ancestor_of(reader.parent) for each in calls]
        #: Coarse rank of each candidate, the higher the better.
        self._rank: list[int] = []
        #: Ranks within which the order is already final.
        self._settled: set[int] = set()
        #: Fingerprints that each candidate shares; for a rejected one, the number left at that
        #: time.
        self._counts: list[int] = candidates.counts.tolist()
        self._sessions: list[int] = candidates.sessions.tolist()
        self._most: list[float] = (_MOST * candidates.sizes).tolist()
        self._update()

    def unexplained(self) -> Hashes:
        """Return the fingerprints of the text that start in no credited stretch."""
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
                # The reader's history already contains it.
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
                    # Other calls of this session now need less evidence.
                    again = [each for each in rejected if self._is_home[each]]
                    rejected = [each for each in rejected if not self._is_home[each]]
                    left += again
                # Most other candidates shared nothing beyond what has now been credited.
                left = [each for each in left if self._is_whole[each] or self._num_rows[each]]
                kept = set(left)
                order = [each for each in order if each in kept] if is_home else self._ranked(left)
                continue
            rejected.append(best)
            if is_whole:
                # The others wrote the same text, and are less likely.
                left = [each for each in left if not self._is_whole[each]]
                order = [each for each in order if not self._is_whole[each]]
        return producers

    def _update(self) -> None:
        """Count each candidate's uncredited fingerprints, and decide which candidates are worth a
        byte comparison.
        """
        found = self._candidates
        num, owners, is_own = len(found), found.owners, found.is_own
        rows = found.counts
        if self._is_left is not None:
            owners, is_own = owners[self._is_left], is_own[self._is_left]
            rows = np.bincount(owners, minlength=num)
        #: Per candidate: its uncredited fingerprints, and how many of them are its own.
        self._num_rows: list[int] = rows.tolist()
        self._num_own: list[int] = np.bincount(owners[is_own], minlength=num).tolist()
        home = self._reader.home()
        self._is_home = [each in home for each in self._sessions] if home else [False] * num
        # A loop is faster than arrays for so few.
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
        """Return true if the remaining fingerprints of another session's candidate, some of them
        its own, may be enough for a link.
        """
        rows, own = self._num_rows[candidate], self._num_own[candidate]
        share = _OWN_OF_ALL if rows >= self._most[candidate] else _OWN
        if own >= share * rows:
            return True
        # Fingerprints from its own prompt do not count.
        output = self._output(candidate)
        if not output.copied:
            return False
        return own >= share * len(self._not_copied(output, self._candidate(candidate).rows))

    def _may_win(self, candidates: list[int]) -> bool:
        """Return true if a candidate may still win after more was credited: it has own fingerprints
        left, or belongs to a session that has been found.
        """
        if self._is_left is not None and not self._is_left.any():
            return any(self._is_whole[each] for each in candidates)
        home = self._reader.home()
        return any(
            self._num_own[each] or not self._is_hopeless[each] or self._sessions[each] in home
            for each in candidates
        )

    def _ranked(self, candidates: list[int]) -> list[int]:
        """Sort the candidates, best last; equal ranks stay unordered."""
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
        """Remove hopeless candidates from the best end, by whole ranks, since the order within a
        rank is not known.
        """
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
        """Return the first index with the same rank as `place`."""
        rank = self._rank[order[place]]
        while place > 0 and self._rank[order[place - 1]] == rank:
            place -= 1
        return place

    def _settle(self, order: list[int], num: int) -> None:
        """Order the last `num` ranked candidates within their ranks."""
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
        """Return the sort key within a rank; the highest is the likeliest."""
        reader, output = self._reader, self._output(candidate)
        call = output.call
        return (
            0 if self._is_whole[candidate] else -len(output.copied),
            -output.readers,
            bool(call.peer) and call.peer == reader.peer,
            by_age(call, reader.now),
        )

    def _closest(self, order: list[int]) -> int:
        """Return the candidate with the longest passage, then the one that is most complete, among
        those about as good as the best: a revised file is mostly the old one.
        """
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
        """Build a candidate from its uncredited fingerprints."""
        found = self._candidates
        first, last = found.owners.searchsorted((place, place + 1)).tolist()
        rows, is_own = found.rows[first:last], found.is_own[first:last]
        if self._is_left is not None:
            is_left = self._is_left[first:last]
            rows, is_own = rows[is_left], is_own[is_left]
        own = rows[is_own].tolist()
        return _Candidate(self._output(place), self._is_whole[place], rows.tolist(), own)

    def _judge(self, candidate: _Candidate, spans: list[Span], others: Iterable[Output]) -> float:
        """Return the confidence that the reader read this output; 0 for an accident.

        Args:
            others: other outputs equal to the text, if this one is.
        """
        reader = self._reader
        output, rows, own = candidate.output, candidate.rows, candidate.own
        length = len(self._content)
        is_home = reader.is_home(output.call)
        session = output.call.session.current
        is_merge = not is_home and reader.is_established
        is_strange = not is_home and bool(reader.found) and session.calls > 1
        if candidate.is_whole:
            # An output that nobody has read is likelier than one that has been read.
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
        # A stretch without anything of the output's own proves nothing, and fingerprints of other
        # sessions reduce the proof.
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
        """Return the session's last call that repeats what a text shares with an output and little
        else: whoever reads a revised text reads the reviser's.
        """
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
        """Return the shared rows that were not in the output's own prompt."""
        if not output.copied:
            return rows
        hashes = self._text.hashes[rows].tolist()
        return [row for row, each in zip(rows, hashes, strict=True) if each not in output.copied]

    def _is_part(self, row: int) -> bool:
        """Return true if a fingerprint of the text belongs to a self-contained part."""
        return bool(self._text.hashes[row] >= PARTS_FROM)

    def _is_inside(self, row: int, spans: list[Span]) -> bool:
        """Return true if a run is away from the ends of a stretch, where the choice of fingerprints
        depends on the text beyond.
        """
        place = int(self._text.positions[row])
        return any(span.start + WINDOW <= place <= span.end - RUN - WINDOW for span in spans)

    def _num_words(self, spans: list[Span]) -> int:
        """Count the different words in the stretches; database records and code have few."""
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
        """Return the stretches that text and output share around their uncredited fingerprints."""
        source = self._source(candidate.output).content.tobytes()
        places = self._text.positions[candidate.rows].tolist()
        spans = shared_spans(self._content, source, places)
        for span in spans:
            # A nearly complete copy in one piece outweighs fragments elsewhere.
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
