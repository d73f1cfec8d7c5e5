"""Runs the application under uvicorn: listening, TLS, signals, draining."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Protocol, cast

import uvicorn
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send

from tureen.clients.keys import load_keys
from tureen.config import Config
from tureen.errors import StartupError, TureenError
from tureen.http.connection import Admission, Connection
from tureen.http.listener import max_connections
from tureen.http.tls import load_context
from tureen.log import RateLimit, get_logger
from tureen.requests.state import ServerState
from tureen.struct_warm_up import warm_up_structs

BACKLOG = 1024
HANDSHAKE_TIMEOUT_S = 10.0
KEEP_ALIVE_S = 5
LAST_EVENTS_S = 1.0
"""Seconds in which the last error events may be sent after draining has timed out."""

log = get_logger("http")


class ServedApp(Protocol):
    """An application whose ServerState is `state.server`."""

    state: State

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class Server(uvicorn.Server):
    """The uvicorn server. The first SIGTERM or SIGINT drains, the second ends immediately. SIGHUP reloads keys and
    certificates."""

    def __init__(self, app: ServedApp, config: Config, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                lifespan="on",  # an error in the application's start or end ends the server
                log_config=None,
                log_level="error",  # its warnings are about clients' malformed requests
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                http=Connection,
                ws="none",
                proxy_headers=False,  # X-Forwarded-* headers are not trusted
                timeout_graceful_shutdown=5,
            )
        )
        self._state: ServerState = app.state.server
        self._settings = config
        self._context = load_context(config)
        self._listeners: list[socket.socket] = []  # of which `servers` has one each
        self._is_listening = asyncio.Lock()  # held while these change
        self._reload: asyncio.Task[None] | None = None
        self._on_ready = on_ready
        self._admission = Admission(max_connections(), self._note_refusal)
        self._refusals = RateLimit(count=20, interval_s=1.0)
        self._drain: asyncio.Task[None] | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then listens on `sockets`; uvicorn calls it."""
        self._event_loop = asyncio.get_running_loop()
        self._listeners = [*(sockets or [])]
        warm_up_structs()
        await super().startup([])  # everything except listening, which `_listen` does, also after a reload
        await self._listen(self._context)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGHUP, self._handle_hang_up)
        if self._state.common.fronts is not None:
            self._state.common.fronts.share_with(self)
        self._on_ready()

    async def cover(self, listener: socket.socket) -> None:
        """Begins to accept the connections of another front's socket as well."""
        async with self._is_listening:
            self.servers.append(await self._accept(listener, self.config.ssl))
            self._listeners.append(listener)

    async def uncover(self, listener: socket.socket) -> None:
        """Stops accepting connections of that socket; accepted connections stay."""
        async with self._is_listening:
            place = self._listeners.index(listener)
            del self._listeners[place]
            await _end([self.servers.pop(place)])

    async def _listen(self, context: ssl.SSLContext | None) -> None:
        """Accepts new connections with the TLS `context` (None = plain HTTP), without losing connections that wait to
        be accepted.

        Each set of asyncio servers has its own descriptors of the same sockets, so that the old set can close its own.
        """
        async with self._is_listening:
            fresh = [await self._accept(listener, context) for listener in self._listeners]
            old, self.servers = self.servers, fresh
            self.config.ssl = context
            await _end(old)
        for connection in list(self.server_state.connections):
            cast(Connection, connection).retire()

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext | None) -> asyncio.Server:
        """Accepts the connections of a socket, through a separate descriptor."""
        loop = asyncio.get_running_loop()
        server: asyncio.Server = await (
            loop.create_server if listener.family != socket.AF_UNIX else loop.create_unix_server
        )(
            self._connection,
            sock=listener.dup(),
            ssl=context,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_TIMEOUT_S,
        )
        return server

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs the server. If it is interrupted while it starts, it ends without a traceback."""
        try:
            await super().serve(sockets)
        except asyncio.CancelledError:
            logging.getLogger("uvicorn.error").disabled = True  # it would log the cancelled application task
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes connections and the application; uvicorn calls it. After a second signal the application has
        LAST_EVENTS_S; uvicorn alone would abandon it and log its traceback."""
        logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)  # of tasks that do not end in time
        await super().shutdown(sockets)
        if self.force_exit:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), LAST_EVENTS_S)

    def _connection(self) -> asyncio.Protocol:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            admission=self._admission,
        )

    def _note_refusal(self, request_id: str, error: TureenError) -> None:
        self._state.metrics.count_response(error.status)
        left_out = self._refusals.admit()
        if left_out is not None:
            suffix = f" ({left_out} like it left out)" if left_out else ""
            log.info("%s refused before it was parsed: %d %s%s", request_id, error.status, error.code, suffix)

    def _handle_hang_up(self, _: int, __: FrameType | None) -> None:
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self.reload)

    def reload(self) -> None:
        """Reloads keys and certificates; running streams continue. If one of them is invalid, logs why and keeps all
        old ones."""
        if self._state.lifecycle.is_draining:
            return
        try:
            keys, context = load_keys(self._settings), load_context(self._settings)
        except StartupError as error:
            log.error("reload: %s; keys and certificates stay unchanged", error.message)
            return
        self._state.common.keys = keys
        if self._state.common.fronts is not None:
            self._state.common.fronts.reload()
        self._reload = asyncio.create_task(self._renew(context))

    async def _renew(self, context: ssl.SSLContext | None) -> None:
        try:
            if context is not None:
                await self._listen(context)
        except OSError as error:
            log.error("reload: cannot listen again: %s; the certificates stay unchanged", error.strerror)
            return
        log.info("reload: keys and certificates were reloaded")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGTERM and SIGINT; uvicorn installs it."""
        if self._event_loop is not None:
            self._event_loop.call_soon_threadsafe(self._stop, sig)

    def _stop(self, sig: int) -> None:
        if self._drain is not None:
            log.warning("second signal: stopping now")
            self._drain.cancel()
            self.should_exit = self.force_exit = True
            return
        name, count = signal.Signals(sig).name, self._state.common.num_running
        again = "Ctrl-C again ends" if sig == signal.SIGINT else "a second signal ends"
        if count:
            most_s = self._settings.drain_timeout_s
            log.info(
                "%s: finishing %d requests within %g s; accepting no new ones; %s them now", name, count, most_s, again
            )
        else:
            log.info("%s: ending; no request was running", name)
        self._state.lifecycle.drain()
        self._drain = asyncio.create_task(self._drain_then_exit())

    async def _drain_then_exit(self) -> None:
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                while self._state.common.num_running:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("%d requests did not finish in time: aborted", self._state.common.abort_all("shutdown"))
            await asyncio.sleep(LAST_EVENTS_S)
        self.should_exit = True


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """Return whether a log line is anything other than the traceback of a cancelled request."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


async def _end(servers: Sequence[asyncio.Server]) -> None:
    """Stops accepting connections, without losing an accepted one."""
    for server in servers:
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening)
    await asyncio.sleep(0)  # let asyncio begin with accepted connections: closing its server would drop them
    for server in servers:
        server.close()
