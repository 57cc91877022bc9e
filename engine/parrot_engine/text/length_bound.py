"""A lower bound on a text's tokens, without tokenizing it.

Nearly all language models' tokenizers are BPE over bytes, or over characters with bytes for unknown
ones. They lose nothing of a text, so it has at least as many tokens as its length divided by that
of the longest token. Pipelines that may drop or shorten text in unknown ways have no bound.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from parrot_engine.text.pieces import BYTE_OF_CHAR

#: Factor by which NFC can shorten a text, in bytes of UTF-8. Canonical decomposition makes it at
#: most 3 times shorter (U+212A becomes K) or 3 times longer (UAX #15), and composition keeps the
#: decomposition. In characters the factor is at most 4.
_NFC_SHRINKS = 9

_LOSSLESS_SPLITS = {"ByteLevel", "Metaspace", "Split", "Digits", "Punctuation"}


@dataclass(frozen=True, slots=True)
class LengthBound:
    """A lower bound of the number of tokens of a text."""

    unit: Literal["bytes", "characters"]
    #: Length of the longest token, in units.
    longest: int
    #: True: texts are converted to NFC, which shortens some that are not ASCII.
    composes: bool = False

    def least_tokens(self, text: str) -> int:
        """Return a number that no tokenization of `text` undercuts."""
        length = len(text)
        if not text.isascii():
            try:
                num_bytes = len(text.encode())
            except UnicodeEncodeError:
                # Half a surrogate pair: not a valid text.
                return 0
            if self.unit == "bytes":
                length = num_bytes
            if self.composes:
                length = -(-length // _NFC_SHRINKS)
        return -(-length // self.longest)


def read_bound(pipeline: Mapping[str, Any]) -> LengthBound | None:
    """Return the bound of a serialised tokenizer; None if there is none.

    Args:
        pipeline: the parsed `tokenizer.json`.
    """
    model = pipeline["model"]
    if model.get("type") != "BPE":
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    splits = _steps(pipeline.get("pre_tokenizer"), "pretokenizers")
    if any(not _is_lossless(step) for step in splits):
        return None
    normalizers = _steps(pipeline.get("normalizer"), "normalizers")
    composes = any(step["type"] == "NFC" for step in normalizers)
    if any(step["type"] != "NFC" and not _keeps_length(step) for step in normalizers):
        return None
    added = pipeline.get("added_tokens") or []
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        # They swallow any number of surrounding blanks.
        return None
    vocab = model["vocab"]
    by_bytes = any(step["type"] == "ByteLevel" for step in splits)
    if by_bytes:
        if not all(char in vocab for char in BYTE_OF_CHAR):
            return None
    elif not model.get("byte_fallback") or any(f"<0x{byte:02X}>" not in vocab
                                               for byte in range(256)):  # fmt: skip
        return None
    contents = [text for token in added for text in _forms(token["content"])]
    lengths = [len(text.encode()) if by_bytes else len(text) for text in contents]
    longest = max([*map(len, vocab), *lengths], default=0)
    return LengthBound("bytes" if by_bytes else "characters", max(longest, 1), composes)


def _steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[key] for step in _steps(inner, key)]
    return [part]


def _is_lossless(split: Mapping[str, Any]) -> bool:
    return split["type"] in _LOSSLESS_SPLITS and split.get("behavior") != "Removed"


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Prepend":
        return True
    pattern = normalizer.get("pattern", {}).get("String")
    # A blank becomes `▁`, which is no shorter in either unit.
    return normalizer["type"] == "Replace" and pattern == " " and len(normalizer["content"]) >= 1


def _forms(content: str) -> tuple[str, str]:
    return content, unicodedata.normalize("NFC", content)
