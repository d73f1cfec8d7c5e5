"""Flags and forms that the commands about models share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def add_places(parser: argparse.ArgumentParser) -> None:
    """Adds where models are kept, and the file that may say it."""
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--download-dir", metavar="FOLDER", default=argparse.SUPPRESS, help="folder of models")


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns a line a row, its words below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: "1 answer", "2,000 answers"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
