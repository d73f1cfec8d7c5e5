"""The engine's process. ProcessClient starts it with FD, one end of a socket pair."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tureen.config import Config
from tureen.contract.types import EngineReady, FromEngine, StartupPhase, ToEngine
from tureen.engine.loop import Loop
from tureen.log import get_logger, set_up_logging
from tureen.sandbox import framing
from tureen.serving.pixels import PixelReceiver, ToChild
from tureen.serving.startup_failure import startup_failure
from tureen.struct_warm_up import warm_up_structs

if TYPE_CHECKING:
    from tureen.serving.door import Door

PING = b""
"""The message that asks whether somebody is there, and the answer to it. All other messages are msgpack."""

ADMIT = b"admit"
"""The message after which other fronts may come in: the engine is in the state that it is to be in."""

log = get_logger("serving")


class BuildOrder(msgspec.Struct, frozen=True):
    """The first message to the child: which engine to build."""

    factory: str  # "module:function", called with (config, progress=…)
    config: Config
    epoch: int = 1  # which engine of this server it is
    weights_descriptor: int | None = None  # for the factory, where there is one; it is inherited
    door: str = ""  # path of the socket at which other fronts may come in; "" = there are none

    @property
    def descriptors(self) -> list[int]:
        """The open files that the child inherits for this."""
        return [] if self.weights_descriptor is None else [self.weights_descriptor]


class Link:
    """The child's end of the socket. The reading thread answers pings even while a step runs."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)
        self._pixel_receiver = PixelReceiver()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._door: Door | None = None  # where other fronts come in

    def make_door(self, path: str) -> None:
        """Makes a door for other fronts, which is opened when the server says so."""
        self._door = importlib.import_module("tureen.serving.door").Door(path, self._inbox.put)

    def receive_order(self) -> BuildOrder:
        return msgspec.msgpack.decode(self._receive() or b"", type=BuildOrder)

    def start_reading(self) -> None:
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def take(self, wait_s: float | None) -> list[ToEngine]:
        """Returns the messages that have come in; waits up to `wait_s` seconds for the first, None = without a
        limit."""
        messages: list[ToEngine] = []
        if wait_s != 0:
            with contextlib.suppress(queue.Empty):
                messages.append(self._inbox.get(timeout=wait_s))
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        return messages

    def publish(self, message: FromEngine) -> None:
        if self._door is not None:
            message = self._door.share(message)
        self._write(self._encoder.encode(message))

    def _read(self) -> None:
        while True:
            payload = self._receive()
            if payload is None:
                os._exit(1)  # the server is gone: this process must end, whatever the engine is doing
            if payload == PING:
                self._write(PING)
                continue
            if payload == ADMIT and self._door is not None:
                self._door.open()
                continue
            message = self._pixel_receiver.receive(self._decoder.decode(payload))
            if message is not None:
                self._inbox.put(message)

    def _receive(self) -> bytes | None:
        with contextlib.suppress(OSError):
            return framing.receive(self._connection, framing.ANY_SIZE)
        return None

    def _write(self, payload: bytes) -> None:
        with self._lock:
            try:
                framing.send(self._connection, payload)
            except OSError:
                os._exit(1)


def main(descriptor: int) -> None:
    """Builds the engine, reports that it is ready, and runs its loop until Close. descriptor: the child's end of the
    socket pair."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)  # whose helpers hold the connection is not seen to end
    link = Link(socket.socket(fileno=descriptor))
    order = link.receive_order()
    if order.door:
        link.make_door(order.door)
    link.start_reading()
    set_up_logging(order.config.log_level, order.config.log_format)
    if order.epoch > 1:
        log.info("engine %d of this server starts", order.epoch)
    module, name = order.factory.split(":")
    try:
        make_engine = getattr(importlib.import_module(module), name)
        if order.weights_descriptor is not None:
            os.set_inheritable(order.weights_descriptor, False)
            make_engine = partial(make_engine, weights_descriptor=order.weights_descriptor)
        engine, info = make_engine(order.config, progress=lambda *phase: link.publish(StartupPhase(*phase)))
    except Exception as error:  # noqa: BLE001 - an edge: the server must hear why
        link.publish(startup_failure(error))
        return
    warm_up_structs()
    link.publish(EngineReady(info))
    Loop(engine, link.take, link.publish).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
