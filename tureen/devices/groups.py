"""Exchanges tensors between the processes that compute one model together, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tureen.devices.base import DeviceInfo

LOOPBACK = "127.0.0.1"


class RankGroup:
    """The ranks of one model, as one of them sees it. Every rank calls the same methods in the same order."""

    def __init__(self, rank: int, size: int, backend: Any = None) -> None:
        """backend: a process group of torch; None = this rank is alone."""
        self.rank = rank
        self.size = size
        self._backend = backend

    def gather_all(self, own: Tensor) -> list[Tensor]:
        """Returns each rank's tensor, in the order of the ranks; all have the same shape. Raises RuntimeError when a
        rank is lost."""
        if self._backend is None:
            return [own]
        own = own.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        self._backend.allgather([gathered], [own]).wait()
        return gathered

    def gather(self, own: Tensor) -> list[Tensor]:
        """Returns to rank 0 each rank's tensor, in the order of the ranks; to the others nothing. Raises as
        `gather_all`."""
        if self._backend is None:
            return [own]
        own = own.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        options = torch.distributed.GatherOptions()
        options.rootRank = 0
        self._backend.gather([gathered] if gathered else [], [own], options).wait()
        return gathered

    def abort(self) -> None:
        """Lets whoever waits for another rank fail: that rank is lost. May be called in any thread."""
        if self._backend is not None:
            self._backend.abort()


def join(rank: int, size: int, store_path: str, device: DeviceInfo, timeout_s: float) -> RankGroup:
    """Waits until all ranks are there: those that name the same file, which need not exist yet. On a CPU they meet on
    the loopback interface. timeout_s: the longest wait for another rank, now and in each exchange."""
    if size == 1:
        return RankGroup(rank, size)
    store = torch.distributed.FileStore(store_path, size)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        nccl = torch.distributed.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return RankGroup(rank, size, torch.distributed.ProcessGroupNCCL(store, rank, size, nccl))
    gloo = torch.distributed.ProcessGroupGloo._Options()
    gloo._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    gloo._timeout = timeout
    gloo._threads = 1
    return RankGroup(rank, size, torch.distributed.ProcessGroupGloo(store, rank, size, gloo))
