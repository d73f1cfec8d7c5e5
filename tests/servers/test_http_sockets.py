"""Odd clients and hostile bytes over real sockets."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from app_under_test import LiveServer
from timeouts import PATIENCE_S, wait_until

import tureen
from tureen.http import connection

START = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b'{"text":"say:good"}'


@pytest.fixture(scope="module")
def server():
    with LiveServer() as running:
        yield running


def exchanged(server: LiveServer, sent: bytes) -> bytes:
    """All that the server answers until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connected:
        connected.sendall(sent)
        return read_whole(connected)


def read_whole(connected: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    return b"".join(iter(lambda: connected.recv(65536), b""))


@pytest.mark.skipif(shutil.which("java") is None, reason="needs java, 11 or later")
def test_the_client_of_the_jdk_which_asks_for_http_2_is_answered(server):
    source = Path(__file__).with_name("Upgrading.java")
    ran = subprocess.run(["java", str(source), server.url], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    answers = [line.split(" ", 2) for line in ran.stdout.splitlines()]
    assert [answer[:2] for answer in answers] == [["HTTP_1_1", "200"]] * 4
    told = [json.loads(answer[2]) for answer in answers]
    assert [one.get("text") for one in told] == ["known length", "again", "in chunks", None]
    assert told[3]["version"] == tureen.__version__


ENDLESS = {
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X-Filler: " + b"y" * 1000 + b"\r\n"),
    "chunk extension": (CHUNKED + b"1;", b"x" * 1000),
    "headers": (START, b"X-Filler: " + b"y" * 1000 + b"\r\n"),
    "path": (b"GET /", b"x" * 1000),
}
"""How each begins, and what is sent again and again."""


def test_what_has_no_end_is_cut_off_over_a_socket_too(server):
    sent = {name: num_sent(server, first, part) for name, (first, part) in ENDLESS.items()}
    # what the networks of both sides hold comes on top
    least, most = connection.MAX_FRAMING_BYTES - 2000, 32 << 20
    assert {name: size for name, size in sent.items() if not least <= size < most} == {}
    assert httpx.get(f"{server.url}/health").status_code == 200


def num_sent(server: LiveServer, first: bytes, part: bytes) -> int:
    """Return how many bytes the server takes before it closes the connection."""
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connected.sendall(first)
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sent += connected.send(part)
    return sent


def test_a_client_of_http_1_0_gets_no_chunks_and_a_stream_ends_with_the_connection(server):
    for keep in (b"", b"Connection: keep-alive\r\n"):
        stream_to_http_1_0(server, keep)
    asked = START.replace(b"POST /generate HTTP/1.1", b"GET /version HTTP/1.0") + b"\r\n"
    head, _, body = exchanged(server, asked).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body) == {"version": tureen.__version__}


def stream_to_http_1_0(server: LiveServer, keep: bytes) -> None:
    body = b'{"text":"say:good","stream":true}'
    asked = START + b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    answer = exchanged(server, asked.replace(b"HTTP/1.1", b"HTTP/1.0") + keep + b"\r\n" + body)
    head, _, events = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith(b"data: {") for event in events.split(b"\n\n")[:-2])  # no sizes of chunks between them
    assert b'"text":"good"' in events


def test_more_connections_than_may_be_open_are_told_so_and_closed_and_those_that_are_open_go_on(monkeypatch):
    monkeypatch.setattr("tureen.http.server.max_connections", lambda: 4)
    monkeypatch.setattr("tureen.http.connection.HEAD_TIMEOUT_S", PATIENCE_S)
    with LiveServer() as server, contextlib.ExitStack() as held:
        address = ("127.0.0.1", server.port)
        held_open = [held.enter_context(socket.create_connection(address, timeout=PATIENCE_S)) for _ in range(4)]
        wait_until(lambda: len(server._server.server_state.connections) == 4, "four connections")
        for _ in range(3):
            with socket.create_connection(address, timeout=PATIENCE_S) as refused:
                head, _, body = read_whole(refused).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        for connected in held_open:
            connected.sendall(START + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
            assert b'"text":"good"' in read_whole(connected)
        wait_until(lambda: not server._server.server_state.connections, "the end of all connections")
        assert server.metric("http_responses_total[503]") == 3
