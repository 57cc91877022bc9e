"""Every error that reaches a client.

    GatewayError                       500 server_error
    ├── PoisonedCallError              500 poisoned_call
    ├── InvalidRequestError            400 (code optional, names the field in `param`)
    │   ├── ContextLengthError         400 context_length_exceeded
    │   ├── TransformSyntaxError       400 transform_syntax
    │   └── UnsupportedError           400 unsupported_parameter
    ├── AuthenticationError            401 invalid_api_key
    ├── ForbiddenError                 403 forbidden
    ├── NotFoundError                  404
    │   ├── ModelNotFoundError         404 model_not_found
    │   ├── ContextNotFoundError       404 context_not_found
    │   ├── SessionNotFoundError       404 session_not_found
    │   ├── StreamNotFoundError        404 stream_not_found
    │   └── VariableNotFoundError      404 variable_not_found
    ├── MethodNotAllowedError          405
    ├── ConflictError                  409 conflict
    │   ├── CallCancelledError         409 call_cancelled
    │   ├── CycleError                 409 dependency_cycle
    │   ├── DoubleProducerError        409 output_taken
    │   ├── SessionFullError           409 session_full
    │   └── VariableStateError         409 variable_already_written
    ├── EventsGoneError                410 events_gone
    ├── PreconditionFailedError        412 settings_changed
    ├── RequestTooLargeError           413 request_too_large
    ├── ValueTooLargeError             413 value_too_large
    ├── ContextTooLargeError           413 context_too_large
    ├── UnsupportedMediaTypeError      415 unsupported_media_type
    ├── ModelLoadError                 422 model_load_failed
    ├── TransformError                 422 transform_failed
    ├── DependencyFailedError          424 dependency_failed
    ├── PreconditionRequiredError      428 if_match_required
    ├── OverloadedError                503 engine_overloaded, with retry-after
    │   ├── DrainedError               503 drained
    │   ├── DrainingError              503 shutting_down
    │   ├── ModelLoadingError          503 model_loading
    │   ├── EngineLostError            503 engine_lost
    │   └── LinkingBehindError         503 linking_behind
    ├── DeadlineError                  504 timeout
    ├── HubError                       502 hub_unreachable
    ├── DiskFullError                  507 disk_full
    └── UpstreamError                  502 upstream_error
        ├── AnswerError                502 answer_unusable
        │   ├── MalformedAnswerError   502 answer_unusable
        │   └── RefusedError           the upstream's own status and code
        ├── UpstreamKeyError           502 upstream_key_refused
        └── UpstreamTimeoutError       504 upstream_timeout

Each class fixes its status, type and code; instances hold a message and the offending field. The
message says what happened, to which name, and what to do next. No cause, path or stack trace of
the server goes into it. The functions at the end make the refusals that many routes share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeAlias

import msgspec

#: How an engine was lost: its link broke; it sent no heartbeats; it sent them and computed nothing;
#: it broke down; it broke the protocol; it left with work left; its model was unloaded; or it was
#: gone before the call began there.
LossKind: TypeAlias = Literal[
    "link", "silent", "stalled", "crashed", "protocol", "left", "unloaded", "unplaced"
]


class GatewayError(Exception):
    """Base of all errors that are answered in OpenAI's shape.

    Subclasses give what differs from their base as class arguments: `status`, `code`,
    `should_retry`.
    """

    status: int = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = "server_error"
    #: Sent as `x-should-retry`; None leaves the decision to the client's own rule.
    should_retry: ClassVar[bool | None] = None

    def __init_subclass__(
        cls, *, status: int | None = None, code: str | None = None, should_retry: bool | None = None
    ) -> None:
        if status is not None:
            cls.status = status
            cls.type = "server_error" if status >= 500 else "invalid_request_error"
            cls.default_code = code
        elif code is not None:
            cls.default_code = code
        if should_retry is not None:
            cls.should_retry = should_retry

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
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}

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


class InvalidRequestError(GatewayError, status=400):
    """The request cannot be honoured as written."""


class ContextLengthError(InvalidRequestError, code="context_length_exceeded"):
    """Prompt and requested output do not fit the model's context."""


class UnsupportedError(InvalidRequestError, code="unsupported_parameter"):
    """A parameter that this model cannot honour; never ignored in silence."""


