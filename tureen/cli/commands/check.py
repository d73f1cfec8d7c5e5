"""`tureen check`: the report for a bug report, and for whoever wonders how fast this machine could be."""

from __future__ import annotations

import argparse
import importlib

import msgspec

HELP = "show what is installed, and the limits of this machine"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the one flag."""
    parser.add_argument("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> int:
    """Prints the report."""
    check = importlib.import_module("tureen.bench.check")
    report = check.make_report()
    print(msgspec.json.encode(report).decode() if options.json else "\n".join(check.lines_of(report)))
    return 0
