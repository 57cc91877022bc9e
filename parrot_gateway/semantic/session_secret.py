"""Session ids of Parrot's own API: secret numbers, and proofs of their ownership.

The number alone lets a client add calls; reading and deleting need the proof too. Neither is
stored: a session is kept under a hash of its number, and the proof is an HMAC of the number under a
key that never leaves the process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from parrot_gateway.exceptions import AuthenticationError

#: Random bits of a number; one more bit above them keeps its length constant.
RANDOM_BITS = 127


class SessionSecrets:
    """Makes and checks the numbers of sessions.

    Args:
        key: of at least 32 random bytes.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) < 32:
            raise ValueError("the key is too short")
        self._key = key

    @staticmethod
    def mint() -> int:
        """Make a new positive number."""
        return (1 << RANDOM_BITS) | secrets.randbits(RANDOM_BITS)

    @staticmethod
    def name_of(number: int) -> str:
        """Return the name under which a number's session is kept."""
        digest = hashlib.blake2b(b"%d" % number, digest_size=16, person=b"parrot session")
        return f"parrot-{digest.hexdigest()}"

    def proof_of(self, number: int) -> str:
        """Return the `session_auth` of a number."""
        return hmac.new(self._key, b"%d" % number, "sha256").hexdigest()

    def check(self, number: int, proof: str) -> None:
        """Check a proof.

        Raises:
            AuthenticationError: the proof does not match the number, with or without a session.
        """
        given = proof.encode("utf-8", "surrogatepass")
        if not hmac.compare_digest(given, self.proof_of(number).encode()):
            raise AuthenticationError(
                "The 'session_auth' is not that of this session. It comes with the answer to "
                "POST /v1/session.",
                param="session_auth",
                code="invalid_session_auth",
            )
