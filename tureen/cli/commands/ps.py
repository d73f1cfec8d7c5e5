"""`tureen ps`: the list the servers on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import time

import msgspec

from tureen.cli.flags import load_config
from tureen.cli.places import add_places, in_columns

HELP = "list the servers on this machine"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds where notes of servers are."""
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """Prints a line a server. Raises StartupError."""
    servers = importlib.import_module("tureen.run_files").running(load_config(options))
    if options.json:
        print(json.dumps([msgspec.to_builtins(server) for server in servers]))
    elif servers:
        rows = [(str(each.pid), each.url, each.model, _ago(time.time() - each.since)) for each in servers]
        print("\n".join(in_columns([("PID", "URL", "MODEL", "UP FOR"), *rows])))
    else:
        print("no server runs here; tureen serve starts one")
    return 0


def _ago(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    return f"{int(seconds)} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h"
