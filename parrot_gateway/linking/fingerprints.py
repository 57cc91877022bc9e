"""Fingerprints of texts that survive reformatting, and an index of who wrote them.

A text is reduced to its letters and digits, in lower case, so that JSON escapes, white space,
quotes, bullets, fences and indentation make no difference. Of all its runs of `RUN` characters a
few are kept, the smallest hash of each `WINDOW` (winnowing: Schleimer, Wilkerson, Aiken, SIGMOD
2003), so that two texts which share `RUN + WINDOW - 1` characters share a fingerprint.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Hashes = NDArray[np.uint32]
Positions = NDArray[np.int64]

#: Normalised bytes of one hashed run, and runs of which one is kept; powers of two.
RUN = 16
WINDOW = 16

_KEPT = np.zeros(256, np.uint8)
for _byte in range(256):
    _character = chr(_byte)
    if _byte >= 0x80 or (_character.isascii() and _character.isalnum()):
        _KEPT[_byte] = ord(_character.lower()) if _byte < 0x80 else _byte
_UNICODE_ESCAPE = re.compile(rb"\\+u([0-9a-fA-F]{4})(?:\\+u([dD][c-fC-F][0-9a-fA-F]{2}))?")
_ESCAPED_BLANKS = np.isin(np.arange(256), list(b"nrt"))
_NO_POSITIONS = np.zeros(0, np.int64)

# The hashes are keyed, so that nobody can write texts that collide on purpose.
_random = np.random.default_rng(secrets.randbits(128))
_BYTE_HASHES = _random.integers(1, 2**32, 256, dtype=np.uint32)
_MULTIPLIERS = [int(each) | 1 for each in _random.integers(1, 2**32, 6, dtype=np.uint32)]


class NormalisedText(NamedTuple):
    """A text reduced to letters and digits.

    Attributes:
        raw: the text in UTF-8.
        content: its normalised bytes, [n].
        positions: offset in `raw` of each of them, [n].
    """

    raw: bytes
    content: Bytes
    positions: Positions

    def character_span(self, start: int, end: int) -> tuple[int, int]:
        """The characters of the original text from which `content[start:end]` was made."""
        first, last = int(self.positions[start]), int(self.positions[end - 1]) + 1
        while first > 0 and _is_inside(self.raw[first]):
            first -= 1
        while last < len(self.raw) and _is_inside(self.raw[last]):
            last += 1
        before = len(self.raw[:first].decode("utf-8", "ignore"))
        return before, before + len(self.raw[first:last].decode("utf-8", "ignore"))


def _is_inside(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first one of its character."""
    return byte & 0xC0 == 0x80


