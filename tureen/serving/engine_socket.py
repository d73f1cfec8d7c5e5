"""The front's end of a connection to an engine that is elsewhere: msgpack in frames, a picture once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from tureen.contract.types import FromEngine, GenerateRequest, StepReport, Submit, ToEngine
from tureen.sandbox.framing import ANY_SIZE, HEADER, Oversized, framed
from tureen.serving.child import PING
from tureen.serving.pixels import PixelSender, ToChild


class EngineSocket:
    """Sends what an engine is told, and hears what it says. Until it is open, it is silent."""

    def __init__(self, receive: Callable[[FromEngine], None], *, max_bytes: int = ANY_SIZE) -> None:
        """receive: hears each message. max_bytes: of one message; a larger one is not read."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._pixel_sender = PixelSender(self._write_message)
        self._with_pictures: dict[str, GenerateRequest] = {}  # requests whose pictures the other side has
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._writer: asyncio.StreamWriter | None = None
        self._has_answered = True

    def open(self, writer: asyncio.StreamWriter) -> None:
        """Writes to this connection from now on."""
        self._writer = writer

    def send(self, message: ToEngine) -> None:
        """Sends a message; does nothing once the connection is closed."""
        if isinstance(message, Submit) and message.request.media:
            self._with_pictures[message.request.id] = stripped = self._pixel_sender.send_pixels(message.request)
            message = msgspec.structs.replace(message, request=stripped)
        self._write_message(message)

    def ask(self) -> bool:
        """Says whether anything came since it was called last; asks for an answer before the next time."""
        has_answered, self._has_answered = self._has_answered, False
        self.write(PING)
        return has_answered

    def write(self, payload: bytes) -> None:
        """Writes one frame."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(framed(payload))

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Passes on all that comes, for ever. Raises IncompleteReadError at the end of the stream, OSError, and
        msgspec.DecodeError for what no engine says."""
        while True:
            payload = await read_frame(reader, self._max_bytes)
            self._has_answered = True
            if payload:
                message = self._decoder.decode(payload)
                if self._with_pictures and isinstance(message, StepReport):
                    self._release_pixels(message)
                self._receive(message)

    async def close(self) -> None:
        """Closes the connection."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()

    def _write_message(self, message: ToChild) -> None:
        self.write(self._encoder.encode(message))

    def _release_pixels(self, report: StepReport) -> None:
        """Takes back the pictures of requests that have ended."""
        for delta in report.deltas:
            if delta.finish is not None and delta.id in self._with_pictures:
                self._pixel_sender.release(self._with_pictures.pop(delta.id))


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    """Reads one frame. Raises IncompleteReadError at the end of the stream, and Oversized before any of a larger frame
    is read."""
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    if size > max_bytes:
        raise Oversized(f"a message of {size} bytes; at most {max_bytes} are taken")
    return await reader.readexactly(size)
