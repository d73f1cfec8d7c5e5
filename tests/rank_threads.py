"""The ranks of one model as threads of this process, which exchange tensors by gloo as processes do.

On a GPU (TUREEN_TEST_DEVICE=cuda) all share the first one, which NCCL does not allow: so they meet by gloo there too.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from runner_driver import folder_source

from tureen.config import Config
from tureen.contract.runner import Batch, Capacity
from tureen.devices.base import DeviceInfo
from tureen.devices.groups import RankGroup
from tureen.runner import loading
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.parts import ForwardParts
from tureen.runner.rank_forward import RankForward, factory_of
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.weights.source import model_config

CPU = DeviceInfo("cpu", "cpu", 1)
DEVICE = DeviceInfo("cuda", "cuda:0", 1) if os.environ.get("TUREEN_TEST_DEVICE") == "cuda" else CPU
LIMIT_S = 600.0


@contextmanager
def ranks_in_threads(
    folder: Path, num_ranks: int, adapters: tuple[Path, ...] = (), **settings
) -> Iterator[ModelRunner]:
    """The runner of rank 0. `adapters`: numbered from 1."""
    inboxes: list[queue.SimpleQueue[Batch | None]] = [queue.SimpleQueue() for _ in range(num_ranks - 1)]

    def tell(batch: Batch) -> None:
        for inbox in inboxes:
            inbox.put(batch)

    loads = threading.Lock()
    with tempfile.TemporaryDirectory() as met:

        def make(rank: int) -> ModelRunner:
            group = RankGroup(rank, num_ranks)
            with loads:  # in processes they do not meet; some parts of torch do not load in several threads at once
                runner = _runner(folder, group, tell if rank == 0 else None, Config(**settings))
                for number, adapter in enumerate(adapters, 1):
                    runner.call("load_adapter", number=number, path=str(adapter))
            group.join(f"{met}/ranks", CPU, LIMIT_S)
            return runner

        def follow(rank: int) -> None:
            forward = make(rank).forward
            assert isinstance(forward, RankForward)
            while (batch := inboxes[rank - 1].get()) is not None:
                forward.follow(batch)

        threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, num_ranks)]
        for thread in threads:
            thread.start()
        yield make(0)
        for inbox in inboxes:
            inbox.put(None)
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def _runner(folder: Path, group: RankGroup, tell, config: Config) -> ModelRunner:
    source = folder_source(folder)
    shape = loading.describe(model_config(source))
    dtype = getattr(torch, config.dtype)
    capacity = Capacity(
        num_pages=64,
        page_size=config.page_size,
        max_rows=16,
        vocab_size=shape.vocab_size,
        context_len=shape.context_len,
        hidden_size=shape.hidden_size,
    )
    factory = factory_of(config)
    attention = factory.find_attention(config, shape, DEVICE, dtype)
    parts = ForwardParts(factory(DEVICE, dtype, shape, capacity, attention, group, tell=tell), source, config)
    sampler = make_sampler(config, shape.vocab_size, TorchArithmetic(torch.device(DEVICE.name)))
    return ModelRunner(parts.assemble(), sampler, capacity, shape, parts)
