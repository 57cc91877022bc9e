"""Who may call: the bearer key of the gateway.

Keeps only a hash of the key and compares in constant time. Tenants come later; this is the one
place that decides.
"""

from __future__ import annotations

import hashlib
import hmac

from parrot_gateway.exceptions import AuthenticationError


class KeyCheck:
    """Checks `Authorization: Bearer …` against one key, or lets everybody in.

    Args:
        key: the secret; None when the gateway serves its own host only.
    """

    __slots__ = ("_digest",)

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else _digest(key.encode())

    @property
    def required(self) -> bool:
        """Whether callers need a key."""
        return self._digest is not None

    def check(self, authorization: bytes | None) -> None:
        """Let the call pass.

        Raises:
            AuthenticationError: no key, or the wrong one.
        """
        if self._digest is None:
            return
        if authorization is None:
            raise AuthenticationError(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        scheme, _, credentials = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(
            _digest(credentials.strip()), self._digest
        ):
            raise AuthenticationError("Incorrect API key provided.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
