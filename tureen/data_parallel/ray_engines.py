"""Engines as actors of a Ray cluster: Ray places, restarts and ends them; tokens go over our own connections. Imported
only for `--replicas ray://…`."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from tureen.build import Model
from tureen.config import Config
from tureen.config_facts import without_secrets
from tureen.data_parallel.cluster_ca import ENGINE_NAME, ClusterAuthority, with_files, write_files
from tureen.data_parallel.engine_command import engine_context, start_engine
from tureen.data_parallel.engine_server import EngineServer
from tureen.data_parallel.handshake import digests_of
from tureen.data_parallel.ray_address import RayCluster, parse_cluster
from tureen.data_parallel.remote import EngineAddress, RemoteClient, RemoteEngine
from tureen.data_parallel.replica import OnTurn
from tureen.data_parallel.router import MakeClient
from tureen.data_parallel.start import front_context
from tureen.errors import StartupError
from tureen.log import get_logger, no_progress, set_up_logging
from tureen.sandbox.limits import die_with_parent
from tureen.serving.unblamed import UnblamedStreams

PLACE_S = 300.0
"""Seconds within which an actor must have its place, and know its address."""

HEAD_S = 5.0
"""Seconds within which Ray's head must take a connection."""

LOOPBACK = "127.0.0.1"

log = get_logger("replicas")


class EngineHost:
    """The actor: an engine, and the socket on which fronts find it. Ray makes it anew when it dies."""

    def __init__(self, config: bytes, files: dict[str, bytes], host: str) -> None:
        """config: the settings, as msgpack. files: the names of settings of TLS, and what is in their files. host: to
        listen on; "" = the address by which Ray knows the machine."""
        die_with_parent(os.getppid())  # Ray's process for this machine; a stopped actor would outlive it
        self._config = msgspec.msgpack.decode(config, type=Config)
        self._files = files
        self._host = host
        self._starting: asyncio.Task[EngineServer] | None = None

    async def address(self) -> tuple[str, int]:
        """Returns where it listens, as soon as it does; the engine may still be loaded then."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        server = await self._starting
        return server.address.host, server.address.port

    async def _start(self) -> EngineServer:
        set_up_logging(self._config.log_level, self._config.log_format)
        with tempfile.TemporaryDirectory() as folder:
            write_files(self._files, Path(folder))
            own = with_files(self._config, Path(folder))
            util: Any = ray.util
            here = EngineAddress(self._host or util.get_node_ip_address(), 0)
            server = await start_engine(own, here, engine_context(own, here), no_progress)
        self._engine = asyncio.create_task(server.engine.start())
        self._engine.add_done_callback(_end_where_it_failed)
        return server


def _end_where_it_failed(starting: asyncio.Task[Any]) -> None:
    """Ends the actor whose engine cannot be started, so that Ray makes another, perhaps elsewhere."""
    if not starting.cancelled() and starting.exception() is not None:
        log.error("%s", starting.exception())
        os._exit(1)


class RayClient(RemoteClient):
    """The client of an engine in an actor, which is there as long as the engine is wanted."""

    def __init__(self, actor_type: Any, engine: RemoteEngine, on_turn: OnTurn, config: Config) -> None:
        super().__init__(
            engine,
            on_turn,
            watchdog_timeout_s=config.watchdog_timeout_s,
            freeze_grace_s=config.freeze_grace_s,
            streams=UnblamedStreams() if config.api_workers > 1 else None,
        )
        self._actor_type = actor_type
        self._actor: Any = None
        engine.find = self._find

    async def _find(self) -> EngineAddress:
        """Returns where the actor listens; makes it where there is none. Raises OSError."""
        self._place.address = ""  # other fronts wait, too
        try:
            self._actor = self._actor or self._actor_type()
            async with asyncio.timeout(PLACE_S):
                host, port = await self._actor.address.remote()
        except TimeoutError:
            raise OSError(await _why_head() or f"Ray has found no place for the actor within {PLACE_S:g} s") from None
        except RayError as error:
            reason = f"the Ray actor is gone: {str(error).strip().splitlines()[-1]}"
            raise OSError(await _why_head() or reason) from None
        address = EngineAddress(host, port, ENGINE_NAME)
        self._place.address = str(address)
        return address

    async def release(self) -> None:
        """Ends the actor, so that its place is free for others."""
        self._place.address = ""
        if self._actor is not None:
            actor, self._actor = self._actor, None
            await asyncio.to_thread(ray.kill, actor)

    async def close(self) -> None:
        await super().close()
        await self.release()


async def _why_head() -> str:
    """Return why Ray's head places no actors; "" if it answers, or this process is in no cluster."""
    if not ray.is_initialized():  # the next call would start a cluster
        return ""
    address = ray.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(HEAD_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except OSError:
        return (
            f"Ray's head process (gcs_server at {address}) does not answer, and without it Ray replaces no engine; the "
            "other engines serve on. Start the head again, then this server; with ray://local, restart this server"
        )
    writer.close()
    return ""


def ray_clients(config: Config, text: str, model: Model, folder: Path | None = None) -> list[MakeClient]:
    """Joins the cluster, or starts one on this machine. Returns functions that make the clients of as many engines as
    there may be. folder: where other fronts find their certificate. Raises StartupError."""
    cluster = parse_cluster(text)
    if not ray.is_initialized():
        _join(cluster, text)
    authority = ClusterAuthority()
    with tempfile.TemporaryDirectory() as unshared:
        place = folder or Path(unshared)
        write_files(authority.issue("front"), place)
        context = front_context(with_files(config, place, "replica_"))
    profile_dir = config.profile_dir and str(Path(config.profile_dir).expanduser().absolute())
    alone = msgspec.structs.replace(
        without_secrets(config), replicas=1, min_replicas=None, max_replicas=None, profile_dir=profile_dir
    )
    kind = ray.remote(num_cpus=cluster.num_cpus, num_gpus=cluster.num_gpus, max_restarts=-1)(EngineHost)
    host = LOOPBACK if cluster.where == "local" else ""
    make = partial(kind.remote, msgspec.msgpack.encode(alone), authority.issue(ENGINE_NAME), host)
    digests = digests_of(model)

    def make_client(on_turn: OnTurn) -> RayClient:
        async def nowhere() -> EngineAddress:
            raise OSError("its actor has not started yet")

        return RayClient(make, RemoteEngine(nowhere, digests, context), on_turn, config)

    return [make_client] * max(cluster.num_engines, config.max_replicas or 1)


def _join(cluster: RayCluster, text: str) -> None:
    """Raises StartupError."""
    job = JobConfig(_client_job=True)  # otherwise actors import from the current folder first, which may be a model's
    try:
        if cluster.where == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(include_dashboard=False, job_config=job, _node_ip_address=LOOPBACK, logging_level=logging.WARNING)
        else:
            ray.init(address=cluster.where, job_config=job, logging_level=logging.WARNING)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        raise StartupError(f"--replicas {text}: Ray cannot be started or reached: {error}", field="replicas") from None
