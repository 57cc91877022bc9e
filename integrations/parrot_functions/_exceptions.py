"""Every error that this package raises.

    FunctionsError
    ├── DefinitionError       a decorated function cannot be a semantic function; a TypeError
    ├── ArgumentError         a call was given what it cannot take; a TypeError
    ├── SessionError          no session is open, or this one is closed; a RuntimeError
    ├── NotReadyError         the text is not here yet; a RuntimeError
    ├── DeadlineError         a wait came to the end of its time; a TimeoutError
    ├── UnreachableError      no answer from the server; a ConnectionError
    ├── ProtocolError         an answer that no Parrot Gateway gives
    └── ServerError           the server refused or failed; carries its `error` object
        ├── OverloadedError        503, after all retries
        └── DependencyFailedError  424, or a call whose input could not be submitted

The cause of an error is its `__cause__` where it happened here, and `ServerError.error` where it
happened on the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FunctionsError(Exception):
    """Base of all errors of this package."""


class DefinitionError(FunctionsError, TypeError):
    """The decorated function cannot be a semantic function."""


class ArgumentError(FunctionsError, TypeError):
    """A call was given something that it cannot take."""


class SessionError(FunctionsError, RuntimeError):
    """No session is open here, or the one that is meant has been closed."""


class NotReadyError(FunctionsError, RuntimeError):
    """A text was to be read without waiting for it, and is not here yet."""


class DeadlineError(FunctionsError, TimeoutError):
    """A wait came to the end of its time; what was waited for goes on."""


class UnreachableError(FunctionsError, ConnectionError):
    """The server could not be reached, or the connection broke, after all retries."""


class ProtocolError(FunctionsError):
    """An answer that no Parrot Gateway gives; most likely another server stands at that address."""


class ServerError(FunctionsError):
    """The server answered with an error.

    Attributes:
        status: of HTTP.
        error: the server's `error` object, as it came.
        message, code, param, type: its four fields; those that are missing are None.
        request_id: by which the operator finds the call in the log.
        failure: why a text has no value: `code`, `message`, `call`, and `cause`, which is of the
            same form or None.
    """

    def __init__(
        self,
        status: int,
        error: Mapping[str, Any],
        request_id: str | None = None,
        failure: Mapping[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.error = dict(error)
        self.message = str(error.get("message") or "no message was given")
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.type: str | None = error.get("type")
        self.request_id = request_id
        self.failure = None if failure is None else dict(failure)
        at = f" (request {request_id})" if request_id is not None else ""
        super().__init__(f"{status} {self.code or 'error'}: {self.message}{at}")


class OverloadedError(ServerError):
    """The server has no room now, and had none in all retries."""


class DependencyFailedError(ServerError):
    """A call that was to write this text, or an input of it, failed or was cancelled."""
