"""Values of deferred texts, read from the gateway with the openai client that the model has."""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from langchain_parrot._deferred_errors import (
    DeferredCancelledError,
    DeferredError,
    DeferredExpiredError,
    DeferredFailedError,
    DeferredTimeoutError,
    DeferredUnreachableError,
)

if TYPE_CHECKING:
    import openai

#: Longer than the gateway was asked to wait, so that it is the one that ends the wait.
_GRACE_S = 10.0


class GatewayResolver:
    """Reads variables by `GET /v1/variables/{reference}`, which waits for the value.

    Goes through the client's own `get`, which is the same in openai 2.x and 3.x, and so has its
    base URL, key, proxies and retries.

    Args:
        client: gives the client; called when a text is looked at.
        async_client: gives the one for `aget`.
    """

    def __init__(
        self,
        client: Callable[[], openai.OpenAI],
        async_client: Callable[[], openai.AsyncOpenAI],
    ) -> None:
        self._client = client
        self._async_client = async_client

    def get(self, reference: str, timeout: float) -> str:
        """The value; blocks for it.

        Raises:
            DeferredError: see `_deferred_errors`.
        """
        try:
            variable = self._client().get(
                _path(reference), cast_to=object, options=_options(timeout)
            )
        except Exception as error:
            _raise_for(error, reference, timeout)
        return _value_of(variable, reference, timeout)

    async def aget(self, reference: str, timeout: float) -> str:
        """The same in an event loop."""
        try:
            variable = await self._async_client().get(
                _path(reference), cast_to=object, options=_options(timeout)
            )
        except Exception as error:
            _raise_for(error, reference, timeout)
        return _value_of(variable, reference, timeout)


def _path(reference: str) -> str:
    return f"/variables/{urllib.parse.quote(reference, safe='')}"


def _options(timeout: float) -> Any:
    return {"params": {"timeout": f"{timeout:g}"}, "timeout": timeout + _GRACE_S}


def _value_of(variable: Any, reference: str, timeout: float) -> str:
    if not isinstance(variable, dict) or variable.get("object") != "variable":
        raise DeferredError(
            f"The answer for {reference} is not one of Parrot Gateway. Does base_url end in "
            "/v1, and does a gateway stand there?",
            reference=reference,
        )
    value = variable.get("value")
    if not isinstance(value, str):
        raise timed_out(reference, timeout)
    return value


def timed_out(reference: str, timeout: float) -> DeferredTimeoutError:
    """The error of a wait that came to its end."""
    return DeferredTimeoutError(
        f"The deferred text {reference} was not written within {timeout:g} s. Its call goes on: "
        "look again, wait longer with text.get(timeout=…), or see what it waits for with "
        "GET /v1/sessions/{session}/graph.",
        reference=reference,
        code="timeout",
    )


def _raise_for(error: Exception, reference: str, timeout: float) -> NoReturn:
    """Raise what the client's error means for a deferred text."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        raise timed_out(reference, timeout) from error
    if isinstance(error, openai.APIConnectionError):
        raise DeferredUnreachableError(
            f"The gateway gave no answer for the deferred text {reference}: {error} Is it running "
            "at base_url? What it holds is lost when it stops: then run the chain again.",
            reference=reference,
        ) from error
    if not isinstance(error, openai.APIStatusError):
        raise error
    body: Any = error.body
    told = body if isinstance(body, dict) else {}
    code = told.get("code")
    message = str(told.get("message") or error.message)
    if error.status_code == 404:
        raise DeferredExpiredError(
            f"The gateway does not know the deferred text {reference}: {message} Texts are "
            "forgotten with their session (sessions.ttl_s after its last use) and when the "
            "gateway stops, and only the key that made them reads them. Run the chain again, or "
            "look at a text (str(text)) before it is old.",
            reference=reference,
            code=code,
        ) from error
    if error.status_code == 409:
        raise DeferredCancelledError(
            f"The call of the deferred text {reference} was cancelled: {message} Run the chain "
            "again.",
            reference=reference,
            code=code,
        ) from error
    if error.status_code in {401, 403}:
        raise DeferredError(
            f"The gateway refused to tell the deferred text {reference}: {message} Check api_key.",
            reference=reference,
            code=code,
        ) from error
    raise DeferredFailedError(
        f"The deferred text {reference} has no value: {message} Mend what the message names and "
        "run the chain again; without defer=True the failing step raises by itself.",
        reference=reference,
        code=code,
    ) from error
