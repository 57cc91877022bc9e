"""Draft tokens by n-gram lookup: those that followed an earlier occurrence of the last tokens.

Prompt lookup: no model, only the tokens themselves. Good for text that repeats what it has seen:
edits of a document, code, quotations, loops.

Plain Python; knows nothing of contexts or steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Final

#: Earlier places that are compared at most.
MAX_PLACES: Final = 16
#: Tokens that are remembered at most, some 150 bytes each.
MAX_INDEXED: Final = 65_536
#: The outcomes with which a generation begins, as right draft tokens of checked ones; what is left
#: of older outcomes when another comes; the share of right ones below which it pauses.
_FIRST_RIGHT: Final = 1.5
_FIRST_CHECKED: Final = 2.5
_KEPT: Final = 0.75
_TOO_FEW: Final = 0.2
#: The outcomes with which it goes on after a pause: one more wrong draft token ends it again.
_RIGHT_AFTER_PAUSE: Final = 0.4
_CHECKED_AFTER_PAUSE: Final = 0.8
#: Tokens of the first pause, and of the longest.
_SHORTEST_PAUSE: Final = 16
_LONGEST_PAUSE: Final = 512
#: No text is taken to repeat itself for longer than some 50 tokens.
_MOST_LIKELY: Final = 0.98


class NgramIndex:
    """An index of one growing text: the places where each run of `min_length` tokens stood.

    Adding a token takes a step of one dictionary; a proposal compares at most
    `MAX_PLACES` places.
    """

    def __init__(self, min_length: int, max_length: int, *, max_indexed: int = MAX_INDEXED) -> None:
        """For agreements of `min_length` to `max_length` tokens.

        Of more than `max_indexed` tokens the older half is forgotten.
        """
        self._min_length = min_length
        self._max_length = max_length
        self._max_indexed = max_indexed
        self._mask = (1 << 32 * min_length) - 1
        self._restart(0)

    def _restart(self, begin: int) -> None:
        """Forget everything before `begin`."""
        self._begin = self._end = begin
        #: The last `min_length` tokens, 32 bits each.
        self._key = 0
        #: Where each key's last token stood last …
        self._latest: dict[int, int] = {}
        #: … and by position, from `_begin`: where the key that ends there did before; -1: nowhere.
        self._earlier: list[int] = []

    @property
    def num_tokens(self) -> int:
        return self._end

    def extend(self, token_ids: Sequence[int], limit: int) -> int:
        """Take in at most `limit` more tokens of the text; returns how many.

        `token_ids` is the whole text, which only grows from call to call.
        """
        if len(token_ids) - self._begin > self._max_indexed:
            self._restart(len(token_ids) - self._max_indexed // 2)
        begin, end = self._end, min(len(token_ids), self._end + limit)
        key, mask, latest, earlier = self._key, self._mask, self._latest, self._earlier
        for position in range(begin, end):
            # One more than the token: a key with a zero in it is of fewer tokens than the others.
            key = (key << 32 | token_ids[position] + 1) & mask
            earlier.append(latest.get(key, -1))
            latest[key] = position
        self._key, self._end = key, end
        return end - begin

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that come next if the text goes on as it did before; or none.

        Of the `MAX_PLACES` latest earlier places of the last `min_length` tokens the one counts
        before which most tokens agree, up to `max_length`; of several the latest. Where what
        followed it reaches the text's end, the propose goes on with its own beginning.

        `token_ids` is the text, all of it taken in by `extend`.
        """
        last, begin = len(token_ids) - 1, self._begin
        if last - begin < self._min_length:
            return []
        best, best_length = -1, 0
        place = self._earlier[last - begin]
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = self._min_length
            while (
                length < self._max_length
                and place - length >= begin
                and token_ids[place - length] == token_ids[last - length]
            ):
                length += 1
            if length > best_length:
                best, best_length = place, length
                if length == self._max_length:
                    break
            place = self._earlier[place - begin]
        if best < 0:
            return []
        propose = list(token_ids[best + 1 : best + 1 + count])
        while len(propose) < count:
            propose.append(propose[len(propose) - (last - best)])
        return propose


class NgramProposer:
    """The draft tokens of one generation, and how they came out."""

    def __init__(self, min_length: int, max_length: int) -> None:
        self.index = NgramIndex(min_length, max_length)
        #: Draft tokens that were right, and those that were checked, the newest counting most.
        #: Those behind the first wrong one were not.
        self._right = _FIRST_RIGHT
        self._checked = _FIRST_CHECKED
        #: Tokens of the generation before drafts are proposed (again).
        self.resumes_at = 0
        self._pause = _SHORTEST_PAUSE

    @property
    def likelihood(self) -> float:
        """The likelihood that a draft token is right, behind others that are."""
        return min(max(self._right / self._checked, _TOO_FEW), _MOST_LIKELY)

    def worth(self, cost: float) -> int:
        """Return the number of drafts, at least 1, likely to be right above `cost`, 0 to 1."""
        return max(1, int(log(cost) / log(self.likelihood)))

    def expected(self, num_drafts: int) -> float:
        """Return the expected number of right tokens among `num_drafts`."""
        likelihood = self.likelihood
        return likelihood * (1 - likelihood**num_drafts) / (1 - likelihood)

    def note(self, num_right: int, num_drafts: int, num_generated: int) -> None:
        """Record that the first `num_right` drafts were right, at `num_generated` tokens now."""
        self._right = _KEPT * self._right + num_right
        self._checked = _KEPT * self._checked + min(num_right + 1, num_drafts)
        if num_right:
            self._pause = _SHORTEST_PAUSE
        elif self._right < _TOO_FEW * self._checked:
            self._right, self._checked = _RIGHT_AFTER_PAUSE, _CHECKED_AFTER_PAUSE
            self.resumes_at = num_generated + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
