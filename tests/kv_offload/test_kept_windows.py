"""Window pages on the disk: a prefix begins after the last page whose window is in the KV cache or there."""

from __future__ import annotations

import random

import msgspec
import pytest
from kept_world import PAGE_SIZE, PROMPT, KeptWorld, ask, continued, evict_some, files_in, fill, keys_of, tokens_of
from world import make_request

from tureen.contract.runner import KvSizes
from tureen.errors import StartupError
from tureen.kv_offload.keys import of_window
from tureen.kv_offload.page_files import PREFIX_BYTES, PageFiles
from tureen.runner.fake import WIDTH

NAMESPACE = ("", "")
WINDOW = 11
SEEN = 3  # window pages that a token after a full page sees
WINDOWS = {"windows": (30, WINDOW)}


def window_paths(world, folder, tokens):
    return [folder / of_window(key).hex()[:2] / of_window(key).hex() for key in keys_of(world, tokens)]


def drop_windows(world):
    for node in world.engine.cache.tree.nodes():
        if node in world.engine.cache.windows.idle:
            world.engine.cache.windows.drop(node)


def test_after_a_restart_only_the_window_pages_that_the_next_token_sees_are_read(tmp_path):
    fill(tmp_path, **WINDOWS)
    with KeptWorld(tmp_path, **WINDOWS) as world:
        assert world.answer(ask()) == (tokens_of(ask()), 40)
        assert world.tier.stats.total_loaded == 10 + SEEN
        assert [path.exists() for path in window_paths(world, tmp_path, PROMPT)] == 10 * [True]


def test_only_window_pages_are_read_if_their_pages_are_in_memory(tmp_path):
    with KeptWorld(tmp_path, **WINDOWS) as world:
        world.answer(ask("first"))
        world.saved()
        drop_windows(world)
        assert world.answer(ask()) == (tokens_of(ask()), 40)
        assert world.tier.stats.total_loaded == SEEN
        assert world.answer(ask("branch", PROMPT[:30])) == (tokens_of(ask("branch", PROMPT[:30])), 28)
        assert world.tier.stats.total_loaded == SEEN + SEEN


@pytest.mark.parametrize(
    ("index", "fault"), [*((index, fault) for index in range(10) for fault in ("gone", "damaged")), (None, "gone")]
)
def test_a_prompt_is_computed_from_the_last_page_on_whose_window_is_whole(tmp_path, index, fault):
    """index: of the page whose window page is lost; None: of them all but the first three."""
    fill(tmp_path, **WINDOWS)
    with KeptWorld(tmp_path, **WINDOWS) as world:
        paths = window_paths(world, tmp_path, PROMPT)
        lost = paths[3:] if index is None else [paths[index]]
        for path in lost:
            path.unlink()
            if fault == "damaged":
                path.write_bytes(b"?")
        usable = 3 if index is None else 10 if index < 10 - SEEN else index
        assert world.answer(ask()) == (tokens_of(ask()), usable * PAGE_SIZE)
        world.check()
    with KeptWorld(tmp_path, **WINDOWS) as world:  # they are there again
        assert world.answer(ask()) == (tokens_of(ask()), 40)


def longest_prefix(world, tokens):
    """Return the most pages that are in memory or on the disk, the window pages of the last window included."""
    nodes = world.engine.cache.known(NAMESPACE, tokens, len(tokens) - 1)
    keys, has = keys_of(world, tokens), world.tier._files.has
    pages = [index < len(nodes) or has(key) for index, key in enumerate(keys)]
    windows = [has(of_window(key)) for key in keys]
    for index, node in enumerate(nodes):
        windows[index] |= node.window is not None

    def is_usable(count):
        first = max(0, count * PAGE_SIZE + 1 - WINDOW) // PAGE_SIZE
        return all(pages[:count]) and all(windows[first:count])

    return max(filter(is_usable, range(1, len(keys) + 1)), default=0)


def lose_something(world, rng, folder):
    """Evict pages or window pages from memory; remove a file."""
    windows = world.engine.cache.windows
    evict_some(world.engine.cache, rng, windows.idle, windows.drop, 5)
    paths = files_in(folder)
    if paths and rng.random() < 0.7:
        rng.choice(paths).unlink()


