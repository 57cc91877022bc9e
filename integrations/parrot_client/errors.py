"""Advice on the gateway's errors by code: the sentences that clients add."""

from __future__ import annotations

from collections.abc import Mapping

_MEND = (
    "The message names the call that failed, and GET /v1/sessions/{session}/graph shows the way "
    "there. Mend its cause and run the deferred call again; without defer=True the call that fails "
    "raises by itself."
)
_BY_CODE: Mapping[str, str] = {
    "invalid_api_key": (
        "Give the key of the gateway at {base_url} with api_key=, PARROT_API_KEY or OPENAI_API_KEY."
    ),
    "model_not_found": "Set model= to a name that the gateway serves: `curl {base_url}/models`.",
    "unknown_route": "Is {base_url} a Parrot Gateway? Its base URL ends in /v1.",
    "variable_not_found": (
        "A deferred text is gone: it expired with its session (sessions.ttl_s after the last use), "
        "the gateway was restarted, or it belongs to another key. Run the deferred call again, and "
        "read the text sooner."
    ),
    "dependency_failed": _MEND,
    "transform_failed": _MEND,
    "answer_unusable": _MEND,
    "no_text": "A deferred call must answer in text: give no tools with defer=True.",
    "call_cancelled": (
        "The call or its session was deleted while it ran: run the deferred call again."
    ),
    "timeout": (
        "The gateway's time limit for a call passed (server.call_timeout_s). What was deferred "
        "goes on: wait again, or raise the limit."
    ),
}
NO_ANSWER = (
    "Nothing answers at {base_url}. Start the gateway with `parrot-gateway serve`, or give its "
    "address with base_url= or PARROT_BASE_URL."
)
NO_ANSWER_IN_TIME = (
    "No answer from {base_url} in time. Give more time with timeout=, or see what the gateway is "
    "busy with at its /health."
)
UNKNOWN_FIELD = (
    "The server at {base_url} is no Parrot Gateway, or an older one that is too old for the field "
    "'{field}': update it, leave the field out, or, where nobody gave it, turn automatic linking "
    "off with linking=False."
)


def advice_for(status: int | None, code: str | None, base_url: str) -> str | None:
    """Return advice on an error answer; None if its own message must do.

    Args:
        status: HTTP status; None for an error within a stream.
        code: code in the answer's `error` object.
        base_url: target of the call.
    """
    advice = _BY_CODE.get(code or "")
    if advice is None and status == 401:
        advice = _BY_CODE["invalid_api_key"]
    elif advice is None and status == 404 and not code:
        advice = _BY_CODE["unknown_route"]
    # NOTE: the reader fills in `{session}`.
    return None if advice is None else advice.replace("{base_url}", base_url)


def sentence(message: str) -> str:
    """Return a message in a form that another sentence can follow."""
    return message if message.endswith((".", "!", "?")) else message + "."
