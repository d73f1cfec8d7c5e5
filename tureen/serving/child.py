"""The engine's process: `python -m tureen.serving.child FD`, started by ProcessClient with one end of a socket pair."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
import socket
import sys
import threading

import msgspec

from tureen.config import Config
from tureen.contract.types import EngineFailed, EngineReady, FromEngine, StartupPhase, ToEngine
from tureen.engine.loop import Loop
from tureen.errors import TureenError
from tureen.log import get_logger, set_up_logging
from tureen.sandbox import framing
from tureen.serving.pixels import PixelReceiver, ToChild

PING = b""
"""The message that asks whether somebody is there, and the answer to it. All other messages are msgpack."""

log = get_logger("serving")


class BuildOrder(msgspec.Struct, frozen=True):
    """The first message to the child: which engine to build."""

    factory: str  # "module:function", called with (config, progress=…)
    config: Config
    epoch: int = 1  # which engine of this server it is


class Link:
    """The child's end of the socket. The reading thread answers pings even while a step runs."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)
        self._pixel_receiver = PixelReceiver()
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._lock = threading.Lock()

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
        self._write(self._encoder.encode(message))

    def _read(self) -> None:
        while True:
            payload = self._receive()
            if payload is None:
                os._exit(1)  # the server is gone: nobody may be left behind, whatever the engine is doing
            if payload == PING:
                self._write(PING)
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
    link.start_reading()
    set_up_logging(order.config.log_level, order.config.log_format)
    if order.epoch > 1:
        log.info("engine %d of this server starts", order.epoch)
    module, name = order.factory.split(":")
    try:
        make_engine = getattr(importlib.import_module(module), name)
        engine, info = make_engine(order.config, progress=lambda *phase: link.publish(StartupPhase(*phase)))
    except TureenError as error:
        link.publish(EngineFailed(error.message, startup=True))
        return
    except Exception as error:  # an edge: the server must hear why
        log.exception("the engine could not be built")
        link.publish(EngineFailed(f"the engine could not be built: {type(error).__name__}", startup=True))
        return
    link.publish(EngineReady(info))
    Loop(engine, link.take, link.publish).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))
