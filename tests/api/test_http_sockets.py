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
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connected:
        connected.sendall(sent)
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


@pytest.mark.parametrize(
    "protocol", [b"h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA", b"websocket\r\nSec-WebSocket-Version: 13"]
)
def test_an_upgrade_is_not_heard_and_the_body_is(server, protocol):
    asked = b"Connection: Upgrade\r\nUpgrade: " + protocol + b"\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    last = START + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    answer = exchanged(server, START + asked + BODY + last + BODY)
    assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b'"text":"good"') == 2
    assert b"101" not in answer.split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (CHUNKED + b"1\r\na\r\n0\r\n", b"X-Filler: " + b"y" * 1000 + b"\r\n"),
        (CHUNKED + b"1;", b"x" * 1000),
        (START, b"X-Filler: " + b"y" * 1000 + b"\r\n"),
        (b"GET /", b"x" * 1000),
    ],
    ids=["trailers", "chunk extension", "headers", "path"],
)
def test_what_has_no_end_is_cut_off_over_a_socket_too(server, first, part):
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connected:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connected.sendall(first)
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sent += connected.send(part)
    # what the networks of both sides hold comes on top
    assert connection.MAX_FRAMING_BYTES - 2000 <= sent < 32 << 20
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_key_in_a_trailer_opens_nothing_over_a_socket():
    with LiveServer(admin_api_key="4dm1n", api_key="k3y") as server:
        for path in (b"/generate", b"/flush_cache"):
            request = CHUNKED.replace(b"/generate", path).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            request += b"%x\r\n%b\r\n0\r\nAuthorization: Bearer 4dm1n\r\n\r\n" % (len(BODY), BODY)
            assert exchanged(server, request).startswith(b"HTTP/1.1 401 ")
