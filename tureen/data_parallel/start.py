"""Starts the replicas of a model: each in a process, with its share of the processors and of the memory."""

from __future__ import annotations

import asyncio
import importlib
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from tureen.build import Model, may_load_torch
from tureen.config import Config
from tureen.contract.types import EngineRole, FromEngine
from tureen.data_parallel.handshake import ModelDigests, digests_of
from tureen.data_parallel.pool import Scaler
from tureen.data_parallel.ray_address import SCHEME, parse_cluster, prepare_environment
from tureen.data_parallel.remote import EngineAddress, RemoteClient, RemoteEngine, parse_address, why_absent
from tureen.data_parallel.replica import OnTurn, OpenReplicaClient, ReplicaClient
from tureen.data_parallel.router import MakeClient, Router
from tureen.devices import cpu
from tureen.devices.base import may_have_cuda
from tureen.errors import StartupError
from tureen.extras import require
from tureen.log import Progress, get_logger, no_progress
from tureen.multi_model.sizes import size_of
from tureen.sandbox.budget import helper_bytes
from tureen.serving.child import BuildOrder
from tureen.serving.process import ProcessHost
from tureen.serving.unblamed import UnblamedStreams

MOST = 64
"""Most replicas of a server."""

FACTORY = "tureen.build:make_engine"
MIB = 1 << 20

log = get_logger("replicas")


async def connect(
    config: Config, model: Model, *, progress: Progress = no_progress, folder: Path | None = None
) -> Router:
    """Starts the engines of `config.replicas`, or connects to them. Returns the client over all once they are ready; of
    engines elsewhere, once one is. Raises StartupError.

    folder: of the doors at which other fronts come in, or of their certificate.
    """
    check_roles(config)
    router = Router(config.prefill_min_tokens)
    num_first = first_of(config)
    if isinstance(config.replicas, str) and config.replicas.startswith(SCHEME):
        prepare_environment(parse_cluster(config.replicas))
        ray_engines = importlib.import_module("tureen.data_parallel.ray_engines")
        # called here: what Ray starts ends with the thread that did
        clients = ray_engines.ray_clients(config, config.replicas, model, folder)
    elif isinstance(config.replicas, str):
        places = remote_engines(config, config.replicas, await asyncio.to_thread(digests_of, model))
        await _look_for(places)
        await router.join(remote_clients(config, places))
        return router
    else:
        check(config)
        most = max(config.replicas, config.max_replicas or 1)
        own = await asyncio.to_thread(own_config, config, model, most)
        doors = [None if folder is None else door_of(folder, number) for number in range(most)]
        clients = [
            partial(make_client, own, FACTORY, door=door, role=role_of(config, number))
            for number, door in enumerate(doors)
        ]
    await router.start(clients, progress, num_first=num_first, scaler=scaler_of(config))
    return router


def check_roles(config: Config) -> None:
    """Raises StartupError for --prefill-replicas where it cannot be kept to."""
    why = ""
    if isinstance(config.replicas, str):
        why = (
            f"--replicas {config.replicas}: engines elsewhere have their roles from tureen engine --role; leave it out"
        )
    elif config.min_replicas or config.max_replicas:
        why = "--min-replicas or --max-replicas: a role needs a replica that stays; give --replicas alone"
    elif config.prefill_replicas >= config.replicas:
        why = f"--replicas {config.replicas}: one at least must answer; raise --replicas"
    elif config.kv_disk is None:
        why = "no --kv-disk, the folder through which prompts are handed over; give one"
    if config.prefill_replicas and why:
        raise StartupError(f"--prefill-replicas {config.prefill_replicas} with {why}", field="prefill_replicas")


def first_of(config: Config) -> int | None:
    """Returns how many replicas are started at the start; None = all. Raises StartupError."""
    count = _count(config)
    if count is None:
        if config.min_replicas or config.max_replicas:
            raise StartupError(
                "--min-replicas and --max-replicas with addresses: all available engines are used; leave them out",
                field="replicas",
            )
        return None
    least, most = config.min_replicas or count, config.max_replicas or count
    if not least <= max(count, least) <= most <= MOST:
        raise StartupError(
            f"--replicas {config.replicas}, --min-replicas {least}, --max-replicas {most}: must not fall below the "
            f"least nor exceed the most, and the most not {MOST}",
            field="max_replicas",
        )
    return max(count, least)


def scaler_of(config: Config) -> Scaler | None:
    """Returns what decides how many replicas run; None where their number is fixed."""
    count = _count(config) or 1
    least, most = config.min_replicas or count, config.max_replicas or count
    return Scaler(least, most, config.replica_target_tokens) if least < most else None


def _count(config: Config) -> int | None:
    """Returns how many replicas the operator wants; None where they are named. Raises StartupError."""
    if not isinstance(config.replicas, str):
        return config.replicas
    return parse_cluster(config.replicas).num_engines if config.replicas.startswith(SCHEME) else None


