"""Every error that reaches a client.

    GatewayError                       500 server_error
    ├── InvalidRequestError            400 (code optional, names the field in `param`)
    │   ├── ContextLengthError         400 context_length_exceeded
    │   ├── TransformSyntaxError       400 transform_syntax
    │   └── UnsupportedError           400 unsupported_parameter
    ├── AuthenticationError            401 invalid_api_key
    ├── NotFoundError                  404
    │   ├── ModelNotFoundError         404 model_not_found
    │   ├── ContextNotFoundError       404 context_not_found
    │   ├── SessionNotFoundError       404 session_not_found
    │   └── VariableNotFoundError      404 variable_not_found
    ├── MethodNotAllowedError          405
    ├── ConflictError                  409 conflict
    │   ├── CallCancelledError         409 call_cancelled
    │   ├── CycleError                 409 dependency_cycle
    │   ├── DoubleProducerError        409 output_taken
    │   ├── SessionFullError           409 session_full
    │   └── VariableStateError         409 variable_already_written
    ├── RequestTooLargeError           413 request_too_large
    ├── ValueTooLargeError             413 value_too_large
    ├── ContextTooLargeError           413 context_too_large
    ├── TransformError                 422 transform_failed
    ├── DependencyFailedError          424 dependency_failed
    ├── OverloadedError                503 engine_overloaded, with retry-after
    │   ├── DrainingError              503 shutting_down
    │   ├── ModelLoadingError          503 model_loading
    │   └── EngineLostError            503 engine_lost
    ├── DeadlineError                  504 timeout
    └── UpstreamError                  502 upstream_error
        ├── AnswerError                502 answer_unusable
        └── UpstreamTimeoutError       504 upstream_timeout

Each class fixes its status, type and code; instances hold a message and the offending field. The
message tells what happened, to which name, and what to do next. No cause, path or stack trace of
the server goes into it.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class TransformSyntaxError(InvalidRequestError):
    """A transform that does not follow the grammar.

    Args:
        text: the whole transform.
        position: of the character, counted from 0, at which it goes wrong.
        expected: what should stand there.
    """

    default_code: ClassVar[str | None] = "transform_syntax"

    def __init__(self, text: str, position: int, expected: str) -> None:
        rest = text[position : position + 20]
        near = f"near {rest!r}" if rest else "its end"
        super().__init__(
            f"Invalid transform at character {position}, {near}: expected {expected}.",
            param="transform",
        )
        self.text = text
        self.position = position
        self.expected = expected


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


class ContextNotFoundError(NotFoundError):
    """A named context that a session does not have, or that holds nothing yet."""

    default_code: ClassVar[str | None] = "context_not_found"

    def __init__(self, context: str, session: str) -> None:
        super().__init__(
            f"Session '{session}' has no context '{context[:80]}' that holds anything. "
            "A call on it that succeeds makes it.",
            param="context",
        )
        self.context = context


class SessionNotFoundError(NotFoundError):
    """A session that does not exist, has expired, or is another tenant's: told alike."""

    default_code: ClassVar[str | None] = "session_not_found"

    def __init__(self, session: str, *, param: str | None = "session") -> None:
        super().__init__(f"Session '{session}' is unknown or has expired.", param=param)
        self.session = session


class VariableNotFoundError(NotFoundError):
    """A variable that does not exist, has expired, or is another tenant's: told alike."""

    default_code: ClassVar[str | None] = "variable_not_found"

    def __init__(self, variable: str, *, param: str | None = "variable") -> None:
        super().__init__(
            f"Variable '{variable}' is unknown or has expired. "
            "Nothing was sent to a model; run the call that produces it again.",
            param=param,
        )
        self.variable = variable


class MethodNotAllowedError(GatewayError):
    """A known path, but not with this method."""

    status = 405
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "method_not_allowed"


class ConflictError(GatewayError):
    """The request contradicts what the session already holds; the same again would fail again."""

    status = 409
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "conflict"
    #: OpenAI's clients repeat a 409 by themselves, which helps nobody here.
    should_retry = False


class CallCancelledError(ConflictError):
    """A call was cancelled by a request of its owner, or with its session."""

    default_code: ClassVar[str | None] = "call_cancelled"