class TransformSyntaxError(InvalidRequestError, code="transform_syntax"):
    """A transform that does not follow the grammar.

    Args:
        text: the whole transform.
        position: of the character, counted from 0, at which it goes wrong.
        expected: what should stand there.
    """

    def __init__(self, text: str, position: int, expected: str) -> None:
        rest = text[position : position + 20]
        near = f"near {rest!r}" if rest else "its end"
        super().__init__(
            f"Invalid transform at character {position}, {near}: expected {expected}.",
            param="transform",
        )
        self.position = position
        self.expected = expected


class AuthenticationError(GatewayError, status=401, code="invalid_api_key"):
    """No key, or a wrong one."""


class ForbiddenError(GatewayError, status=403, code="forbidden"):
    """A caller that a gateway without a key does not serve."""


class NotFoundError(GatewayError, status=404, code="not_found"):
    """A route or an object that does not exist."""


class ModelNotFoundError(NotFoundError, code="model_not_found"):
    """A model name that nothing serves."""


class ContextNotFoundError(NotFoundError, code="context_not_found"):
    """A named context that a session does not have, or that holds nothing yet."""

    def __init__(self, context: str, session: str) -> None:
        super().__init__(
            f"Session '{session}' has no context '{context[:80]}' that holds anything. "
            "A call on it that succeeds makes it.",
            param="context",
        )


class SessionNotFoundError(NotFoundError, code="session_not_found"):
    """A session that does not exist, has expired, or is another tenant's, without distinction."""

    def __init__(self, session: str, *, param: str | None = "session") -> None:
        super().__init__(f"Session '{session}' is unknown or has expired.", param=param)


class StreamNotFoundError(NotFoundError, code="stream_not_found"):
    """A stream that was not made to be resumed, is no longer kept, or is another tenant's, without
    distinction."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"Stream '{stream[:80]}' is unknown or no longer kept: it is for 'streams.resume_s' "
            "after its last reader left, and not over a restart. Send the call again.",
            param="stream_id",
        )


class VariableNotFoundError(NotFoundError, code="variable_not_found"):
    """A variable that does not exist, has expired, or is another tenant's, without distinction."""

    def __init__(self, variable: str, *, param: str | None = "variable") -> None:
        super().__init__(
            f"Variable '{variable}' is unknown or has expired. "
            "Nothing was sent to a model; run the call that produces it again.",
            param=param,
        )


class MethodNotAllowedError(GatewayError, status=405, code="method_not_allowed"):
    """A known path, but not with this method."""


# OpenAI's clients repeat a 409 by themselves, which cannot succeed here.
class ConflictError(GatewayError, status=409, code="conflict", should_retry=False):
    """The request contradicts what the session already holds; the same again would fail again."""


class CallCancelledError(ConflictError, code="call_cancelled"):
    """A call was cancelled by a request of its owner, or with its session."""


class CycleError(ConflictError, code="dependency_cycle"):
    """A call would need its own output.

    Args:
        path: names along the cycle, calls and variables in turn; the first is not repeated.
    """

    #: Steps shown at each end of a long cycle.
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


class DoubleProducerError(ConflictError, code="output_taken"):
    """A variable has one producer; this one has it already, or a value."""

    def __init__(self, variable: str, taken_by: str, *, param: str | None = "output") -> None:
        super().__init__(
            f"Variable '{variable}' is already written by {taken_by}. "
            "Give the output of this call another name.",
            param=param,
        )


class SessionFullError(ConflictError, code="session_full"):
    """A session holds as much as the settings allow, and all of it is still needed."""

    def __init__(self, session: str, held: str, setting: str) -> None:
        super().__init__(
            f"Session '{session}' holds {held}, all still needed (setting sessions.{setting}). "
            "Wait for its calls, delete variables, or begin another session.",
            param="session",
        )


class VariableStateError(ConflictError, code="variable_already_written"):
    """A variable was to change in a way that its state does not allow.

    Args:
        story: the states it went through, oldest first, with who caused them.
    """

    def __init__(self, variable: str, attempt: str, story: Sequence[str]) -> None:
        super().__init__(
            f"Variable '{variable}' cannot {attempt}; it went {' -> '.join(story)}. "
            "A variable is written once: use another name.",
            param="variable",
        )
        self.story = tuple(story)


