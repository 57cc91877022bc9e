"""Every error that reaches a client.

    GatewayError                       500 server_error
    ├── InvalidRequestError            400 (code optional, names the field in `param`)
    │   ├── ContextLengthError         400 context_length_exceeded
    │   └── UnsupportedError           400 unsupported_parameter
    ├── AuthenticationError            401 invalid_api_key
    ├── NotFoundError                  404
    │   └── ModelNotFoundError         404 model_not_found
    ├── MethodNotAllowedError          405
    ├── RequestTooLargeError           413 request_too_large
    ├── OverloadedError                503 engine_overloaded, with retry-after
    │   ├── DrainingError              503 shutting_down
    │   ├── ModelLoadingError          503 model_loading
    │   └── EngineLostError            503 engine_lost
    ├── DeadlineError                  504 timeout
    └── UpstreamError                  502 upstream_error
        └── UpstreamTimeoutError       504 upstream_timeout

Each class fixes its status, type and code; instances hold a message and the offending field. The
message tells what happened, to which name, and what to do next. No cause, path or stack trace of
the server goes into it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class GatewayError(Exception):
    """Base of all errors that are answered in OpenAI's shape."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "server_error"
    #: Sent as `x-should-retry`; None leaves the decision to the client's own rule.
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, str | None]:
        """The value of `error` in the body: the four keys that clients require."""
        return {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }

    def body(self) -> bytes:
        """The JSON body of the answer."""
        return msgspec.json.encode({"error": self.to_dict()})

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Extra response headers: when and whether to retry."""
        headers: list[tuple[bytes, bytes]] = []
        if self.retry_after_s is not None:
            headers.append((b"retry-after", f"{self.retry_after_s:g}".encode()))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


class InvalidRequestError(GatewayError):
    """The request cannot be honoured as written."""

    status = 400
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = None


class ContextLengthError(InvalidRequestError):
    """Prompt and requested output do not fit the model's context."""

    default_code: ClassVar[str | None] = "context_length_exceeded"


class UnsupportedError(InvalidRequestError):
    """A parameter that this model cannot honour; never ignored in silence."""

    default_code: ClassVar[str | None] = "unsupported_parameter"


class AuthenticationError(GatewayError):
    """No key, or a wrong one."""

    status = 401
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "invalid_api_key"


class NotFoundError(GatewayError):
    """A route or an object that does not exist."""

    status = 404
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "not_found"


class ModelNotFoundError(NotFoundError):
    """A model name that nothing serves."""

    default_code: ClassVar[str | None] = "model_not_found"


class MethodNotAllowedError(GatewayError):
    """A known path, but not with this method."""

    status = 405
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "method_not_allowed"


class RequestTooLargeError(GatewayError):
    """The body is over the limit in the settings."""

    status = 413
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "request_too_large"


class OverloadedError(GatewayError):
    """No room now; the client may come back after `retry_after_s`."""

    status = 503
    type = "server_error"
    default_code: ClassVar[str | None] = "engine_overloaded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class DrainingError(OverloadedError):
    """The gateway is shutting down and takes no new calls."""

    default_code: ClassVar[str | None] = "shutting_down"


class ModelLoadingError(OverloadedError):
    """The model is known, but its engine is not ready yet."""

    default_code: ClassVar[str | None] = "model_loading"


class EngineLostError(OverloadedError):
    """The engine that ran the call went away."""

    default_code: ClassVar[str | None] = "engine_lost"


class DeadlineError(GatewayError):
    """A wait came to the end of its time."""

    status = 504
    type = "server_error"
    default_code: ClassVar[str | None] = "timeout"
    should_retry = False


class UpstreamError(GatewayError):
    """An upstream server could not be reached or broke off, after all retries."""

    status = 502
    type = "server_error"
    default_code: ClassVar[str | None] = "upstream_error"
    #: The gateway has already retried: the client must not do the work three times over.
    should_retry = False


class UpstreamTimeoutError(UpstreamError):
    """An upstream server did not answer in time."""

    status = 504
    default_code: ClassVar[str | None] = "upstream_timeout"
