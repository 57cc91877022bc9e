"""Failures of backends before anything of an answer was passed on: which are tried elsewhere, and
which of several the client gets to read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias

from parrot_gateway.backends.upstreams.client import UpstreamClient, UpstreamRequest
from parrot_gateway.backends.upstreams.reported_error import refusal_of
from parrot_gateway.backends.upstreams.response import UpstreamResponse
from parrot_gateway.backends.upstreams.retry_policy import named_delay
from parrot_gateway.exceptions import (
    AnswerError,
    GatewayError,
    OverloadedError,
    RefusedError,
    UpstreamError,
    UpstreamKeyError,
    UpstreamTimeoutError,
)

#: Why a backend was left for another:
#:
#: - `connection`: it could not be reached, or broke off before its first content;
#: - `timeout`: it was silent for too long;
#: - `unavailable`: it was not asked: breaker open, drained, no room;
#: - `server_error`, `rate_limited`: a 5xx or 408; a 429;
#: - `redirected`: it sends callers somewhere else, where they are not followed;
#: - `answer_error`: a success that reports an error, or makes no sense, before its first content;
#: - `key_refused`, `not_found`: 401 or 403 of the gateway's own key, 404 of the model or the route;
#: - `context_length`: the prompt is too long for it;
#: - `refused`: any other refusal, of a backend that was a fallback itself.
FailureReason: TypeAlias = Literal[
    "connection", "timeout", "unavailable", "server_error", "rate_limited", "redirected",
    "answer_error", "key_refused", "not_found", "context_length", "refused",
]  # fmt: skip
#: Failures that are returned, so that another backend can answer: none; those that another may not
#: have; all, of a backend that is itself a fallback.
Returned: TypeAlias = Literal["nothing", "failures", "all"]

#: Bytes of a refusal that are kept, and the time that they may take.
_MAX_REFUSAL_BYTES = 1024 * 1024
_REFUSAL_TIMEOUT_S = 5.0
#: Bytes of a refusal that are searched.
_SEARCHED_BYTES = 8192
_TOO_LONG = re.compile(
    # OpenAI and this gateway; llama.cpp; then the wordings of messages: OpenAI, vLLM, SGLang,
    # llama.cpp, Anthropic, LiteLLM, TGI.
    rb"context_length_exceeded|exceed_context_size"
    rb"|maximum context length|maximum model length|model's context length|max_model_len"
    rb"|available context size|context window|ContextWindowExceeded"
    rb"|prompt is too long|input tokens exceed|too large to process|must be <= \d+\. Given",
    re.IGNORECASE,
)
_TOO_LONG_STATUSES = (400, 413, 422)


class FailedAttempt(NamedTuple):
    """One backend could not answer, and another may."""

    #: For the client, if no other backend answers.
    error: GatewayError
    reason: FailureReason


async def ask(
    upstream: UpstreamClient,
    request: UpstreamRequest,
    returned: Returned,
    first_byte_timeout_s: float | None = None,
) -> UpstreamResponse | FailedAttempt:
    """Send a request, and judge the beginning of its answer.

    Args:
        returned: the failures to return.
        first_byte_timeout_s: as of `Upstream.request`.

    Returns:
        an answer that passes on, to be closed; or a failure, which `request.note_failed` knows of.

    Raises:
        GatewayError: there is no answer, and `returned` is `nothing`.
    """
    if returned == "nothing":
        return await upstream.request(request, first_byte_timeout_s=first_byte_timeout_s)
    try:
        response = await upstream.request(
            request._replace(holds_first=True), first_byte_timeout_s=first_byte_timeout_s
        )
    except (UpstreamError, OverloadedError) as error:
        attempt = FailedAttempt(error, reason_of_error(error))
    else:
        reason = _reason_of(response, request, upstream, returned)
        if reason is None:
            return response
        attempt = FailedAttempt(await refusal_error(response), reason)
    if request.note_failed is not None and not upstream.notes_failures:
        request.note_failed(upstream.name, attempt.reason)
    return attempt


def reason_of_error(error: GatewayError) -> FailureReason:
    """The reason of a failure without an answer."""
    if isinstance(error, UpstreamKeyError):
        return "key_refused"
    if isinstance(error, UpstreamTimeoutError):
        return "timeout"
    if isinstance(error, RefusedError):
        return reason_of_status(error.status) or "refused"
    if isinstance(error, AnswerError):
        return "answer_error"
    if isinstance(error, UpstreamError):
        return "connection"
    return "unavailable" if isinstance(error, OverloadedError) else "refused"


def reason_of_status(status: int) -> FailureReason | None:
    """The reason that a status alone is for asking somebody else; None: it is none."""
    if status >= 500 or status == 408:
        return "server_error"
    if 300 <= status < 400:
        return "redirected"
    return "rate_limited" if status == 429 else None


def error_to_tell(failures: Sequence[FailedAttempt]) -> GatewayError:
    """The error that the client gets when all backends have failed.

    It is the first that an upstream gave as its answer, else the first of one that was asked in
    vain, else the first of one that was not asked. A fallback's refusal of a request that the model
    asked for would perhaps have taken is told never.

    Args:
        failures: in their order, at least one.
    """
    _, number = min((_weight(each, number), number) for number, each in enumerate(failures))
    error = failures[number].error
    waits = [each.error.retry_after_s for each in failures if each.error.retry_after_s is not None]
    if waits and (error.status >= 500 or error.status == 429):
        error.retry_after_s = min(waits)
    return error


def _weight(failure: FailedAttempt, number: int) -> int:
    if number and failure.reason in ("refused", "context_length", "not_found", "key_refused"):
        return 3
    if failure.reason == "unavailable":
        return 2
    return 0 if isinstance(failure.error, AnswerError) else 1


def _reason_of(
    response: UpstreamResponse, request: UpstreamRequest, upstream: UpstreamClient, returned: str
) -> FailureReason | None:
    status = response.status
    if status < 300:
        return None
    if (reason := reason_of_status(status)) is not None:
        return reason
    if status == 403 and not upstream.forwards_authorization:
        return "key_refused"
    path = request.path if isinstance(request.path, str) else request.path.decode("latin-1")
    # What is not there may also be an earlier response, which no other backend has either.
    if status == 404 and not path.endswith("/responses"):
        return "not_found"
    searched = b"" if response.encoded else response.first[:_SEARCHED_BYTES]
    if status in _TOO_LONG_STATUSES and _TOO_LONG.search(searched):
        return "context_length"
    return "refused" if returned == "all" else None


async def refusal_error(response: UpstreamResponse) -> RefusedError:
    """A refusal as an error; the answer is read and closed."""
    body, status = response.first, response.status
    try:
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
                while not response.at_eof and len(body) < _MAX_REFUSAL_BYTES:
                    body += await response.read()
    finally:
        response.close()
    readable = b"" if response.encoded else body
    retry_after_s = named_delay(response.hints, time.time())
    return RefusedError(refusal_of(readable, status), status, response.headers_for_client(), body,
                        retry_after_s=retry_after_s)  # fmt: skip
