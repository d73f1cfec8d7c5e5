"""Exchanges tensors between the processes that compute one model together, by torch.distributed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tureen.devices.base import DeviceInfo

LOOPBACK = "127.0.0.1"
DISTRIBUTED: Any = torch.distributed  # its types lack the classes that are used here


class RankGroup:
    """The ranks of one model, as one of them sees it. Every rank calls the same methods in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend: Any = None  # a process group of torch, once all have met

    def join(self, store_path: str, device: DeviceInfo, timeout_s: float) -> None:
        """Waits until all ranks are there: those that name the same file, which need not exist yet. On a CPU they meet
        on the loopback interface.

        timeout_s: the longest wait for another rank, now and in each exchange. Raises RuntimeError.
        """
        if self.size == 1:
            return
        store = DISTRIBUTED.FileStore(store_path, self.size)
        make = _nccl if device.type == "cuda" else _gloo
        self._backend = make(store, self.rank, self.size, timedelta(seconds=timeout_s))

    def gather_all(self, own: Tensor) -> list[Tensor]:
        """Returns each rank's tensor, in the order of the ranks; all have the same shape. Raises RuntimeError when a
        rank is lost."""
        if self.size == 1:
            return [own]
        own = own.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        self._backend.allgather([gathered], [own]).wait()
        return gathered

    def gather(self, own: Tensor) -> list[Tensor]:
        """Returns to rank 0 each rank's tensor, in the order of the ranks; to the others nothing. Raises as
        `gather_all`."""
        if self.size == 1:
            return [own]
        own = own.contiguous()
        gathered = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        options = DISTRIBUTED.GatherOptions()
        options.rootRank = 0
        self._backend.gather([gathered] if gathered else [], [own], options).wait()
        return gathered

    def send(self, own: Tensor, rank: int) -> None:
        """Sends a tensor to another rank, which calls `receive`. Raises RuntimeError when that is lost."""
        self._backend.send([own.contiguous()], rank, 0).wait()

    def receive(self, place: Tensor, rank: int) -> Tensor:
        """Fills `place`, and returns it, with what another rank sends: a tensor of its shape and type. Raises as
        `send`."""
        self._backend.recv([place], rank, 0).wait()
        return place

    def abort(self) -> None:
        """Lets whoever waits for another rank fail: that rank is lost. May be called in any thread."""
        if self._backend is not None:
            self._backend.abort()


def _gloo(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = DISTRIBUTED.ProcessGroupGloo._Options()
    options._devices = [DISTRIBUTED.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timeout
    options._threads = 1
    return DISTRIBUTED.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    options = DISTRIBUTED.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return DISTRIBUTED.ProcessGroupNCCL(store, rank, size, options)