class EventsGoneError(GatewayError, status=410, code="events_gone", should_retry=False):
    """A stream is still there, but no longer the events from which it was to be resumed.

    Args:
        first: number of events before the oldest one that is kept.
    """

    def __init__(self, first: int) -> None:
        super().__init__(
            f"The events up to number {first} of this stream are no longer kept (setting "
            "streams.max_stream_bytes). Resume it from there on, or send the call again.",
            param="starting_after",
        )


class PreconditionFailedError(
    GatewayError, status=412, code="settings_changed", should_retry=False
):
    """The thing to be replaced has changed since the client read it."""


class PreconditionRequiredError(
    GatewayError, status=428, code="if_match_required", should_retry=False
):
    """A request that replaces something does not say what."""


class RequestTooLargeError(GatewayError, status=413, code="request_too_large"):
    """The body is over the limit in the settings."""


class UnsupportedMediaTypeError(GatewayError, status=415, code="unsupported_media_type"):
    """A body in a form that is not taken."""


class ValueTooLargeError(GatewayError, status=413, code="value_too_large"):
    """The value of a variable is over the limit in the settings."""

    def __init__(
        self, variable: str, limit_bytes: int, setting: str = "sessions.max_value_bytes"
    ) -> None:
        super().__init__(
            f"The value of variable '{variable}' does not fit into {limit_bytes} bytes "
            f"(setting {setting}).",
            param="variable",
        )


class ContextTooLargeError(GatewayError, status=413, code="context_too_large"):
    """A named context is over the limit in the settings; it stays as it was."""

    def __init__(self, context: str, limit_bytes: int) -> None:
        super().__init__(
            f"Context '{context}' would not fit into {limit_bytes} bytes "
            "(setting sessions.max_context_bytes). Begin another one.",
            param="context",
        )


class ModelLoadError(GatewayError, status=422, code="model_load_failed", should_retry=False):
    """A model that was to be loaded cannot be served; the reason is the engine's."""


class TransformError(GatewayError, status=422, code="transform_failed", should_retry=False):
    """A transform could not be applied to its text; the same again would fail again.

    Args:
        step: the step of the pipeline, as written.
        reason: what was wrong with its text.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"The transform {step} failed: {reason}.", param="transform")
        self.step = step


class DependencyFailedError(GatewayError, status=424, code="dependency_failed", should_retry=False):
    """The producer of what a call or a reader waits for failed or was cancelled.

    Args:
        variable: name of the variable that was waited for.
        call: id of the call that was to write it, if one was.
        cause: what happened there, fit for the client's eyes.
    """

    def __init__(self, *, variable: str, call: str | None, cause: str) -> None:
        producer = f" of call '{call}'" if call is not None else ""
        super().__init__(f"Variable '{variable}'{producer} has no value: {cause}", param="variable")


class OverloadedError(GatewayError, status=503, code="engine_overloaded"):
    """No room now; the client may come back after `retry_after_s`."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)


class DrainedError(OverloadedError, code="drained"):
    """The operator has drained whatever could answer.

    Args:
        what: is drained, as the beginning of a sentence.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} by this gateway's operator. Try again later.", retry_after_s=10.0)


class DrainingError(OverloadedError, code="shutting_down"):
    """The gateway is shutting down and takes no new calls."""


class ModelLoadingError(OverloadedError, code="model_loading"):
    """The model is known, but its engine is not ready yet."""


class EngineLostError(OverloadedError, code="engine_lost"):
    """The engine that ran the call went away.

    Args:
        kind: the reason in a word, for metrics.
    """

    def __init__(self, message: str, kind: LossKind = "unplaced") -> None:
        super().__init__(message)
        self.kind: LossKind = kind


class PoisonedCallError(GatewayError, code="poisoned_call", should_retry=False):
    """A call has lost several engines without progress, or too many in all.

    Args:
        losses: engines that were lost while they ran it.
    """

    def __init__(self, losses: int) -> None:
        super().__init__(
            f"This call was stopped: {losses} engines were lost while they ran it, and it is not "
            "tried on another. Tell the operator, whose log names them, before you send it again."
        )


class LinkingBehindError(OverloadedError, code="linking_behind"):
    """The linking process has not answered a question in time, so that nobody knows."""

    def __init__(self) -> None:
        super().__init__(
            "The linking process is behind and has not said whether it knows this. Ask again.",
            retry_after_s=5.0,
        )


class DeadlineError(GatewayError, status=504, code="timeout", should_retry=False):
    """A wait came to the end of its time."""


class HubError(GatewayError, status=502, code="hub_unreachable", should_retry=False):
    """The hub could not be reached, or a download from it broke off."""


class DiskFullError(GatewayError, status=507, code="disk_full", should_retry=False):
    """A download, a file or a batch does not fit on the disk."""


# The gateway has already retried: the client must not do the work three times over.
class UpstreamError(GatewayError, status=502, code="upstream_error", should_retry=False):
    """An upstream server could not be reached or broke off, after all retries."""


class UpstreamKeyError(UpstreamError, code="upstream_key_refused"):
    """An upstream refuses the key that the gateway has for it, which is no fault of the caller."""


class UpstreamTimeoutError(UpstreamError, status=504, code="upstream_timeout"):
    """An upstream server did not answer in time."""


class AnswerError(UpstreamError, code="answer_unusable"):
    """A model's answer reports an error, or no text can be read out of it.

    Args:
        upstream_status: of an answer that is an error by its status.
    """

    def __init__(
        self, message: str, *, code: str | None = None, upstream_status: int | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.upstream_status = upstream_status


class MalformedAnswerError(AnswerError):
    """A model's answer, or an event of it, cannot be read."""


