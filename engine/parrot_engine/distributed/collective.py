"""Collective operations of the ranks of a tensor-parallel engine, through `torch.distributed`.

It uses NCCL between GPUs and gloo between processes on a CPU. Sums over few tokens go through
memory that the GPUs of a host map into each other (`PeerMemory`): in one kernel each GPU writes to
the others (`kernels/sum_ranks.py`), where NCCL would pass messages.

NVLink multicast is never used. It needs a set-up of the whole host's switches and gains nothing at
these sizes, so it is switched off here for both NCCL and torch.
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

#: A rank is given up after this wait, which includes loading weights.
TIMEOUT_S = 600.0
#: Time limit for leaving the group.
LEAVE_TIMEOUT_S = 10.0
#: Largest sum in bytes that uses peer memory, by number of ranks: each writes to all.
PEER_BYTES = MappingProxyType({2: 2 << 20, 4: 1 << 20, 8: 512 << 10})
#: All ranks are on one host, so no other interface should be searched.
_ENVIRONMENT = MappingProxyType(
    {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }
)


class PeerMemory:
    """Memory on each GPU that all others write to; made once in the life of a process.

    torch numbers the exchanges of a process through its whole life, and ranks meet under that
    number. A rank that has exchanged memory before would wait for ever for others that have not.
    """

    #: True once this process has exchanged memory, or begun to.
    was_exchanged: ClassVar[bool] = False

    def __init__(
        self, shard: Shard, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate and exchange it, for sums of up to `PEER_BYTES`; every rank must do so.

        No rank may sum before all ranks have returned from here.

        Raises:
            RuntimeError: the GPUs cannot reach each other's memory.
        """
        PeerMemory.was_exchanged = True
        # Exists only in torch with CUDA.
        from torch.distributed import _symmetric_memory as symmetric_memory

        # Imports triton, which is installed only where it is used.
        from parrot_engine.kernels import sum_ranks

        self._sum_ranks_onto = sum_ranks.sum_ranks_onto
        max_rows = PEER_BYTES[shard.size] // (hidden_size * dtype.itemsize)
        self._row = (hidden_size, dtype)
        count, nothing = sum_ranks.empty_boxes(shard.size, max_rows, *self._row)
        bits = torch.int16 if dtype.itemsize == 2 else torch.int32
        self._boxes = symmetric_memory.empty(count, dtype=bits, device=device).fill_(nothing)
        handle = symmetric_memory.rendezvous(self._boxes, dist.group.WORLD.group_name)
        boxes = [handle.get_buffer(rank, [count], bits) for rank in range(shard.size)]
        self._exchange = sum_ranks.Exchange(
            shard.rank,
            torch.tensor([of_rank.data_ptr() for of_rank in boxes], device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )

    def takes(self, x: Tensor) -> bool:
        return (x.shape[1], x.dtype) == self._row and 0 < len(x) <= self._exchange.max_rows

    def sum_onto(
        self, share: Tensor, hidden: Tensor, norm: tuple[Tensor, float] | None
    ) -> tuple[Tensor, Tensor]:
        """Sum through peer memory; see `Collective.sum_onto`."""
        return self._sum_ranks_onto(share, hidden, self._exchange, norm)


class TorchCollective:
    """Implements `parrot_engine.models.sharding.Collective`; one per process at a time."""

    def __init__(self, shard: Shard, store: Path, device: torch.device) -> None:
        """Meet the other ranks through the file `store`.

        Raises:
            SettingsError: the process is part of another group already.
            RuntimeError: the others do not appear, or cannot be reached.
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

    def use_peer_memory(self, hidden_size: int, dtype: torch.dtype) -> bool:
        """Start using peer memory if possible; see `RankCollective`."""
        if self._device.type != "cuda" or self.shard.size not in PEER_BYTES:
            return False
        # All ranks exchange, or none does.
        if not self.least(not PeerMemory.was_exchanged):
            _log.warning("a rank's process was in such a group before: sums go through NCCL")
            return False
        try:
            peers = PeerMemory(self.shard, hidden_size, dtype, self._device)
        except RuntimeError as error:
            _log.warning("GPUs cannot map each other's memory, sums go through NCCL: %s", error)
            peers = None
        if self.least(peers is not None):
            self._peers = peers
        return self._peers is not None

    def sums_onto(self, share: Tensor) -> bool:
        return self._peers is not None and self._peers.takes(share)

    def sum_onto(
        self, share: Tensor, hidden: Tensor, norm: tuple[Tensor, float] | None
    ) -> tuple[Tensor, Tensor]:
        assert self._peers is not None
        return self._peers.sum_onto(share, hidden, norm)

    def all_reduce(self, x: Tensor) -> Tensor:
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
        """Return the smallest `value` of all ranks; waits for them."""
        values = torch.tensor(int(value), dtype=torch.int64, device=self._device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return int(values)

    def leave(self) -> bool:
        """Leave the group once nothing more is launched; every rank must do so at the same time.

        Graphs with work of this group must be gone. Returns false if the others do not leave in
        time because one of them is lost: then this process cannot join a group again.
        """
        # Graphs may survive in reference cycles.
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
