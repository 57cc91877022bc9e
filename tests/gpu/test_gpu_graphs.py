"""Steps through captured CUDA graphs against the same steps launched one by one."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, VOCAB_SIZE, make_checkpoint
from harness.engine.paged import PagedHarness, PagedSequence
from parrot_engine import LLM, SamplingParams
from parrot_engine.attention.triton_backend import Parts, TritonAttention
from parrot_engine.batch import StepBatch
from parrot_engine.engine.builtin_engine import BuiltinEngine
from parrot_engine.exceptions import SettingsError
from parrot_engine.kernels import rowwise
from parrot_engine.kernels.attention import rotary_write
from parrot_engine.kernels.attention.hopper_prefill import hopper_prefill
from parrot_engine.kernels.attention.prefill_attention import prefill_attention
from parrot_engine.kernels.attention.split_attention import merge_splits, split_attention
from parrot_engine.loading.factory import EngineOptions, load_engine_alone
from parrot_engine.runner.graphs import CudaCapture, StepGraphs
from parrot_engine.runner.loader import load_runner
from parrot_engine.runner.model_runner import ModelRunner
from parrot_engine.settings import BuiltinSettings
from torch import Tensor
from transformers import LlamaConfig

pytestmark = pytest.mark.gpu

#: Heads of 128 in groups of four.
_CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=1024,
    intermediate_size=2048,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=VOCAB_SIZE - 1,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("graphs") / "llama", _CONFIG)


def _runner(
    path: Path,
    *,
    dtype: str = "float32",
    block_size: int = 16,
    wide_min_bytes: int | None = None,
    num_blocks: int = 2000,
) -> ModelRunner:
    settings = BuiltinSettings(
        device="cuda", dtype=dtype, num_blocks=num_blocks, block_size=block_size, cuda_graphs="off"
    )
    runner = load_runner(path, settings)
    if wide_min_bytes is not None:
        attention = runner._attention
        assert isinstance(attention, TritonAttention)
        runner._attention = TritonAttention(
            attention._shape,
            windows=attention._windows,
            device=torch.device("cuda"),
            dtype=getattr(torch, dtype),
            wide_min_bytes=wide_min_bytes,
        )
    return runner


def _use_graphs(runner: ModelRunner, *, capture: bool = False) -> StepGraphs:
    """Graphs that are captured when they are needed, or all of them at once."""
    graphs = runner.use_graphs(
        CudaCapture(torch.device("cuda")), max_rows=64, max_context=4096, max_tokens=2048
    )
    assert graphs is not None
    if capture:
        graphs.capture_all()
    return graphs


def _prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(1, VOCAB_SIZE - 1, (length,), generator=generator).tolist()


def _close(ours: Tensor, theirs: Tensor, bound: float = 2e-4) -> bool:
    return bool(ours.isfinite().all()) and float((ours - theirs).abs().max()) < bound


@pytest.mark.parametrize(("block_size", "chunk"), [(16, 60), (64, 1100)])
def test_mixed_batches(path: Path, block_size: int, chunk: int) -> None:
    lengths = (1, 15, 16, 17, 63, 64, 65, 300, 513, 900, 1100)
    prompts = [_prompt(length) for length in lengths]
    plain = PagedHarness(_runner(path, block_size=block_size))
    expected, expected_logits = plain.generate(prompts, 16, chunk=chunk)
    runner = _runner(path, block_size=block_size)
    graphs = _use_graphs(runner)
    tokens, logits = PagedHarness(runner).generate(prompts, 16, chunk=chunk)
    assert tokens == expected
    assert all(map(_close, logits, expected_logits))
    assert graphs.num_replays > 16
    assert bool(graphs.num_misses) == (chunk == 1100)


def test_windows(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "windows", CONFIGS["qwen2-windows"])
    prompts = [_prompt(length % 200 + 1) for length in (3, 40, 199, 77)]
    expected, _ = PagedHarness(_runner(path, num_blocks=200)).generate(prompts, 20, chunk=50)
    runner = _runner(path, num_blocks=200)
    graphs = _use_graphs(runner)
    tokens, _ = PagedHarness(runner).generate(prompts, 20, chunk=50)
    assert tokens == expected
    assert graphs.num_misses == 0


@pytest.mark.parametrize("wide_min_bytes", [0, 10**12])
def test_shared_prefixes(path: Path, wide_min_bytes: int) -> None:
    """Forks of one context, some more than a bucket; with wide items and without."""

    def run(runner: ModelRunner) -> list[Tensor]:
        harness = PagedHarness(runner)
        parent = PagedSequence()
        harness.fill(parent, _prompt(1100), chunk=700)
        children, copies = [], []
        for _ in range(41):
            child, copied = harness.fork(parent)
            children.append(child)
            copies += copied
        outputs = []
        for step in range(6):
            family = children[: 41 - 7 * step]
            rows = [harness.row(child, [6 * i + step + 1]) for i, child in enumerate(family)]
            outputs.append(runner.execute(StepBatch(rows, copies if step == 0 else [])))
        return outputs

    expected = run(_runner(path, wide_min_bytes=wide_min_bytes))
    runner = _runner(path, wide_min_bytes=wide_min_bytes)
    graphs = _use_graphs(runner)
    chosen: list[Parts] = []
    choose = graphs._choose

    def spy(*args: Any, **options: Any) -> Any:
        key = choose(*args, **options)
        if key is not None:
            chosen.append(key.parts)
        return key

    graphs._choose = spy  # type: ignore[method-assign]
    assert all(map(_close, run(runner), expected))
    assert (Parts(False, True) in chosen) == (wide_min_bytes == 0)
    assert Parts(False, False) in chosen or wide_min_bytes == 0


def _generate(runner: ModelRunner, steps: int) -> list[list[int | None]]:
    """Many steps are launched before the first is waited for, their rows in any order."""
    shuffle = random.Random(3)
    prompts = [_prompt(length) for length in (1, 5, 40, 200, 511, 512, 700)]
    order = list(range(len(prompts)))
    orders = []
    for step in range(steps):
        shuffle.shuffle(order)
        if step == steps // 2:
            order = order[:5]
        orders.append(list(order))
    return PagedHarness(runner).generate_ahead(prompts, orders)


def test_tokens_that_only_the_device_knows(path: Path) -> None:
    runner = _runner(path)
    graphs = _use_graphs(runner)
    ours = _generate(runner, 24)
    assert graphs.num_replays == 23
    assert ours == _generate(_runner(path), 24)


def test_a_step_with_nan_leaves_none_behind(path: Path) -> None:
    """Buffers are used again and again: what one step leaves in them must not matter."""
    runner = _runner(path)
    _use_graphs(runner)
    harness = PagedHarness(runner)
    sick, healthy = PagedSequence(), PagedSequence()
    harness.fill(sick, _prompt(600), chunk=100)
    harness.fill(healthy, _prompt(650), chunk=100)
    expected = _runner(path)
    plain = PagedHarness(expected)
    other = PagedSequence()
    plain.fill(other, _prompt(650), chunk=100)
    runner.kv_cache[:, :, sick.block_table] = float("nan")
    together = runner.execute(StepBatch([harness.row(sick, [1]), harness.row(healthy, [2])]))
    assert together[0].isnan().all()
    for token in (2, 3, 4):
        theirs = expected.execute(StepBatch([plain.row(other, [token])]))
        if token > 2:
            ours = runner.execute(StepBatch([harness.row(healthy, [token])]))
        else:
            ours = together[1:]
        assert _close(ours, theirs)


def test_nothing_is_compiled_after_the_graphs(path: Path) -> None:
    runner = _runner(path, dtype="bfloat16", wide_min_bytes=0)
    _use_graphs(runner, capture=True)
    kernels = [split_attention, merge_splits, prefill_attention, hopper_prefill]
    kernels += [rotary_write.rotate_and_write, rowwise.rms_norm_kernel, rowwise.swiglu_kernel]

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    before = compiled()
    for chunk, lengths in ((64, (1, 2, 16, 17, 100, 1000)), (512, (16, 31, 512)), (48, (700,))):
        PagedHarness(runner).generate([_prompt(length) for length in lengths], 12, chunk=chunk)
    assert compiled() == before


_PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


def test_the_engine_gives_the_same_with_graphs_and_without(path: Path) -> None:
    prompts = [_prompt(300) + _prompt(length) for length in (1, 7, 64, 500)]
    prompts += [_prompt(length, seed=5) for length in (1, 2, 1000)]
    said = {}
    for graphs in ("off", "lazy", "auto", "start"):
        with LLM(
            str(path),
            device="cuda",
            dtype="float32",
            num_blocks=500,
            max_batch_tokens=96,
            cuda_graphs=graphs,
        ) as llm:
            outputs = llm.generate(prompts, _PARAMS) + llm.generate(prompts[:2], _PARAMS, n=3)
            said[graphs] = [[o.token_ids for o in output.outputs] for output in outputs]
    assert said["off"] == said["lazy"] == said["auto"] == said["start"]


def test_an_idle_engine_captures_all_graphs(path: Path) -> None:
    options = EngineOptions(str(path), device="cuda", num_blocks=500, max_batch_tokens=96)
    engine = load_engine_alone(options)
    assert isinstance(engine, BuiltinEngine)
    taken = torch.cuda.memory_allocated()
    while engine.prepare():
        pass
    assert torch.cuda.memory_allocated() > taken
    assert not engine.prepare()
    engine.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_first(path: Path) -> None:
    prompts = [_prompt(length) for length in (1, 70, 300)]
    said = []
    for device in ("cuda:0", "cuda:1"):
        with LLM(str(path), device=device, dtype="float32", num_blocks=200) as llm:
            said.append([output.outputs[0].token_ids for output in llm.generate(prompts, _PARAMS)])
        torch.cuda.set_device(0)
    assert said[0] == said[1]


def test_the_cache_is_what_is_left_of_a_share(path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    share = 1 - free / total + 0.1
    with LLM(
        str(path),
        device="cuda",
        gpu_memory_utilization=share,
        max_batch_tokens=4096,
        cuda_graphs="lazy",
    ) as llm:
        taken = free - torch.cuda.mem_get_info()[0]
        print(f"{taken / total:.4f} of the memory, {llm.info.num_blocks} blocks")
        assert 0.08 * total < taken < 0.105 * total
        llm.generate(_prompt(3000), _PARAMS)


def test_a_share_of_its_own_does_not_count_what_others_take(path: Path) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    # As another engine would: memory that torch has not allocated in this process does not count.
    reserved = torch.cuda.memory_reserved()
    free = torch.cuda.mem_get_info()[0]
    with LLM(
        str(path), device="cuda", memory_share=0.1, max_batch_tokens=4096, cuda_graphs="lazy"
    ) as llm:
        taken = free - torch.cuda.mem_get_info()[0]
        print(f"{taken / total:.4f} of the memory, {reserved} reserved before")
        assert 0.07 * total < taken + reserved < 0.105 * total
        llm.generate(_prompt(3000), _PARAMS)


def test_a_share_that_is_too_small_says_so(path: Path) -> None:
    with pytest.raises(SettingsError, match="leaves nothing for the KV cache"):
        LLM(str(path), device="cuda", gpu_memory_utilization=0.001)
    with pytest.raises(SettingsError, match="memory_share"):
        LLM(str(path), device="cuda", memory_share=0.001)


def test_a_cache_that_does_not_fit_says_what_would(path: Path) -> None:
    with pytest.raises(SettingsError, match="would"):
        LLM(str(path), device="cuda", num_blocks=10**8)
