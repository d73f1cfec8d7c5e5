"""Limits the memory of all helper processes together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from tureen.config import Config
from tureen.devices import cpu
from tureen.log import get_logger
from tureen.sandbox.worker import Worker

log = get_logger("sandbox")


SHARE = 0.25
"""The share of the memory that helpers may take, by default."""

FRONT_SHARE = 1 / 3
"""The share of the helpers' memory that the front's helpers may take: pictures, second checks. The rest is for the
engine's: grammars, client processors."""

SETTLED_S = 0.5
"""Seconds after a worker was first seen at work at which its reservation ends; from then on what it takes counts."""

ROOM_TIMEOUT_S = 30.0


def helper_bytes(config: Config) -> int:
    """Returns the bytes that all helper processes together may take."""
    return config.helper_memory_mib << 20 if config.helper_memory_mib else int(SHARE * cpu.total_bytes())


class HasWorkers(Protocol):
    """An owner of workers, such as a Supervisor."""

    @property
    def workers(self) -> list[Worker]: ...


class Reservation:
    """Memory reserved for a worker that starts, until its use of memory can be measured."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.worker: Worker | None = None  # until it is there
        self.seen_s: float | None = None  # when it was first seen at work


class MemoryBudget:
    """Ends workers while all together take more than the limit, and reserves memory for those that start.

    Idle workers go first, the one idle for longest before all others; then the largest. Any thread may call it.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self._clock = clock
        self._changed = threading.Condition()
        self._owners: list[HasWorkers] = []
        self._reservations: list[Reservation] = []

    def add(self, owner: HasWorkers) -> None:
        """Counts the workers of this owner from now on."""
        with self._changed:
            self._owners.append(owner)

    def discard(self, owner: HasWorkers) -> None:
        """Counts the workers of this owner no longer."""
        with self._changed:
            self._owners.remove(owner)

    @property
    def used_bytes(self) -> int:
        """The bytes that the workers of all owners take now."""
        with self._changed:
            return sum(self._sizes().values())

    def reserve(self, size: int, timeout_s: float = ROOM_TIMEOUT_S) -> Reservation | None:
        """Waits for room, which idle workers make. Returns None where there was none within `timeout_s`.

        One start at a time always has room: if it takes too much, `enforce` ends other workers, or it.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._make_room(size), timeout_s):
                return None
            reservation = Reservation(size)
            self._reservations.append(reservation)
            return reservation

    def release(self, worker: Worker | None, reservation: Reservation | None = None) -> None:
        """Ends the reservation of a worker that has ended, or was not started."""
        with self._changed:
            self._reservations = [
                held
                for held in self._reservations
                if held is not reservation and (held.worker is not worker or not worker)
            ]
            self._changed.notify_all()

    def enforce(self) -> None:
        """Kills workers until the rest fits. Who waits for a killed worker is told that it is lost."""
        with self._changed:
            self._reservations = [held for held in self._reservations if not self._has_settled(held)]
            sizes = self._sizes()
            self._changed.notify_all()
        total = sum(sizes.values())
        for worker in sorted(sizes, key=lambda each: _rank(each, sizes[each])):
            if total <= self.limit_bytes:
                return
            if worker.idle_since_s is None:
                log.warning("helper processes use %d MiB of %d; one is killed", total >> 20, self.limit_bytes >> 20)
            worker.kill()
            total -= sizes[worker]

    def _sizes(self) -> dict[Worker, int]:
        """Measures the bytes that each worker takes now."""
        return {worker: worker.memory_bytes for owner in self._owners for worker in owner.workers}

    def _make_room(self, size: int) -> bool:
        """Says whether one more may start. Ends idle workers that are in its way."""
        sizes = {worker: taken for worker, taken in self._sizes().items() if not worker.is_killed}
        total = sum(sizes.values())
        for held in self._reservations:
            total += max(0, held.size - (sizes.get(held.worker, 0) if held.worker is not None else 0))
        for worker in sorted(sizes, key=lambda each: _rank(each, sizes[each])):
            if total + size <= self.limit_bytes or worker.idle_since_s is None:
                break
            worker.kill()
            total -= sizes[worker]
        return total + size <= self.limit_bytes or not self._reservations

    def _has_settled(self, reservation: Reservation) -> bool:
        worker = reservation.worker
        if worker is None or not worker.has_begun:
            return False
        now_s = self._clock()
        reservation.seen_s = now_s if reservation.seen_s is None else reservation.seen_s
        return now_s - reservation.seen_s >= SETTLED_S


def _rank(worker: Worker, size: int) -> tuple[bool, float]:
    """Returns a key by which the workers that are to go first come first."""
    return (True, -size) if worker.idle_since_s is None else (False, worker.idle_since_s)
