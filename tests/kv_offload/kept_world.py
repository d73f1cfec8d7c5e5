"""An engine in a small world that keeps its pages, and the states after them, in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from timeouts import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from world import World, expected, make_request

from tureen.engine.restoring import Restoring
from tureen.kv_offload.disk import DiskTier
from tureen.kv_offload.page_files import PREFIX_BYTES, PageFiles
from tureen.runner.fake import WIDTH

NAMESPACE = ("", "")
PAGE_SIZE = 4
FILE_BYTES = PREFIX_BYTES + PAGE_SIZE * WIDTH
PROMPT = tuple(range(1, 42))  # ten pages and a token


class KeptWorld(World):
    """An engine whose pages are kept in a folder. `gate`: loads wait for it."""

    def __init__(self, folder, *, num_kept=10_000, gate=None, model=b"model", **options):
        super().__init__(**options)
        memory, self.folder = self.runner, Path(folder)
        files = PageFiles(self.folder, sizes=memory.sizes, max_bytes=num_kept * FILE_BYTES)
        if gate is not None:
            read = files.read
            files.read = lambda key, into: (gate.wait(), read(key, into))

        def identify():
            return model + str(self.runner._weights).encode()

        self.tier = DiskTier(files, memory, self.engine.cache, identify)
        for number, adapter in ((1, b"red"), (2, b"blue")):
            self.tier.add_adapter(str(number), adapter)
        self.restoring = Restoring(self.tier, self.engine.scheduler)
        self.engine.preparing.restore_from(self.restoring)

    def check(self):
        assert self.engine.cache.check() == []
        loaded = [restored.state for restored in self.restoring.loads if restored.state >= 0]
        assert sorted(self.engine.cache.states.taken) == sorted(loaded)

    def _has_sequences(self):
        """Those that wait may have to wait for pages that are being loaded for others."""
        return not self.restoring.loads and super()._has_sequences()

    def step(self):
        if self.restoring.loads and not super()._has_sequences():
            wait_until(lambda: any(restored.load.is_done for restored in self.restoring.loads), "a load")
        return super().step()

    def answer(self, request):
        self.add(request)
        self.drain()
        answer = self.answers[request.id]
        return answer.token_ids, answer.usage.cached_tokens

    def saved(self):
        """Waits until all that was to be saved so far is."""
        wait_until(self.tier.mark(), "all is saved")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.close()

    def drain_saving(self):
        """Step until all is done; the threads that save have time between the steps."""
        wait_until(lambda: self.step() or not (self.engine.has_work or self.engine.is_preparing), "the end of all work")


def tokens_of(request, adapter=0):
    return expected(request, 10_000, adapter)[0]


def ask(request_id="r", prompt=PROMPT, **fields):
    return make_request(request_id, prompt, ignore_eos=True, **{"max_new_tokens": 6, **fields})


def fill(folder, *requests, **options):
    with KeptWorld(folder, **options) as world:
        for request in requests or (ask("first"),):
            assert world.answer(request)[0] == tokens_of(request)
        assert world.tier.stats.total_lost == 0


def keys_of(world, tokens):
    """Return the keys of the full pages that a prompt of these tokens may begin with."""
    keys = []
    for index in range((len(tokens) - 1) // PAGE_SIZE):
        keys.append(world.tier._keys.after(keys, NAMESPACE, tokens, PAGE_SIZE, index))
    return keys


def continued(talk, answer, rng):
    """Return the next prompt of a conversation; one that has become long goes on from an earlier place."""
    talk = [*talk, *answer, *(rng.randrange(3, 60) for _ in range(rng.randrange(1, 6)))]
    return talk if len(talk) <= 60 else talk[: rng.randrange(1, 50)]


def evict_some(cache, rng, held, drop, most):
    """Evict up to three pages from memory, and drop the states or window pages of fewer than `most` of these nodes."""
    for _ in range(rng.randrange(4)):
        if cache.tree.idle:
            cache.tree.evict()
    held = list(held)  # after the evictions
    for node in rng.sample(held, min(len(held), rng.randrange(most))):
        drop(node)


def files_in(folder):
    """Return the files of pages, states and window pages."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "usage")
