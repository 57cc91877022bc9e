"""A model over several GPUs says what it says on one; a lost process ends the engine."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from checkpoints import CONFIGS, make_checkpoint
from parrot_engine.builtin.collective import PeerMemory
from parrot_engine.builtin.engine import BuiltinEngine
from parrot_engine.builtin.settings import BuiltinSettings
from parrot_engine.protocol import Fill, Generate, SamplingParams
from parrot_engine.testing.driving import greedy, run_until_idle, tokens_of

pytestmark = pytest.mark.gpu

PROMPT = [(7 * index + 3) % 250 for index in range(200)]

#: A rank dies while steps run. In a process of its own: work on the other GPU never ends.
_LOSS = """
import os, signal, sys
from pathlib import Path
from parrot_engine.builtin.engine import BuiltinEngine
from parrot_engine.builtin.settings import BuiltinSettings
from parrot_engine.exceptions import ShardError
from parrot_engine.protocol import Fill, Generate
from parrot_engine.testing.driving import greedy

settings = BuiltinSettings.for_device(
    "cuda", dtype="bfloat16", num_blocks=64, tensor_parallel=2, cuda_graphs="lazy"
)
engine = BuiltinEngine.load(Path(sys.argv[1]), settings, model="m")
engine.submit([Fill(1, list(range(60))), Generate(1, greedy(400))])
for _ in range(20):
    engine.step()
(pid,) = engine._runner._lead.followers.pids
os.kill(pid, signal.SIGKILL)
try:
    for _ in range(1000):
        engine.step()
except ShardError as error:
    print(error, flush=True)
    engine.close()
    sys.exit(0)
"""


def conversation(folder: Path, dtype: str, **changes: object) -> list[list[int]]:
    given = {"dtype": dtype, "num_blocks": 64, "block_size": 16, "seed": 5, **changes}
    settings = BuiltinSettings.for_device("cuda", device="cuda:0", max_batch_tokens=96, **given)
    engine = BuiltinEngine.load(folder, settings, model="m")
    drawn = SamplingParams(20, temperature=0.9, top_p=0.9, seed=3, ignore_eos=True)
    try:
        events = run_until_idle(
            engine,
            Fill(1, PROMPT),
            Generate(1, greedy(40)),
            Fill(2, PROMPT[:60]),
            Generate(2, drawn),
            Fill(3, [9, 8, 7], parent_context_id=1),
            Generate(3, greedy(30, repetition_penalty=1.3)),
        )
    finally:
        engine.close()
    return [tokens_of(events, context_id) for context_id in (1, 2, 3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough heads for the kernels."""
    config = CONFIGS["llama"]
    config = type(config).from_dict(
        {
            **config.to_dict(),
            "hidden_size": 256,
            "intermediate_size": 512,
            "head_dim": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        }
    )
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), config)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """What one GPU says."""
    return conversation(folder, "float32", cuda_graphs="lazy")


@pytest.mark.parametrize("peer_memory", [True, False])
@pytest.mark.parametrize("cuda_graphs", ["lazy", "off"])
@pytest.mark.parametrize("size", [size for size in (2, 4) if size <= torch.cuda.device_count()])
def test_several_gpus_say_what_one_says(
    folder: Path, expected: list[list[int]], size: int, cuda_graphs: str, peer_memory: bool
) -> None:
    # A process can exchange peer memory once.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        said = process.submit(
            conversation,
            folder,
            "float32",
            tensor_parallel=size,
            cuda_graphs=cuda_graphs,
            peer_memory=peer_memory,
        ).result(timeout=110)
    assert said == expected


def test_a_second_engine_of_a_process_does_without_peer_memory(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerMemory, "was_exchanged", True)
    assert conversation(folder, "float32", tensor_parallel=2, cuda_graphs="lazy") == expected


def test_a_cache_sized_from_memory_is_the_same_on_both(folder: Path) -> None:
    settings = BuiltinSettings.for_device(
        "cuda", dtype="bfloat16", tensor_parallel=2, gpu_memory_utilization=0.2, cuda_graphs="off"
    )
    engine = BuiltinEngine.load(folder, settings, model="m")
    try:
        events = run_until_idle(engine, Fill(1, PROMPT), Generate(1, greedy(8)))
        assert len(tokens_of(events, 1)) == 8
        assert engine.info.num_blocks is not None
        assert engine.info.num_blocks > 1000
    finally:
        engine.close()


def test_a_lost_rank_ends_the_engine(folder: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", _LOSS, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "rank 1 of the engine was lost: ended by SIGKILL" in process.stdout, process.stderr
    assert process.returncode == 70