class RefusedError(AnswerError):
    """An upstream's own refusal, which goes to the client as it came.

    Args:
        refusal: what it says.
        status: of the upstream.
        headers: for the client.
        body: as it came.
        retry_after_s: the wait that it names.
    """

    def __init__(
        self,
        refusal: AnswerError,
        status: int,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        *,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(refusal.message, code=refusal.code, upstream_status=status)
        self.status = status
        self.retry_after_s = retry_after_s
        self._named_s = retry_after_s
        self._headers = headers
        self._body = body

    def body(self) -> bytes:
        return self._body

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Its own headers, and the wait of another backend where that is shorter."""
        if self.retry_after_s == self._named_s:
            return list(self._headers)
        kept = [each for each in self._headers if not each[0].startswith(b"retry-after")]
        return [*kept, (b"retry-after", f"{self.retry_after_s:g}".encode())]


def missing_parameter(name: str) -> InvalidRequestError:
    """A required field is left out."""
    return InvalidRequestError(
        f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
    )


def wrong_type(name: str, expected: str) -> InvalidRequestError:
    """A field is of another type than `expected`, which has an article."""
    return InvalidRequestError(
        f"Invalid type for '{name}': expected {expected}.", param=name, code="invalid_type"
    )


def invalid_value(name: str, reason: str) -> InvalidRequestError:
    """A field cannot have this value; `reason` is the message behind the colon."""
    return InvalidRequestError(f"Invalid '{name}': {reason}", param=name, code="invalid_value")


def empty_array(name: str) -> InvalidRequestError:
    """An array has to have an item."""
    return InvalidRequestError(
        f"Invalid '{name}': empty array. Expected an array with minimum length 1, but got an empty "
        "array instead.",
        param=name,
        code="empty_array",
    )


def long_array(name: str, limit: int, length: int) -> InvalidRequestError:
    """An array has `length` items, more than `limit`."""
    return InvalidRequestError(
        f"Invalid '{name}': array too long. Expected an array with maximum length {limit}, but got "
        f"an array with length {length} instead.",
        param=name,
        code="array_above_max_length",
    )


def mutually_exclusive(first: str, second: str) -> InvalidRequestError:
    """Two fields of one request; the error names the second in `param`."""
    return InvalidRequestError(
        f"Mutually exclusive parameters: '{first}' and '{second}' cannot be used together.",
        param=second,
        code="mutually_exclusive_parameters",
    )


def unsupported_value(name: str, reason: str) -> UnsupportedError:
    """A value that this model cannot honour; `reason` is the message behind the colon."""
    return UnsupportedError(f"Unsupported value: {reason}", param=name, code="unsupported_value")


#: Classes of errors of downloads by their codes; `HubError` for others.
_DOWNLOAD_ERRORS: dict[str, type[GatewayError]] = {
    "model_not_found": ModelNotFoundError,
    "model_gated": ForbiddenError,
    "no_safetensors": ModelLoadError,
    "download_too_large": RequestTooLargeError,
    "download_cancelled": ConflictError,
    "disk_full": DiskFullError,
}


def download_error(code: str, reason: str) -> GatewayError:
    """The error of a download that failed with a code of `parrot_engine.loading.hub`."""
    return _DOWNLOAD_ERRORS.get(code, HubError)(reason, param="model", code=code)
