"""A front's client of an engine that another front has started: it joins through the engine's door."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from tureen.config import Config
from tureen.contract.types import EngineInfo, FromEngine, ToEngine
from tureen.errors import StartupError
from tureen.log import Progress, get_logger, no_progress
from tureen.serving.engine_socket import EngineSocket
from tureen.serving.healing import HealingClient, Lose
from tureen.serving.process import STOPPED, state_of
from tureen.serving.unblamed import UnblamedStreams
from tureen.serving.watchdog import Sign, processor_s

LOOK_S = 0.05
WAIT_S = 60.0
"""Seconds in which an engine that is there must let a front in that starts."""

log = get_logger("fronts")

CREDENTIALS = struct.Struct("3i")  # process, user, group: see unix(7), SO_PEERCRED


class JoinedHost:
    """A Host that is reached through its door. It is replaced by whoever started it."""

    can_be_killed = True

    def __init__(self, path: str, receive: Callable[[FromEngine], None], lose: Lose) -> None:
        self._path = path
        self._lose = lose
        self._socket = EngineSocket(receive)
        self._pid: int | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Waits until the engine lets it in: who starts the engine knows how long that may take."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
                break
            except OSError:
                await asyncio.sleep(LOOK_S)
        self._socket.open(writer)
        facts = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        self._pid = CREDENTIALS.unpack(facts)[0]
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, message: ToEngine) -> None:
        self._socket.send(message)

    def sign(self) -> Sign:
        if self._pid is None:
            return Sign(has_answered=True, processor_s=0.0)
        return Sign(self._socket.ask(), processor_s(self._pid), state_of(self._pid) in STOPPED)

    async def close(self, *, at_once: bool) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._socket.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Reads all that the engine sends. The end of the stream is its death, noticed at once."""
        try:
            await self._socket.read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._lose("the engine process has closed its connection")
        except Exception as error:  # an edge: an engine whose messages are not read is lost
            log.exception("the engine process sent an invalid message")
            self._lose(f"the engine process sent an invalid message: {type(error).__name__}")


class JoinedStreams(UnblamedStreams):
    """The streams of a front that did not start the engine: who did says when it is hung, and ends it. Else requests
    would be sent to the same engine again, and called the cause of more deaths than there were."""

    @property
    def is_waiting(self) -> bool:
        return False


class JoinedClient(HealingClient):
    """The client of an engine that another front has started."""

    def __init__(self, path: str, config: Config) -> None:
        def make_host(_: int, receive: Callable[[FromEngine], None], lose: Lose) -> JoinedHost:
            return JoinedHost(path, receive, lose)

        super().__init__(make_host, watchdog_timeout_s=config.watchdog_timeout_s, freeze_grace_s=config.freeze_grace_s)
        self._streams: JoinedStreams = JoinedStreams()

    async def start(self, progress: Progress = no_progress) -> EngineInfo:
        """Joins the engine, which is there. Raises StartupError where it does not let this front in."""
        try:
            async with asyncio.timeout(WAIT_S):
                return await super().start(progress)
        except TimeoutError:
            raise StartupError(f"the engine does not answer within {WAIT_S:g} s") from None

    @property
    def num_asked(self) -> int:
        """The requests that the engine has of this front."""
        return len(self._streams.submitted)

    def expect_none(self, reason: str) -> None:
        """Ends the streams that wait for an engine: whoever starts it has given up. One that comes later is used."""
        if self._is_starting:
            self._give_up(reason)