@pytest.mark.parametrize("seed", range(24))
def test_a_prompt_begins_after_the_deepest_page_that_is_there_with_all_before_it_and_its_window(tmp_path, seed):
    """Whatever was evicted from memory or from the disk, in whatever order, and after any number of restarts."""
    rng = random.Random(seed)
    talks = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    number = num_begun_on_disk = 0
    for _ in range(4):
        with KeptWorld(tmp_path, num_pages=rng.choice((24, 60)), num_kept=rng.choice((40, 500)), **WINDOWS) as world:
            world.saved()  # a smaller quota is kept from the start
            for _ in range(rng.randrange(3, 9)):
                lose_something(world, rng, tmp_path)
                talk, number = rng.randrange(3), number + 1
                request = ask(f"r{number}", talks[talk], max_new_tokens=rng.randrange(1, 9))
                count = longest_prefix(world, talks[talk])
                num_begun_on_disk += count > len(world.engine.cache.match(NAMESPACE, talks[talk], len(talks[talk]) - 1))
                answer = world.answer(request)
                assert answer == (tokens_of(request), count * PAGE_SIZE)
                talks[talk] = continued(talks[talk], answer[0], rng)
                world.saved()
                world.check()
    assert num_begun_on_disk > 0


@pytest.mark.parametrize("seed", range(12))
def test_conversations_at_the_same_time_over_a_small_disk_and_few_window_pages_give_the_same_tokens(tmp_path, seed):
    """With preempted requests, whose window pages others take while they are saved."""
    rng = random.Random(seed)
    talks = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 30))] for _ in range(4)]
    with KeptWorld(tmp_path, num_pages=40, num_kept=60, token_budget=8, windows=(7, WINDOW)) as world:
        for turn in range(6):
            requests = [ask(f"{turn} {n}", talk, max_new_tokens=rng.randrange(1, 9)) for n, talk in enumerate(talks)]
            for request in requests:
                world.add(request)
            world.drain()
            world.check()
            for n, request in enumerate(requests):
                assert world.answers[request.id].token_ids == tokens_of(request)
                talks[n] = continued(talks[n], tokens_of(request), rng)
            world.saved()
            lose_something(world, rng, tmp_path)


def test_a_copy_of_a_window_page_that_was_replaced_meanwhile_is_not_kept(tmp_path):
    with KeptWorld(tmp_path, **WINDOWS) as world:
        cache, read, num_copied = world.engine.cache, world.runner.read, []

        def replaced(part, number):
            copy = read(part, number)
            if part == "window":
                node = next(node for node in cache.tree.nodes() if node.window and node.window.number == number)
                cache.windows.drop(node)
                num_copied.append(number)
            return copy

        world.runner.read = replaced
        world.answer(ask())
        world.saved()
        assert world.tier.stats.total_lost == len(num_copied) > 10
        assert not any(path.exists() for path in window_paths(world, tmp_path, PROMPT))


def test_what_a_failed_row_may_have_spoilt_is_removed_with_its_window_pages(tmp_path):
    fill(tmp_path, **WINDOWS)
    with KeptWorld(tmp_path, fault=lambda call, row: "poison" if call == 0 else None, **WINDOWS) as world:
        world.add(ask("bad"))
        world.drain()
        assert world.answers["bad"].finish.type == "error"
        world.saved()
        assert not any(path.exists() for path in window_paths(world, tmp_path, PROMPT))


def test_the_window_pages_of_a_conversation_are_removed_before_its_pages(tmp_path):
    tokens = list(PROMPT)
    with KeptWorld(tmp_path, num_pages=200, num_kept=50, windows=(60, WINDOW)) as world:
        for turn in range(4):
            answer, _ = world.answer(ask(f"turn {turn}", tokens))
            tokens += [*answer, 60, 61]
            world.saved()
        world.answer(ask("other", range(10, 51)))
        world.saved()
        assert world.tier.stats.total_evicted > 0
        keys, has = keys_of(world, tokens), world.tier._files.has
        assert all(has(key) for key in keys if has(of_window(key)))


@pytest.mark.parametrize("num_tokens", [38, 40, 41])
def test_a_prompt_that_another_engine_is_to_read_is_saved_with_its_window(tmp_path, num_tokens):
    full = num_tokens // PAGE_SIZE * PAGE_SIZE
    prompt = msgspec.structs.replace(make_request("prompt", PROMPT[:full], max_new_tokens=0), awaits_saving=True)
    request = ask("answer", PROMPT[:num_tokens])
    few = {"windows": (6, WINDOW)}
    with KeptWorld(tmp_path, token_budget=8, **few) as world, KeptWorld(tmp_path, **few) as other:
        world.add(prompt)
        world.drain_saving()
        assert world.answers["prompt"].finish.type == "length"
        assert other.answer(request) == (tokens_of(request), (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE)


def test_a_quota_that_no_page_fits_in_with_its_window_page_is_refused(tmp_path):
    sizes = KvSizes(PAGE_SIZE * WIDTH, window=1000)
    least = 2 * PREFIX_BYTES + PAGE_SIZE * WIDTH + 1000
    PageFiles(tmp_path / "fits", max_bytes=least, sizes=sizes)
    with pytest.raises(StartupError, match=f"--kv-disk-size {least - 1} is less than one page with that of the layers"):
        PageFiles(tmp_path / "does-not", max_bytes=least - 1, sizes=sizes)
