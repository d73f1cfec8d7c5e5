"""`tureen list`: the models on this machine, and those on the shelf."""

from __future__ import annotations

import argparse
import importlib
import json

from tureen.cli.flags import load_config
from tureen.cli.places import add_places, in_columns
from tureen.log import size

HELP = "list models on this machine, and known names"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds where models are."""
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """Prints what can be served at once, what is half there, and what could be pulled. Raises StartupError."""
    on_disk = importlib.import_module("tureen.fetching.on_disk")
    shelf = importlib.import_module("tureen.fetching.shelf").shelf()
    config = load_config(options)
    models = on_disk.kept_models(config)
    rest = on_disk.unfinished(config)
    if options.json:
        here = [{"name": each.name, "path": str(each.path), "bytes": each.num_bytes} for each in models]
        left = [{"path": str(path), "bytes": num_bytes} for path, num_bytes in rest]
        print(json.dumps({"models": here, "unfinished": left, "shelf": list(shelf.models)}))
        return 0
    if models:
        rows = [("NAME", "SIZE", "PATH"), *((each.name, size(each.num_bytes), str(each.path)) for each in models)]
        print("\n".join(in_columns(rows)))
    else:
        print("no models here yet")
    for path, num_bytes in rest:
        print(f"unfinished: {path} ({size(num_bytes)}); tureen pull resumes it, tureen rm removes it")
    missing = [name for name in shelf.models if name not in {each.name for each in models}]
    if missing:
        print(f"known names, not downloaded: {', '.join(missing)}  (tureen show NAME, tureen pull NAME)")
    return 0
