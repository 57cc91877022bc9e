"""Settings of the builtin engine, and the size of its cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parrot_engine.exceptions import SettingsError
from parrot_engine.runner.memory import free_memory_bytes, gpu_cache_blocks, share_left_bytes
from parrot_engine.runner.profiling import largest_step
from parrot_engine.settings import BuiltinSettings, kv_blocks

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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.1),
        ("cuda_graphs", "on"),
        ("kv_cache_dtype", "fp8"),
    ],
)
def test_other_values_out_of_range(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name) as caught:
        BuiltinSettings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.setting == name


def test_a_gpu_has_defaults_of_its_own() -> None:
    assert BuiltinSettings.for_device("cpu") == BuiltinSettings()
    on_gpu = BuiltinSettings.for_device("cuda", max_batch_size=3)
    assert (on_gpu.block_size, on_gpu.max_batch_size, on_gpu.max_batch_tokens) == (64, 3, 8192)
    assert on_gpu.speculative_batch_tokens == 256
    with pytest.raises(SettingsError, match="block_size"):
        BuiltinSettings.for_device("cuda", block_size=0)


GIB = 2**30


def gpu_blocks(**values: float) -> int:
    sizes: dict[str, float] = {
        "bytes_per_block": 8 * MIB,
        "total_bytes": 100 * GIB,
        "free_bytes": 80 * GIB,
        "step_bytes": 2 * GIB,
        "graph_bytes": 1 * GIB,
        "utilization": 0.75,
    }
    return gpu_cache_blocks(**{**sizes, **values})  # type: ignore[arg-type]


def test_a_gpu_cache_takes_what_is_left_of_its_share() -> None:
    # 80 free, 25 to be left alone, 3 for steps and graphs
    assert gpu_blocks() == 52 * GIB // (8 * MIB)
    assert gpu_blocks(utilization=1.0) == 77 * GIB // (8 * MIB)
    # Memory that others took counts against the share too.
    assert gpu_blocks(free_bytes=70 * GIB) == 42 * GIB // (8 * MIB)


def test_a_gpu_without_room_for_the_cache_says_so() -> None:
    with pytest.raises(SettingsError, match="lower max_batch_tokens") as caught:
        gpu_blocks(step_bytes=60 * GIB)
    assert caught.value.setting == "gpu_memory_utilization"


def test_a_share_of_the_memory_is_an_engines_own_account() -> None:
    device = torch.device("cpu")
    whole, half = (share_left_bytes(device, share) for share in (1.0, 0.5))
    assert 0 < half <= whole <= free_memory_bytes(device) * 1.1
    # This process has more than that already.
    assert share_left_bytes(device, 1e-6) == 0
    with pytest.raises(SettingsError) as caught:
        gpu_blocks(free_bytes=GIB, utilization=1.0, setting="memory_share")  # type: ignore[arg-type]
    assert caught.value.setting == "memory_share"
    with pytest.raises(SettingsError, match="at most 1"):
        BuiltinSettings(memory_share=1.5)


@given(st.integers(1, 700), st.integers(1, 40), st.integers(1, 90), st.integers(1, 50))
def test_the_largest_step_is_what_settings_allow(
    max_tokens: int, max_rows: int, longest: int, max_logprobs: int
) -> None:
    settings = BuiltinSettings(
        max_batch_tokens=max_tokens, max_batch_size=max_rows, max_logprob_tokens=max_logprobs
    )
    batch = largest_step(settings, longest)
    counts = [len(row.token_ids) for row in batch.rows]
    scored = [len(wish.target_token_ids) for wish in batch.scoring if wish is not None]
    assert len(counts) <= max_rows
    assert max(counts) <= longest
    assert batch.num_tokens <= max_tokens
    assert sum(scored) == min(max_logprobs, max_tokens, longest)
    # Tokens go unused only where rows are as many and as long as they may be.
    spare = max_tokens - batch.num_tokens
    assert spare == 0 or (len(counts) == max_rows and sorted(counts)[1:2] in ([], [longest]))


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
