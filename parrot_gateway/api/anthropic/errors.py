"""Errors in the shape that Anthropic's clients read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from parrot_gateway.exceptions import GatewayError
from parrot_gateway.http.exchange import Exchange, Headers

_ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
#: Names of a chat's fields, and those of a message that they come from.
_FIELD_NAMES = (
    (re.compile(r"\bfunction\.parameters\b"), "input_schema"),
    (re.compile(r"(?<=tools\[)(\d+)\]\.function\b"), r"\1]"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "output_config.format"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_tokens"),
    (re.compile(r"\breasoning_effort\b"), "output_config.effort"),
)


def use_anthropic_shape(exchange: Exchange) -> None:
    """Give an exchange errors in Anthropic's shape, and `request-id`."""

    def add_request_id(headers: Headers) -> None:
        if not any(name == b"request-id" for name, _ in headers):
            headers.append((b"request-id", exchange.request_id.encode()))

    def write(error: GatewayError) -> bytes:
        return msgspec.json.encode(error_of(error.status, message_of(error), exchange.request_id))

    exchange.on_headers(add_request_id)
    exchange.on_error(write)


def error_of(status: int, message: str, request_id: str | None = None) -> dict[str, Any]:
    """An error as an answer or an event holds it, its type by the status."""
    kind = _ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    error = {"type": "error", "error": {"type": kind, "message": message}}
    return error if request_id is None else {**error, "request_id": request_id}


def message_of(error: GatewayError) -> str:
    """The message, which names the field at fault: there is no other place for that."""
    message = error.message
    if error.param is not None and f"'{error.param}'" not in message:
        message = f"{error.param}: {message}"
    for pattern, name in _FIELD_NAMES:
        message = pattern.sub(name, message)
    return message


def failure_event(error: GatewayError) -> bytes:
    """A failure in mid-stream, which ends it."""
    return (
        b"event: error\ndata: "
        + msgspec.json.encode(error_of(error.status, message_of(error)))
        + b"\n\n"
    )
