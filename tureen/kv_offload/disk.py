"""Carries KV pages to the disk and back, in threads beside the engine's.

Saving holds nothing: a page of the prefix cache is not written to as long as its node is in the tree, so a copy that
was made before the node is looked at again is the page. A page that was evicted meanwhile is lost, and counted. The
same is true of a saved state and of a window page, as long as its node holds it.

A state and a window page are kept under names of their own, which follow from the name of their page. They are evicted
earlier than that page: whoever marks one of them as used marks its page as used afterwards.

A disk that stops answering is noticed, and is not there until it answers: prompts are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Literal

from tureen.cache.manager import CacheManager
from tureen.cache.pages import Held
from tureen.cache.radix import Namespace, RadixNode
from tureen.contract.runner import PageMemory
from tureen.contract.types import KvDiskStats
from tureen.engine.restoring import KeptPart, KeptPrefix
from tureen.kv_offload.disk_thread import DiskThread, beat
from tureen.kv_offload.keys import PageKeys, follow, of_state, of_window
from tureen.kv_offload.page_files import DamagedPage, NoPage, PageFiles
from tureen.log import get_logger

CLOSE_S = 5.0
"""Time that the pages which wait to be saved have when the engine ends."""
LOOK_S = 2.0
"""Time that the engine waits for a look at the folder; what was found by then is read."""
MAX_WAITING = 1024  # prefixes that wait to be saved; more are lost
LOWER_BY = 10  # the saving thread's priority

log = get_logger("kv-disk")


class PageLoad:
    """Parts of the KV cache that are being loaded, one after another.

    Once it has ended or is cancelled, the first `num_loaded` of them are there.
    """

    def __init__(self, parts: Sequence[KeptPart], thread: DiskThread) -> None:
        """thread: that is to run it."""
        self.parts = parts
        self.num_loaded = 0
        self.lacks_file = False
        self._thread = thread
        self._cancelled = threading.Event()
        self._writing = threading.Lock()  # held while a part is filled, never while the disk is waited for
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

    def run(self, memory: PageMemory, files: PageFiles, buffers: Mapping[str, memoryview], totals: _Totals) -> None:
        """Loads them, up to the first that is not there. buffers: of the size of each kind."""
        try:
            for part in self.parts:
                if not self._fill(files, part, buffers[part.part], memory):
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
            totals.loaded += self.num_loaded
            self._done.set()
            used = self.parts[: self.num_loaded]
            files.touch(part.key for part in used if part.part != "page")
            files.touch(part.key for part in reversed(used) if part.part == "page")

    def _fill(self, files: PageFiles, part: KeptPart, buffer: memoryview, memory: PageMemory) -> bool:
        """Reads a file and writes it to its place. Returns False if the load is cancelled. Raises as PageFiles.read."""
        if self._cancelled.is_set():
            return False
        files.read(part.key, buffer)
        beat()
        with self._writing:
            if not self._cancelled.is_set():
                memory.write(part.part, part.number, buffer)
                return True
        return False


class _Totals:
    """Counts of pages since the start."""

    def __init__(self) -> None:
        self.saved = self.loaded = self.evicted = self.lost = self.damaged = self.failed = 0


class DiskTier:
    """The pages of one engine on the disk. Its methods are called by the engine's thread."""

    def __init__(
        self, files: PageFiles, memory: PageMemory, cache: CacheManager, identify: Callable[[], bytes]
    ) -> None:
        """`identify` returns the digest of what computes now."""
        self._files = files
        self._memory = memory
        self._page_size = cache.page_size
        self._windows = cache.windows
        self._identify = identify
        self._keys = PageKeys(identify())
        self._totals = _Totals()
        self._num_bytes = 0
        self._has_warned = False
        self._sizes = memory.sizes
        buffer = memoryview(bytearray(max(self._sizes)))
        self._buffers = {part: buffer[:size] for part, size in self._sizes._asdict().items()}  # of what is loaded
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

        If the model has states, a prefix ends with a page that has its state on the disk. If it has window pages, those
        that the next token sees are in the KV cache or on the disk.
        """
        keys = self._keys.of_nodes(nodes)
        is_away = self._looking.is_stuck() or self._loading.is_stuck()
        if len(keys) != len(nodes) or is_away or not self._look.is_set():
            return None
        held = {index for index, node in enumerate(nodes) if node.window is not None}  # that have a window page
        borders: list[int] = []  # numbers of pages after which a sequence can begin

        def look() -> None:
            num_in_row = 0  # pages up to this one whose window page is held or on the disk
            for index in range(min(sizes[0] - 1, self._first_seen(sizes[0])), sizes[-1]):
                if index == len(keys):
                    key = self._keys.after(keys, namespace, token_ids, self._page_size, index)
                    if key is None or not self._files.has(key):
                        return
                    keys.append(key)
                if self._windows.is_used:
                    has_window = index in held or self._files.has(of_window(keys[index]))
                    num_in_row = num_in_row + 1 if has_window else 0
                is_border = index + 1 >= sizes[0] and self._windows.is_enough(num_in_row, index + 1)
                if is_border and (not self._sizes.state or self._files.has(of_state(keys[index]))):
                    borders.append(index + 1)

        self._looking.give(look)
        self._look = self._looking.mark()
        self._look.wait(LOOK_S)
        if not borders:
            return None
        end = borders[-1]
        seen = range(self._first_seen(end), end)
        window_keys = {index: of_window(keys[index]) for index in seen if index not in held}
        state_key = of_state(keys[end - 1]) if self._sizes.state else b""
        return KeptPrefix(end, keys[len(nodes) : end], state_key, window_keys)

    def _first_seen(self, num_pages: int) -> int:
        """Returns the index of the first of `num_pages` pages whose window page the next token sees."""
        return self._windows.first_seen(num_pages * self._page_size) if self._windows.is_used else num_pages

    def load(self, parts: Sequence[KeptPart]) -> PageLoad:
        """Loads parts of the KV cache that no sequence uses until the load ends."""
        load = PageLoad(parts, self._loading)
        self._loading.give(partial(load.run, self._memory, self._files, self._buffers, self._totals))
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
            data = self._memory.read("page", nodes[index].page)
            if nodes[index].parent is None:  # it left the tree: the copy may be of another page
                self._totals.lost += len(keys) - index
                del keys[index:]
                break
            self._totals.evicted += self._files.write(key, data)
            self._totals.saved += 1
            self._has_warned = False
        earlier, new = self._save_others("state", nodes, keys)
        windows = chain.from_iterable(self._save_others("window", nodes, keys))
        self._files.touch([*windows, *earlier[-1:], *new, *reversed(keys)])

    def _save_others(
        self, part: Literal["state", "window"], nodes: Sequence[RadixNode], keys: Sequence[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """Saves the states, or the window pages, of the pages that have `keys`. Returns the keys of those that were
        there and of those that are new. Raises OSError."""
        earlier, new = [], []
        of_part = of_state if part == "state" else of_window
        for node, page_key in zip(nodes, keys, strict=False):
            held: Held | None = getattr(node, part)
            if held is None:
                continue
            key = of_part(page_key)
            if self._files.has(key):
                earlier.append(key)
                continue
            data = self._memory.read(part, held.number)
            if getattr(node, part) is not held:  # it was replaced: the copy may be of another one
                self._totals.lost += 1
                continue
            self._totals.evicted += self._files.write(key, data)
            self._totals.saved += 1
            new.append(key)
        return earlier, new

    def _remove(self, nodes: Sequence[RadixNode], first: int) -> None:
        """Removes a page and all that others have computed on top of it, as far as the tree knew."""
        below = list(zip(self._keys.of_nodes(nodes[: first + 1])[first:], nodes[first:], strict=False))
        while below:
            key, node = below.pop()
            self._files.remove(of_state(key))
            self._files.remove(of_window(key))
            self._files.remove(key)
            below += [(follow(key, child.key), child) for child in node.children.values()]
