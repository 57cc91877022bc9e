"""Finds who wrote the passages of a prompt.

Candidates share fingerprints with a text; each is verified by the real overlap. They compete: a
stretch of text is credited to one of them, so that of several calls that wrote the same only the
most plausible gets a link. What stood in the prompt of the call that wrote it, in the history of
the reader, or in the prompts of unrelated calls, proves nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from parrot_gateway.linking.linker.call_store import CallStore, Output, by_age
from parrot_gateway.linking.linker.candidates import (
    WHOLE_EQUAL,
    Candidate,
    NewText,
    Reader,
    find_candidates,
)
from parrot_gateway.linking.linker.fingerprints import (
    COMMON,
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
_WORD = re.compile(r"[^\W\d_]{3,}")
#: Where writing has no spaces each sign counts.
_WORDS_AND_SIGNS = re.compile(r"[^\W\d_\u3000-\U0010ffff]{3,}|[\u3000-\U0010ffff]")
#: A text that is a whole answer is found by equality: its least length where one session wrote it.
_WHOLE = 20


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


def find_producers(
    store: CallStore, counts: PassageCounts, text: NewText, reader: Reader
) -> Explanation:
    """Who wrote what stands in a text."""
    is_common = counts.of(text.hashes) >= COMMON
    candidates = find_candidates(store, text, is_common, reader)
    if not candidates:
        return Explanation([], text.hashes, False)
    is_equal = candidates[0].is_whole
    matcher = _Matcher(text, reader)
    producers = matcher.match(candidates)
    rest = text.hashes[~matcher.is_explained()]
    is_answer = is_equal or (bool(producers) and 2 * len(rest) <= len(text.hashes))
    return Explanation(producers, rest, is_answer)


class _Matcher:
    """Credits the stretches of one text to the outputs that explain them."""

    def __init__(self, text: NewText, reader: Reader) -> None:
        self._text = text
        self._reader = reader
        self._content = text.normalised.content.tobytes()
        #: Normalised bytes that have been credited, and whether there are any.
        self._covered = bytearray(len(self._content))
        self._has_credited = False
        #: Of each fingerprint whether its run starts in them.
        self._is_covered = bytes(len(text.hashes))
        self._positions: list[int] = text.positions.tolist()
        self._sources: dict[Output, NormalisedText] = {}

    def is_explained(self) -> np.ndarray:
        """Which fingerprints of the text start in a credited stretch; [m] bool."""
        return np.frombuffer(self._is_covered, np.bool_)

    def match(self, candidates: list[Candidate]) -> list[Producer]:
        """Who wrote what; uses up the candidates."""
        producers: list[Producer] = []
        rejected: list[Candidate] = []
        reader = self._reader
        order = self._ranked(candidates)
        while order:
            self._settle(order, 1)
            best = order[-1]
            if not best.is_whole:
                best = self._closest(order)
            order.remove(best)
            candidates.remove(best)
            best.rows, best.own = self._uncovered(best.rows), self._uncovered(best.own)
            if not best.is_whole and not self._can_join(best):
                rejected.append(best)
                continue
            output = best.output
            call = output.call
            if best.is_whole and not self._has_credited:
                spans = [Span(0, len(self._content), 0)]
            elif best.rows:
                spans = self._spans(best)
            else:
                continue
            if call.is_ancestor_of(reader.parent):
                # The history of the reader holds it already.
                self._credit(spans)
                continue
            confidence = self._judge(best, spans, candidates)
            if confidence:
                self._credit(spans)
                producers.append(Producer(output, confidence, self._evidence(output, spans)))
                is_home = reader.is_home(call)
                reader.found.add(call.session.current)
                if not is_home:
                    # Less is asked of others of this session.
                    again = [each for each in rejected if reader.is_home(each.output.call)]
                    rejected = [each for each in rejected if each not in again]
                    candidates += again
                # Most others have no more than what has been credited now.
                candidates = [each for each in candidates if self._is_left(each)]
                if is_home:
                    order = [each for each in order if each in candidates]
                else:
                    order = self._ranked(candidates)
                continue
            rejected.append(best)
            if best.is_whole:
                # The others wrote the same, and are less likely.
                candidates = [each for each in candidates if not each.is_whole]
                order = [each for each in order if not each.is_whole]
        return producers

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """The candidates, the best one last; those of one rank are not told apart yet."""
        parent, home = self._reader.parent, self._reader.home()
        for each in candidates:
            is_whole = each.is_whole
            each.rank = (
                parent is not None and each.output.call.is_ancestor_of(parent),
                is_whole,
                each.session in home,
                is_whole and each.output.text.strip() == self._text.text.strip(),
                0 if is_whole else len(each.rows),
            )
        return sorted(candidates, key=attrgetter("rank"), reverse=True)[::-1]

    def _settle(self, order: list[Candidate], num: int) -> None:
        """Tell the last `num` of some ranked candidates apart."""
        first = max(0, len(order) - num)
        while first > 0 and order[first - 1].rank == order[first].rank:
            first -= 1
        if first < len(order) - 1:
            order[first:] = sorted(
                order[first:], key=lambda each: (each.rank, self._preference(each))
            )

    def _preference(self, candidate: Candidate) -> tuple[int, int, bool, float]:
        """Among candidates of one rank the one that has it highest is likelier."""
        reader, output = self._reader, candidate.output
        call = output.call
        return (
            0 if candidate.is_whole else -len(output.copied),
            -output.readers,
            bool(call.peer) and call.peer == reader.peer,
            by_age(call, reader.now),
        )

    def _closest(self, order: list[Candidate]) -> Candidate:
        """Of candidates that are there about as fully as the best one, that which explains the
        longest passage, then that of which most is there: a revised file is mostly the old one."""
        best = order[-1]
        if best.rank[0] or len(best.rows) < _MOST * best.output.size:
            return best
        is_home = best.rank[2]
        least = _NEARLY * len(self._uncovered(best.rows))
        if all(len(each.rows) < least for each in order[:-1]):
            return best
        self._settle(order, _MAX_NEAR)
        near = [
            each
            for each in order[: -_MAX_NEAR - 1 : -1]
            if each.rank[2] is is_home
            and len(self._uncovered(each.rows)) >= least
            and len(each.rows) >= _MOST * each.output.size
        ]
        if near == [best]:
            return best

        def closeness(candidate: Candidate) -> tuple[int, float, bool]:
            spans = self._spans(candidate)
            longest = max((size_in_text(each) for each in passages_of(spans)), default=0)
            size = len(self._source(candidate.output).content)
            return longest, longest / size, candidate is best

        return max(near, key=closeness)

    def _is_left(self, candidate: Candidate) -> bool:
        """Whether it may explain what has not been credited."""
        return candidate.is_whole or 0 in map(self._is_covered.__getitem__, candidate.rows)

    def _uncovered(self, rows: list[int]) -> list[int]:
        """Rows that stand in what has not been credited."""
        if not self._has_credited:
            return rows
        is_covered = self._is_covered
        return [row for row in rows if not is_covered[row]]

    def _judge(self, candidate: Candidate, spans: list[Span], others: Iterable[Candidate]) -> float:
        """Confidence that the reader read this output; 0 for an accident."""
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
                each.output.call.session.current
                for each in others
                if each.is_whole and each.output.readers <= output.readers
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
            minted = [row for row in minted if self._is_inside(row, spans)]
        credited = size_in_text(spans)
        share = size_in_source(spans) / max(1, len(self._source(output).content))
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
        for passage in passages_of(spans):
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

    def _not_copied(self, output: Output, rows: list[int]) -> list[int]:
        """Rows that an output shares and that its own prompt did not hold."""
        if not output.copied:
            return rows
        hashes = self._text.hashes[rows].tolist()
        return [row for row, each in zip(rows, hashes, strict=True) if each not in output.copied]

    def _can_join(self, candidate: Candidate) -> bool:
        """Whether it is worth while to look where an output and the text are equal."""
        output, num_rows = candidate.output, len(candidate.rows)
        if not num_rows:
            return False
        share = _OWN_OF_ALL if num_rows >= _MOST * output.size else _OWN
        if len(candidate.own) >= max(1, share * num_rows):
            return True
        call = output.call
        return self._reader.is_home(call) or call.is_ancestor_of(self._reader.parent)

    def _is_inside(self, row: int, spans: list[Span]) -> bool:
        """Whether a run stands off the ends of a stretch, where the fingerprints that are kept
        depend on what stands beyond."""
        place = self._positions[row]
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

    def _spans(self, candidate: Candidate) -> list[Span]:
        """The stretches that text and output share, around those of the fingerprints that they
        share that are not credited yet."""
        positions = self._positions
        places = [positions[row] for row in self._uncovered(candidate.rows)]
        source = self._source(candidate.output).content.tobytes()
        return shared_spans(self._content, source, places)

    def _credit(self, spans: list[Span]) -> None:
        for span in spans:
            self._covered[span.start : span.end] = b"\1" * (span.end - span.start)
        self._has_credited = self._has_credited or bool(spans)
        covered = np.frombuffer(self._covered, np.uint8)
        self._is_covered = covered.take(self._text.positions).tobytes()

    def _evidence(self, output: Output, spans: list[Span]) -> Evidence:
        span = max(spans, key=lambda each: each.end - each.start)
        start, end = self._text.normalised.character_span(span.start, span.end)
        source_end = span.source_start + span.end - span.start
        source = self._source(output).character_span(span.source_start, source_end)
        return Evidence(self._text.message, start, end, *source)
