"""Errors of the gateway: `openai`'s own exceptions, as of LlamaIndex's OpenAI model, with advice.

The types stay what they are, so that `except openai.RateLimitError` goes on working; the message
says in addition what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: What to do about an error's `code`.
_BY_CODE = {
    "invalid_api_key": "Give the gateway's key as api_key=, PARROT_API_KEY or OPENAI_API_KEY.",
    "model_not_found": "Set model= to a name that the gateway serves (GET /v1/models lists them).",
    "context_length_exceeded": (
        "Lower max_tokens or the size of chunks. If the prompt held deferred texts, they were "
        "longer than LlamaIndex reckoned: Settings.tokenizer = llm.tokenizer() makes it count "
        "them."
    ),
    "variable_not_found": (
        "A deferred text is gone: it expired (sessions.ttl_s), the gateway was restarted, or it "
        "belongs to another key. Run the query again and resolve the answer sooner."
    ),
    "dependency_failed": (
        "A deferred call that this text needs failed: the message names it, and "
        "GET /v1/sessions/{session}/graph shows the way there. Mend its cause and run again."
    ),
    "call_cancelled": "The call or its session was deleted while it ran; run the query again.",
    "timeout": (
        "The gateway's time limit for a call passed (server.call_timeout_s). What was deferred "
        "goes on: resolve again, or raise the limit."
    ),
    "no_text": "A deferred call must answer in text: give no tools with defer=True.",
}


@contextmanager
def explained(base_url: str) -> Iterator[None]:
    """Add advice to whatever `openai` raises inside; the exception itself passes through."""
    try:
        yield
    except Exception as error:
        advice = _advice(error, base_url)
        if advice is not None:
            _add(error, advice)
        raise


def _advice(error: Exception, base_url: str) -> str | None:
    openai: Any = sys.modules.get("openai")
    if openai is None or not isinstance(error, openai.APIError):
        return None
    if isinstance(error, openai.APITimeoutError):
        return f"{base_url} did not answer in time: raise timeout=, or ask for less."
    if isinstance(error, openai.APIConnectionError):
        return (
            f"No gateway answers at {base_url}: start one (`parrot-gateway serve`), or set "
            "base_url= or PARROT_BASE_URL."
        )
    code, param = getattr(error, "code", None), str(getattr(error, "param", None) or "")
    if code == "unknown_parameter" and param.startswith("parrot."):
        return (
            f"This gateway is too old for the field '{param.removeprefix('parrot.')}': update it "
            "or leave the field out; linking=False leaves out run, parent and group."
        )
    if isinstance(error, openai.NotFoundError) and code in (None, "unknown_route"):
        return f"Is {base_url} a Parrot Gateway, and does the address end in /v1?"
    return _BY_CODE.get(str(code))


def _add(error: Any, advice: str) -> None:
    if advice in str(error):
        return
    error.message = f"{error.message} {advice}"
    error.args = (f"{error} {advice}", *error.args[1:])
