"""A server takes the connections of another front's socket while that front is not there."""

from __future__ import annotations

import asyncio
import socket

import httpx
import uvloop
from app_under_test import LiveServer
from timeouts import PATIENCE_S

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def do(server: LiveServer, work) -> None:
    asyncio.run_coroutine_threadsafe(work, server._server._event_loop).result(PATIENCE_S)


def answer_of(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    return connection.recv(1 << 16)


def test_a_connection_of_a_front_that_is_gone_is_answered_once_its_socket_is_covered_also_after_a_reload(monkeypatch):
    monkeypatch.setattr("tureen.http.server.KEEP_ALIVE_S", 10 * PATIENCE_S)  # no idle connection is closed
    for loop in LOOPS.values():
        with LiveServer(loop=loop) as server:
            is_answered_once_its_socket_is_covered(server)
            a_reload_keeps_what_is_covered(server)


def is_answered_once_its_socket_is_covered(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        with socket.create_connection(listener.getsockname(), PATIENCE_S) as waiting:
            do(server, server._server.cover(listener))
            assert answer_of(waiting).startswith(b"HTTP/1.1 200")
            do(server, server._server.uncover(listener))
            assert answer_of(waiting).startswith(b"HTTP/1.1 200")  # it stays with who has accepted it
        with socket.create_connection(listener.getsockname(), PATIENCE_S) as later:
            accepted, _ = listener.accept()
            accepted.close()
            assert later.recv(1) == b""
        assert httpx.get(f"{server.url}/health").status_code == 200


def a_reload_keeps_what_is_covered(server):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        do(server, server._server.cover(listener))
        do(server, server._server._listen(None))
        with socket.create_connection(listener.getsockname(), PATIENCE_S) as connection:
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
        do(server, server._server.uncover(listener))
        with socket.create_connection(server._server._listeners[0].getsockname(), PATIENCE_S) as connection:
            assert answer_of(connection).startswith(b"HTTP/1.1 200")
