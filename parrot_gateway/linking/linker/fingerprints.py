"""Fingerprints of texts that survive reformatting, and an index of their writers.

A text is reduced to lower-case letters and digits, so JSON escapes, white space, quotes, bullets,
fences and indentation make no difference. Of all runs of `RUN` characters, the smallest hash of
each `WINDOW` is kept (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD 2003). Two texts that share
`RUN + WINDOW - 1` characters therefore share a fingerprint.

Short self-contained parts (a JSON string, a list item, text after a label or between tags) have a
fingerprint of their own, which matches only if the whole part is equal.
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

#: Normalised bytes of one hashed run, and number of runs of which one is kept; powers of two.
RUN = 16
WINDOW = 16
#: A passage found in the prompts of this many calls is common: it identifies no writer.
COMMON = 3
#: Fingerprints of parts start here; winnowed hashes are minima and so lie lower.
PARTS_FROM = np.uint32(0xC0000000)

# Letters, digits and non-ASCII bytes are kept, in lower case.
_LOWER = bytes(range(256)).lower()
_IS_KEPT = bytes(byte in WORDS for byte in range(256))
_UNICODE_ESCAPE = re.compile(rb"\\+u([0-9a-fA-F]{4})(?:\\+u([dD][c-fC-F][0-9a-fA-F]{2}))?")
#: General punctuation: typographic quotes, dashes, bullets.
_PUNCTUATION = re.compile(rb"\xe2\x80.", re.DOTALL)
_NO_POSITIONS = np.zeros(0, np.int64)
_NO_HASHES = np.zeros(0, np.uint32)
_TRUE = np.ones(1, np.bool_)
#: Runs processed together. The upper bits of a hash are combined with its position among them, so
#: one minimum gives both.
_BLOCK = 1 << 14
_PLACES = np.arange(_BLOCK, dtype=np.uint32)
_PLACE = np.uint32(_BLOCK - 1)
#: Halves of a 64-bit word.
_HIGH = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_ONE = np.uint64(1)
_EMPTY = np.uint64(2**64 - 1)
_PART_BITS = 0x3FFFFFFF


# The hashes are keyed, so nobody can construct collisions on purpose.
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
        #: Position of each byte of the unescaped text in the raw one; None if they are equal.
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
        #: The text with escapes replaced, which determines the kept bytes.
        self._even = raw
        #: Positions of the kept bytes. Faster than dropping the others with `translate`.
        self._kept = np.frombuffer(raw.translate(_IS_KEPT), np.bool_).nonzero()[0]
        self.content: Bytes = np.frombuffer(raw.translate(_LOWER), np.uint8).take(self._kept)

    def parts(self, *, is_answer: bool = False) -> tuple[Hashes, Positions]:
        """Fingerprint the self-contained parts; return them with their start positions, ascending.

        Args:
            is_answer: true for an answer: a line of prose is no part, as it may be a stock phrase.
        """
        parts = find_parts(self._even, self._kept, is_answer=is_answer)
        if not parts:
            return _NO_HASHES, _NO_POSITIONS
        content = self.content.tobytes()
        hashes = [hash(content[start:end]) & _PART_BITS for start, end in parts]
        starts = [start for start, _ in parts]
        return np.array(hashes, np.uint32) | PARTS_FROM, np.array(starts, np.int64)

    def character_span(self, start: int, end: int) -> tuple[int, int]:
        """Return the characters of the original text that `content[start:end]` was made from."""
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
    """Return true if a UTF-8 byte is not the first of its character."""
    return byte & 0xC0 == 0x80


def normalise(text: str) -> NormalisedText:
    """Reduce a text to letters and digits; non-ASCII bytes stay, punctuation is dropped."""
    return NormalisedText(text)


def _unescape(raw: bytes) -> tuple[bytes, Positions]:
    r"""Replace `\uXXXX`; return the new bytes and the origin of each."""
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
    """Return the winnowed hashes of a normalised text and the start of each run; [m] each."""
    num_runs = len(content) - RUN + 1
    if num_runs <= _BLOCK:
        return _winnow(_hashes(content))
    # Blocks that fit into the processor's cache are several times as fast.
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
    """Return the fingerprints of a text and of its parts with their start positions; [m] each."""
    return with_parts(text, *fingerprint(text.content), is_answer=is_answer)


def with_parts(
    text: NormalisedText, hashes: Hashes, positions: Positions, *, is_answer: bool = False
) -> tuple[Hashes, Positions]:
    """Merge the fingerprints of a text with those of its parts, by start position."""
    parts, starts = text.parts(is_answer=is_answer)
    if not len(parts):
        return hashes, positions
    positions = np.concatenate((positions, starts))
    order = positions.argsort(kind="stable")
    return np.concatenate((hashes, parts)).take(order), positions.take(order)


def _hashes(content: Bytes) -> Hashes:
    """Hash each run; [n - RUN + 1]."""
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
    """Return the smallest of each `WINDOW` hashes by upper bits, the first of equals, with
    positions; [m] each.

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
    # Windows with a different minimum than the one before: it has entered, or an older one has
    # left.
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
    """Return the bounds of runs of equal values: their starts, and the last end; [m + 1]."""
    changes = (values[1:] != values[:-1]).nonzero()[0]
    bounds = np.empty(len(changes) + 2, np.int64)
    bounds[0], bounds[-1] = 0, len(values)
    np.add(changes, 1, out=bounds[1:-1])
    return bounds


