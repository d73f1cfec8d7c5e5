"""The door of an engine's process: other fronts than the one that started it connect here, and give it requests.

Each front gets one message a step, with what is new of its own requests. The requests of a front that leaves end.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from tureen.contract.types import (
    Abort,
    EngineFailed,
    EngineReady,
    FromEngine,
    OutputDelta,
    StepReport,
    Submit,
    ToEngine,
)
from tureen.log import get_logger
from tureen.sandbox import framing
from tureen.serving.peer_credentials import is_trusted
from tureen.serving.pixels import PixelReceiver, ToChild

MOST_UNREAD = 64 << 20
"""Most bytes that wait for a front. One that is so far behind is cut off: it does not get to run."""

BACKLOG = 64

log = get_logger("serving")

Put = Callable[[ToEngine], None]


class Guest:
    """A front that has come in. The engine's thread sends to it, and never waits for it."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.request_ids: set[str] = set()  # that have not ended, as the front calls them
        self._connection = connection
        self._is_closed = False
        self._news = threading.Condition()
        self._unread: deque[bytes] = deque()  # what it did not take at once
        self._num_unread = 0
        self._has_writer = False

    def send(self, payload: bytes) -> None:
        """Sends a message; one that the front does not take at once is sent by a thread."""
        data = framing.framed(payload)
        with self._news:
            if not self._unread:
                try:
                    data = data[self._connection.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    pass
                except OSError:
                    return  # it is gone, and its reading thread hears of it
            if data:
                self._keep(data)

    def receive(self) -> bytes | None:
        """Returns its next message; None when it has left."""
        with contextlib.suppress(OSError):
            return framing.receive(self._connection, framing.ANY_SIZE)
        return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._news:  # no thread sends now: another connection may reuse the descriptor's number
            self._connection.close()
            self._is_closed = True
            self._news.notify()

    def id_of(self, request_id: str) -> str:
        """Returns what the engine calls a request, so that those of several fronts are not taken for each other, nor
        those of a connection that has ended."""
        return f"{self.number}/{request_id}"

    def _keep(self, data: bytes) -> None:
        self._unread.append(data)
        self._num_unread += len(data)
        if self._num_unread > MOST_UNREAD:
            log.error("a front does not read the engine's messages: its connection is closed")
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)
        if not self._has_writer:
            self._has_writer = True
            threading.Thread(target=self._write, name="front", daemon=True).start()
        self._news.notify()

    def _write(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._unread or self._is_closed)
                if self._is_closed:
                    return
                data = self._unread[0]
            try:
                self._connection.sendall(data)
            except OSError:
                return
            with self._news:
                self._unread.popleft()
                self._num_unread -= len(data)


class Door:
    """Lets fronts in, gives the engine what they ask, and each front its share of what the engine says."""

    def __init__(self, path: str, put: Put) -> None:
        """put: gives the engine's loop a message."""
        self._path = path
        self._put = put
        self._ready = b""
        self._guests: dict[str, Guest] = {}  # by number, as the ids of their requests have it
        self._num_guests = 0  # ever
        self._encoder = msgspec.msgpack.Encoder()

    def open(self) -> None:
        """Begins to let fronts in."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        Path(self._path).unlink(missing_ok=True)
        listener.bind(self._path)
        listener.listen(BACKLOG)
        threading.Thread(target=self._accept, args=(listener,), name="door", daemon=True).start()

    def share(self, message: FromEngine) -> FromEngine:
        """Sends the fronts their parts of a message. Returns the part of the front that started the engine."""
        if isinstance(message, EngineReady):
            self._ready = self._encoder.encode(message)
        elif isinstance(message, StepReport) and self._guests:
            return self._split(message)
        elif isinstance(message, EngineFailed):
            for guest in tuple(self._guests.values()):
                guest.send(self._encoder.encode(message))
        return message

    def _split(self, report: StepReport) -> StepReport:
        own: list[OutputDelta] = []
        guests = self._guests.copy()
        parts = {number: list[OutputDelta]() for number, guest in guests.items() if guest.request_ids}
        for delta in report.deltas:
            number, _, name = delta.id.partition("/")
            guest = guests.get(number)
            if guest is None or name not in guest.request_ids:
                own.append(delta)
                continue
            parts.setdefault(number, []).append(msgspec.structs.replace(delta, id=name))
            if delta.finish is not None:
                guest.request_ids.discard(name)
        for number, deltas in parts.items():
            guests[number].send(self._encoder.encode(StepReport(tuple(deltas), report.stats)))
        return StepReport(tuple(own), report.stats)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            os.set_inheritable(connection.fileno(), False)
            if not is_trusted(connection):
                log.warning("a process of another user is refused at %s", self._path)
                connection.close()
                continue
            self._num_guests += 1
            guest = Guest(self._num_guests, connection)
            self._guests[str(guest.number)] = guest
            guest.send(self._ready)
            threading.Thread(target=self._serve, args=(guest,), name="front", daemon=True).start()

    def _serve(self, guest: Guest) -> None:
        try:
            self._listen_to(guest)
        except Exception:  # an edge: a front that is not understood has left
            log.exception("a front sent an invalid message: its connection is closed")
        del self._guests[str(guest.number)]
        for request_id in tuple(guest.request_ids):
            self._put(Abort(guest.id_of(request_id)))
        guest.close()

    def _listen_to(self, guest: Guest) -> None:
        """Gives the engine what a front asks, until it leaves."""
        decoder, pixel_receiver = msgspec.msgpack.Decoder(ToChild), PixelReceiver()
        while (payload := guest.receive()) is not None:
            if not payload:  # a ping
                guest.send(payload)
                continue
            message = pixel_receiver.receive(decoder.decode(payload))
            if isinstance(message, Submit):
                request = message.request
                guest.request_ids.add(request.id)
                self._put(
                    msgspec.structs.replace(
                        message, request=msgspec.structs.replace(request, id=guest.id_of(request.id))
                    )
                )
            elif isinstance(message, Abort) and message.request_id in guest.request_ids:
                self._put(msgspec.structs.replace(message, request_id=guest.id_of(message.request_id)))
