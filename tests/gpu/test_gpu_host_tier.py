"""The host tier on a GPU: bits, the order of streams, graphs, more contexts than fit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.dummy_engine import dummy_engine
from harness.engine_checks import greedy, run_until_idle, tokens_of
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.exceptions import SettingsError
from parrot_engine.kv_cache.host_copies import Copy, CudaCopies, HostMemory, make_copies
from parrot_engine.protocol import Fill, FreeContext, Generate
from parrot_engine.runner.model_runner import ModelRunner

pytestmark = pytest.mark.gpu

#: Cycles of the GPU: some tenth of a second.
LONG = 200_000_000


def wait(copy: Copy) -> None:
    """Until it is done."""
    deadline = time.monotonic() + 30
    while not copy.is_done():
        assert time.monotonic() < deadline
        time.sleep(0.0001)


def random_cache(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A KV cache of random bits, values that are no numbers among them."""
    probe = torch.empty(shape, dtype=dtype, device="cuda")
    probe.view(torch.uint8).random_(0, 256)
    torch.cuda.synchronize()
    return probe


def bits(cache: Tensor, block: int) -> Tensor:
    """Return what a block holds, as bytes."""
    return cache[:, :, block].contiguous().view(torch.uint8).cpu()


@pytest.fixture
def cache() -> Tensor:
    return random_cache(4, 2, 32, 2, 16, 64)


@pytest.fixture
def copies(cache: Tensor) -> Iterator[CudaCopies]:
    made = make_copies(cache, 40)
    assert isinstance(made, CudaCopies)
    # What is loaded or pinned for the first time may wait for the device.
    kept = cache[:, :, 31].clone()
    cache[:, :, 31].zero_()
    torch.cuda._sleep(1)
    for _ in range(2):
        wait(made.store([31], [39]))
        wait(made.load([39], [31], after=0, behind=[]))
    cache[:, :, 31] = kept
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()
    made.close()


