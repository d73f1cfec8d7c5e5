"""Bytes on a connection: however they are cut, the same requests come of them, and those that another parser reads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import h11
import uvicorn
from uvicorn.server import ServerState as Uvicorn
from virtual_clock import Clock, VirtualLoop
from wire import Wire

from tureen.http import connection as limits
from tureen.http.connection import Connection

PIECE_BYTES = 19
LEFT_TO_EACH = ("host", "content-length", "transfer-encoding")
"""Headers that a parser may rewrite: by the target's host, in small letters, without zeros. Bodies are compared."""

Seen = dict[str, Any]


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers what it saw."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    seen = {"method": scope["method"], "target": scope["raw_path"].decode("latin-1"), "headers": headers}
    answer = json.dumps(seen | {"body": body.decode("latin-1")}).encode()
    length = (b"content-length", b"%d" % len(answer))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": answer})


def make_config() -> uvicorn.Config:
    config = uvicorn.Config(echo, lifespan="off", log_config=None, access_log=False, http=Connection, ws="none")
    config.load()
    return config


CONFIG = make_config()


async def talk(pieces: list[bytes]) -> tuple[bytes, bool]:
    """What a new connection writes when these arrive one after the other, and whether it is closed then."""
    wire = Wire(Connection(config=CONFIG, server_state=Uvicorn(), app_state={}))
    await wire.send(*pieces)
    assert wire.server._framing_bytes <= limits.MAX_FRAMING_BYTES + len(b"".join(pieces)) // 8 + limits.MAX_PIECE_BYTES
    is_closed = wire.is_closed
    written = re.sub(rb"x-request-id: [0-9a-f]+\r\n", b"", wire.transport.written)
    wire.transport.close()
    await wire.settle()
    return written, is_closed


def requests_of(written: bytes) -> list[Seen]:
    """What the application saw. Fails for bytes that are no answers, and for one behind a refusal."""
    seen: list[Seen] = []
    while written:
        head, end, rest = written.partition(b"\r\n\r\n")
        assert end, written
        status = int(head.split()[1])
        if status == 100:
            written = rest
            continue
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        is_to_head = status == 200 and not rest.startswith(b"{")
        body, written = (b"", rest) if is_to_head else (rest[:length], rest[length:])
        assert len(body) == (0 if is_to_head else length)
        if status != 200:
            assert status in (400, 408, 431), head
            assert b"connection: close" in head
            assert not written
            break
        seen.append({} if is_to_head else json.loads(body))  # {}: a HEAD, whose answer has no body
    return seen


def read_by_another(data: bytes) -> list[Seen]:
    """The requests that h11 reads, as far as it takes them."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    seen: list[Seen] = []
    with contextlib.suppress(h11.RemoteProtocolError):
        reader.receive_data(data)
        while True:
            event = reader.next_event()
            if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
                break
            if isinstance(event, h11.Request):
                headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in event.headers]
                head = {"method": event.method.decode(), "target": event.target.decode(), "headers": headers}
                body = b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                seen.append(head | {"body": body.decode("latin-1")})
                reader.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                reader.send(h11.EndOfMessage())
                if reader.our_state is not h11.DONE or reader.their_state is not h11.DONE:
                    break
                reader.start_next_cycle()
    return seen


def meaning(seen: Seen) -> Seen:
    """What both parsers tell in the same way: blanks around values and the host in a target are not."""
    headers = sorted((name, value.strip(" \t")) for name, value in seen["headers"] if name not in LEFT_TO_EACH)
    target = seen["target"].partition("?")[0]
    if "://" in target:
        target = "/" + target.split("/", 3)[3]
    return {"method": seen["method"], "target": target, "headers": headers, "body": seen["body"]}


def run(data: bytes) -> None:
    if not data:
        return
    pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(Clock())) as runner:
        whole, is_closed = runner.run(talk([data]))
        cut, is_cut_closed = runner.run(talk(pieces))
    assert (whole, is_closed) == (cut, is_cut_closed)
    ours = requests_of(whole)
    for seen, other in zip(ours, read_by_another(data), strict=False):
        assert not seen or meaning(seen) == meaning(other), (seen, other)
