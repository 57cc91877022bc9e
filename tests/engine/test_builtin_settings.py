"""Settings of the builtin engine, and the size of its cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parrot_engine.builtin.settings import BuiltinSettings, kv_blocks
from parrot_engine.exceptions import SettingsError

MIB = 2**20


@pytest.mark.parametrize(
    "name",
    [
        "block_size",
        "num_blocks",
        "kv_cache_bytes",
        "max_batch_size",
        "max_batch_tokens",
        "max_context_tokens",
        "max_logprob_tokens",
        "max_waiting",
        "max_contexts",
        "num_threads",
    ],
)
def test_numbers_must_be_positive(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name}: must be at least 1") as caught:
        replace(BuiltinSettings(), **{name: 0})
    assert caught.value.setting == name


def blocks(free_bytes: int = 1024 * MIB, max_position: int = 1000, **values: int) -> int:
    return kv_blocks(
        BuiltinSettings(**values),  # type: ignore[arg-type]
        bytes_per_block=MIB,
        max_position=max_position,
        free_bytes=free_bytes,
    )


def test_given_sizes_win() -> None:
    assert blocks(num_blocks=7, kv_cache_bytes=100 * MIB) == 7
    assert blocks(kv_cache_bytes=100 * MIB + 5) == 100
    with pytest.raises(SettingsError, match="kv_cache_bytes"):
        blocks(kv_cache_bytes=MIB - 1)


def test_default_holds_several_long_contexts_within_the_memory() -> None:
    # 63 blocks hold 1,000 tokens.
    assert blocks(free_bytes=10**6 * MIB) == 16 * 63
    assert blocks(free_bytes=10**6 * MIB, max_context_tokens=100) == 16 * 7
    assert blocks(free_bytes=10**6 * MIB, max_context_tokens=9999) == 16 * 63
    assert blocks(free_bytes=1000 * MIB) == 400
    with pytest.raises(SettingsError, match="smaller model or block_size"):
        blocks(free_bytes=2 * MIB)
