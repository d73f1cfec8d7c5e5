"""A front's router over engines that the owner has started, or has found elsewhere. Imported only where there are
several."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tureen.api_workers.joining import WAIT_S, JoinedHost, JoinedStreams
from tureen.config import Config
from tureen.contract.types import EngineRole, FromEngine
from tureen.data_parallel.ray_address import SCHEME
from tureen.data_parallel.remote import LOOK_S, EngineAddress, RemoteEngine, parse_address
from tureen.data_parallel.replica import OnTurn, ReplicaClient
from tureen.data_parallel.router import MakeClient, Router
from tureen.data_parallel.start import door_of, front_context, remote_clients, remote_engines, role_of
from tureen.errors import StartupError
from tureen.serving.client import ReplicaFacts
from tureen.serving.healing import Lose

MOVE_S = 5.0
"""Seconds in which an address that was tried is not tried again: the owner may be about to tell another."""


async def join(config: Config, folder: Path, facts: Sequence[ReplicaFacts]) -> Router:
    """Returns the router once an engine is there. facts: what the owner says of each replica. Raises StartupError."""
    router = Router(config.prefill_min_tokens)
    try:
        async with asyncio.timeout(WAIT_S):
            await router.join(clients_of(config, folder, len(facts)), facts)
    except TimeoutError:
        raise StartupError(f"no engine answers within {WAIT_S:g} s") from None
    router.company.prefixes.share()
    return router


def clients_of(config: Config, folder: Path, count: int) -> list[MakeClient]:
    """Returns functions that make the clients of the replicas. Raises StartupError."""
    if not isinstance(config.replicas, str):
        return [
            partial(_joined_client, config, door_of(folder, number), role_of(config, number)) for number in range(count)
        ]
    if config.replicas.startswith(SCHEME):
        return remote_clients(config, _engines_in_actors(config, folder, count))
    return remote_clients(config, remote_engines(config, config.replicas, None))


def _engines_in_actors(config: Config, folder: Path, count: int) -> list[RemoteEngine]:
    """Returns engines that are where the owner says. folder: of this front's certificate."""
    cluster_ca = importlib.import_module("tureen.data_parallel.cluster_ca")
    context = front_context(cluster_ca.with_files(config, folder, "replica_"))

    def make() -> RemoteEngine:
        tried, tried_s = "", 0.0

        async def find() -> EngineAddress:
            nonlocal tried, tried_s
            while not engine.address or (engine.address == tried and time.monotonic() < tried_s + MOVE_S):
                await asyncio.sleep(LOOK_S)
            tried, tried_s = engine.address, time.monotonic()
            return parse_address(engine.address, "--replicas")._replace(name=cluster_ca.ENGINE_NAME)

        engine = RemoteEngine(find, None, context)
        return engine

    return [make() for _ in range(count)]


def _joined_client(config: Config, door: str, role: EngineRole, on_turn: OnTurn) -> ReplicaClient:
    def make_host(_: int, receive: Callable[[FromEngine], None], lose: Lose) -> JoinedHost:
        return JoinedHost(door, receive, lose)

    client = ReplicaClient(
        make_host,
        on_turn,
        watchdog_timeout_s=config.watchdog_timeout_s,
        freeze_grace_s=config.freeze_grace_s,
        streams=JoinedStreams(),
    )
    client.role = role
    return client


def take(router: Router, op: str, args: dict[str, Any]) -> object:
    """Does what the owner asks of a router."""
    if op == "others":
        router.company.hear_others(args["loads"], args["news"])
        return True
    return router.company.says(args["question"], args["replica"])