# Bits


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((32, 2, 40, 8, 64, 128), torch.bfloat16),
        ((3, 2, 40, 2, 16, 64), torch.float32),
        ((2, 2, 40, 1, 5, 3), torch.float16),
        ((2, 2, 40, 3, 16, 96), torch.float16),
    ],
)
def test_bits_survive_the_way_there_and_back(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    cache = random_cache(*shape, dtype=dtype)
    copies = make_copies(cache, 24)
    before = [bits(cache, block) for block in range(shape[2])]
    count = min(8, copies.chunk)
    for first in range(0, 24, count):
        # Slots in runs and alone, blocks in no order.
        blocks = [(7 * index) % 40 for index in range(first, first + count)]
        wait(copies.store(blocks, list(range(first, first + count))))
    cache.view(torch.uint8).zero_()
    torch.cuda.synchronize()
    for first in range(0, 24, count):
        slots = list(range(first, first + count))[::-1]
        wait(copies.load(slots, [39 - slot for slot in slots], after=0, behind=[]))
    for slot in range(24):
        assert torch.equal(bits(cache, 39 - slot), before[(7 * slot) % 40])
    for block in range(16):
        assert not bits(cache, block).any()
    copies.close()


def test_copies_wait_for_nothing_on_the_host(cache: Tensor, copies: CudaCopies) -> None:
    wait(copies.store([1, 2], [0, 1]))
    wait(copies.load([0, 1], [3, 4], after=0, behind=[]))
    torch.cuda.set_sync_debug_mode("error")
    try:
        stored = copies.store([5, 6], [2, 3])
        copies.before_launch([stored])
        copies.after_launch(1)
        loaded = copies.load([2, 3], [7, 8], after=1, behind=[stored])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wait(loaded)
    assert torch.equal(bits(cache, 7), bits(cache, 5))


# Order


@pytest.mark.parametrize("after", [1, 0])
def test_blocks_come_in_behind_the_steps_that_read_them(
    cache: Tensor, copies: CudaCopies, after: int
) -> None:
    old, new = bits(cache, 3), bits(cache, 9)
    wait(copies.store([9], [0]))
    torch.cuda._sleep(LONG)
    seen = cache[:, :, 3].clone()
    copies.after_launch(1)
    copy = copies.load([0], [3], after=after, behind=[])
    if after == 0:
        # Nothing said that a step reads it: the copy does not wait.
        wait(copy)
    torch.cuda.synchronize()
    expected = old if after else new
    assert torch.equal(seen.view(torch.uint8).cpu(), expected)
    assert torch.equal(bits(cache, 3), new)


@pytest.mark.parametrize("is_told", [True, False])
def test_steps_wait_until_what_they_overwrite_was_read(
    cache: Tensor, copies: CudaCopies, is_told: bool
) -> None:
    old = bits(cache, 3)
    with torch.cuda.stream(copies._out):
        torch.cuda._sleep(LONG)
    copy = copies.store([3], [0])
    assert not copy.is_read()
    if is_told:
        copies.before_launch([copy])
    cache[:, :, 3].zero_()
    copies.after_launch(1)
    wait(copy)
    wait(copies.load([0], [4], after=1, behind=[]))
    assert torch.equal(bits(cache, 4), old) == is_told


def test_a_copy_that_is_on_its_way_out_can_come_back_in(cache: Tensor, copies: CudaCopies) -> None:
    old = bits(cache, 3)
    with torch.cuda.stream(copies._out):
        torch.cuda._sleep(LONG)
    stored = copies.store([3], [0])
    wait(copies.load([0], [4], after=0, behind=[stored]))
    assert torch.equal(bits(cache, 4), old)


def test_more_memory_than_there_is_names_the_setting() -> None:
    with pytest.raises(SettingsError, match="host_memory_gb"):
        HostMemory(1 << 50, is_pinned=True)


# Engines


def make_engine(folder: Path, **values: Any) -> BuiltinEngine:
    defaults = {
        "dtype": "float32",
        "block_size": 16,
        "max_batch_tokens": 256,
        "max_batch_size": 16,
        "host_min_tokens": 1,
    }
    return dummy_engine(folder, **{**defaults, **values})


def prompt(number: int, length: int) -> list[int]:
    """A prompt of its own."""
    return [(number * 131 + at * at + 7 * at) % 1000 for at in range(length)]


def two_rounds(engine: BuiltinEngine, contexts: int, length: int) -> list[list[int]]:
    """Return what contexts say that ask, are freed, and ask again, four at a time."""
    said = []
    for first in range(0, 2 * contexts, 4):
        ids = range(first, first + 4)
        primitives: list[Any] = []
        for number in ids:
            tokens = prompt(number % contexts, length + number % contexts)
            primitives += [Fill(number, tokens), Generate(number, greedy(12))]
        events = run_until_idle(engine, *primitives)
        said += [tokens_of(events, number) for number in ids]
        run_until_idle(engine, *(FreeContext(number) for number in ids))
        engine.check_integrity()
    return said


@pytest.mark.parametrize("graphs", ["off", "lazy"])
@pytest.mark.parametrize("overlap", ["off", "on", "auto"])
def test_many_contexts_say_the_same_with_and_without(
    tmp_path: Path, graphs: str, overlap: str
) -> None:
    how = {"cuda_graphs": graphs, "overlap": overlap}
    # 24 contexts of 13 to 15 blocks: the first engine keeps all of them, the second one in four.
    whole = make_engine(tmp_path, num_blocks=600, **how)
    expected = two_rounds(whole, 24, 200)
    whole_found = whole.stats().cached_tokens
    whole.close()
    engine = make_engine(tmp_path, num_blocks=100, host_blocks=500, **how)
    assert two_rounds(engine, 24, 200) == expected
    stats = engine.stats()
    assert stats.cached_tokens >= 0.9 * whole_found > 0
    assert stats.blocks_from_host >= 200
    engine.close()


def test_blocks_of_an_engine_keep_their_bits(tmp_path: Path) -> None:
    engine = make_engine(
        tmp_path, num_blocks=64, host_blocks=400, dtype="bfloat16", cuda_graphs="lazy", overlap="on"
    )
    runner, pool = engine._runner, engine._pool
    assert isinstance(runner, ModelRunner)
    kept: dict[bytes, Tensor] = {}
    seen = 0
    for number in range(48):
        run_until_idle(engine, Fill(number, prompt(number % 16, 161)), Generate(number, greedy(4)))
        torch.cuda.synchronize()
        for block in range(64):
            digest = pool.digest(block)
            if digest is not None:
                now = bits(runner.kv_cache, block)
                seen += digest in kept
                assert torch.equal(kept.setdefault(digest, now), now)
        run_until_idle(engine, FreeContext(number))
    assert engine.stats().blocks_from_host > 200
    assert seen > 1000
    engine.close()


def test_what_is_worth_it_is_measured(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, num_blocks=64, host_memory_gb=0.05, host_min_tokens=None)
    said = two_rounds(engine, 8, 100)
    assert said[:8] == said[8:]
    engine.close()
