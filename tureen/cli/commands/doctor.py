"""`tureen doctor`: what works here, what does not and why; one report to paste into a bug report."""

from __future__ import annotations

import argparse
import importlib
import json

from tureen.cli.flags import load_config
from tureen.cli.places import add_places
from tureen.config import DEFAULT_MODEL

HELP = "report what works here: kernels, memory, disk, extras, measured speed"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the model that is measured."""
    parser.add_argument(
        "--model", metavar="NAME", default=DEFAULT_MODEL, help="the model to measure, if it is on this machine"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_places(parser)


def run(options: argparse.Namespace) -> int:
    """Prints the report. Fetches nothing. Raises StartupError for a model's name that is none."""
    doctor = importlib.import_module("tureen.bench.doctor")
    diagnosis = doctor.examine(options.model, load_config(options))
    print(json.dumps(dict(diagnosis), indent=1) if options.json else "\n".join(doctor.lines_of(diagnosis)))
    return 0
