"""Starts the replicas of a model: each in a process, with its share of the processors and of the memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from tureen.build import Model, may_load_torch
from tureen.config import Config
from tureen.contract.types import FromEngine
from tureen.devices import cpu
from tureen.devices.base import may_have_cuda
from tureen.errors import StartupError
from tureen.fleet.sizes import size_of
from tureen.log import Progress, get_logger, no_progress
from tureen.replicas.replica import OnTurn, ReplicaClient
from tureen.replicas.router import Router
from tureen.sandbox.budget import helper_bytes
from tureen.serving.child import BuildOrder
from tureen.serving.process import ProcessHost

FACTORY = "tureen.build:make_engine"
MIB = 1 << 20

log = get_logger("replicas")


async def connect(config: Config, model: Model, *, progress: Progress = no_progress) -> Router:
    """Starts the engines of `config.replicas`. Returns the client over all once they are ready. Raises StartupError."""
    check(config)
    own = await asyncio.to_thread(own_config, config, model)
    router = Router()
    await router.start([partial(make_client, own, FACTORY)] * config.replicas, progress)
    return router


FROM_OTHERS = 1 << 16
"""Requests that an engine takes beyond its own limit: those of others that are lost. The front bounds them all."""


def make_client(config: Config, factory: str, on_turn: OnTurn) -> ReplicaClient:
    """Makes the client of one replica. `factory`: "module:function" that makes its engine."""

    def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> ProcessHost:
        return ProcessHost(BuildOrder(factory, config, epoch), receive, lose)

    return ReplicaClient(
        make_host, on_turn, watchdog_timeout_s=config.watchdog_timeout_s, freeze_grace_s=config.freeze_grace_s
    )


def check(config: Config) -> None:
    """Raises StartupError for settings that several replicas cannot have."""
    if config.engine == "thread":
        raise StartupError(
            f"--replicas {config.replicas} with --engine thread: each replica has a process of its own; leave --engine "
            "out",
            field="engine",
        )
    if config.device == "cuda" or (config.device == "auto" and may_have_cuda()):
        raise StartupError(
            f"--replicas {config.replicas} on a GPU: all replicas would share the first one; start a server for each "
            "GPU (CUDA_VISIBLE_DEVICES=0, 1, …) behind a router, or give --device cpu",
            field="replicas",
        )


def own_config(config: Config, model: Model) -> Config:
    """Returns the settings of each replica: its share of the processors, of the memory and of the helpers.

    Raises StartupError when the memory that is free is not enough for all.
    """
    free, count = cpu.free_bytes(), config.replicas
    share_bytes = int(free * config.mem_fraction_static) // count
    size = size_of(model.source, config, share_bytes, uses_torch=may_load_torch(config, model))
    if size.num_bytes * count > free:
        raise StartupError(
            f"--replicas {count}: each needs {size.num_bytes // MIB} MiB, all together {size.num_bytes * count // MIB} "
            f"MiB, and {free // MIB} MiB are free; start at most {free // size.num_bytes}, take a smaller model or "
            "--quantization int4, or lower --max-total-tokens",
            field="replicas",
        )
    num_threads = config.num_threads or max(1, cpu.num_threads() // count)
    log.info("%d replicas: %d MiB and %d threads each", count, size.num_bytes // MIB, num_threads)
    return msgspec.structs.replace(
        config,
        num_threads=num_threads,
        max_queued_requests=config.max_queued_requests + FROM_OTHERS,
        max_total_tokens=size.num_tokens or config.max_total_tokens,
        helper_memory_mib=max(1, (helper_bytes(config) // count) // MIB),
    )
