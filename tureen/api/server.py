"""Runs the application under uvicorn: socket, signals, drain."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from tureen.api.connection import Connection
from tureen.api.state import ServerState
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import get_logger

KEEP_ALIVE_S = 5
LAST_WORDS_S = 1.0
"""After the drain, how long the last error events may take to be sent."""

log = get_logger("http")


def bind(config: Config) -> socket.socket:
    """The listening socket, before the model is loaded, so that a port in use is known at once. Raises StartupError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            free = _free_port(config.host, config.port, family)
            raise StartupError(f"port {config.port} is in use; choose another, such as --port {free}") from None
        raise StartupError(f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}") from None
    return listener


def _free_port(host: str, after: int, family: socket.AddressFamily) -> int:
    for port in range(after + 1, min(after + 100, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return 0


class Server(uvicorn.Server):
    """The first SIGTERM or SIGINT drains, the second ends at once."""

    def __init__(self, app: Starlette, config: Config, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="error",  # what it warns of is clients' nonsense
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                http=Connection,
                ws="none",
                backlog=1024,
                timeout_graceful_shutdown=5,
            )
        )
        self._state: ServerState = app.state.server
        self._drain_timeout_s = config.drain_timeout_s
        self._on_ready = on_ready
        self._drain: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        if self._drain is not None:
            log.warning("second signal: ending now")
            self._drain.cancel()
            self.should_exit = self.force_exit = True
            return
        log.info("%s: finishing %d requests, taking no new ones", signal.Signals(sig).name, self._state.num_running)
        self._state.is_draining = True
        self._drain = asyncio.create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                while self._state.num_running and self._state.client.failure is None:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests did not end in time: aborted", self._state.abort(None, "shutdown"))
            await asyncio.sleep(LAST_WORDS_S)
        self.should_exit = True
