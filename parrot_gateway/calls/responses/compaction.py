"""Compacted histories, as opaque texts that clients carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from parrot_gateway.calls.opaque_text import pack, unpack

if TYPE_CHECKING:
    from parrot_engine.text import Tokenizer

#: How the content of a compaction item begins.
_MARK = "parrot1."


class Compaction(msgspec.Struct, frozen=True):
    """The user's texts, newest last, and a summary of all that was said."""

    said: tuple[str, ...]
    summary: str

    @property
    def text(self) -> str:
        """The text that a model reads."""
        parts = []
        if self.said:
            parts.append("Earlier in this conversation I wrote:\n\n" + "\n\n".join(self.said))
        parts.append(f"A summary of the conversation so far:\n\n{self.summary}")
        return "\n\n".join(parts)


_DECODER = msgspec.json.Decoder(Compaction)


def packed(compaction: Compaction) -> str:
    """Write a compaction as the content of a compaction item."""
    return pack(_MARK, msgspec.json.encode(compaction))


def unpacked(content: str) -> Compaction | None:
    """The compaction that a content holds; None where it is no content of ours."""
    data = unpack(_MARK, content)
    try:
        return None if data is None else _DECODER.decode(data)
    except msgspec.DecodeError:
        return None


def newest_within(texts: Sequence[str], tokens: int, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the newest texts that fit into `tokens`; the first that does not fit is cut."""
    kept: list[str] = []
    for text in reversed(texts):
        # NOTE: hardly a token is longer than 8 characters, and no more of a text than can be kept
        # is worth tokenizing.
        token_ids = tokenizer.encode(text[: tokens * 8], add_special_tokens=False)
        if len(token_ids) > tokens or len(text) > tokens * 8:
            kept.append(tokenizer.decode(token_ids[:tokens]) + " …")
            break
        kept.append(text)
        tokens -= len(token_ids)
    return tuple(reversed(kept))
