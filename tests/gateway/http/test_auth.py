"""The bearer key."""

from __future__ import annotations

import pytest

from parrot_gateway.exceptions import AuthenticationError
from parrot_gateway.http.auth import KeyCheck


def test_open_without_a_key() -> None:
    KeyCheck(None).check(None)
    assert not KeyCheck(None).required


@pytest.mark.parametrize("sent", [b"Bearer secret", b"bearer secret", b"Bearer  secret"])
def test_the_right_key_passes(sent: bytes) -> None:
    KeyCheck("secret").check(sent)


@pytest.mark.parametrize(
    "sent", [None, b"", b"secret", b"Bearer", b"Bearer ", b"Bearer Secret", b"Basic secret",
             b"Bearer secret2", b"Bearer \xff\xfe"],
)  # fmt: skip
def test_anything_else_is_a_401(sent: bytes | None) -> None:
    with pytest.raises(AuthenticationError) as caught:
        KeyCheck("secret").check(sent)
    assert caught.value.status == 401
    assert caught.value.code == "invalid_api_key"
    assert "secret" not in caught.value.message


def test_the_key_is_not_kept() -> None:
    check = KeyCheck("very-secret")
    assert b"very-secret" not in check._digest  # type: ignore[operator]
