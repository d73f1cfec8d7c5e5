"""A trainer: rank 0 of a process group over gloo, made as SGLang's and slime's trainers make it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

TIMEOUT = timedelta(seconds=60)


def main(port: str, name: str, path: str, kind: str) -> int:
    store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=TIMEOUT))
    store = dist.PrefixStore(name, store)
    group, _ = _new_process_group_helper(size, rank, [], "gloo", store, group_name=name, timeout=TIMEOUT)
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    tensors = [tensor for _, tensor in sorted(load_file(path).items())]
    if kind == "flattened_bucket":
        tensors = [torch.cat([tensor.flatten() for tensor in tensors])]
    for number, tensor in enumerate(tensors):
        if kind == "dies" and number == 3:
            os._exit(3)
        try:
            dist.broadcast(tensor.contiguous(), 0, group=group)
        except RuntimeError as error:
            print(error)
            return 4
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdin.read()  # until the test has seen what arrived
    sys.stdout.flush()
    os._exit(status)  # a group that is left at the interpreter's end aborts it
