"""The ranks of one model as threads of this process, which exchange tensors by gloo as processes do.

On a GPU (TUREEN_TEST_DEVICE=cuda) all share the first one, which NCCL does not allow: so they meet by gloo there too.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from runner_driver import folder_source

from tureen.config import Config
from tureen.contract.runner import Capacity
from tureen.devices.base import DeviceInfo
from tureen.devices.groups import RankGroup
from tureen.models.config import ModelConfig
from tureen.runner import loading
from tureen.runner.model_runner import ModelRunner, make_sampler
from tureen.runner.parts import ForwardParts
from tureen.runner.rank_child import obey
from tureen.runner.rank_forward import Tell, factory_of
from tureen.runner.rank_orders import RankCall, RankStep, ToRank
from tureen.runner.ranks import RankedRunner, Ranks
from tureen.sampling.sampler import Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.sandbox import framing
from tureen.weights.source import model_config

CPU = DeviceInfo("cpu", "cpu", 1)
DEVICE = DeviceInfo("cuda", "cuda:0", 1) if os.environ.get("TUREEN_TEST_DEVICE") == "cuda" else CPU
LIMIT_S = 600.0


class RankThreads(Ranks):
    """The other ranks, which are threads: they get the messages that processes get."""

    def __init__(self, group: RankGroup, field: str, make: Callable[[RankGroup], ModelRunner]) -> None:
        super().__init__(group, field)
        self.operations: list[str] = []  # done by the others, in their order
        self._make = make
        self._loads = threading.Lock()  # some parts of torch do not load in several threads at once
        self._threads: list[threading.Thread] = []

    def start_threads(self) -> None:
        for rank in range(1, self._group.size):
            ours, theirs = socket.socketpair()
            self._connections.append(ours)
            self._threads.append(threading.Thread(target=self._follow, args=(rank, theirs), daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        super().close()
        for thread in self._threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()

    def _follow(self, rank: int, connection: socket.socket) -> None:
        group = RankGroup(rank, self._group.size)
        decoder = msgspec.msgpack.Decoder(ToRank)
        with connection:
            with self._loads:
                runner = self._make(group)
            group.join(self.store_path, CPU, LIMIT_S)
            try:
                while (payload := framing.receive(connection, framing.ANY_SIZE)) is not None:
                    self._obey(runner, decoder.decode(payload), connection)
            except BaseException:
                self._lose(f"rank {rank} failed")
                raise

    def _obey(self, runner: ModelRunner, message: RankStep | RankCall, connection: socket.socket) -> None:
        if isinstance(message, RankStep):
            obey(runner, message, connection)
            return
        self.operations.append(message.op)
        with self._loads:
            obey(runner, message, connection)


@contextmanager
def ranks_in_threads(
    folder: Path, num_ranks: int, adapters: tuple[Path, ...] = (), **settings
) -> Iterator[RankedRunner]:
    """The runner of rank 0. `adapters`: numbered from 1."""
    source, config = folder_source(folder), Config(**settings)
    shape = loading.describe(model_config(source))
    capacity, factory = _capacity(config, shape), factory_of(config)

    def parts(group: RankGroup, tell: Tell | None = None) -> ForwardParts:
        dtype = getattr(torch, config.dtype)
        attention = factory.find_attention(config, shape, DEVICE, dtype)
        return ForwardParts(factory(DEVICE, dtype, shape, capacity, attention, group, tell=tell), source, config)

    def sampler() -> Sampler:
        return make_sampler(config, shape.vocab_size, TorchArithmetic(torch.device(DEVICE.name)))

    def make_other(group: RankGroup) -> ModelRunner:
        own = parts(group)
        return ModelRunner(own.assemble(), sampler(), capacity, shape, own)

    group = RankGroup(0, num_ranks)
    ranks = RankThreads(group, factory.field, make_other)
    own = parts(group, ranks.tell)
    ranks.start_threads()
    group.join(ranks.store_path, CPU, LIMIT_S)
    runner = RankedRunner(own, sampler(), capacity, shape, ranks, factory)
    try:
        for number, adapter in enumerate(adapters, 1):
            runner.call("load_adapter", number=number, path=str(adapter))
        yield runner
    finally:
        runner.close()


def _capacity(config: Config, shape: ModelConfig) -> Capacity:
    return Capacity(
        num_pages=64,
        page_size=config.page_size,
        max_rows=16,
        vocab_size=shape.vocab_size,
        context_len=shape.context_len,
        hidden_size=shape.hidden_size,
    )