def remote_engines(config: Config, addresses: str, digests: ModelDigests | None) -> list[RemoteEngine]:
    """Returns the engines elsewhere that an operator names. digests: see RemoteEngine. Raises StartupError."""
    places = [parse_address(text, "--replicas") for text in addresses.split(",")]
    context = front_context(config)
    for number, place in enumerate(places):
        if place in places[:number]:
            raise StartupError(f"--replicas: {place} is a duplicate", field="replicas")
        if context is None and not place.is_loopback:
            raise StartupError(
                f"--replicas {place}: outside this machine an engine needs certificates: give --replica-tls-cert, "
                "--replica-tls-key and --replica-tls-ca",
                field="replicas",
            )

    def finder(place: EngineAddress) -> Callable[[], Awaitable[EngineAddress]]:
        async def find() -> EngineAddress:
            return place

        return find

    return [RemoteEngine(finder(place), digests, context) for place in places]


async def _look_for(places: Sequence[RemoteEngine]) -> None:
    """Raises StartupError where one of the engines is a wrong one, or none is there."""
    faults = [fault for fault in await asyncio.gather(*map(why_absent, places)) if fault]
    if len(faults) == len(places):
        raise StartupError(f"--replicas: no engine is available: {'; '.join(faults)}", field="replicas")
    for fault in faults:
        log.warning("an engine is not available yet, and is used when it appears: %s", fault)


def remote_clients(config: Config, places: Sequence[RemoteEngine]) -> list[MakeClient]:
    """Returns functions that make the clients of engines elsewhere."""

    def make(place: RemoteEngine, on_turn: OnTurn) -> ReplicaClient:
        return RemoteClient(
            place,
            on_turn,
            watchdog_timeout_s=config.watchdog_timeout_s,
            freeze_grace_s=config.freeze_grace_s,
            streams=UnblamedStreams() if config.api_workers > 1 else None,
        )

    return [partial(make, place) for place in places]


def front_context(config: Config) -> ssl.SSLContext | None:
    """Makes the TLS context of connections to engines elsewhere; None = without. Raises StartupError."""
    names = ("replica_tls_cert", "replica_tls_key", "replica_tls_ca")
    paths = {name: getattr(config, name) for name in names}
    flags = {name: f"--{name.replace('_', '-')}" for name in names}
    if not any(paths.values()):
        return None
    for name, value in paths.items():
        if value is None:
            raise StartupError(f"{flags[name]} is missing: {', '.join(flags.values())} go together", field=name)
    require("--replica-tls-cert", "cryptography", field="replica_tls_cert")
    from tureen.http import certificates  # noqa: PLC0415 - a library that engines on this machine have no use for

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    certificates.load_own(context, paths["replica_tls_cert"], paths["replica_tls_key"], flags="--replica-tls")
    certificates.load_authorities(context, paths["replica_tls_ca"], "--replica-tls-ca")
    return context


FROM_OTHERS = 1 << 16
"""Requests that an engine takes beyond its own limit: those of others that are lost. The front bounds them all."""


def with_room(config: Config) -> Config:
    """Returns an engine's settings with room in its queue for requests of others that are lost."""
    return msgspec.structs.replace(config, max_queued_requests=config.max_queued_requests + FROM_OTHERS)


def door_of(folder: Path, number: int) -> str:
    """Returns the path of the door of a replica's engine."""
    return str(folder / f"engine-{number}")


def role_of(config: Config, number: int) -> EngineRole:
    """Returns the role of a replica in a process of this machine."""
    if not config.prefill_replicas:
        return "both"
    return "prefill" if number < config.prefill_replicas else "decode"


def make_client(
    config: Config, factory: str, on_turn: OnTurn, *, door: str | None = None, role: EngineRole = "both"
) -> ReplicaClient:
    """Makes the client of one replica. factory: "module:function" that makes its engine. door: see BuildOrder."""

    def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> ProcessHost:
        return ProcessHost(BuildOrder(factory, config, epoch, door=door or ""), receive, lose)

    kind = ReplicaClient if door is None else OpenReplicaClient
    client = kind(
        make_host,
        on_turn,
        watchdog_timeout_s=config.watchdog_timeout_s,
        freeze_grace_s=config.freeze_grace_s,
        streams=None if door is None else UnblamedStreams(),
    )
    client.role = role
    return client


def check(config: Config) -> None:
    """Raises StartupError for settings that several replicas cannot have."""
    if config.engine == "thread":
        raise StartupError(
            f"--replicas {config.replicas} with --engine thread: each replica has its own process; leave --engine out",
            field="engine",
        )
    if config.device == "cuda" or (config.device == "auto" and may_have_cuda()):
        raise StartupError(
            f"--replicas {config.replicas} on a GPU: all replicas would share the first one; start a server for each "
            "GPU (CUDA_VISIBLE_DEVICES=0, 1, …) behind a router, or give --device cpu",
            field="replicas",
        )


def own_config(config: Config, model: Model, count: int) -> Config:
    """Returns the settings of each of `count` replicas: its share of the processors, of the memory and of the helpers.

    Raises StartupError when the memory that is free is not enough for all.
    """
    free = cpu.free_bytes()
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
        with_room(config),
        num_threads=num_threads,
        max_total_tokens=size.num_tokens or config.max_total_tokens,
        helper_memory_mib=max(1, (helper_bytes(config) // count) // MIB),
    )
