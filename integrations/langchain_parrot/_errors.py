"""Every error that this package raises, and what each answer of a server becomes.

    ParrotError, a langchain_core ModelError
    ├── DeferredError and its kinds   a value is not to be had, see `_deferred_errors`
    ├── ParrotFeatureError            the server cannot do what was asked for
    └── those of `_openai_errors`     each is an error of openai and of langchain_core too

`_openai_errors` is loaded with the first error that needs it: this module imports no `openai`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from langchain_core.exceptions import ModelError

if TYPE_CHECKING:
    import openai

    from langchain_parrot._deferred_errors import DeferredError


class ParrotError(ModelError):
    """Base of all errors of this package."""


class ParrotFeatureError(ParrotError):
    """The server cannot do what was asked for: it is too old, or no Parrot Gateway at all."""


def from_openai(error: Exception, base_url: str) -> Exception:
    """What to raise in place of an error of the `openai` client, or of the HTTP library below it.

    Args:
        error: what a call raised.
        base_url: where it was sent, for the message.

    Returns:
        An error of this package, whose message says what to do; `error` itself if it is none that
        a server or a connection is to blame for.
    """
    import openai

    from langchain_parrot import _openai_errors

    if isinstance(error, ParrotError):
        return error
    if isinstance(error, openai.APIError):
        return _of_a_value(error) or _openai_errors.of_api_error(error, base_url)
    # NOTE: openai 2.x lets an error of httpx through when a stream breaks.
    if type(error).__module__.partition(".")[0] in {"httpx", "httpx2", "httpcore", "httpcore2"}:
        return _openai_errors.of_broken_stream(error, base_url)
    return error


def _of_a_value(error: openai.APIError) -> DeferredError | None:
    """The error of a value that a call needed, if it is one."""
    from langchain_parrot._deferred_errors import (
        DeferredCancelledError,
        DeferredExpiredError,
        DeferredFailedError,
    )

    message, code = words_of(error), error.code
    if code in {"dependency_failed", "transform_failed", "no_text", "answer_unusable"}:
        return DeferredFailedError(
            f"{message} Mend what it names and run the chain again; without defer=True the step "
            "that fails raises by itself.",
            code=code,
        )
    if code == "variable_not_found":
        return DeferredExpiredError(
            f"{message} Values are forgotten with their session (sessions.ttl_s after its last "
            "use) and when the gateway stops: run the deferred call again.",
            code=code,
        )
    if code == "call_cancelled":
        return DeferredCancelledError(f"{message} Run the chain again.", code=code)
    return None


def words_of(error: openai.APIError) -> str:
    """The server's own message as a sentence, without the client's wrapping of its body."""
    body = error.body
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        words = str(body["message"])
        return words if words.endswith((".", "!", "?")) else words + "."
    return error.message


@contextmanager
def translated(base_url: str) -> Iterator[None]:
    """Inside, what the `openai` client raises becomes an error of this package."""
    try:
        yield
    except Exception as error:
        better = from_openai(error, base_url)
        if better is error:
            raise
        raise better from error
