"""Binds the socket that the server listens on, before anything that takes time."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import sys

from tureen.config import Config
from tureen.errors import StartupError, echo

MAX_SHARE = 0.75
"""Share of the process's file descriptors (RLIMIT_NOFILE) that connections may use. Models, helper processes and
pictures need the rest."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNIX = ("unix socket", 0)
"""The address that is recorded for clients of a Unix socket."""


def bind(config: Config) -> socket.socket:
    """Binds the listening socket. Called before the model is loaded, so a port in use is reported immediately. Raises
    StartupError."""
    if config.uds is not None:
        return _bind_unix(config.uds)
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


def remove_socket(config: Config) -> None:
    """Removes the file of a Unix socket that no process listens on any more."""
    if config.uds is not None:
        with contextlib.suppress(StartupError, OSError):
            _remove_stale(config.uds)


def _bind_unix(path: str) -> socket.socket:
    """Binds a Unix socket that only its owner may open. Replaces a socket that no process listens on. Raises
    StartupError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    others = os.umask(0o177)  # the file is never open to others, not even before a chmod
    try:
        _remove_stale(path)
        listener.bind(path)
    except (OSError, ValueError) as error:  # ValueError: this is not a valid file name
        listener.close()
        raise StartupError(f"cannot listen on --uds {echo(path)}: {error.args[-1]}") from None
    except StartupError:
        listener.close()
        raise
    finally:
        os.umask(others)
    return listener


def _remove_stale(path: str) -> None:
    """Removes the file of our own socket that refuses connections. Raises StartupError if the file is anything else,
    OSError."""
    try:
        facts = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(facts.st_mode):
        raise StartupError(f"--uds {path}: a file of this name exists and is not a socket; choose another name")
    if facts.st_uid != os.geteuid():
        raise StartupError(f"--uds {path}: another user's socket has this name; choose another name")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise StartupError(f"--uds {path} is in use by a running server; choose another name")


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
