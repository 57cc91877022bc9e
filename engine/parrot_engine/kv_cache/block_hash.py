"""Hashes of KV blocks: of their tokens and of all tokens before them.

Shared by engines, which find cached blocks by these hashes, and by the gateway, which locates
prefixes. The standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b


def root_hash(salt: str, adapter: str = "") -> bytes:
    """The hash before a context's first block; one chain of hashes per salt and adapter.

    `adapter` is its id, of up to 64 bytes; empty for none.
    """
    return blake2b(
        salt.encode("utf-8", "surrogatepass"),
        digest_size=32,
        key=adapter.encode(),
        person=b"kv root",
    ).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block: of its tokens and, by its parent's hash, of all before them.

    The same on every machine, so that hashes may be compared between engines. Cryptographic: no
    tenant can make a prompt that collides with another's.
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(packed, digest_size=32, key=parent, person=b"kv block").digest()


def short_hash(digest: bytes) -> int:
    """The first 64 bits of a block's hash: enough to locate a prefix.

    NOTE: never to decide what a block holds; two blocks of a million share a short hash with a
    probability of 3e-8.
    """
    return int.from_bytes(digest[:8], "little")


def prompt_hashes(
    token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = ""
) -> tuple[int, ...]:
    """Short hashes of a prompt's full blocks, in order.

    Args:
        token_ids: the prompt.
        block_size: tokens of a block, as the engine has them.
        salt, adapter: those of its Fill.
    """
    digest = root_hash(salt, adapter)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = block_hash(digest, token_ids[start : start + block_size])
        hashes.append(short_hash(digest))
    return tuple(hashes)
