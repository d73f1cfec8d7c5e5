"""The process of one rank. `ranks.py` starts it with FD, one end of a socket pair."""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import torch

from tureen.contract.runner import Capacity
from tureen.devices.base import DeviceInfo
from tureen.devices.dtypes import default_dtype
from tureen.devices.groups import RankGroup
from tureen.errors import TureenError
from tureen.fetching.ggufs import Companion
from tureen.log import get_logger, set_up_logging
from tureen.models.config import ModelConfig
from tureen.runner import loading
from tureen.runner.model_runner import ModelRunner
from tureen.runner.parts import ForwardParts
from tureen.runner.rank_forward import RankForward, factory_of
from tureen.runner.rank_orders import RankCall, RankOrder, RankReply, RankStep, ToRank
from tureen.sampling.custom import CustomProcessors
from tureen.sampling.sampler import Sampler
from tureen.sampling.torch_arithmetic import TorchArithmetic
from tureen.sandbox import framing
from tureen.struct_warm_up import warm_up_structs
from tureen.weights.source import ModelSource, model_config

log = get_logger("runner")


def main(descriptor: int) -> None:
    """Loads the rank's part of the model, and does what rank 0 says until that is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    order = msgspec.msgpack.decode(framing.receive(connection, framing.ANY_SIZE) or b"", type=RankOrder)
    warm_up_structs()
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), name="rank 0", daemon=True).start()
    set_up_logging(order.config.log_level, order.config.log_format)
    num_ranks = getattr(order.config, factory_of(order.config).field)
    device, group = _device(order), RankGroup(order.rank, num_ranks)
    try:
        runner = _load(order, device, group)
    except TureenError as error:
        _reply(connection, error.message)
        return
    _reply(connection)
    group.join(order.store_path, device, order.config.watchdog_timeout_s)
    while True:
        obey(runner, inbox.get(), connection)


def obey(runner: ModelRunner, message: ToRank, connection: socket.socket) -> None:
    """Does what rank 0 says; a call is answered."""
    if isinstance(message, RankStep):
        forward = runner.forward
        assert isinstance(forward, RankForward)
        forward.follow(message.batch)
    else:
        _call(runner, message, connection)


def _device(order: RankOrder) -> DeviceInfo:
    """Chooses the rank's own device."""
    torch.set_num_threads(order.num_threads)
    if order.device != "cuda":
        return DeviceInfo(order.device, order.device, order.num_threads)
    torch.cuda.set_device(order.rank)
    return DeviceInfo(order.device, f"cuda:{order.rank}", order.num_threads)


def _load(order: RankOrder, device: DeviceInfo, group: RankGroup) -> ModelRunner:
    """Raises StartupError."""
    config = order.config
    mmproj = Companion(None if order.mmproj is None else Path(order.mmproj))
    source = ModelSource(order.name, Path(order.path), order.format, mmproj)
    shape = loading.describe(model_config(source))
    dtype = default_dtype(device) if config.dtype == "auto" else getattr(torch, config.dtype)
    factory = factory_of(config)
    attention = factory.find_attention(config, shape, device, dtype)
    parts = ForwardParts(factory(device, dtype, shape, order.capacity, attention, group), source, config)
    return ModelRunner(parts.assemble(), _no_sampler(device, shape, order.capacity), order.capacity, shape, parts)


def _no_sampler(device: DeviceInfo, shape: ModelConfig, capacity: Capacity) -> Sampler:
    """Returns a sampler that is never called: rank 0 draws."""
    arithmetic = TorchArithmetic(torch.device(device.name))
    return Sampler(capacity.max_rows, shape.vocab_size, arithmetic, CustomProcessors({}, None))


def _call(runner: ModelRunner, message: RankCall, connection: socket.socket) -> None:
    try:
        runner.call(message.op, **message.args)
    except TureenError as error:
        _reply(connection, error.message)
    else:
        _reply(connection)


def _read(connection: socket.socket, inbox: queue.SimpleQueue[ToRank]) -> None:
    """Takes what rank 0 sends. Its end is this process's, whatever that is doing."""
    decoder = msgspec.msgpack.Decoder(ToRank)
    while True:
        try:
            payload = framing.receive(connection, framing.ANY_SIZE)
        except OSError:
            payload = None
        if payload is None:
            os._exit(0)
        inbox.put(decoder.decode(payload))


def _reply(connection: socket.socket, error: str = "") -> None:
    framing.send(connection, msgspec.msgpack.encode(RankReply(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
