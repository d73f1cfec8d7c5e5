"""Starts a server with several fronts: what they may not be combined with, the engine with its door, the sockets."""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec

from tureen.build import Model
from tureen.config import Config
from tureen.config_facts import is_alone
from tureen.contract.types import FromEngine
from tureen.errors import StartupError
from tureen.log import Progress, no_progress
from tureen.serving.child import BuildOrder
from tureen.serving.client import EngineClient
from tureen.serving.healing import HealingClient, Lose
from tureen.serving.process import ProcessHost
from tureen.serving.unblamed import UnblamedStreams

FACTORY = "tureen.build:make_engine"
DOOR, OWNER = "engine", "owner"
"""Names of the sockets in the folder: of the engine, of the owner."""


def check(config: Config) -> None:
    """Raises StartupError for settings that several fronts cannot have."""
    why = ""
    if config.engine == "thread":
        why, field = "--engine thread: the fronts share an engine in its own process; leave --engine out", "engine"
    elif config.models:
        why, field = "several models: only one front can manage loaded models; leave --api-workers out", "models"
    if why:
        raise StartupError(f"--api-workers {config.api_workers} with {why}", field=field)


class SharedClient(HealingClient):
    """The owner's client of an engine in a process that other fronts join, too."""

    def __init__(self, factory: str, config: Config, door: str) -> None:
        """door: path of the socket at which the others come in."""
        # Each worker bounds its own requests.
        with_room = importlib.import_module("tureen.data_parallel.start").with_room
        order = BuildOrder(factory, with_room(config), door=door)

        def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Lose) -> ProcessHost:
            return ProcessHost(msgspec.structs.replace(order, epoch=epoch), receive, lose)

        super().__init__(make_host, watchdog_timeout_s=config.watchdog_timeout_s, freeze_grace_s=config.freeze_grace_s)
        self._streams: UnblamedStreams = UnblamedStreams()

    def watch_for(self, num_elsewhere: Callable[[], int]) -> None:
        """Takes the engine for hung also when nothing comes of the requests of other fronts. num_elsewhere: returns
        how many of them it has."""
        self._streams.num_elsewhere = num_elsewhere

    def _open(self) -> None:
        super()._open()
        assert isinstance(self._host, ProcessHost)
        self._host.admit()


async def connect(config: Config, model: Model, folder: Path, *, progress: Progress = no_progress) -> EngineClient:
    """Starts the engine, or the engines, with their doors in the folder. Returns their client once they are ready.
    Raises StartupError."""
    if not is_alone(config):
        replicas = importlib.import_module("tureen.data_parallel.start")
        several: EngineClient = await replicas.connect(config, model, folder=folder, progress=progress)
        return several
    client = SharedClient(FACTORY, config, str(folder / DOOR))
    await client.start(progress)
    return client


def more_listeners(listener: socket.socket, count: int) -> list[socket.socket]:
    """Returns the sockets of `count` more fronts, bound to the first one's address.

    The kernel spreads connections over sockets of one address. Those for a socket whose front is gone wait in it, since
    it stays open here. A Unix socket cannot be bound twice: all have the same, and whoever is free accepts.
    """
    if listener.family == socket.AF_UNIX:
        return [listener.dup() for _ in range(count)]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # after it was bound alone: the port was free
    listeners = []
    for _ in range(count):
        another = socket.socket(listener.family, socket.SOCK_STREAM)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        another.bind(listener.getsockname())
        listeners.append(another)
    return listeners
