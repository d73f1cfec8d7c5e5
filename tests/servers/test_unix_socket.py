"""--uds: a Unix socket that its owner alone may open, in place of a port."""

from __future__ import annotations

import os
import socket
import stat
import subprocess

import httpx
import pytest
from app_under_test import LiveServer

from tureen.config import Config
from tureen.errors import StartupError
from tureen.http.listener import bind, remove_socket


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("uds") / "s.sock")
    with LiveServer(uds=path) as running:
        yield running


def through(server, **more) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=server.config.uds), base_url="http://localhost", **more)


def test_a_server_answers_through_its_socket_those_who_may_open_it(server):
    curl_and_streams_come_through_the_socket(server)
    who_opens_the_socket_for_himself_may_use_control_routes_and_a_proxy_may_not(server)


def curl_and_streams_come_through_the_socket(server):
    command = ["curl", "-s", "--unix-socket", server.config.uds, "http://localhost/generate", "-d", '{"text": "ab"}']
    ran = subprocess.run([*command, "-H", "Content-Type: application/json"], capture_output=True, check=True)
    assert b'"meta_info"' in ran.stdout
    body = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 3}}
    with through(server) as client, client.stream("POST", "/generate", json=body) as answer:
        assert [line for line in answer.iter_lines() if line][-1] == "data: [DONE]"


WHO = (
    ({}, 200),
    ({"x-forwarded-for": "203.0.113.7"}, 403),
    ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 403),
    ({"Host": "evil.example"}, 403),
)
"""Headers of a request, and its status."""


def who_opens_the_socket_for_himself_may_use_control_routes_and_a_proxy_may_not(server):
    assert stat.S_IMODE(os.stat(server.config.uds).st_mode) == 0o600
    told = []
    for headers, _ in WHO:
        with through(server, headers=headers) as client:
            told.append((headers, client.post("/flush_cache").status_code))
    assert told == list(WHO)


def test_only_a_socket_that_no_server_uses_is_replaced(tmp_path):
    the_umask_is_as_it_was(tmp_path)
    a_path_that_cannot_be_is_one_line_that_names_the_flag()
    checks = (
        a_socket_that_a_server_left_behind_is_taken_over,
        a_socket_in_use_is_left_alone,
        what_is_no_socket_is_never_removed,
    )
    for number, check in enumerate(checks):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(folder)


def the_umask_is_as_it_was(tmp_path):
    before = os.umask(0o027)
    try:
        bind(Config(uds=str(tmp_path / "s"))).close()
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def a_socket_that_a_server_left_behind_is_taken_over(tmp_path):
    path = str(tmp_path / "s")
    bind(Config(uds=path)).close()  # as after kill -9: nobody listens
    with bind(Config(uds=path)) as listener:
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)


def a_socket_in_use_is_left_alone(tmp_path):
    path = str(tmp_path / "s")
    with bind(Config(uds=path)) as listener:
        listener.listen()
        with pytest.raises(StartupError, match="in use by a running server"):
            bind(Config(uds=path))
        remove_socket(Config(uds=path))
        assert os.path.exists(path)
    remove_socket(Config(uds=path))
    assert not os.path.exists(path)


def what_is_no_socket_is_never_removed(tmp_path):
    path, other = tmp_path / "s", tmp_path / "other"
    other.write_text("mine")
    make = {"folder": path.mkdir, "file": lambda: path.write_text("mine"), "link": lambda: path.symlink_to(other)}
    for kind, put in make.items():
        put()
        with pytest.raises(StartupError, match="is not a socket"):
            bind(Config(uds=str(path)))
        remove_socket(Config(uds=str(path)))
        assert os.path.lexists(path), kind
        assert other.read_text() == "mine", kind
        path.rmdir() if kind == "folder" else path.unlink()


def a_path_that_cannot_be_is_one_line_that_names_the_flag():
    for path in ("/" + 200 * "x", "/nowhere/at/all/s", "a\0b"):
        with pytest.raises(StartupError, match="--uds ") as refused:
            bind(Config(uds=path))
        assert "\n" not in refused.value.message
