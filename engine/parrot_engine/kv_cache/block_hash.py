"""Hashes of KV blocks, over their tokens and all tokens before them.

Engines find cached blocks by these hashes, and the gateway locates prefixes. Uses only the standard
library.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Return the hash before a context's first block; each salt and adapter has its own chain.

    `adapter` is its id, of up to 64 bytes; empty for none.
    """
    return blake2b(
        salt.encode("utf-8", "surrogatepass"),
        digest_size=32,
        key=adapter.encode(),
        person=b"kv root",
    ).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a full block: of its tokens and, through its parent's hash, of all before
    them.

    It is the same on every machine, so hashes can be compared between engines. It is cryptographic,
    so no tenant can make a prompt that collides with another's.
    """
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return blake2b(packed, digest_size=32, key=parent, person=b"kv block").digest()


def short_hash(digest: bytes) -> int:
    """Return the first 64 bits of a block's hash, enough to locate a prefix.

    NOTE: never use it to decide the content of a block; among a million blocks, two share a short
    hash with probability 3e-8.
    """
    return int.from_bytes(digest[:8], "little")


def prompt_hashes(
    token_ids: Sequence[int], block_size: int, salt: str = "", adapter: str = ""
) -> tuple[int, ...]:
    """Return the short hashes of a prompt's full blocks, in order.

    Args:
        token_ids: the prompt.
        block_size: the engine's tokens per block.
        salt, adapter: those of the prompt's Fill.
    """
    digest = root_hash(salt, adapter)
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        digest = block_hash(digest, token_ids[start : start + block_size])
        hashes.append(short_hash(digest))
    return tuple(hashes)
