"""`tureen bench`: measures a running server."""

from __future__ import annotations

import argparse
import importlib

HELP = "measure a running server"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the benchmark's own flags."""
    importlib.import_module("tureen.bench.command").add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Measures and prints the figures. Raises TureenError."""
    return int(importlib.import_module("tureen.bench.command").run(options))
