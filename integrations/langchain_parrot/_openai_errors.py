"""Exceptions that subclass both `openai`'s and langchain_core's, so that code for either works.

    ParrotConnectionError       nothing answers at the base URL
    ParrotTimeoutError          no answer in time
    ParrotStreamError           a stream broke, or ended with an error
    ParrotStatusError           any other status
    ├── ParrotInvalidRequestError      400, 413, 422
    │   ├── ParrotContextOverflowError     the prompt is too long
    │   └── ParrotFieldError               the server does not know a field; a ParrotFeatureError
    ├── ParrotAuthenticationError      401
    ├── ParrotPermissionDeniedError    403
    ├── ParrotNotFoundError            404
    ├── ParrotConflictError            409
    ├── ParrotRateLimitError           429
    └── ParrotServerError              500 and above
        └── ParrotServerTimeoutError       504

Imports `openai`, and is loaded with the first error.
"""

from __future__ import annotations

import re
from typing import Any

import openai
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAPIError,
    ModelAuthenticationError,
    ModelConnectionError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelRateLimitError,
    ModelTimeoutError,
)
from parrot_client.errors import NO_ANSWER, NO_ANSWER_IN_TIME, UNKNOWN_FIELD, advice_for, sentence

from langchain_parrot.exceptions import (
    DeferredCancelledError,
    DeferredError,
    DeferredExpiredError,
    DeferredFailedError,
    DeferredUnreachableError,
    ParrotError,
    ParrotFeatureError,
    timed_out,
)


class ParrotConnectionError(openai.APIConnectionError, ParrotError, ModelConnectionError):
    """Nothing answers at the base URL."""


class ParrotTimeoutError(openai.APITimeoutError, ParrotError, ModelTimeoutError):
    """There was no answer in time."""

    def __init__(self, message: str, request: Any) -> None:
        super().__init__(request)
        self.message = message
        self.args = (message,)


class ParrotStreamError(openai.APIError, ParrotError, ModelAPIError):
    """A stream broke off, or ended with an error."""


class ParrotStatusError(openai.APIStatusError, ParrotError):
    """An error answer whose status has no class of its own."""


class ParrotInvalidRequestError(
    ParrotStatusError, openai.BadRequestError, ModelInvalidRequestError
):
    """The server refuses the call; `param` names the field concerned, if any."""


class ParrotContextOverflowError(ParrotInvalidRequestError, ContextOverflowError):
    """Prompt and answer do not fit the model's context."""


class ParrotFieldError(ParrotInvalidRequestError, ParrotFeatureError):
    """The server does not know one of Parrot's fields."""


class ParrotAuthenticationError(
    ParrotStatusError, openai.AuthenticationError, ModelAuthenticationError
):
    """The key is missing or wrong."""


class ParrotPermissionDeniedError(
    ParrotStatusError, openai.PermissionDeniedError, ModelPermissionDeniedError
):
    """The key does not allow this."""


class ParrotNotFoundError(ParrotStatusError, openai.NotFoundError, ModelNotFoundError):
    """There is no such model, or no such route."""


class ParrotConflictError(ParrotStatusError, openai.ConflictError):
    """A conflict: a variable is written twice, a cycle, a full session."""


class ParrotRateLimitError(ParrotStatusError, openai.RateLimitError, ModelRateLimitError):
    """Too many calls at the moment."""


class ParrotServerError(ParrotStatusError, openai.InternalServerError, ModelAPIError):
    """The server, an engine or an upstream failed."""


class ParrotServerTimeoutError(ParrotServerError, ModelTimeoutError):
    """A deadline of the server passed."""


_BY_STATUS: dict[int, type[ParrotStatusError]] = {
    400: ParrotInvalidRequestError,
    401: ParrotAuthenticationError,
    403: ParrotPermissionDeniedError,
    404: ParrotNotFoundError,
    409: ParrotConflictError,
    413: ParrotInvalidRequestError,
    422: ParrotInvalidRequestError,
    429: ParrotRateLimitError,
    504: ParrotServerTimeoutError,
}
#: Codes of a call that needs an unavailable value.
_DEFERRED_BY_CODE: dict[str, type[DeferredError]] = {
    "dependency_failed": DeferredFailedError,
    "transform_failed": DeferredFailedError,
    "no_text": DeferredFailedError,
    "answer_unusable": DeferredFailedError,
    "variable_not_found": DeferredExpiredError,
    "call_cancelled": DeferredCancelledError,
}
#: Statuses of a request for one value.
_DEFERRED_BY_STATUS: dict[int, type[DeferredError]] = {
    401: DeferredError,
    403: DeferredError,
    404: DeferredExpiredError,
    409: DeferredCancelledError,
}

#: Phrases of servers other than Parrot Gateway for a prompt that is too long.
_OVERFLOWS = ("context_length_exceeded", "prompt is too long", "maximum context length")

