"""The process that is a rank of a trainer's process group and writes the weights that the trainer broadcasts.

admin/weight_group.py starts it with FD, one end of a socket pair. If the trainer dies, or sends nothing, only this
process waits for it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from tureen.sandbox import framing


class GroupMember:
    """A rank of the group. Rank 0 of the group is the trainer."""

    def __init__(self) -> None:
        self._group: Any = None

    def join(self, *, url: str, rank: int, world_size: int, name: str, timeout_s: float) -> None:
        """Join the group, as SGLang's trainers make it: besides the default group, with the name in the store's keys.

        Raise RuntimeError, ValueError or OSError.
        """
        timeout = timedelta(seconds=timeout_s)
        store, rank, world_size = next(rendezvous(url, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        group, _ = distributed_c10d._new_process_group_helper(
            world_size,
            rank,
            [],
            "gloo",
            distributed_c10d.PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        self._group = group

    def receive(self, *, sizes: Sequence[int], path: str) -> None:
        """Receive tensors of these bytes, one after another, and append them to a file; "" = drop them. Raise
        RuntimeError, OSError."""
        with open(path or os.devnull, "ab") as file:
            for size in sizes:
                data = torch.empty(size, dtype=torch.uint8)
                dist.broadcast(data, 0, group=self._group)
                file.write(data.numpy().data)


def main(descriptor: int) -> None:
    """Do what the parent says until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    connection, member = socket.socket(fileno=descriptor), GroupMember()
    operations: dict[str, Callable[..., None]] = {"join": member.join, "receive": member.receive}
    while (payload := framing.receive(connection)) is not None:
        order = msgspec.msgpack.decode(payload, type=dict[str, Any])
        try:
            operations[order["op"]](**order["args"])
            fault = ""
        except (RuntimeError, ValueError, OSError) as error:  # torch's faults of a group are RuntimeErrors
            fault = (str(error).strip() or type(error).__name__).splitlines()[0]
        framing.send(connection, msgspec.msgpack.encode(fault))


if __name__ == "__main__":
    main(int(sys.argv[1]))
