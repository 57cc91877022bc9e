"""Collective operations of the ranks of a tensor-parallel engine, through `torch.distributed`.

NCCL between GPUs, gloo between processes on a CPU. Sums of few tokens go through memory that the
GPUs of a host map into each other (`PeerMemory`): one kernel, in which each GPU reads what the
others wrote, where NCCL passes messages.

NVLink multicast is never used: it needs a set-up of the whole host's switches, gains nothing at
these sizes, and is switched off here for NCCL and for torch alike.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from parrot_engine.exceptions import SettingsError
from parrot_engine.models.sharding import Shard

_log = logging.getLogger(__name__)

#: A rank that another waits for longer than this is given up; loading weights is waited for, too.
TIMEOUT_S = 600.0
#: How long taking leave may take.
LEAVE_TIMEOUT_S = 10.0
#: Largest sum in bytes that goes through peer memory, by number of ranks: each reads all others'.
PEER_BYTES = MappingProxyType({2: 2 << 20, 4: 1 << 20, 8: 512 << 10})
#: Of the kinds that torch's kernel adds.
_PEER_DTYPES = (torch.bfloat16, torch.float32)
#: All ranks are of one host: no other interface is to be looked at.
_ENVIRONMENT = MappingProxyType(
    {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)


class PeerMemory:
    """A buffer on each GPU that all others read; one in the life of a process.

    torch numbers the exchanges of a process through its whole life, and ranks meet under that
    number: one that has exchanged memory before would wait for ever for others that have not.
    """

    #: Whether this process exchanged memory, or began to.
    was_exchanged: ClassVar[bool] = False

    def __init__(self, num_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make and exchange it; every rank does.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        PeerMemory.was_exchanged = True
        # Part of torch on CUDA only.
        from torch.distributed import _symmetric_memory as symmetric_memory

        count = num_bytes // dtype.itemsize
        self.group = dist.group.WORLD.group_name
        self.buffer = symmetric_memory.empty(count, dtype=dtype, device=device)
        symmetric_memory.rendezvous(self.buffer, self.group)

    def takes(self, x: Tensor) -> bool:
        # The kernel moves 16 bytes at a time.
        return bool(
            x.dtype == self.buffer.dtype
            and 0 < x.numel() <= len(self.buffer)
            and x.nbytes % 16 == 0
            and x.is_contiguous()
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """A new tensor with the sum of every rank's `x`."""
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            self.buffer[: x.numel()].view(x.shape), x, "sum", self.group
        )
        return total


class TorchCollective:
    """Implements `parrot_engine.models.sharding.Collective`; one at a time in a process."""

    def __init__(self, shard: Shard, store: Path, device: torch.device) -> None:
        """Meet the other ranks, by way of the file `store`.

        Raises:
            SettingsError: the process is part of another group already.
            RuntimeError: the others do not come, or cannot be reached.
        """
        if dist.is_initialized():
            raise SettingsError(
                "tensor_parallel",
                "torch.distributed is in use in this process already: one such engine a process",
            )
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self.shard = shard
        self._device = device
        self._peers: PeerMemory | None = None
        on_cuda = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=dist.FileStore(str(store), shard.size),
            rank=shard.rank,
            world_size=shard.size,
            timeout=timedelta(seconds=TIMEOUT_S),
            device_id=device if on_cuda else None,
        )

    def use_peer_memory(self, dtype: torch.dtype) -> bool:
        """Sum few tokens of `dtype` through peer memory, where that works for every rank."""
        num_bytes = PEER_BYTES.get(self.shard.size)
        if self._device.type != "cuda" or num_bytes is None or dtype not in _PEER_DTYPES:
            return False
        # All ranks exchange, or none does.
        if not self.least(not PeerMemory.was_exchanged):
            _log.warning("a rank's process was in such a group before: sums go through NCCL")
            return False
        try:
            peers = PeerMemory(num_bytes, dtype, self._device)
        except RuntimeError as error:
            _log.warning("GPUs cannot map each other's memory, sums go through NCCL: %s", error)
            peers = None
        if self.least(peers is not None):
            self._peers = peers
        return self._peers is not None

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._peers is not None and self._peers.takes(x):
            return self._peers.all_reduce(x)
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = torch.empty((self.shard.size, *x.shape), dtype=x.dtype, device=x.device)
        if self._device.type == "cuda":
            dist.all_gather_into_tensor(parts, x.contiguous())
        else:
            dist.all_gather(list(parts.unbind(0)), x.contiguous())
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, src=0)
        return x

    def least(self, value: int) -> int:
        """The smallest of every rank's `value`; waits for all of them."""
        values = torch.tensor(int(value), dtype=torch.int64, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return int(values)

    def leave(self) -> bool:
        """Take leave, once nothing is launched any more; every rank does at the same time.

        Graphs that hold work of this group must be gone. False when the others do not do the
        same in time, because one of them is lost: then this process cannot be in a group again.
        """
        # In cycles of references there may be graphs still.
        gc.collect()
        thread = threading.Thread(target=self._leave, name="leave-ranks", daemon=True)
        thread.start()
        thread.join(LEAVE_TIMEOUT_S)
        return not thread.is_alive()

    def _leave(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._peers = None
        dist.destroy_process_group()
