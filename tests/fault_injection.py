"""What code in a helper process must not do. The doubles of fork servers do it where they are told to."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable


def spin() -> None:
    while True:
        pass


def take_memory() -> None:
    blocks = []
    while True:
        blocks.append(bytes(1 << 20))


MISDEEDS: dict[str, Callable[[], object]] = {
    "sleep": lambda: time.sleep(1000),
    "spin": spin,
    "memory": take_memory,
    "crash": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(0),
}
