"""A real tokenizer of as many tokens as the scripted runner has logits, most of them letters."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from harness.engine.doubles import EOS, VOCAB_SIZE

__all__ = ["EOS", "PIECES", "text_of", "tokenizer_json"]

#: The text of each token; None for the end of text.
PIECES: list[str | None] = [
    None, "a", "b", "c", "ab", "bc", "abc", "aa", '"', "{", "}", "[", "]", ":", ",",
    "0", "1", "2", "true", "x", "y", '":', "z", "!",
]  # fmt: skip

assert len(PIECES) == VOCAB_SIZE


def tokenizer_json() -> str:
    """The tokenizer, as the tokenizers library writes it."""
    vocabulary = {piece or "<end>": token for token, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    text: str = tokenizer.to_str()
    return text


def text_of(token_ids: Sequence[int]) -> str:
    """Return the text of these tokens."""
    return "".join(PIECES[token] or "" for token in token_ids)
