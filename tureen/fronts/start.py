"""Starts a server with several fronts: what they may not be combined with, the engine with its door, the sockets."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from tureen.build import Model
from tureen.config import Config, is_alone
from tureen.contract.types import FromEngine
from tureen.errors import StartupError
from tureen.fronts.client import FrontClient
from tureen.log import Progress, no_progress
from tureen.serving.child import ADMIT, BuildOrder
from tureen.serving.healing import Lose
from tureen.serving.process import ProcessHost
from tureen.serving.streams import Streams

FACTORY = "tureen.build:make_engine"
DOOR, OWNER = "engine", "owner"
"""Names of the sockets in the folder: of the engine, of the owner."""


def check(config: Config) -> None:
    """Raises StartupError for settings that several fronts cannot have."""
    why = ""
    if config.engine == "thread":
        why, field = "--engine thread: the fronts share an engine in a process of its own; leave --engine out", "engine"
    elif config.models:
        why, field = "several models: only one front knows which are loaded; leave --api-workers out", "models"
    elif not is_alone(config):
        why, field = "--replicas: only one front can move requests between engines; leave one of them out", "replicas"
    if why:
        raise StartupError(f"--api-workers {config.api_workers} with {why}", field=field)


def make_folder() -> Path:
    """Makes the folder of the sockets between the processes, which nobody else may open."""
    return Path(tempfile.mkdtemp(prefix="tureen-fronts-"))


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


class SharedStreams(Streams):
    """The streams of the front that sees to the engine for all."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elsewhere: Callable[[], int] = lambda: 0  # returns how many requests the engine has of other fronts

    @property
    def is_waiting(self) -> bool:
        return self.is_busy or self.num_elsewhere() > 0


class SharedClient(FrontClient):
    """The owner's client of an engine in a process that other fronts join, too."""

    def __init__(self, factory: str, config: Config, door: str) -> None:
        """door: path of the socket at which the others come in."""
        order = BuildOrder(factory, config, door=door)

        def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Lose) -> SharedHost:
            return SharedHost(msgspec.structs.replace(order, epoch=epoch), receive, lose)

        super().__init__(make_host, config)
        self._streams: SharedStreams = SharedStreams()

    def watch_for(self, num_elsewhere: Callable[[], int]) -> None:
        """Takes the engine for hung also when nothing comes of the requests of other fronts. num_elsewhere: returns
        how many of them it has."""
        self._streams.num_elsewhere = num_elsewhere

    def _open(self) -> None:
        super()._open()
        assert isinstance(self._host, SharedHost)
        self._host.admit()


class SharedHost(ProcessHost):
    """A Host with a door for other fronts."""

    def admit(self) -> None:
        """Lets them in: the engine is in the state that it is to be in."""
        self._socket.write(ADMIT)


async def connect(config: Config, model: Model, folder: Path, *, progress: Progress = no_progress) -> SharedClient:
    """Starts the engine, with its door in the folder. Returns its client once it is ready. Raises StartupError."""
    del model  # the engine's process finds it by itself
    client = SharedClient(FACTORY, config, str(folder / DOOR))
    await client.start(progress)
    return client


def more_listeners(listener: socket.socket, count: int) -> list[socket.socket]:
    """Returns the sockets of so many more fronts, bound to the address of the first one's.

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
