"""`tureen rm`: removes a model that was pulled."""

from __future__ import annotations

import argparse
import importlib

from tureen.cli.flags import load_config
from tureen.cli.places import add_places
from tureen.errors import Conflict
from tureen.log import size

HELP = "remove a downloaded model"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the models' names."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="a name that tureen list shows")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Removes models, and says how much is free again. Raises StartupError, and Conflict for one that is served."""
    on_disk = importlib.import_module("tureen.fetching.on_disk")
    names, pull = (importlib.import_module(f"tureen.fetching.{part}") for part in ("names", "pull"))
    run_files = importlib.import_module("tureen.run_files")
    config = load_config(options)
    for name in options.names:
        for server in run_files.running(config):
            if server.path == str(pull.find_here(names.parse(name), config)):
                raise Conflict(f"{name}: the server at {server.url} uses it; run tureen stop {server.pid} first")
        folder, num_bytes = on_disk.remove(name, config)
        print(f"removed {name} ({size(num_bytes)} in {folder})")
    return 0
