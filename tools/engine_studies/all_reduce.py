"""Sums over GPUs of one host, by size and way: `python tools/engine_study.py all_reduce --size 2`.

Ways: `nccl`; `one_shot`, in which each GPU reads what all others have (what the engine takes for
small steps); `two_shot`, in which each adds up one part and then fetches the others' parts. Times
are those of one sum among many in a CUDA graph, microseconds on rank 0. `error` is the largest
difference from NCCL's sum over the largest entry.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from parrot_engine.bench.device import time_s
from parrot_engine.distributed.collective import PeerMemory, TorchCollective
from parrot_engine.models.sharding import Shard
from torch import Tensor

from engine_studies.harness import emit

#: Bytes of a sum: 1, 16, 64, 128 and 256 tokens of 4,096 bf16 values, and a step of prefill.
_SIZES = (8 << 10, 128 << 10, 512 << 10, 1 << 20, 2 << 20, 16 << 20)
_REPEATS = 32
_TIMEOUT_S = 120.0


def _ways(
    collective: TorchCollective, peers: PeerMemory | None, x: Tensor
) -> dict[str, Callable[[], Tensor]]:
    ways: dict[str, Callable[[], Tensor]] = {"nccl": lambda: collective.all_reduce(x.clone())}
    if peers is None:
        return ways
    ops, group = torch.ops.symm_mem, peers.group
    buffer = peers.buffer[: x.numel()].view(x.shape)

    def two_shot() -> Tensor:
        buffer.copy_(x)
        out: Tensor = ops.two_shot_all_reduce_out(buffer, "sum", group, torch.empty_like(x))
        return out

    return {**ways, "one_shot": lambda: peers.all_reduce(x), "two_shot": two_shot}


def _time_us(way: Callable[[], Tensor]) -> float:
    return round(1e6 * time_s(way, calls=_REPEATS), 2)


@torch.inference_mode()
def _measure(shard: Shard, store: Path) -> None:
    device = torch.device("cuda", shard.rank)
    torch.cuda.set_device(device)
    collective = TorchCollective(shard, store, device)
    try:
        peers = PeerMemory(_SIZES[-1], torch.bfloat16, device)
    except RuntimeError as error:
        print(f"rank {shard.rank}: no peer memory: {error}", file=sys.stderr, flush=True)
        peers = None
    if not collective.least(peers is not None):
        peers = None
    for num_bytes in _SIZES:
        x = torch.randn(num_bytes // 2, device=device, dtype=torch.bfloat16)
        line: dict[str, float | int] = {"ranks": shard.size, "bytes": num_bytes}
        expected = None
        for name, way in _ways(collective, peers, x).items():
            try:
                out = way().float()
            except RuntimeError as error:
                # Refused before anything is launched, so by all ranks alike.
                print(f"rank {shard.rank}: no {name}: {error}", file=sys.stderr, flush=True)
                continue
            expected = out if expected is None else expected
            difference = float((out - expected).abs().max() / expected.abs().max())
            collective.least(0)

            line[f"{name}_us"] = _time_us(way)
            line[f"{name}_error"] = round(difference, 5)
        line["copy_us"] = _time_us(x.clone)
        if shard.rank == 0:
            emit(line)
    collective.least(0)
    collective.leave()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `harness.Study`."""
    parser.add_argument("--size", type=int, default=2, help="GPUs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> None:
    """See `harness.Study`."""
    if options.rank is not None:
        _measure(Shard(options.rank, options.size), options.store)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, sys.argv[0], "all_reduce"]
        command += ["--size", str(options.size), "--store", f"{folder}/store", "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)])  # noqa: S603 -- our own interpreter
            for rank in range(options.size)
        ]
        try:
            codes = [rank.wait(_TIMEOUT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    sys.exit(max(map(abs, codes)))
