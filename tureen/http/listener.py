"""Binds the socket that the server listens on, before anything that takes time."""

from __future__ import annotations

import errno
import resource
import socket
import sys

from tureen.config import Config
from tureen.errors import StartupError

MAX_SHARE = 0.75
"""Share of the files that the process may open (RLIMIT_NOFILE) which connections may take. Models, helper processes
and pictures need the rest."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def bind(config: Config) -> socket.socket:
    """Binds the listening socket. It is called before the model is loaded, so that a port in use is known at once.
    Raises StartupError."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            free = _free_port(config.host, config.port, family)
            raise StartupError(f"port {config.port} is in use; choose another, such as --port {free}") from None
        raise StartupError(f"cannot listen on --host {config.host} --port {config.port}: {error.strerror}") from None
    return listener


def max_connections() -> int:
    """Returns how many connections may be open at once."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if num_files == resource.RLIM_INFINITY else max(1, int(num_files * MAX_SHARE))


def _free_port(host: str, after: int, family: socket.AddressFamily) -> int:
    for port in range(after + 1, min(after + 100, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return 0
