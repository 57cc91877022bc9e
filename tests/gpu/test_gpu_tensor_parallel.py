"""A model over several GPUs says what it says on one; a lost process ends the engine.

All stories of a number of GPUs run in two processes (`ranks`), because starting one takes longer
than the story: an engine of several ranks is two interpreters that load torch, and then meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

from harness.engine.checkpoints import CONFIGS, make_checkpoint
from harness.engine.ranks import Process, Story, started
from harness.lora_folders import make_adapter

pytestmark = pytest.mark.gpu

SIZES = [size for size in (2, 4) if size <= torch.cuda.device_count()]

#: Gives the process of this name and number of GPUs, started when it is first asked for.
Processes: TypeAlias = Callable[[str, int], Process]


def stories(name: str, size: int, adapters: list[str]) -> list[Story]:
    """List what is told in one process, in this order.

    A process can exchange peer memory once: the first engine of each does.
    """
    ranks: dict[str, Any] = {"tensor_parallel": size, "max_loras": 2}
    off = {**ranks, "cuda_graphs": "off"}
    lazy = {**ranks, "cuda_graphs": "lazy"}
    sized = {**off, "num_blocks": None, "gpu_memory_utilization": 0.1}
    if name == "graphs":
        kind = "loss" if size == 2 else "conversation"
        return [Story("peer memory, graphs", lazy, kind, adapters)]
    alone = {"cuda_graphs": "lazy", "max_loras": 2}
    return [
        *([Story("alone", alone, adapters=adapters)] if size == 2 else []),
        Story("peer memory, kernel by kernel", off, adapters=adapters),
        Story("a second engine", lazy),
        Story("NCCL, kernel by kernel", {**off, "peer_memory": False}, adapters=adapters),
        Story("a cache sized from memory", sized),
    ]


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> int:
    """GPUs; all tests of a number, and so its processes, are done before those of the next."""
    count: int = request.param
    return count


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
def processes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """All processes of this module; none outlives it."""
    logs = tmp_path_factory.mktemp("logs")
    adapters = [
        str(make_adapter(logs / f"adapter-{rank}", folder, rank=rank, seed=rank))
        for rank in (4, 8, 3)
    ]
    with ExitStack() as stack:

        @cache
        def process(name: str, size: int) -> Process:
            log = logs / f"{name}-{size}.log"
            return stack.enter_context(
                started(folder, "cuda:0", stories(name, size, adapters), log)
            )

        yield process


def tell(processes: Processes, process: str, size: int, name: str) -> dict[str, Any]:
    told = processes(process, size).told(name)
    # Shown with -s, or when the test fails.
    print(f"{process} of {size} GPUs, {name}: {told['seconds']}")
    return told


def said_alone(processes: Processes) -> list[list[int]]:
    """Return what one GPU says."""
    said: list[list[int]] = tell(processes, "kernels", 2, "alone")["said"]
    assert [len(tokens) for tokens in said] == [40, 20, 30]
    return said


def check_adapters(processes: Processes, told: dict[str, Any]) -> None:
    """Three adapters, of which a step may have two, say what they say on one GPU."""
    adapted: list[list[int]] = tell(processes, "kernels", 2, "alone")["adapted"]
    assert [len(tokens) for tokens in adapted] == [20, 20, 20]
    assert len(set(map(tuple, adapted))) == 3
    assert told["adapted"] == adapted


def peers_reach_each_other(size: int) -> bool:
    return all(torch.cuda.can_device_access_peer(0, other) for other in range(1, size))


def test_kernels_launched_one_by_one(processes: Processes, size: int) -> None:
    expected = said_alone(processes)
    told = tell(processes, "kernels", size, "peer memory, kernel by kernel")
    assert told["said"] == expected
    check_adapters(processes, told)
    assert told["has_peers"] == peers_reach_each_other(size)
    assert told["graph_steps"] == 0


def test_a_second_engine_of_a_process_does_without_peer_memory(
    processes: Processes, size: int
) -> None:
    told = tell(processes, "kernels", size, "a second engine")
    assert told["said"] == said_alone(processes)
    assert not told["has_peers"]
    assert told["graph_steps"] > 0


def test_nccl_alone(processes: Processes, size: int) -> None:
    told = tell(processes, "kernels", size, "NCCL, kernel by kernel")
    assert told["said"] == said_alone(processes)
    check_adapters(processes, told)
    assert not told["has_peers"]
    assert told["graph_steps"] == 0


def test_a_cache_sized_from_memory_is_the_same_on_all(processes: Processes, size: int) -> None:
    told = tell(processes, "kernels", size, "a cache sized from memory")
    assert told["said"] == said_alone(processes)
    assert told["num_blocks"] > 1000


def test_peer_memory_in_graphs(processes: Processes, size: int) -> None:
    told = tell(processes, "graphs", size, "peer memory, graphs")
    assert told["said"] == said_alone(processes)
    check_adapters(processes, told)
    assert told["has_peers"] == peers_reach_each_other(size)
    assert told["graph_steps"] > 0


def test_a_lost_rank_ends_the_engine(processes: Processes) -> None:
    told = tell(processes, "graphs", 2, "peer memory, graphs")
    assert told["problem"] == "rank 1 of the engine was lost: ended by SIGKILL"
    # Work on the other GPU never ends, and so the process ends at once.
    assert processes("graphs", 2).status() == 70
