"""Errors of the gateway: the `openai` exceptions of LlamaIndex's OpenAI model, with advice.

The types are unchanged, so `except openai.RateLimitError` still works; the message adds a remedy.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parrot_client.errors import NO_ANSWER, NO_ANSWER_IN_TIME, UNKNOWN_FIELD, advice_for, sentence

_OVERFLOW = (
    "Lower max_tokens or the size of chunks. If the prompt held deferred texts, they were longer "
    "than LlamaIndex counted: Settings.tokenizer = llm.tokenizer() makes it count them."
)


@contextmanager
def with_advice(base_url: str) -> Iterator[None]:
    """Add advice to any `openai` exception raised inside; the exception itself passes through."""
    try:
        yield
    except Exception as error:
        advice = _advice(error, base_url)
        if advice is not None and advice not in str(error):
            _add(error, advice)
        raise


def _advice(error: Exception, base_url: str) -> str | None:
    openai: Any = sys.modules.get("openai")
    if openai is None or not isinstance(error, openai.APIError):
        return None
    if isinstance(error, openai.APITimeoutError):
        return NO_ANSWER_IN_TIME.format(base_url=base_url)
    if isinstance(error, openai.APIConnectionError):
        return NO_ANSWER.format(base_url=base_url)
    code, param = getattr(error, "code", None), str(getattr(error, "param", None) or "")
    if code == "unknown_parameter" and param.startswith("parrot."):
        return UNKNOWN_FIELD.format(base_url=base_url, field=param.removeprefix("parrot."))
    if code == "context_length_exceeded":
        return _OVERFLOW
    return advice_for(getattr(error, "status_code", None), code, base_url)


def _add(error: Any, advice: str) -> None:
    error.message = f"{sentence(error.message)} {advice}"
    error.args = (f"{sentence(str(error))} {advice}", *error.args[1:])
