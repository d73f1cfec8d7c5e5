"""Sequences that wait for pages of their prompt which are kept outside the KV cache. They are loaded into pages of the
pool, which then stand in the prefix cache as if they had been computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from tureen.cache.manager import LowerTier, PageTable
from tureen.cache.radix import Namespace, RadixNode
from tureen.contract.types import KvDiskStats, OutputDelta
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence

WAIT_S = 0.001


class Load(Protocol):
    """Pages on their way into the KV cache. `num_loaded` of them, from the first on, are there once it has ended or is
    cancelled."""

    num_loaded: int

    def wait(self, seconds: float) -> None:
        """Waits for its end, at most so long."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or will not."""

    def cancel(self) -> None:
        """Loads no more of it, and does not wait for the disk. Nothing is written to its pages any more."""


class Tier(LowerTier, Protocol):
    """Keeps pages outside the KV cache, and loads them again, beside the engine's thread."""

    @property
    def stats(self) -> KvDiskStats: ...

    def find(self, namespace: Namespace, nodes: Items[RadixNode], token_ids: Items[int], max_pages: int) -> list[bytes]:
        """Returns the keys of the pages that follow `nodes`, up to page number `max_pages`."""

    def load(self, keys: Items[bytes], pages: Items[int]) -> Load:
        """Loads pages into places of the KV cache that nobody uses until it is done."""

    def mark(self) -> Callable[[], bool]:
        """Returns a function that says whether all that was to be saved so far is saved, or lost."""


class Restored(NamedTuple):
    """A load, the pages that it fills, and the tokens that these will hold."""

    load: Load
    table: PageTable
    token_ids: list[int]
    first_key: bytes


class Restoring:
    """Loads what is found of prompts in a tier. `waiting`: the sequences that wait, each for its load or for one that
    another has begun. `loads`: those that have not been taken over, also where nobody waits any more. `put_off`: last
    deltas that wait until pages are saved, each with a function that says so."""

    def __init__(self, tier: Tier, scheduler: Scheduler) -> None:
        self.tier = tier
        self.waiting: dict[Sequence, Restored] = {}
        self.loads: list[Restored] = []
        self.put_off: list[tuple[OutputDelta, Callable[[], bool]]] = []
        self._cache = scheduler.cache
        self._scheduler = scheduler
        scheduler.cache.tier = tier

    def must_wait(self, sequence: Sequence) -> bool:
        """Returns whether pages of the sequence are being loaded; then `advance` queues it."""
        if sequence.request.embeds:
            return False
        cache = self._cache
        max_pages = sequence.max_reused // cache.page_size
        nodes = cache.match(sequence.namespace, sequence.token_ids, sequence.max_reused)
        if len(nodes) >= max_pages:
            return False
        keys = self.tier.find(sequence.namespace, nodes, sequence.token_ids, max_pages)
        if not keys:
            return False
        for restored in self.loads:
            if restored.first_key == keys[0]:
                self.waiting[sequence] = restored
                return True
        end = (len(nodes) + len(keys)) * cache.page_size
        table = cache.open(sequence.namespace, nodes, end, headroom=len(self._scheduler.running) + 1)
        if table is None:
            return False
        load = self.tier.load(keys, table.pages[len(nodes) :])
        restored = Restored(load, table, sequence.token_ids[:end], keys[0])
        self.loads.append(restored)
        self.waiting[sequence] = restored
        return True

    def advance(self) -> None:
        """Publishes the pages that are loaded, and queues the sequences that waited for them."""
        for restored in [restored for restored in self.loads if restored.load.is_done]:
            restored.load.cancel()  # it may wait for a disk that does not answer
            self._finish(restored, restored.load.num_loaded)
            waited = [sequence for sequence, load in self.waiting.items() if load is restored]
            for rank, sequence in enumerate(waited):
                del self.waiting[sequence]
                if rank == 0 or not self.must_wait(sequence):  # others may have more pages there
                    self._scheduler.queue.add(sequence)

    def take_saved(self) -> list[OutputDelta]:
        """Returns the deltas that need not wait any longer."""
        if not self.put_off:
            return []
        are_saved = [is_saved() for _, is_saved in self.put_off]  # each is asked once: it may become true meanwhile
        saved = [end for (end, _), is_saved in zip(self.put_off, are_saved, strict=True) if is_saved]
        self.put_off[:] = [each for each, is_saved in zip(self.put_off, are_saved, strict=True) if not is_saved]
        return saved

    def wait(self) -> None:
        """Waits a little for a load, where one holds the pages that all others wait for."""
        if self.loads:
            self.loads[0].load.wait(WAIT_S)

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence that has ended. What it waited for is loaded all the same."""
        del self.waiting[sequence]

    def clear(self) -> None:
        """Ends all loads, without their pages, and queues who waited."""
        for restored in tuple(self.loads):
            restored.load.cancel()
            self._finish(restored, 0)
        for sequence in self.waiting:
            self._scheduler.queue.add(sequence)
        self.waiting.clear()

    def _finish(self, restored: Restored, num_loaded: int) -> None:
        table = restored.table
        self.loads.remove(restored)
        self._cache.publish(table, restored.token_ids, (table.num_matched + num_loaded) * self._cache.page_size)
        self._cache.close(table)
