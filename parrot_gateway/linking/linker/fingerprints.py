"""Fingerprints of texts that survive reformatting, and an index of who wrote them.

A text is reduced to its letters and digits, in lower case, so that JSON escapes, white space,
quotes, bullets, fences and indentation make no difference. Of all its runs of `RUN` characters a
few are kept, the smallest hash of each `WINDOW` (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD
2003), so that two texts which share `RUN + WINDOW - 1` characters share a fingerprint.

Short parts that stand by themselves (a string of JSON, an item of a list, what follows a label or
stands between tags) have a fingerprint of their own, which tells that all of the part is the same.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from parrot_gateway.linking.linker.parts import WORDS, Positions, find_parts

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint32]

#: Normalised bytes of one hashed run, and runs of which one is kept; powers of two.
RUN = 16
WINDOW = 16
#: A passage that stood in the prompts of this many calls is nobody's.
COMMON = 3
#: From here on upwards are the fingerprints of parts: the least of several hashes is smaller.
PARTS_FROM = np.uint32(0xC0000000)

# Letters and digits stay, in lower case, and what is not ASCII.
_LOWER = bytes(range(256)).lower()
_IS_KEPT = bytes(byte in WORDS for byte in range(256))
_UNICODE_ESCAPE = re.compile(rb"\\+u([0-9a-fA-F]{4})(?:\\+u([dD][c-fC-F][0-9a-fA-F]{2}))?")
#: General punctuation: typographic quotes, dashes, bullets.
_PUNCTUATION = re.compile(rb"\xe2\x80.", re.DOTALL)
_NO_POSITIONS = np.zeros(0, np.int64)
_NO_HASHES = np.zeros(0, np.uint32)
_TRUE = np.ones(1, np.bool_)
#: Runs that are looked at together: the upper bits of a hash stand above its place among these, so
#: that the least of a window tells both.
_BLOCK = 1 << 14
_PLACES = np.arange(_BLOCK, dtype=np.uint32)
_PLACE = np.uint32(_BLOCK - 1)
#: The upper and the lower half of 64 bits.
_HIGH = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_ONE = np.uint64(1)
_EMPTY = np.uint64(2**64 - 1)
_PART_BITS = 0x3FFFFFFF


# The hashes are keyed, so that nobody can write texts that collide on purpose.
_random = np.random.default_rng(secrets.randbits(128))
_BYTE_HASHES = _random.integers(1, 2**32, 256, dtype=np.uint32)
_MULTIPLIERS = [each | np.uint32(1) for each in _random.integers(1, 2**32, 5, dtype=np.uint32)]


class NormalisedText:
    """A text reduced to letters and digits.

    Attributes:
        content: its normalised bytes, [n].
    """

    __slots__ = ("_even", "_is_ascii", "_kept", "_offsets", "_raw", "content")

    def __init__(self, text: str) -> None:
        self._is_ascii = text.isascii()
        #: In UTF-8.
        self._raw = raw = text.encode("utf-8", "replace")
        #: Where each byte of the even text stands in the raw one; None where it is at its place.
        self._offsets: Positions | None = None
        if b"\\" in raw:
            if b"\\u" in raw:
                raw, self._offsets = _unescape(raw)
            for blank in (b"\\n", b"\\r", b"\\t"):
                raw = raw.replace(blank, b"\\ ")
        if not raw.isascii():
            if b"\xe2\x80" in raw:
                raw = _PUNCTUATION.sub(b"   ", raw)
            raw = raw.replace(b"\xc2\xa0", b"  ")
        #: As long as what is kept is known of it: escapes replaced.
        self._even = raw
        #: Where its bytes that are kept stand in it. Faster than `translate` can drop the others.
        self._kept = np.frombuffer(raw.translate(_IS_KEPT), np.bool_).nonzero()[0]
        self.content: Bytes = np.frombuffer(raw.translate(_LOWER), np.uint8).take(self._kept)

    def parts(self, *, is_answer: bool = False) -> tuple[Hashes, Positions]:
        """Fingerprints of the parts that stand by themselves, and where they start, ascending.

        Args:
            is_answer: others take its parts: a line of prose is none, it may be a stock phrase.
        """
        parts = find_parts(self._even, self._kept, is_answer=is_answer)
        if not parts:
            return _NO_HASHES, _NO_POSITIONS
        content = self.content.tobytes()
        hashes = [hash(content[start:end]) & _PART_BITS for start, end in parts]
        starts = [start for start, _ in parts]
        return np.array(hashes, np.uint32) | PARTS_FROM, np.array(starts, np.int64)

    def character_span(self, start: int, end: int) -> tuple[int, int]:
        """The characters of the original text from which `content[start:end]` was made."""
        first, last = int(self._kept[start]), int(self._kept[end - 1])
        if self._offsets is not None:
            first, last = int(self._offsets[first]), int(self._offsets[last])
        last += 1
        if self._is_ascii:
            return first, last
        while first > 0 and _is_inside(self._raw[first]):
            first -= 1
        while last < len(self._raw) and _is_inside(self._raw[last]):
            last += 1
        before = len(self._raw[:first].decode("utf-8", "ignore"))
        return before, before + len(self._raw[first:last].decode("utf-8", "ignore"))


def _is_inside(byte: int) -> bool:
    """True if a byte of UTF-8 is not the first one of its character."""
    return byte & 0xC0 == 0x80


def normalise(text: str) -> NormalisedText:
    """Reduce a text to its letters and digits; bytes that are not ASCII stay, punctuation goes."""
    return NormalisedText(text)


def _unescape(raw: bytes) -> tuple[bytes, Positions]:
    r"""Replace `\uXXXX`; returns the new bytes and where each came from."""
    pieces: list[bytes] = []
    offsets: list[Positions] = []
    end = 0
    for match in _UNICODE_ESCAPE.finditer(raw):
        pieces.append(raw[end : match.start()])
        offsets.append(np.arange(end, match.start()))
        units = b"".join(int(part, 16).to_bytes(2, "big") for part in match.groups() if part)
        piece = units.decode("utf-16-be", "replace").encode()
        pieces.append(piece)
        offsets.append(np.full(len(piece), match.start()))
        end = match.end()
    pieces.append(raw[end:])
    offsets.append(np.arange(end, len(raw)))
    return b"".join(pieces), np.concatenate(offsets)


def fingerprint(content: Bytes) -> tuple[Hashes, Positions]:
    """The winnowed hashes of a normalised text, and where their runs start; [m] each."""
    num_runs = len(content) - RUN + 1
    if num_runs <= _BLOCK:
        return _winnow(_hashes(content))
    # What fits into the processor's cache is several times as fast.
    chosen: tuple[list[Hashes], list[Positions]] = ([], [])
    for start in range(0, num_runs - WINDOW + 1, _BLOCK - WINDOW + 1):
        hashes, positions = _winnow(_hashes(content[start : start + _BLOCK + RUN - 1]))
        positions += start
        if start and positions[0] == chosen[1][-1][-1]:
            hashes, positions = hashes[1:], positions[1:]
        chosen[0].append(hashes)
        chosen[1].append(positions)
    return np.concatenate(chosen[0]), np.concatenate(chosen[1])


def passages(text: NormalisedText, *, is_answer: bool = False) -> tuple[Hashes, Positions]:
    """The fingerprints of a text and of its parts, and where they start; [m] each."""
    return with_parts(text, *fingerprint(text.content), is_answer=is_answer)


def with_parts(
    text: NormalisedText, hashes: Hashes, positions: Positions, *, is_answer: bool = False
) -> tuple[Hashes, Positions]:
    """The fingerprints of a text with those of its parts, by where they start."""
    parts, starts = text.parts(is_answer=is_answer)
    if not len(parts):
        return hashes, positions
    positions = np.concatenate((positions, starts))
    order = positions.argsort(kind="stable")
    return np.concatenate((hashes, parts)).take(order), positions.take(order)


def _hashes(content: Bytes) -> Hashes:
    """A hash of each run; [n - RUN + 1]."""
    if len(content) < RUN:
        return _NO_HASHES
    hashes = _BYTE_HASHES.take(content)
    for step, multiplier in zip((1, 2, 4, 8), _MULTIPLIERS, strict=False):
        sums = hashes[:-step] * multiplier
        sums += hashes[step:]
        hashes = sums
    hashes ^= hashes >> np.uint32(15)
    hashes *= _MULTIPLIERS[4]
    return hashes


def _winnow(hashes: Hashes) -> tuple[Hashes, Positions]:
    """The smallest of each `WINDOW` hashes by their upper bits, the first of equal ones, and their
    places; [m] each.

    Args:
        hashes: at most `_BLOCK`.
    """
    if not len(hashes):
        return _NO_HASHES, _NO_POSITIONS
    least, step = hashes & ~_PLACE, 1
    least |= _PLACES[: len(least)]
    while step < WINDOW and len(least) > step:
        least = np.minimum(least[:-step], least[step:])
        step *= 2
    # Windows whose least hash is another one than before: it has come in, or an older one has left.
    is_first = np.empty(len(least), np.bool_)
    is_first[0] = True
    np.not_equal(least[1:], least[:-1], out=is_first[1:])
    places = (least[is_first] & _PLACE).astype(np.int64)
    found = hashes.take(places)
    is_other = found[1:] != found[:-1]
    if not is_other.all():
        is_first = np.concatenate((_TRUE, is_other))
        found, places = found[is_first], places[is_first]
    return found, places


def runs(values: Positions) -> Positions:
    """Where runs of equal values begin, and where the last one ends; [m + 1]."""
    changes = (values[1:] != values[:-1]).nonzero()[0]
    bounds = np.empty(len(changes) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(values)
    np.add(changes, 1, out=bounds[1:-1])
    return bounds


def distinct(hashes: Hashes) -> Hashes:
    """Each of some fingerprints once, ascending; several times as fast as `np.unique`."""
    ordered = np.sort(hashes)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


class FingerprintCache:
    """Fingerprints of messages that later prompts will repeat; the oldest ones go first."""

    _MAX_BYTES = 1 << 22

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Hashes] = OrderedDict()
        self.size_bytes = 0

    def of(self, text: str, key: int) -> Hashes:
        """The fingerprints of a text, which are probably known.

        Args:
            key: hash of the text.
        """
        found = self._kept.get(key)
        if found is None:
            found = passages(normalise(text))[0]
            self.keep(key, found)
        else:
            self._kept.move_to_end(key)
        return found

    def known(self, key: int) -> Hashes | None:
        """The fingerprints of a text where they are remembered."""
        return self._kept.get(key)

    def keep(self, key: int, hashes: Hashes) -> None:
        """Remember the fingerprints of a text."""
        if key not in self._kept:
            self._kept[key] = hashes
            self.size_bytes += hashes.nbytes + 128
            while self.size_bytes > self._MAX_BYTES:
                self.size_bytes -= self._kept.popitem(last=False)[1].nbytes + 128


class FingerprintIndex:
    """Finds the owners of fingerprints: a table of fixed size whose oldest entries go first.

    Args:
        max_entries: a power of two; 8 bytes each. The table starts small and doubles up to it.
    """

    _SLOT_BITS = 3
    _SLOTS = 1 << _SLOT_BITS

    def __init__(self, max_entries: int = 1 << 21) -> None:
        self._max_bits = max(0, (max_entries // self._SLOTS).bit_length() - 1)
        self._bits = min(8, self._max_bits)
        self._clear()

    def _clear(self) -> None:
        shape = (1 << self._bits, self._SLOTS)
        #: A fingerprint above its owner less one; all ones where a slot is empty. A row is a line
        #: of the processor's cache, so that a look-up waits for memory once.
        self._entries = np.full(shape, _EMPTY)
        self._next = np.zeros(shape[0], np.uint8)
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return self._entries.nbytes + self._next.nbytes

    def add(self, hashes: Hashes, owner: int) -> None:
        """Remember that `owner` (from 1 upward) wrote these; hashes are distinct."""
        entries = hashes.astype(np.uint64)
        entries <<= _HIGH
        entries |= np.uint64(owner - 1)
        self._insert(hashes, entries)
        self._used += len(hashes)
        if self._bits < self._max_bits and self._used * 2 > self._entries.size:
            entries = self._entries.ravel()
            entries = entries[entries != _EMPTY]
            entries = entries[np.argsort(entries & _LOW, kind="stable")]
            self._bits += 1
            self._clear()
            self._insert((entries >> _HIGH).astype(np.uint32), entries)
            self._used = len(entries)

    def _insert(self, hashes: Hashes, entries: NDArray[np.uint64]) -> None:
        table = self._entries.ravel()
        buckets = self._buckets(hashes)
        while len(entries):
            slots = self._next.take(buckets)
            places = (buckets << self._SLOT_BITS) + slots
            # Of those with the same place the one that is written last stays: the first.
            table[places[::-1]] = entries[::-1]
            slots += 1
            slots &= self._SLOTS - 1
            self._next[buckets] = slots
            is_left = table.take(places) != entries
            if not is_left.any():
                return
            entries, buckets = entries[is_left], buckets[is_left]

    def find(self, hashes: Hashes) -> tuple[Positions, Positions]:
        """Pairs of (index into `hashes`, owner), ordered by owner, then by index."""
        found = self._entries.take(self._buckets(hashes), 0).ravel()
        wanted = hashes.astype(np.uint64)
        wanted <<= _HIGH
        # What is left of an entry with that fingerprint is its owner.
        found ^= wanted.repeat(self._SLOTS)
        places = (found < _LOW).nonzero()[0]
        pairs = found.take(places)
        places >>= self._SLOT_BITS
        pairs <<= _HIGH
        pairs |= places.view(np.uint64)
        pairs.sort()
        rows = (pairs & _LOW).view(np.int64)
        pairs >>= _HIGH
        pairs += _ONE
        return rows, pairs.view(np.int64)

    def _buckets(self, hashes: Hashes) -> Positions:
        return (hashes & np.uint32((1 << self._bits) - 1)).astype(np.int64)


class PassageCounts:
    """Counts the calls in which a passage stood that no earlier answer explains.

    All prompts of a template share such passages; retrieved documents and stock phrases are some
    too. Counts are halved as texts go by.

    Args:
        bits: the table has `2**bits` counters of a byte.
    """

    def __init__(self, bits: int = 19) -> None:
        self._counts = np.zeros(1 << bits, np.uint8)
        self._shift = np.uint32(32 - bits)
        self._added = 0

    @property
    def size_bytes(self) -> int:
        return self._counts.nbytes

    def add(self, hashes: Hashes) -> None:
        """Count the passages of one call, each once."""
        places = hashes >> self._shift
        # Of a place that is named twice one counts.
        counts = self._counts.take(places)
        counts += counts < 255
        self._counts[places] = counts
        self._added += len(places)
        # Past this, passages of which each was seen once would count as common by collisions.
        if self._added > self._counts.size // 4:
            self._counts >>= 1
            self._added = 0

    def are_common(self, hashes: Hashes) -> bool:
        """True if all of some passages, which are few, are nobody's."""
        return all(self._counts.item(each) >= COMMON for each in (hashes >> self._shift).tolist())

    def of(self, hashes: Hashes) -> Bytes:
        """Calls in which each passage stood, at least; [m]."""
        return self._counts.take(hashes >> self._shift)
