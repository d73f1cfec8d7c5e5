"""The messages between the owner and another front, in frames over a socket pair."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tureen.config import Config
from tureen.sandbox.framing import HEADER, framed
from tureen.serving.client import ReplicaFacts


class SharedFacts(msgspec.Struct, frozen=True):
    """The facts that operators change while the server runs, and all fronts tell."""

    adapters: dict[str, str]  # name -> path
    model_path: str
    weight_version: str
    log_level: int  # of logging
    replicas: list[ReplicaFacts] = []  # where there are several


class Order(msgspec.Struct, frozen=True, tag="order"):
    """The first message to a front: what it is to be."""

    config: Config
    number: int  # of the front, from 1; the owner is 0
    folder: str  # of the sockets of engine and owner
    factory: str  # "module:function", called with the settings: gives tokenizer and loader of pictures
    facts: SharedFacts


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Has a front do something; its Answer has the same number."""

    number: int
    op: str
    args: dict[str, Any] = {}


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The answer of a front; number 0: it was not asked, and tells its Figures."""

    number: int
    value: Any = None


class Unable(msgspec.Struct, frozen=True, tag="unable"):
    """Says why a front cannot start."""

    reason: str


Sample = tuple[str, dict[str, str], float]
"""A value in the metrics: its name, its labels, the value."""


class Figures(msgspec.Struct, frozen=True):
    """The figures of a front: requests that run, those of them that the engine has, and its counters."""

    num_running: int
    samples: list[Sample] = []
    num_asked: int = 0
    loads: list[int] = []  # tokens that each replica is to compute for it
    news: list[list[int]] = []  # pages that it has given to each replica since it told the last


class Wire:
    """One end of the connection between two fronts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(Order | Ask | Answer | Unable)

    def send(self, message: Order | Ask | Answer | Unable) -> None:
        if not self._writer.is_closing():
            self._writer.write(framed(msgspec.msgpack.encode(message)))

    async def receive(self) -> Order | Ask | Answer | Unable | None:
        """Returns the next message; None when the other end is gone."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            message: Order | Ask | Answer | Unable = self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return message

    def close(self) -> None:
        self._writer.close()
