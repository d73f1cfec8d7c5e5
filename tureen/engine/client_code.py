"""Requests with code of their clients: loads it before they run, and charges its cost for others to the client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tureen.contract.runner import RowError
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence
from tureen.sampling.custom import load_failed
from tureen.sampling.processor_pool import Lease, ProcessorPool
from tureen.sandbox.budget import MemoryBudget
from tureen.sandbox.supervisor import Supervisor


class ClientCode:
    """Sequences with a client's code as processor, from their arrival to their end."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Refuses code until `allow` is called."""
        self._pool: ProcessorPool | None = None
        self.has_helpers = False
        self._scheduler = scheduler
        self._leases: dict[Sequence, Lease] = {}
        self.waiting: dict[Sequence, None] = {}  # read from outside, changed here only

    def allow(self, pool: ProcessorPool) -> None:
        """Accepts requests with client code from now on; the pool's processes run it."""
        self._pool = pool
        self.has_helpers = True
        self._scheduler.rests = self.rests

    @property
    def supervisor(self) -> Supervisor | None:
        """The supervisor of the processes that run clients' code; None if code is refused."""
        return None if self._pool is None else self._pool.supervisor

    def share(self, budget: MemoryBudget) -> None:
        """Counts the memory of the processes that run clients' code for this budget."""
        if self._pool is not None:
            self._pool.supervisor.share(budget)

    @contextlib.contextmanager
    def acquired(self, sequence: Sequence) -> Iterator[None]:
        """Loads the sequence's code, if it has any; releases it if the block raises.

        Raises TooManyRequests, Unavailable.
        """
        if self._pool is not None and sequence.request.processor.startswith("{"):
            self._leases[sequence] = self._pool.acquire(sequence.request.client, sequence.request.processor)
        try:
            yield
        except BaseException:
            self.release(sequence)
            raise

    def must_wait(self, sequence: Sequence) -> bool:
        """Returns whether the sequence must wait here for its code, until `take_ready` or `release`."""
        lease = self._leases.get(sequence)
        if lease is None or (lease.is_settled.is_set() and lease.error is None):
            return False
        self.waiting[sequence] = None
        return True

    def take_ready(self) -> list[tuple[Sequence, RowError | None]]:
        """Returns the sequences that need not wait any longer, each with an error or, if its code is loaded, None."""
        done = [sequence for sequence in self.waiting if self._leases[sequence].is_settled.is_set()]
        for sequence in done:
            del self.waiting[sequence]
        return [
            (sequence, None if (error := self._leases[sequence].error) is None else load_failed(error))
            for sequence in done
        ]

    def release(self, sequence: Sequence) -> bool:
        """Releases the code of a sequence that has ended. Returns whether the sequence still waited for it."""
        was_waiting = sequence in self.waiting
        self.waiting.pop(sequence, None)
        lease = self._leases.pop(sequence, None)
        if lease is not None and self._pool is not None:
            self._pool.release(lease)
        return was_waiting

    def charge(self, sequences: Iterable[Sequence]) -> None:
        """Charges each client, after a step, for the seconds that other clients' sequences waited for its code.

        sequences: all unfinished ones.
        """
        waits = {} if self._pool is None or not self._leases else self._pool.take_waits()
        for client, seconds in waits.items():
            own = None
            is_shared = False
            for sequence in sequences:
                own = sequence if sequence.request.client == client else own
                is_shared = is_shared or sequence.request.client != client
            if self._pool is not None and is_shared:
                self._pool.charges.add(client, seconds)
                if own is not None:
                    self._scheduler.queue.order.held_up(own, seconds)

    def rests(self, sequence: Sequence) -> bool:
        """Returns whether the sequence skips a step because code of its client delayed others."""
        return (
            self._pool is not None
            and sequence in self._leases
            and self._pool.charges.is_resting(sequence.request.client)
        )