def normalise(text: str) -> NormalisedText:
    """Reduce a text to its letters and digits; bytes that are not ASCII stay, punctuation goes."""
    original = text.encode("utf-8", "replace")
    raw, offsets = original, None
    if b"\\u" in raw:
        raw, offsets = _unescape(raw)
    values = np.frombuffer(raw, np.uint8)
    mapped = _KEPT[values]
    if b"\\" in raw:
        escaped = np.flatnonzero(values[:-1] == 0x5C) + 1
        mapped[escaped[_ESCAPED_BLANKS[values[escaped]]]] = 0
    if b"\xe2\x80" in raw:
        # General punctuation: typographic quotes, dashes, bullets.
        found = np.flatnonzero((values[:-2] == 0xE2) & (values[1:-1] == 0x80))
        for place in range(3):
            mapped[found + place] = 0
    if b"\xc2\xa0" in raw:
        found = np.flatnonzero((values[:-1] == 0xC2) & (values[1:] == 0xA0))
        mapped[found] = mapped[found + 1] = 0
    kept = np.flatnonzero(mapped)
    return NormalisedText(original, mapped[kept], kept if offsets is None else offsets[kept])


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
    if len(content) < RUN:
        return np.zeros(0, np.uint32), _NO_POSITIONS
    hashes = _BYTE_HASHES[content]
    for step, multiplier in zip((1, 2, 4, 8), _MULTIPLIERS, strict=False):
        hashes = hashes[:-step] * np.uint32(multiplier) + hashes[step:]
    hashes ^= hashes >> np.uint32(15)
    hashes *= np.uint32(_MULTIPLIERS[4])
    keyed = (hashes.astype(np.uint64) << np.uint64(32)) | np.arange(len(hashes), dtype=np.uint64)
    step = 1
    while step < WINDOW and len(keyed) > step:
        keyed = np.minimum(keyed[:-step], keyed[step:])
        step *= 2
    chosen = (keyed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    if len(chosen) > 1:
        chosen = chosen[np.concatenate(([True], chosen[1:] != chosen[:-1]))]
    return hashes[chosen], chosen


class FingerprintIndex:
    """Which owners wrote a fingerprint: a table of fixed size whose oldest entries go first.

    Args:
        max_entries: a power of two; 8 bytes each. The table starts small and doubles up to it.
    """

    _SLOTS = 8

    def __init__(self, max_entries: int = 1 << 21) -> None:
        self._max_bits = max(0, (max_entries // self._SLOTS).bit_length() - 1)
        self._bits = min(8, self._max_bits)
        self._clear()

    def _clear(self) -> None:
        shape = (1 << self._bits, self._SLOTS)
        self._tags = np.zeros(shape, np.uint32)
        #: 0 where a slot is empty.
        self._owners = np.zeros(shape, np.uint32)
        self._next = np.zeros(shape[0], np.uint8)
        self._used = 0

    @property
    def size_bytes(self) -> int:
        return self._tags.nbytes + self._owners.nbytes + self._next.nbytes

    def add(self, hashes: Hashes, owner: int) -> None:
        """Remember that `owner` (from 1 upward) wrote these; hashes are distinct."""
        self._insert(hashes, np.full(len(hashes), owner, np.uint32))
        self._used += len(hashes)
        if self._bits < self._max_bits and self._used * 2 > self._tags.size:
            tags, owners = self._tags.ravel(), self._owners.ravel()
            order = np.argsort(owners, kind="stable")
            order = order[np.searchsorted(owners[order], 1) :]
            self._bits = min(self._max_bits, self._bits + 2)
            self._clear()
            self._insert(tags[order], owners[order])
            self._used = len(order)

    def _insert(self, hashes: Hashes, owners: Hashes) -> None:
        if not len(hashes):
            return
        buckets = self._buckets(hashes)
        order = np.argsort(buckets, kind="stable")
        ordered = buckets[order]
        begins = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        starts = np.flatnonzero(begins)
        counts = np.diff(np.append(starts, len(ordered)))
        ranks = np.arange(len(ordered)) - np.repeat(starts, counts)
        slots = (self._next[ordered] + ranks) % self._SLOTS
        self._tags[ordered, slots] = hashes[order]
        self._owners[ordered, slots] = owners[order]
        self._next[ordered[starts]] = (self._next[ordered[starts]] + counts) % self._SLOTS

    def find(self, hashes: Hashes) -> tuple[Positions, Hashes]:
        """Pairs of (index into `hashes`, owner)."""
        buckets = self._buckets(hashes)
        rows, slots = np.nonzero(self._tags[buckets] == hashes[:, None])
        owners = self._owners[buckets[rows], slots]
        is_used = owners != 0
        return rows[is_used], owners[is_used]

    def _buckets(self, hashes: Hashes) -> Positions:
        mixed = hashes * np.uint32(_MULTIPLIERS[5])
        return (mixed >> np.uint32(32 - self._bits)).astype(np.int64)


class PassageCounts:
    """In how many calls a passage stood that no earlier answer explains: what all prompts of a
    template share, retrieved documents, stock phrases. Counts are halved as texts go by.

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
        places = np.unique(hashes >> self._shift)
        self._counts[places] += self._counts[places] < 255
        self._added += len(places)
        if self._added > self._counts.size * 4:
            self._counts >>= 1
            self._added = 0

    def of(self, hashes: Hashes) -> Bytes:
        """Calls in which each passage stood, at least; [m]."""
        counts: Bytes = self._counts[hashes >> self._shift]
        return counts
