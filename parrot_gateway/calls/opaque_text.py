"""Opaque texts that clients carry and bring back: compactions, and reasoning that is not shown.

They are neither secret nor trusted: one holds what its caller sent or was answered, and comes back
as input like any other.
"""

from __future__ import annotations

import base64
import binascii
import zlib

#: Of the unpacked content.
MAX_BYTES = 4 * 1024 * 1024
#: How packed reasoning begins.
_REASONING = "parrot_reasoning1."


def pack(mark: str, data: bytes) -> str:
    """Data as a text that begins with a mark."""
    return mark + base64.urlsafe_b64encode(zlib.compress(data)).decode()


def unpack(mark: str, content: str) -> bytes | None:
    """The data that a text holds; None where it was not packed under this mark."""
    if not content.startswith(mark):
        return None
    try:
        data = base64.urlsafe_b64decode(content.removeprefix(mark))
        return zlib.decompressobj().decompress(data, MAX_BYTES)
    except (binascii.Error, ValueError, zlib.error):
        return None


def pack_reasoning(text: str) -> str:
    return pack(_REASONING, text.encode("utf-8", "replace"))


def unpack_reasoning(content: str) -> str | None:
    """The reasoning that a text holds; None where it was packed by another server."""
    data = unpack(_REASONING, content)
    return None if data is None else data.decode("utf-8", "replace")
