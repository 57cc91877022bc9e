"""Every error that this package raises; all are langchain_core's `ModelError`s.

    ParrotError
    ├── ParrotFeatureError             the server cannot do what a call asks for
    ├── DeferredError                  a deferred text has no value
    │   ├── DeferredFailedError        its call failed, or a call that this one needed
    │   ├── DeferredCancelledError     its call was cancelled, or the session deleted
    │   ├── DeferredExpiredError       the gateway does not know the reference any more
    │   ├── DeferredTimeoutError       not written at the end of a wait; also a TimeoutError
    │   └── DeferredUnreachableError   no answer from the gateway; also a ConnectionError
    └── those of `_openai_errors`      each is an exception of `openai` too

Imports no `openai`.
"""

from __future__ import annotations

from langchain_core.exceptions import ModelConnectionError, ModelError, ModelTimeoutError


class ParrotError(ModelError):
    """Base of all errors of this package."""


class ParrotFeatureError(ParrotError):
    """The server cannot do what a call asks for: it is too old, or not a Parrot Gateway."""


class DeferredError(ParrotError):
    """A deferred text has no value.

    Args:
        message: cause and remedy.
        reference: reference of the text; None if the failed call needed another text.
        code: the gateway's error code, if it gave one.
    """

    #: True if asking again gives the same error.
    is_final = False

    def __init__(
        self, message: str, *, reference: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.code = code


class DeferredFailedError(DeferredError):
    """The call that writes the text failed, or one that it needs did."""

    is_final = True


class DeferredCancelledError(DeferredError):
    """The call that writes the text was cancelled."""

    is_final = True


class DeferredExpiredError(DeferredError):
    """The gateway has forgotten the text, or it belongs to another key."""

    is_final = True


class DeferredTimeoutError(DeferredError, ModelTimeoutError, TimeoutError):
    """The text was not written within the wait; its call goes on."""


class DeferredUnreachableError(DeferredError, ModelConnectionError, ConnectionError):
    """The gateway gave no answer."""


def timed_out(reference: str, timeout: float) -> DeferredTimeoutError:
    """Return the error at the end of a wait of `timeout` seconds."""
    return DeferredTimeoutError(
        f"The deferred text {reference} was not written within {timeout:g} s. Its call goes on: "
        "look again, wait longer with text.get(timeout=…), or see what it waits for with "
        "GET /v1/sessions/{session}/graph.",
        reference=reference,
        code="timeout",
    )
