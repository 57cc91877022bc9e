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

The cause of a local error is its `__cause__`; the cause of a server's error is `ServerError.error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FunctionsError(Exception):
    """Base of all errors of this package."""


class DefinitionError(FunctionsError, TypeError):
    """The decorated function cannot be a semantic function."""


class ArgumentError(FunctionsError, TypeError):
    """A call was given something that it cannot accept."""


class SessionError(FunctionsError, RuntimeError):
    """No session is open here, or the session has been closed."""


class NotReadyError(FunctionsError, RuntimeError):
    """A text was read without waiting, and is not here yet."""


class DeadlineError(FunctionsError, TimeoutError):
    """A wait reached its time limit; the text is still being written."""


class UnreachableError(FunctionsError, ConnectionError):
    """The server could not be reached, or the connection broke, after all retries."""


class ProtocolError(FunctionsError):
    """An answer that no Parrot Gateway gives; another server probably runs at that address."""


class ServerError(FunctionsError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        error: the server's `error` object, unchanged.
        message, code, param, type: its four fields; missing ones are None.
        request_id: id with which the operator finds the call in the log.
        failure: reason why a text has no value: `code`, `message`, `call`, and `cause`, which has
            the same form or is None.
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
    """The server has no room now, and had none during all retries."""


class DependencyFailedError(ServerError):
    """The call that writes this text, or an input of that call, failed or was cancelled."""
