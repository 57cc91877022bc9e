"""Hides keys in texts by others: upstreams repeat them in errors, people in prompts."""

from __future__ import annotations

import re

#: Matches a likely key: a usual prefix followed by a digit-bearing or long text.
_KEY = re.compile(
    r"\b(sk-|(?i:bearer) |hf_|gh[pousr]_|gsk_|xai-|AIza|AKIA)"
    r"(?:(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{20,})"
)
#: Every match contains one of these, in lower case. Testing for them takes a tenth of the time.
_SIGNS = ("sk-", "bearer ", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "gsk_", "xai-", "aiza",
          "akia")  # fmt: skip


def hide_keys(text: str) -> str:
    """Remove everything that looks like a key from a text."""
    lowered = text.lower()
    if not any(sign in lowered for sign in _SIGNS):
        return text
    return _KEY.sub(r"\1…", text)
