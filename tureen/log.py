"""Logging set-up, and how long work reports its progress."""

from __future__ import annotations

import logging
from typing import Protocol

LOGGER_NAME = "tureen"


class Progress(Protocol):
    """Told about every phase of start-up: `progress("load weights", 12, 272)`. `total` 0 = unknown."""

    def __call__(self, phase: str, done: int, total: int) -> None: ...


def no_progress(phase: str, done: int, total: int) -> None:
    """For callers that show nothing."""


def get_logger(part: str) -> logging.Logger:
    """The logger of one part of the program: `get_logger("engine")`."""
    return logging.getLogger(f"{LOGGER_NAME}.{part}")
