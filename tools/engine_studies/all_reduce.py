"""Sums over GPUs of one host with the norm behind them: `engine_study.py all_reduce --size 2`.

What follows o and down in a layer: the shares of all ranks are summed, the residual is added, the
norm of the sum is made. Ways: `nccl` and `one_shot` (torch's kernel, in which each GPU reads what
all others have) sum alone, and a kernel of its own adds and normalises; `pushed` is the engine's
(`kernels/sum_ranks.py`), all in one. Times are those of one among many in a CUDA graph,
microseconds on rank 0. `error` is the relative one of the norm, from float64 of the shares.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from parrot_engine.bench.device import time_s
from parrot_engine.distributed.collective import PeerMemory, TorchCollective
from parrot_engine.kernels import rowwise
from parrot_engine.models.sharding import Shard
from torch import Tensor

from engine_studies.harness import emit

_HIDDEN, _DTYPE, _EPS = 4096, torch.bfloat16, 1e-5
_ROWS = (1, 8, 16, 64, 128, 256)
_REPEATS = 64
_TIMEOUT_S = 120.0


def _one_shot(count: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """torch's kernel for up to `count` elements."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    group = torch.distributed.group.WORLD.group_name
    buffer = symmetric_memory.empty(count, dtype=_DTYPE, device=device)
    symmetric_memory.rendezvous(buffer, group)

    def total(x: Tensor) -> Tensor:
        there = buffer[: x.numel()].view(x.shape)
        out: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(there, x, "sum", group)
        return out

    return total


def _time_us(way: Callable[[], Any]) -> float:
    return round(1e6 * time_s(way, calls=_REPEATS), 2)


@torch.inference_mode()
def _measure(shard: Shard, store: Path) -> None:
    device = torch.device("cuda", shard.rank)
    torch.cuda.set_device(device)
    collective = TorchCollective(shard, store, device)
    peers = PeerMemory(shard, _HIDDEN, _DTYPE, device)
    one_shot = _one_shot(max(_ROWS) * _HIDDEN, device)
    collective.least(0)
    torch.manual_seed(0)
    weight = torch.randn(_HIDDEN, device=device, dtype=_DTYPE)
    for rows in _ROWS:
        hidden, *shares = torch.randn(
            1 + shard.size, rows, _HIDDEN, device=device, dtype=_DTYPE
        ).unbind()
        share = shares[shard.rank].contiguous()
        exact = torch.stack([hidden, *shares]).double().sum(0)
        exact = torch.nn.functional.rms_norm(exact, (_HIDDEN,), weight.double(), _EPS)

        def after(total: Tensor, hidden: Tensor = hidden) -> Tensor:
            return rowwise.add_rms_norm(hidden, total, weight, _EPS)[0]

        def norm(share: Tensor = share) -> Tensor:
            return after(share)

        def nccl(share: Tensor = share) -> Tensor:
            return after(collective.all_reduce(share.clone()))

        def reading(share: Tensor = share) -> Tensor:
            return after(one_shot(share))

        def pushed(share: Tensor = share, hidden: Tensor = hidden) -> Tensor:
            return peers.sum_onto(share, hidden, (weight, _EPS))[0]

        ways: dict[str, Callable[[], Tensor]] = {"nccl": nccl, "one_shot": reading}
        if peers.takes(share):
            ways["pushed"] = pushed
        line: dict[str, float | int] = {"ranks": shard.size, "rows": rows}
        for name, way in ways.items():
            error = float((way().double() - exact).norm() / exact.norm())
            collective.least(0)
            line[f"{name}_us"] = _time_us(way)
            line[f"{name}_error"] = round(error, 5)
            collective.least(0)
        line["norm_us"] = _time_us(norm)
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
