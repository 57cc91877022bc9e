"""Cuts texts to a number of tokens of a model, for transforms such as `truncate(tokens=100)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class TokenCounter(Protocol):
    """What it takes of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ...


def token_cutter(tokenizer: TokenCounter) -> Callable[[str, int], str]:
    """Gives a function that returns a beginning of a text of at most so many tokens.

    The longest one, but for texts whose tokens do not spell them exactly.
    """

    def cut(text: str, limit: int) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) <= limit:
            return text
        # Tokens may end within a character, which the one before then has to give up.
        for end in range(limit, max(-1, limit - 4), -1):
            beginning = tokenizer.decode(ids[:end], skip_special_tokens=False)
            if text.startswith(beginning):
                return beginning
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            if len(tokenizer.encode(text[:middle], add_special_tokens=False)) <= limit:
                low = middle
            else:
                high = middle - 1
        return text[:low]

    return cut
