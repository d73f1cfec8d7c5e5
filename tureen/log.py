"""Logging set-up, and how long work reports its progress.

Imports: nothing.
Imported by: all.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Protocol

LOGGER_NAME = "tureen"
COLOURS = {"DEBUG": "\033[2m", "INFO": "", "WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}
RESET = "\033[0m"


BYTES = " (bytes)"
"""The end of a phase's name whose progress is counted in bytes: these are shown with their rate and the time left."""


def size(num_bytes: float) -> str:
    """Return a size for people: "23 KiB", "92 MiB", "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1023.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"


class Progress(Protocol):
    """Hears about every phase of start-up: `progress("load weights", 12, 272)`. `total` 0 = unknown."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def no_progress(phase: str, done: int, total: int) -> None:
    """A Progress that shows nothing."""


def get_logger(part: str) -> logging.Logger:
    """Returns the logger of one part of the program: `get_logger("engine")`."""
    return logging.getLogger(f"{LOGGER_NAME}.{part}")


def set_up_logging(level: str, log_format: str) -> None:
    """Sends our log, and warnings of libraries, to stderr in the chosen format.

    Prompts and outputs are never passed to a logger.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(LOGGER_NAME).setLevel(level.upper())
    logging.raiseExceptions = False  # a closed stderr must not stop the server


def warn_of_root() -> None:
    """Log a warning if the process runs as root. Servers and engines call it once at their start."""
    if os.geteuid() == 0:
        get_logger("start").warning(
            "running as root: a fault in this program would expose the whole machine; run it as its own user, as in "
            "deploy/systemd/tureen.service and deploy/docker/Dockerfile do"
        )


class TextFormatter(logging.Formatter):
    """Formats a line as `12:00:00 INFO  engine: message`, coloured by level on a terminal unless NO_COLOR is set."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(part)s: %(message)s", datefmt="%H:%M:%S")
        self._has_colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ

    def format(self, record: logging.LogRecord) -> str:
        record.part = record.name.removeprefix(f"{LOGGER_NAME}.")
        text = super().format(record)
        colour = COLOURS.get(record.levelname, "") if self._has_colour else ""
        return f"{colour}{text}{RESET}" if colour else text


class JsonFormatter(logging.Formatter):
    """Formats a line as one JSON object: time, level, part, message, what the record has as `figures`, and the
    exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": record.name.removeprefix(f"{LOGGER_NAME}."),
            "message": record.getMessage(),
            **getattr(record, "figures", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class RateLimit:
    """Admits at most `count` events in each `interval_s`; tells how many were left out since."""

    def __init__(self, count: int, interval_s: float) -> None:
        self._count = count
        self._interval_s = interval_s
        self._window_start = 0.0
        self._in_window = 0
        self._left_out = 0

    def admit(self) -> int | None:
        """Returns None where this event is to be left out; else how many were left out before it."""
        now = time.monotonic()
        if now - self._window_start > self._interval_s:
            self._window_start, self._in_window = now, 0
        self._in_window += 1
        if self._in_window > self._count:
            self._left_out += 1
            return None
        left_out, self._left_out = self._left_out, 0
        return left_out
