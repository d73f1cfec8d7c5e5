"""The memory of all helper processes together."""

from __future__ import annotations

import threading
from typing import Protocol

from tureen.config import Config
from tureen.devices import cpu
from tureen.log import get_logger
from tureen.sandbox.worker import Worker

log = get_logger("sandbox")


SHARE = 0.25
"""The share of the memory that helpers may take, by default."""

FRONT_SHARE = 1 / 3
"""The share of that for the front's helpers: pictures, second checks. The rest is the engine's: grammars, client
processors."""


def helper_bytes(config: Config) -> int:
    """Returns the bytes that all helper processes together may take."""
    return config.helper_memory_mib << 20 if config.helper_memory_mib else int(SHARE * cpu.total_bytes())


class HasWorkers(Protocol):
    @property
    def workers(self) -> list[Worker]: ...


class MemoryBudget:
    """Ends workers while all together take more than the limit: idle ones first, the one idle for longest before all
    others; then the largest. Any thread may call it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._owners: list[HasWorkers] = []

    def add(self, owner: HasWorkers) -> None:
        with self._lock:
            self._owners.append(owner)

    def discard(self, owner: HasWorkers) -> None:
        with self._lock:
            self._owners.remove(owner)

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(worker.memory_bytes for owner in self._owners for worker in owner.workers)

    def enforce(self) -> None:
        """Kill until what remains fits. Who waits for a worker that is killed is told that it is lost."""
        with self._lock:
            sizes = {worker: worker.memory_bytes for owner in self._owners for worker in owner.workers}
        total = sum(sizes.values())
        for worker in sorted(sizes, key=lambda one: _rank(one, sizes[one])):
            if total <= self.limit_bytes:
                return
            if worker.idle_since_s is None:
                log.warning("helper processes take %d MiB of %d; one is ended", total >> 20, self.limit_bytes >> 20)
            worker.kill()
            total -= sizes[worker]


def _rank(worker: Worker, size: int) -> tuple[bool, float]:
    """Returns a key by which the workers that are to go first come first."""
    return (True, -size) if worker.idle_since_s is None else (False, worker.idle_since_s)
