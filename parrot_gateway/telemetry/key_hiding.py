"""Keys in texts that others wrote: upstreams repeat them in errors, people in prompts."""

from __future__ import annotations

import re

#: What looks like a key: one of the usual beginnings, and what follows has a digit or is long.
_KEY = re.compile(
    r"\b(sk-|(?i:bearer) |hf_|gh[pousr]_|gsk_|xai-|AIza|AKIA)"
    r"(?:(?=[\w.~+/=-]*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{20,})"
)
#: What stands in every such text, in lower case. To look for these takes a tenth of the time.
_SIGNS = ("sk-", "bearer ", "hf_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "gsk_", "xai-", "aiza",
          "akia")  # fmt: skip


def hide_keys(text: str) -> str:
    """The text without what looks like a key."""
    lowered = text.lower()
    if not any(sign in lowered for sign in _SIGNS):
        return text
    return _KEY.sub(r"\1…", text)
