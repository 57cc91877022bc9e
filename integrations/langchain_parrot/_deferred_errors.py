"""What a deferred text raises when it has no value, each with the way out in its message.

DeferredError                a ParrotError
├── DeferredFailedError      the call that was to write it failed, or something before it did
├── DeferredCancelledError   that call was cancelled, or its session deleted
├── DeferredExpiredError     the gateway does not know the reference any more
├── DeferredTimeoutError     not here yet at the end of a wait; also a TimeoutError
└── DeferredUnreachableError the gateway could not be asked; also a ConnectionError
"""

from __future__ import annotations

from langchain_core.exceptions import ModelConnectionError, ModelTimeoutError

from langchain_parrot._errors import ParrotError


class DeferredError(ParrotError):
    """A deferred text has no value.

    Args:
        message: what happened and what to do.
        reference: of the text; None where a call names another one that it needed.
        code: the gateway's error code, where it gave one.
    """

    #: Whether asking again would answer the same.
    is_final = False

    def __init__(
        self, message: str, *, reference: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.code = code


class DeferredFailedError(DeferredError):
    """The call that was to write the text failed, or one that it needed did."""

    is_final = True


class DeferredCancelledError(DeferredError):
    """The call that was to write the text was cancelled."""

    is_final = True


class DeferredExpiredError(DeferredError):
    """The gateway has forgotten the text, or it belongs to another key."""

    is_final = True


class DeferredTimeoutError(DeferredError, ModelTimeoutError, TimeoutError):
    """The text was not here at the end of the wait; its call goes on."""


class DeferredUnreachableError(DeferredError, ModelConnectionError, ConnectionError):
    """The gateway gave no answer."""
