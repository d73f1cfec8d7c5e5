"""The socket that a server listens on. Each test has a loopback address of its own, whose ports nobody else uses."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tureen.config import Config
from tureen.errors import StartupError
from tureen.http.listener import bind


def _taken(host: str, *ports: int) -> contextlib.ExitStack:
    """These ports, in use."""
    stack = contextlib.ExitStack()
    for port in ports:
        taken = stack.enter_context(socket.create_server((host, port)))
        assert taken.getsockname() == (host, port)
    return stack


def test_the_port_and_address_that_were_asked_for_are_taken_or_others_are_named():
    who_connects_to_the_port_that_was_asked_for_is_heard()
    a_port_that_a_server_before_has_just_left_is_taken_again()
    where_a_port_is_in_use_the_next_free_one_is_named_and_0_lets_the_system_choose()
    a_hundred_ports_in_use_are_enough()
    an_address_that_is_not_this_machine_s_is_named()


def who_connects_to_the_port_that_was_asked_for_is_heard():
    with bind(Config(host="127.83.1.1", port=30_000)) as listener:
        listener.listen()
        with socket.create_connection(("127.83.1.1", 30_000)), listener.accept()[0] as heard:
            assert heard.getsockname() == ("127.83.1.1", 30_000)


def a_port_that_a_server_before_has_just_left_is_taken_again():
    with bind(Config(host="127.83.1.2", port=30_000)) as listener:
        listener.listen()
        client = socket.create_connection(("127.83.1.2", 30_000))
        listener.accept()[0].close()  # who closes first waits for what may still come
        client.close()
    bind(Config(host="127.83.1.2", port=30_000)).close()


PORTS = (
    ([30_000], 30_001),
    ([30_000, 30_001, 30_002], 30_003),
    ([65_534], 65_535),
    ([65_535], 0),
    ([65_534, 65_535], 0),
)
"""Ports in use, and the one that is named."""


def where_a_port_is_in_use_the_next_free_one_is_named_and_0_lets_the_system_choose():
    for taken, free in PORTS:
        with _taken("127.83.1.3", *taken):
            with pytest.raises(StartupError) as caught:
                bind(Config(host="127.83.1.3", port=taken[0]))
            assert str(caught.value) == f"port {taken[0]} is in use; choose another, such as --port {free}"
            bind(Config(host="127.83.1.3", port=free)).close()


def a_hundred_ports_in_use_are_enough():
    with _taken("127.83.1.4", *range(30_000, 30_100)), pytest.raises(StartupError, match=r"--port 0$"):
        bind(Config(host="127.83.1.4", port=30_000))


def an_address_that_is_not_this_machine_s_is_named():
    with pytest.raises(StartupError, match=r"^cannot listen on --host 192\.0\.2\.1 --port 30000: Cannot assign"):
        bind(Config(host="192.0.2.1", port=30_000))  # RFC 5737: nobody's


def test_an_address_of_ipv6_is_taken():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with bind(Config(host="::1", port=0)) as listener:
        assert listener.getsockname()[0] == "::1"
