"""Sequences that wait for pages of their prompt that are stored outside the KV cache, and for the state after them.
These are loaded into the pool, and the prefix cache then has them as if they had been computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

from tureen.cache.manager import LowerTier, PageTable
from tureen.cache.radix import Namespace, RadixNode
from tureen.contract.runner import KvPart
from tureen.contract.types import KvDiskStats, OutputDelta
from tureen.engine.scheduler import Scheduler
from tureen.engine.sequence import Sequence

WAIT_S = 0.001


class KeptPrefix(NamedTuple):
    """A prefix that a tier completes. The keys name, in the tier, the parts that the KV cache lacks."""

    num_pages: int
    keys: list[bytes]  # of pages
    state_key: bytes = b""  # of the state after the last page; empty: the model has no states
    window_keys: Mapping[int, bytes] = {}  # of window pages that the next token sees, by the index of their page


class KeptPart(NamedTuple):
    """A part of the KV cache that is loaded: its key in the tier, and its number in the KV cache."""

    part: KvPart
    number: int
    key: bytes


class Load(Protocol):
    """Parts of the KV cache that are being loaded, one after another.

    After its end or its cancellation, the first `num_loaded` of them are loaded.
    """

    num_loaded: int
    lacks_file: bool  # a part was damaged or is gone: another look-up finds less

    def wait(self, seconds: float) -> None:
        """Waits for its end, at most this long."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or will never end."""

    def cancel(self) -> None:
        """Stops the load without waiting for the disk. Nothing is written to its pages afterwards."""


class Tier(LowerTier, Protocol):
    """Stores pages outside the KV cache and loads them again, in other threads than the engine's."""

    @property
    def stats(self) -> KvDiskStats: ...

    def find(
        self, namespace: Namespace, nodes: Items[RadixNode], token_ids: Items[int], sizes: range
    ) -> KeptPrefix | None:
        """Returns the longest prefix, with a number of pages in `sizes`, that the tier can add to `nodes`, which the
        tree has. The KV cache and the tier together have all that the token after the prefix needs."""

    def load(self, parts: Items[KeptPart]) -> Load:
        """Loads parts of the KV cache, up to the first missing one. No sequence uses them before the load ends."""

    def mark(self) -> Callable[[], bool]:
        """Returns a function that returns whether all pages to be saved so far are saved, or lost."""


class Restored(NamedTuple):
    """A load, the pages and the state that it fills, and the tokens that the pages will hold.

    The first `num_others` of its parts are the state and window pages, without which the pages are useless.
    """

    load: Load
    table: PageTable
    state: int  # its number; -1: none is loaded
    token_ids: list[int]
    num_others: int
    first_key: bytes


class Restoring:
    """Loads the parts of prompts that a tier has. `waiting`: the waiting sequences, each with its load, which another
    sequence may have begun. `loads`: loads that are not published yet, also if no sequence waits any more. `put_off`:
    last deltas that wait until pages are saved, each with the function that returns whether they are."""

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
        nodes = cache.known(sequence.namespace, sequence.token_ids, sequence.max_reused)
        sizes = range(cache.num_usable(nodes) + 1, max_pages + 1)
        kept = self.tier.find(sequence.namespace, nodes, sequence.token_ids, sizes) if sizes else None
        if kept is None:
            return False
        first_key = kept.keys[0] if kept.keys else kept.state_key or next(iter(kept.window_keys.values()))
        restored = next((each for each in self.loads if each.first_key == first_key), None)
        restored = restored or self._load(sequence, nodes[: kept.num_pages], kept, first_key)
        if restored is None:
            return False
        self.waiting[sequence] = restored
        return True

    def _load(self, sequence: Sequence, nodes: list[RadixNode], kept: KeptPrefix, first_key: bytes) -> Restored | None:
        """Begins to load what the tier adds to `nodes`. Returns None if there is no room for it."""
        cache, states = self._cache, self._scheduler.states
        state = -1
        if kept.state_key:
            number = None if states is None else states.take()
            if number is None:
                return None
            state = number
        end = kept.num_pages * cache.page_size
        table = cache.open(sequence.namespace, nodes, end, headroom=len(self._scheduler.running) + 1)
        if table is None:
            if state >= 0:
                cache.states.give_back(state)
            return None
        others = [KeptPart("state", state, kept.state_key)] if state >= 0 else []
        live = table.live
        others += [KeptPart("window", live.pages[at - live.first], key) for at, key in kept.window_keys.items()]
        pages = zip(table.pages[len(nodes) :], kept.keys, strict=True)
        load = self.tier.load([*others, *(KeptPart("page", page, key) for page, key in pages)])
        restored = Restored(load, table, state, sequence.token_ids[:end], len(others), first_key)
        self.loads.append(restored)
        return restored

    def advance(self) -> None:
        """Publishes loaded pages, and queues the sequences that waited for them."""
        for restored in [restored for restored in self.loads if restored.load.is_done]:
            restored.load.cancel()  # it may wait for a disk that does not respond
            num_tokens = self._finish(restored, restored.load.num_loaded)
            waited = [sequence for sequence, load in self.waiting.items() if load is restored]
            for rank, sequence in enumerate(waited):
                del self.waiting[sequence]
                sequence.counts.loaded += num_tokens
                looks_again = rank > 0 or restored.load.lacks_file  # others may have more pages there
                if not (looks_again and self.must_wait(sequence)):
                    self._scheduler.queue.add(sequence)

    def take_saved(self) -> list[OutputDelta]:
        """Returns the deltas whose wait is over."""
        if not self.put_off:
            return []
        are_saved = [is_saved() for _, is_saved in self.put_off]  # called once: the result may change meanwhile
        saved = [end for (end, _), is_saved in zip(self.put_off, are_saved, strict=True) if is_saved]
        self.put_off[:] = [each for each, is_saved in zip(self.put_off, are_saved, strict=True) if not is_saved]
        return saved

    def wait(self) -> None:
        """Waits a little for a load if it holds the pages that all sequences wait for."""
        if self.loads:
            self.loads[0].load.wait(WAIT_S)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended. Its load continues."""
        del self.waiting[sequence]

    def clear(self) -> None:
        """Ends all loads without publishing pages, and queues the waiting sequences."""
        for restored in tuple(self.loads):
            restored.load.cancel()
            self._finish(restored, 0)
        for sequence in self.waiting:
            self._scheduler.queue.add(sequence)
        self.waiting.clear()

    def _finish(self, restored: Restored, num_loaded: int) -> int:
        """Publishes the loaded parts. Returns the number of tokens in their pages."""
        table = restored.table
        self.loads.remove(restored)
        num_pages = table.num_matched + max(0, num_loaded - restored.num_others)
        self._cache.publish(table, restored.token_ids, num_pages * self._cache.page_size)
        if num_loaded >= restored.num_others:
            self._cache.keep_windows(table)
        if restored.state >= 0 and num_loaded >= restored.num_others:
            self._cache.keep_state(table, len(restored.token_ids), restored.state)
        elif restored.state >= 0:
            self._cache.states.give_back(restored.state)
        self._cache.close(table)
        return (num_pages - table.num_matched) * self._cache.page_size
