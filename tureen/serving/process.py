"""Runs an engine in a child process: msgpack over a socket pair. The parent imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from tureen.config import Config
from tureen.contract.types import Close, FromEngine, ToEngine
from tureen.log import get_logger
from tureen.serving.child import ADMIT, BuildOrder
from tureen.serving.engine_socket import EngineSocket
from tureen.serving.healing import HealingClient
from tureen.serving.watchdog import Sign, processor_s

CLOSE_TIMEOUT_S = 10.0
END_TIMEOUT_S = 1.0
"""Seconds that a process may still be there after its end of the socket is closed."""

STOPPED = ("T", "t")  # states of a process that a signal, or a debugger, has stopped

log = get_logger("serving")


class ProcessHost:
    """A Host that starts the child and talks to it. A thread of the child answers pings, so a long step is no
    silence."""

    can_be_killed = True

    def __init__(self, order: BuildOrder, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> None:
        self._order = order
        self._lose = lose
        self._socket = EngineSocket(receive)
        self._child: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The child's process id."""
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        from tureen.sandbox import child_process  # noqa: PLC0415 - an engine in a thread needs none

        ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), *self._order.descriptors]
            try:
                self._child = child_process.start("tureen.serving.child", str(theirs.fileno()), pass_fds=descriptors)
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours)
        self._socket.open(writer)
        self._socket.write(msgspec.msgpack.encode(self._order))
        self._reading = asyncio.create_task(self._read(reader))

    def send(self, message: ToEngine) -> None:
        self._socket.send(message)

    def admit(self) -> None:
        """Lets other fronts in at the engine's door: it is in the state that it is to be in."""
        self._socket.write(ADMIT)

    def sign(self) -> Sign:
        assert self._child is not None
        has_answered = self._socket.ask()
        if self._child.poll() is not None:  # though somebody may hold its end of the socket
            asyncio.get_running_loop().call_soon(self._lose, _how_ended(self._child.returncode))
        return Sign(has_answered, processor_s(self.pid), state_of(self.pid) in STOPPED)

    async def close(self, *, at_once: bool) -> None:
        child = self._child
        if child is None:
            return
        if not at_once:
            self.send(Close())
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(child.wait, CLOSE_TIMEOUT_S)
        child.kill()
        await asyncio.to_thread(child.wait)
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=END_TIMEOUT_S)  # it ends with the child's last words
            self._reading.cancel()
        await self._socket.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Reads all that the child sends. The end of the stream is the child's death, noticed at once."""
        assert self._child is not None
        try:
            await self._socket.read(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._child.wait, END_TIMEOUT_S)
            self._lose(_how_ended(self._child.returncode))
        except Exception as error:  # an edge: an engine whose messages are not read is lost
            log.exception("the engine process sent an invalid message")
            self._lose(f"the engine process sent an invalid message: {type(error).__name__}")


class ProcessClient(HealingClient):
    """An EngineClient whose engine runs in a child process. `factory` is "module:function"."""

    def __init__(self, factory: str, config: Config, weights_descriptor: int | None = None) -> None:
        """`weights_descriptor`: of the file in which the engine finds weights that others use, too."""

        def make_host(epoch: int, receive: Callable[[FromEngine], None], lose: Callable[[str], None]) -> ProcessHost:
            return ProcessHost(BuildOrder(factory, config, epoch, weights_descriptor), receive, lose)

        super().__init__(make_host, watchdog_timeout_s=config.watchdog_timeout_s, freeze_grace_s=config.freeze_grace_s)


def _how_ended(status: int | None) -> str:
    if status is None:
        return "the engine process has closed its connection"
    if status >= 0:
        return f"the engine process ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"the engine process was ended by {signal.Signals(-status).name}"
    return f"the engine process was ended by signal {-status}"


def state_of(pid: int) -> str:
    """Returns a process's state, one letter, see proc(5); empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][1]
    return ""