class CycleError(ConflictError):
    """A call would need its own output.

    Args:
        path: names along the cycle, calls and variables in turn; the first is not repeated.
    """

    default_code: ClassVar[str | None] = "dependency_cycle"
    #: Steps told at each end of a long cycle.
    _SHOWN = 8

    def __init__(self, path: Sequence[str], *, param: str | None = "inputs") -> None:
        steps = [f"'{name}'" for name in path]
        if len(steps) > 2 * self._SHOWN:
            left_out = len(steps) - 2 * self._SHOWN
            steps[self._SHOWN : -self._SHOWN] = [f"… {left_out} more …"]
        story = " -> ".join([*steps, f"'{path[0]}'"])
        super().__init__(
            f"This call would wait for its own output: {story}. Nothing was submitted.", param=param
        )
        self.path = tuple(path)


class DoubleProducerError(ConflictError):
    """A variable has one producer; this one has it already, or a value."""

    default_code: ClassVar[str | None] = "output_taken"

    def __init__(self, variable: str, taken_by: str, *, param: str | None = "output") -> None:
        super().__init__(
            f"Variable '{variable}' is already written by {taken_by}. "
            "Give the output of this call another name.",
            param=param,
        )
        self.variable = variable


class SessionFullError(ConflictError):
    """A session holds as much as the settings allow, and all of it is still needed."""

    default_code: ClassVar[str | None] = "session_full"

    def __init__(self, session: str, held: str, setting: str) -> None:
        super().__init__(
            f"Session '{session}' holds {held}, all still needed (setting sessions.{setting}). "
            "Wait for its calls, delete variables, or begin another session.",
            param="session",
        )
        self.session = session


class VariableStateError(ConflictError):
    """A variable was to change in a way that its state does not allow.

    Args:
        story: the states it went through, oldest first, with who caused them.
    """

    default_code: ClassVar[str | None] = "variable_already_written"

    def __init__(self, variable: str, attempt: str, story: Sequence[str]) -> None:
        super().__init__(
            f"Variable '{variable}' cannot {attempt}; it went {' -> '.join(story)}. "
            "A variable is written once: use another name.",
            param="variable",
        )
        self.variable = variable
        self.story = tuple(story)


class RequestTooLargeError(GatewayError):
    """The body is over the limit in the settings."""

    status = 413
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "request_too_large"


class ValueTooLargeError(GatewayError):
    """The value of a variable is over the limit in the settings."""

    status = 413
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "value_too_large"

    def __init__(
        self, variable: str, limit_bytes: int, setting: str = "sessions.max_value_bytes"
    ) -> None:
        super().__init__(
            f"The value of variable '{variable}' does not fit into {limit_bytes} bytes "
            f"(setting {setting}).",
            param="variable",
        )
        self.variable = variable
        self.limit_bytes = limit_bytes


class ContextTooLargeError(GatewayError):
    """A named context is over the limit in the settings; it stays as it was."""

    status = 413
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "context_too_large"

    def __init__(self, context: str, limit_bytes: int) -> None:
        super().__init__(
            f"Context '{context}' would not fit into {limit_bytes} bytes "
            "(setting sessions.max_context_bytes). Begin another one.",
            param="context",
        )
        self.context = context
        self.limit_bytes = limit_bytes


class TransformError(GatewayError):
    """A transform could not be applied to the text it was given.

    Args:
        step: the step of the pipeline, as written.
        reason: what was wrong with its text.
    """

    status = 422
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "transform_failed"
    #: The same transform of the same text would fail again.
    should_retry = False

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"The transform {step} failed: {reason}.", param="transform")
        self.step = step
        self.reason = reason


class DependencyFailedError(GatewayError):
    """What a call or a reader waits for will never come: its producer failed or was cancelled.

    Args:
        variable: name of the variable that was waited for.
        call: id of the call that was to write it, if one was.
        cause: what happened there, fit for the client's eyes.
    """

    status = 424
    type = "invalid_request_error"
    default_code: ClassVar[str | None] = "dependency_failed"
    #: The same call again would meet the same failure.
    should_retry = False

    def __init__(self, *, variable: str, call: str | None, cause: str) -> None:
        producer = f" of call '{call}'" if call is not None else ""
        super().__init__(f"Variable '{variable}'{producer} has no value: {cause}", param="variable")
        self.variable = variable
        self.call = call


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


class AnswerError(UpstreamError):
    """A model's answer told an error, or no text can be read out of it.

    Args:
        message: what happened, fit for the client's eyes.
        answer_status: HTTP status of the answer, where it was one of failure.
    """

    default_code: ClassVar[str | None] = "answer_unusable"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        answer_status: int | None = None,
    ) -> None:
        super().__init__(message, code=code)
        self.answer_status = answer_status
