"""Carries KV pages to the disk and back, in threads beside the engine's.

Saving holds nothing: a page of the prefix cache is not written to as long as its node is in the tree, so a copy that
was made before the node is looked at again is the page. A page that was evicted meanwhile is lost, and counted. The
same is true of a saved state, as long as its node holds it.

A state is kept under a name of its own, which follows from the name of the page before it. It is evicted
earlier than that page: whoever marks a state as used marks its page as used afterwards.

A disk that stops answering is noticed, and is not there until it answers: prompts are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from tureen.cache.radix import Namespace, RadixNode
from tureen.contract.runner import PageMemory
from tureen.contract.types import KvDiskStats
from tureen.engine.restoring import KeptPrefix
from tureen.log import get_logger
from tureen.tiers.disk_thread import DiskThread, beat
from tureen.tiers.keys import PageKeys, follow, of_state
from tureen.tiers.page_files import DamagedPage, NoPage, PageFiles

CLOSE_S = 5.0
"""Time that the pages which wait to be saved have when the engine ends."""
LOOK_S = 2.0
"""Time that the engine waits for a look at the folder; what was found by then is read."""
MAX_WAITING = 1024  # prefixes that wait to be saved; more are lost
LOWER_BY = 10  # the saving thread's priority

log = get_logger("kv-disk")


class PageLoad:
    """Pages, and the state after them, on their way into the KV cache.

    Once it has ended or is cancelled, the first `num_loaded` pages are there, and the state if `has_state`.
    """

    def __init__(self, kept: KeptPrefix, pages: Sequence[int], state: int, thread: DiskThread) -> None:
        """pages, state: the places that it fills. thread: that is to run it."""
        self.kept = kept
        self.pages = pages
        self.num_loaded = 0
        self.has_state = False
        self.lacks_file = False
        self._state = state
        self._thread = thread
        self._cancelled = threading.Event()
        self._writing = threading.Lock()  # held while a page is filled, never while the disk is waited for
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, or is not to be waited for since the disk does not answer."""
        return self._done.is_set() or self._thread.is_stuck()

    def wait(self, seconds: float) -> None:
        """Waits for its end, at most so long."""
        self._done.wait(seconds)

    def cancel(self) -> None:
        """Loads no more of it. Returns when nothing is written to its pages any more."""
        with self._writing:
            self._cancelled.set()

    def run(self, memory: PageMemory, files: PageFiles, buffer: memoryview, totals: _Totals) -> None:
        """Loads the state, without which the pages are useless, and the pages, up to the first that is not there."""
        try:
            if self.kept.state_key:
                room = np.empty(memory.state_bytes, np.uint8).data
                self.has_state = self._fill(files, self.kept.state_key, room, partial(memory.write_state, self._state))
                if not self.has_state:
                    return
            for key, page in zip(self.kept.keys, self.pages, strict=True):
                if not self._fill(files, key, buffer, partial(memory.write, page)):
                    break
                self.num_loaded += 1
        except DamagedPage as damage:
            self.lacks_file = damage.is_removed
            totals.damaged += 1
            log.warning("a KV page on the disk was damaged and is computed again")
        except NoPage:  # removed since it was looked for
            self.lacks_file = True
        except OSError as error:
            totals.failed += 1
            log.warning("cannot read a KV page: %s", error.strerror)
        except Exception:
            log.exception("KV pages could not be loaded")
        finally:
            totals.loaded += self.num_loaded + self.has_state
            self._done.set()
            used = [self.kept.state_key] if self.has_state else []
            files.touch([*used, *reversed(self.kept.keys[: self.num_loaded])])

    def _fill(self, files: PageFiles, key: bytes, buffer: memoryview, write: Callable[[memoryview], None]) -> bool:
        """Reads a file and writes it to its place. Returns False if the load is cancelled. Raises as PageFiles.read."""
        if self._cancelled.is_set():
            return False
        files.read(key, buffer)
        beat()
        with self._writing:
            if not self._cancelled.is_set():
                write(buffer)
                return True
        return False


class _Totals:
    """Counts of pages since the start."""

    def __init__(self) -> None:
        self.saved = self.loaded = self.evicted = self.lost = self.damaged = self.failed = 0


