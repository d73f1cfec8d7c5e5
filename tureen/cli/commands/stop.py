"""`tureen stop`: asks a server on this machine to finish and to end."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from tureen.cli.flags import load_config
from tureen.cli.places import add_places
from tureen.errors import Forbidden, NotFound, RequestTimeout

HELP = "stop a server that runs on this machine"
GRACE_S = 10.0
"""Seconds that a server may take to end once its requests are finished, or cut short."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds which server."""
    parser.add_argument("which", nargs="?", metavar="PID|PORT|URL", help="as shown by tureen ps [the only one]")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Stops a server, and returns when it has ended. Raises NotFound, Forbidden, RequestTimeout."""
    run_files = importlib.import_module("tureen.run_files")
    server = _chosen(run_files.running(load_config(options)), options.which)
    print(
        f"stopping {server.url} (process {server.pid}): it takes no new requests, and running ones may finish within "
        f"{server.drain_timeout_s:g} s",
        flush=True,
    )
    try:
        run_files.stop(server)
    except PermissionError:
        raise Forbidden(f"process {server.pid} belongs to another user; only that user or root can stop it") from None
    if not run_files.wait(server, server.drain_timeout_s + GRACE_S):
        raise RequestTimeout(
            f"it still runs after {server.drain_timeout_s + GRACE_S:g} s; kill -9 {server.pid} ends it immediately"
        )
    print("stopped")
    return 0


def _chosen(servers: list[Any], which: str | None) -> Any:
    """Returns the server that is meant. Raises NotFound naming those that run."""
    fits = [server for server in servers if which is None or which in _names(server)]
    if len(fits) == 1:
        return fits[0]
    if not servers:
        raise NotFound("no server runs here that tureen ps knows")
    all_of_them = ", ".join(f"{server.pid} ({server.url})" for server in servers)
    why = "several servers run; name one" if which is None else f"no server has the name or process id {which}"
    raise NotFound(f"{why}. Running: {all_of_them}")


def _names(server: Any) -> tuple[str, ...]:
    return str(server.pid), server.url, server.url.rpartition(":")[2]