#: Matches other servers' mentions of an unknown body field `parrot`, but not model names.
_NAMES_PARROT = re.compile(r"(?<![\w/-])parrot(?![\w-])")
_EXTRA = ("unrecognized", "unknown", "extra", "unexpected", "not permitted", "not allowed")


class _StreamOverflowError(ParrotStreamError, ContextOverflowError):
    """An error within a stream: with the inserted values the prompt is too long."""


def from_openai(error: Exception, base_url: str) -> Exception:
    """Return the exception to raise in place of one from the `openai` client or its HTTP library.

    Args:
        error: what a call raised.
        base_url: target of the call, for the message.

    Returns:
        `error` itself if neither a server nor a connection caused it.
    """
    if isinstance(error, ParrotError):
        return error
    # NOTE: openai 2.x passes on httpx's own error when a stream breaks.
    if type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2"}:
        return ParrotStreamError(
            f"The connection to {base_url} broke in the middle of an answer ({error}).",
            # An error of the HTTP library has its request, except where no server was involved.
            getattr(error, "_request", None),  # type: ignore[arg-type]
            body=None,
        )
    if not isinstance(error, openai.APIError):
        return error
    if isinstance(error, openai.APITimeoutError):
        return ParrotTimeoutError(NO_ANSWER_IN_TIME.format(base_url=base_url), error.request)
    if isinstance(error, openai.APIConnectionError):
        message = NO_ANSWER.format(base_url=base_url)
        return ParrotConnectionError(
            message=f"{message} ({error.__cause__ or error.message})", request=error.request
        )
    if (kind := _DEFERRED_BY_CODE.get(error.code or "")) is not None:
        status = getattr(error, "status_code", None)
        advice = advice_for(status, error.code, base_url)
        return kind(f"{_message(error)} {advice}", code=error.code)
    if isinstance(error, openai.APIStatusError):
        return _of_status(error, base_url)
    stream_error = ParrotStreamError
    if error.code == "context_length_exceeded":
        stream_error = _StreamOverflowError
    return stream_error(error.message, error.request, body=error.body)


def from_read(error: Exception, reference: str, timeout: float, base_url: str) -> Exception:
    """Return the exception to raise for a deferred text that could not be read.

    Args:
        error: what the client raised.
        reference: reference of the text.
        timeout: limit of the wait, in seconds.
        base_url: URL that it was read from.

    Returns:
        a `DeferredError`; `error` itself if neither a server nor a connection caused it.
    """
    if isinstance(error, openai.APITimeoutError):
        return timed_out(reference, timeout)
    if isinstance(error, openai.APIConnectionError):
        return DeferredUnreachableError(
            f"No answer for the deferred text {reference}: {error} Is it running? "
            f"{NO_ANSWER.format(base_url=base_url)} Values are lost with the gateway: then run the "
            "deferred call again.",
            reference=reference,
        )
    if not isinstance(error, openai.APIStatusError):
        return error
    status = error.status_code
    kind = _DEFERRED_BY_STATUS.get(status, DeferredFailedError)
    otherwise = "invalid_api_key" if kind is DeferredError else "dependency_failed"
    advice = advice_for(status, error.code, base_url) or advice_for(status, otherwise, base_url)
    return kind(
        f"The deferred text {reference} has no value: {_message(error)} {advice}",
        reference=reference,
        code=error.code,
    )


def _message(error: openai.APIError) -> str:
    """Return the server's message as a sentence, without the client's wrapping."""
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        return sentence(str(body["message"]))
    return error.message


def _of_status(error: openai.APIStatusError, base_url: str) -> Exception:
    message, code, param = _message(error), error.code or "", error.param or ""
    status = error.status_code
    kind = _BY_STATUS.get(status, ParrotServerError if status >= 500 else ParrotStatusError)
    advice = advice_for(status, error.code, base_url)
    if status in (400, 422) and _is_about_parrot(code, param, message):
        kind = ParrotFieldError
        field = param.removeprefix("parrot.") or "parrot"
        advice = UNKNOWN_FIELD.format(base_url=base_url, field=field)
    elif kind is ParrotInvalidRequestError and any(words in str(error) for words in _OVERFLOWS):
        kind = ParrotContextOverflowError
    message = f"{message} {advice}" if advice else message
    return kind(message, response=error.response, body=error.body)


def _is_about_parrot(code: str, param: str, message: str) -> bool:
    """Return true if an error is about a Parrot field that the server does not know.

    The gateway names the field in `param`; others mention the object `parrot` in some form.
    """
    if code in ("unknown_parameter", "unknown_header"):
        return param.lower().startswith(("parrot", "x-parrot"))
    if param == "parrot":
        return True
    words = message.lower()
    return _NAMES_PARROT.search(words) is not None and any(word in words for word in _EXTRA)
