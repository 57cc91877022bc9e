"""Errors that are of `openai` and of langchain_core at once: code for either goes on working.

    ParrotConnectionError       nothing answers at the base URL
    ParrotTimeoutError          no answer in time
    ParrotStreamError           a stream broke, or told of an error
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

Imports `openai`: only loaded when there is an error to make.
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

from langchain_parrot._errors import ParrotError, ParrotFeatureError, words_of


class ParrotConnectionError(openai.APIConnectionError, ParrotError, ModelConnectionError):
    """Nothing answers at the base URL."""


class ParrotTimeoutError(openai.APITimeoutError, ParrotError, ModelTimeoutError):
    """There was no answer in time."""

    def __init__(self, message: str, request: Any) -> None:
        super().__init__(request)
        self.message = message
        self.args = (message,)


class ParrotStreamError(openai.APIError, ParrotError, ModelAPIError):
    """A stream broke off, or told of an error."""


class ParrotStatusError(openai.APIStatusError, ParrotError):
    """An answer that is an error, of a status without a class of its own."""


class ParrotInvalidRequestError(
    ParrotStatusError, openai.BadRequestError, ModelInvalidRequestError
):
    """The server refuses the call; `param` names the field where it is about one."""


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
    """Something is taken: a variable that is written twice, a cycle, a full session."""


class ParrotRateLimitError(ParrotStatusError, openai.RateLimitError, ModelRateLimitError):
    """Too many calls for now."""


class ParrotServerError(ParrotStatusError, openai.InternalServerError, ModelAPIError):
    """The server, an engine or an upstream failed."""


class ParrotServerTimeoutError(ParrotServerError, ModelTimeoutError):
    """A deadline of the server's passed."""


_OF_STATUS: dict[int, type[ParrotStatusError]] = {
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

#: How servers that are no Parrot Gateway say that a prompt is too long.
_OVERFLOWS = ("context_length_exceeded", "prompt is too long", "maximum context length")

#: How servers name the object `parrot` of a body that they do not know; not a model's name.
_NAMES_PARROT = re.compile(r"(?<![\w/-])parrot(?![\w-])")
_EXTRA = ("unrecognized", "unknown", "extra", "unexpected", "not permitted", "not allowed")


def of_api_error(error: openai.APIError, base_url: str) -> Exception:
    """The error of this package for one of the client's."""
    if isinstance(error, openai.APITimeoutError):
        return ParrotTimeoutError(
            f"No answer from {base_url} in time. Give more time with timeout=…, or see what the "
            "gateway is busy with at its /health.",
            error.request,
        )
    if isinstance(error, openai.APIConnectionError):
        return ParrotConnectionError(
            message=f"Nothing answers at {base_url} ({error.__cause__ or error.message}). Start "
            "the gateway with `parrot-gateway serve`, or say where it is with base_url=… or "
            "PARROT_BASE_URL.",
            request=error.request,
        )
    if isinstance(error, openai.APIStatusError):
        return _of_status(error, base_url)
    if error.code == "context_length_exceeded":
        return _StreamOverflow(error.message, error.request, body=error.body)
    return ParrotStreamError(error.message, error.request, body=error.body)


class _StreamOverflow(ParrotStreamError, ContextOverflowError):
    """Told within a stream: the prompt is too long once the values are in."""


def of_broken_stream(error: Exception, base_url: str) -> Exception:
    """The error of this package for one of the HTTP library's."""
    return ParrotStreamError(
        f"The connection to {base_url} broke in the middle of an answer ({error}).",
        # An error of the HTTP library has its request, except in places that no server reaches.
        getattr(error, "_request", None),  # type: ignore[arg-type]
        body=None,
    )


def _of_status(error: openai.APIStatusError, base_url: str) -> Exception:
    message, code, param = words_of(error), error.code or "", error.param or ""
    status = error.status_code
    kind = _OF_STATUS.get(status, ParrotServerError if status >= 500 else ParrotStatusError)
    if status in (400, 422) and _is_about_parrot(code, param, message):
        kind = ParrotFieldError
        message += (
            f" The server at {base_url} is no Parrot Gateway, or an older one than this field "
            "needs: upgrade it, leave the field out, or, where nobody gave it, turn automatic "
            "linking off with linking=False."
        )
    elif kind is ParrotInvalidRequestError and any(words in str(error) for words in _OVERFLOWS):
        kind = ParrotContextOverflowError
    elif status == 401:
        message += (
            f" Give the key of the gateway at {base_url} with api_key=…, PARROT_API_KEY or "
            "OPENAI_API_KEY."
        )
    elif status == 404 and code in ("", "unknown_route"):
        message += f" Is {base_url} right? A gateway's base URL ends in /v1."
    elif status == 404:
        message += f" `curl {base_url}/models` shows the models."
    return kind(message, response=error.response, body=error.body)


def _is_about_parrot(code: str, param: str, message: str) -> bool:
    """Whether a field of Parrot's is what the server does not know.

    The gateway names it in `param`; others name `parrot`, the whole object, in some way.
    """
    if code in ("unknown_parameter", "unknown_header"):
        return param.lower().startswith(("parrot", "x-parrot"))
    if param == "parrot":
        return True
    words = message.lower()
    return _NAMES_PARROT.search(words) is not None and any(word in words for word in _EXTRA)