def distinct(hashes: Hashes) -> Hashes:
    """Return the unique fingerprints, ascending; several times as fast as `np.unique`."""
    ordered = np.sort(hashes)
    is_first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]


class FingerprintCache:
    """Fingerprints of messages that later prompts will repeat; the oldest are evicted first."""

    _MAX_BYTES = 1 << 22

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Hashes] = OrderedDict()
        self.size_bytes = 0

    def of(self, text: str, key: int) -> Hashes:
        """Return the fingerprints of a text, which are probably cached.

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
        """Return the cached fingerprints of a text, if any."""
        return self._kept.get(key)

    def keep(self, key: int, hashes: Hashes) -> None:
        """Cache the fingerprints of a text."""
        if key not in self._kept:
            self._kept[key] = hashes
            self.size_bytes += hashes.nbytes + 128
            while self.size_bytes > self._MAX_BYTES:
                self.size_bytes -= self._kept.popitem(last=False)[1].nbytes + 128


class FingerprintIndex:
    """Finds the owners of fingerprints in a table of limited size; the oldest entries are
    overwritten.

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
        #: A fingerprint above its owner minus one; all ones in an empty slot. A row is one cache
        #: line, so a look-up waits for memory once.
        self._entries = np.full(shape, _EMPTY)
        self._next = np.zeros(shape[0], np.uint8)
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return self._entries.nbytes + self._next.nbytes

    def add(self, hashes: Hashes, owner: int) -> None:
        """Record that `owner` (1 or more) wrote these distinct hashes."""
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
            # If several map to one place, the last written stays, which is the first of them.
            table[places[::-1]] = entries[::-1]
            slots += 1
            slots &= self._SLOTS - 1
            self._next[buckets] = slots
            is_left = table.take(places) != entries
            if not is_left.any():
                return
            entries, buckets = entries[is_left], buckets[is_left]

    def find(self, hashes: Hashes) -> tuple[Positions, Positions]:
        """Return pairs of (index into `hashes`, owner), ordered by owner, then by index."""
        found = self._entries.take(self._buckets(hashes), 0).ravel()
        wanted = hashes.astype(np.uint64)
        wanted <<= _HIGH
        # XOR leaves only the owner of an entry with that fingerprint.
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
    """Counts the calls whose prompt had a passage that no earlier answer explains.

    All prompts of a template share such passages, as do retrieved documents and stock phrases.
    Counts are halved over time.

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
        # A place named twice counts once.
        counts = self._counts.take(places)
        counts += counts < 255
        self._counts[places] = counts
        self._added += len(places)
        # Beyond this, collisions would make passages common that were each seen once.
        if self._added > self._counts.size // 4:
            self._counts >>= 1
            self._added = 0

    def are_common(self, hashes: Hashes) -> bool:
        """Return true if all of a few passages are common."""
        return all(self._counts.item(each) >= COMMON for each in (hashes >> self._shift).tolist())

    def of(self, hashes: Hashes) -> Bytes:
        """Return an estimate of the calls that had each passage; [m]."""
        return self._counts.take(hashes >> self._shift)