class DiskTier:
    """The pages of one engine on the disk. Its methods are called by the engine's thread."""

    def __init__(self, files: PageFiles, memory: PageMemory, page_size: int, identify: Callable[[], bytes]) -> None:
        """`identify` returns the digest of what computes now."""
        self._files = files
        self._memory = memory
        self._page_size = page_size
        self._identify = identify
        self._keys = PageKeys(identify())
        self._totals = _Totals()
        self._num_bytes = 0
        self._has_warned = False
        self._has_states = memory.state_bytes > 0
        self._buffer = memoryview(bytearray(memory.page_bytes))  # of a page that is loaded
        self._look = threading.Event()  # set once the latest look at the folder is done
        self._look.set()
        self._saving = DiskThread("kv-save", lower_by=LOWER_BY)
        self._loading = DiskThread("kv-load")
        self._looking = DiskThread("kv-look")
        self._to_save(files.recount)

    @property
    def stats(self) -> KvDiskStats:
        """The pages that went to and fro since the start, and the bytes on the disk."""
        totals = self._totals
        return KvDiskStats(
            num_bytes=self._num_bytes,
            total_saved=totals.saved,
            total_loaded=totals.loaded,
            total_evicted=totals.evicted,
            total_lost=totals.lost,
            total_damaged=totals.damaged,
            total_failed=totals.failed,
        )

    def renew(self) -> None:
        """Hears that the tree is empty, and that something else may compute from now on."""
        self._keys = self._keys.with_identity(self._identify())

    def add_adapter(self, name: str, digest: bytes) -> None:
        """Notes which adapter a namespace means by `name`."""
        self._keys.add_adapter(name, digest)

    def save(self, nodes: Sequence[RadixNode]) -> None:
        """Saves a prefix, in the background: nodes that follow each other from the root on."""
        if self._saving.num_waiting < MAX_WAITING:
            self._to_save(partial(self._save, nodes))
        else:
            self._totals.lost += len(nodes)

    def forget(self, nodes: Sequence[RadixNode], first: int) -> None:
        """Removes pages that cannot be trusted: those of `nodes` from the index `first` on."""
        self._to_save(partial(self._remove, nodes, first))

    def find(
        self, namespace: Namespace, nodes: Sequence[RadixNode], token_ids: Sequence[int], sizes: range
    ) -> KeptPrefix | None:
        """Returns the longest prefix of a number of pages in `sizes` that the disk adds to `nodes`; what was found in
        LOOK_S, and None while an earlier look is not done or the disk does not answer.

        If the model has states, a prefix ends with a page that has its state on the disk.
        """
        keys = self._keys.of_nodes(nodes)
        is_away = self._looking.is_stuck() or self._loading.is_stuck()
        if len(keys) != len(nodes) or is_away or not self._look.is_set():
            return None
        borders: list[int] = []  # numbers of pages after which a saved state lies

        def look() -> None:
            for count in range(sizes[0], sizes[-1] + 1):
                while len(keys) < count:
                    key = self._keys.after(keys, namespace, token_ids, self._page_size, len(keys))
                    if key is None or not self._files.has(key):
                        return
                    keys.append(key)
                if self._has_states and self._files.has(of_state(keys[count - 1])):
                    borders.append(count)

        self._looking.give(look)
        self._look = self._looking.mark()
        self._look.wait(LOOK_S)
        if self._has_states:
            if not borders:
                return None
            return KeptPrefix(borders[-1], keys[len(nodes) : borders[-1]], of_state(keys[borders[-1] - 1]))
        new = keys[len(nodes) :]
        return KeptPrefix(len(nodes) + len(new), new) if new else None

    def load(self, kept: KeptPrefix, pages: Sequence[int], state: int) -> PageLoad:
        """Loads pages and a state into places of the KV cache that no sequence uses until the load ends."""
        load = PageLoad(kept, pages, state, self._loading)
        self._loading.give(partial(load.run, self._memory, self._files, self._buffer, self._totals))
        return load

    def mark(self) -> Callable[[], bool]:
        """Returns a function that says whether all that was to be saved so far is saved, or lost."""
        saved = self._saving.mark()
        return lambda: saved.is_set() or self._saving.is_stuck()

    def close(self) -> None:
        """Saves what waits, for a while, and ends the threads."""
        for thread in (self._saving, self._loading, self._looking):
            thread.end(CLOSE_S)

    def _to_save(self, job: Callable[[], None]) -> None:
        """Has a job done that changes what is on the disk."""

        def do() -> None:
            try:
                job()
            except OSError as error:
                self._totals.failed += 1
                if not self._has_warned:
                    log.warning("cannot save KV pages: %s; they are computed again when needed", error.strerror)
                self._has_warned = True
            self._num_bytes = self._files.num_bytes

        self._saving.give(do)

    def _save(self, nodes: Sequence[RadixNode]) -> None:
        """Raises OSError."""
        keys = self._keys.of_nodes(nodes)
        self._files.touch(reversed(keys))  # the room for the others is not taken from these
        for index, key in enumerate(keys):
            if self._files.has(key):
                continue
            data = self._memory.read(nodes[index].page)
            if nodes[index].parent is None:  # it left the tree: the copy may be of another page
                self._totals.lost += len(keys) - index
                del keys[index:]
                break
            self._totals.evicted += self._files.write(key, data)
            self._totals.saved += 1
            self._has_warned = False
        states = self._save_states(nodes, keys)
        self._files.touch([*states, *reversed(keys)])

    def _save_states(self, nodes: Sequence[RadixNode], keys: Sequence[bytes]) -> list[bytes]:
        """Saves the states after the pages that have `keys`. Returns the keys of those to mark as used: the new ones,
        and the deepest earlier one, which the sequence may have begun with. Raises OSError."""
        earlier, new = [], []
        for node, page_key in zip(nodes, keys, strict=False):
            state, key = node.state, of_state(page_key)
            if state is None:
                continue
            if self._files.has(key):
                earlier = [key]
                continue
            data = self._memory.read_state(state.number)
            if node.state is not state:  # it was replaced: the copy may be of another state
                self._totals.lost += 1
                continue
            self._totals.evicted += self._files.write(key, data)
            self._totals.saved += 1
            new.append(key)
        return [*earlier, *new]

    def _remove(self, nodes: Sequence[RadixNode], first: int) -> None:
        """Removes a page and all that others have computed on top of it, as far as the tree knew."""
        below = list(zip(self._keys.of_nodes(nodes[: first + 1])[first:], nodes[first:], strict=False))
        while below:
            key, node = below.pop()
            self._files.remove(of_state(key))
            self._files.remove(key)
            below += [(follow(key, child.key), child) for child in node.children.values()]
