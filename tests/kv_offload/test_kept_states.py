"""Saved states of layers without attention on the disk: a prefix begins after the last page whose state is there."""

from __future__ import annotations

import errno
import os
import random
import threading

import msgspec
import pytest
from kept_world import (
    FILE_BYTES,
    NAMESPACE,
    PAGE_SIZE,
    PROMPT,
    KeptWorld,
    ask,
    continued,
    evict_some,
    files_in,
    fill,
    keys_of,
    tokens_of,
)
from timeouts import wait_until
from world import make_request

from tureen.contract.runner import KvSizes
from tureen.errors import StartupError
from tureen.kv_offload.keys import of_state
from tureen.kv_offload.page_files import PREFIX_BYTES, PageFiles
from tureen.runner.fake import WIDTH

SAVED = {"num_saved": 40}
WITH_AND_WITHOUT = pytest.mark.parametrize("saved", [SAVED, {}], ids=["states", "pages"])


def longest_prefix(world, tokens, damaged):
    """Return the most pages of which each is in memory or on the disk, and the last one's state is, too."""
    nodes = world.engine.cache.known(NAMESPACE, tokens, len(tokens) - 1)
    keys = keys_of(world, tokens)

    def has(key):
        return (
            world.tier._files.has(key)
            and damaged.get(key.hex()) != (world.folder / key.hex()[:2] / key.hex()).read_bytes()
        )

    pages = [index < len(nodes) or has(key) for index, key in enumerate(keys)]
    states = [has(of_state(key)) for key in keys]
    for index, node in enumerate(nodes):
        states[index] |= node.state is not None
    return max((count for count in range(1, len(keys) + 1) if all(pages[:count]) and states[count - 1]), default=0)


def lose_something(world, rng, folder):
    """Evict pages or states from memory; remove or damage a file. Return the name and content of a damaged one."""
    states = world.engine.cache.states
    evict_some(world.engine.cache, rng, states.held, states.drop, 3)
    paths = files_in(folder)
    if not paths or rng.random() < 0.5:
        return {}
    path = rng.choice(paths)
    if rng.random() < 0.5:
        path.unlink()
        return {}
    path.write_bytes(rng.choice((b"?", path.read_bytes()[:-1] + b"?")))
    return {path.name: path.read_bytes()}


@pytest.mark.parametrize("seed", range(24))
def test_a_prompt_begins_after_the_deepest_page_that_is_there_with_all_before_it_and_its_state(tmp_path, seed):
    """Whatever was evicted from memory or from the disk, in whatever order, and after any number of restarts."""
    rng = random.Random(seed)
    talks = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))] for _ in range(3)]
    number, num_begun_on_disk, damaged = 0, 0, {}
    for _ in range(4):
        options = {"num_kept": rng.choice((30, 500)), "num_saved": rng.choice((0, 1, 3, 30))}
        with KeptWorld(tmp_path, num_pages=rng.choice((24, 40)), **options) as world:
            world.saved()  # a smaller quota is kept from the start
            for _ in range(rng.randrange(3, 9)):
                damaged |= lose_something(world, rng, tmp_path)
                talk, number = rng.randrange(3), number + 1
                request = ask(f"r{number}", talks[talk], max_new_tokens=rng.randrange(1, 9))
                count = longest_prefix(world, talks[talk], damaged) if options["num_saved"] else 0
                num_begun_on_disk += count > len(world.engine.cache.match(NAMESPACE, talks[talk], len(talks[talk]) - 1))
                before = world.runner.num_tokens
                answer = world.answer(request)
                assert answer == (tokens_of(request), count * PAGE_SIZE)
                assert world.runner.num_tokens - before == len(talks[talk]) + len(answer[0]) - 1 - count * PAGE_SIZE
                talks[talk] = continued(talks[talk], answer[0], rng)
                world.saved()
    assert num_begun_on_disk > 0


@pytest.mark.parametrize("seed", range(16))
def test_conversations_at_the_same_time_over_a_small_disk_with_damage_give_the_same_tokens(tmp_path, seed):
    """With aborted, preempted and failed requests in a small KV cache."""

    def fault(call, row):
        rng = random.Random(f"{seed} {call} {row.slot}")
        return rng.choice(["poison", "raise"]) if rng.random() < 0.03 * (seed % 2) else None

    rng = random.Random(seed)
    talks = [[rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))] for _ in range(5)]
    number = 0
    for _ in range(4):
        sizes = {"num_kept": rng.choice((3, 30, 500)), "num_saved": rng.choice((1, 2, 5, 30))}
        sizes |= {"num_pages": rng.choice((24, 40)), "token_budget": rng.choice((5, 32))}
        with KeptWorld(tmp_path, fault=fault, **sizes) as world:
            for _ in range(rng.randrange(2, 6)):
                batch = {}
                for talk in rng.sample(range(5), rng.randrange(1, 5)):
                    number += 1
                    batch[talk] = ask(f"r{number}", talks[talk], max_new_tokens=rng.randrange(1, 9))
                    world.add(batch[talk])
                    for _ in range(rng.randrange(3)):
                        world.step()
                if rng.random() < 0.3:
                    world.engine.abort(rng.choice(list(batch.values())).id)
                if rng.random() < 0.2:
                    world.engine.control.pause("retract")
                    world.engine.control.resume()
                world.drain()
                for talk, request in batch.items():
                    answer = world.answers[request.id]
                    num_tokens = len(answer.token_ids) if answer.finish.type in ("abort", "error") else None
                    assert answer.token_ids == tokens_of(request)[:num_tokens]
                    talks[talk] = continued(talks[talk], answer.token_ids, rng)
                world.saved()
                world.check()
                paths = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "usage")
                if paths and rng.random() < 0.3:
                    with rng.choice(paths).open("r+b") as file:
                        file.write(b"?")


@pytest.mark.parametrize("seed", range(6))
def test_a_state_leaves_the_disk_no_later_than_its_page(tmp_path, seed):
    rng = random.Random(seed)
    talks, names = [[3 + talk] * 9 for talk in range(3)], {}
    for number in range(24):
        with KeptWorld(tmp_path, num_kept=40, **SAVED) as world:
            talk = rng.randrange(3)
            request = ask(f"r{number}", talks[talk])
            answer, _ = world.answer(request)
            names |= {of_state(key): key for key in keys_of(world, [*talks[talk], *answer])}
            talks[talk] = continued(talks[talk], answer, rng)
            world.saved()
            has = world.tier._files.has
            assert all(has(page) for state, page in names.items() if has(state))
    assert sum(not has(page) for page in names.values()) > 5


@pytest.mark.parametrize("options", [{"num_kept": 56}, {"num_kept": 63, **SAVED}])
def test_what_is_written_for_a_turn_takes_the_room_of_other_conversations(tmp_path, options):
    first = ask("first")
    turn = ask("turn", (*PROMPT, *tokens_of(first), 5, 6))
    with KeptWorld(tmp_path, num_pages=100, **options) as world:
        for request in (first, *(ask(f"other {n}", range(n, n + 41)) for n in range(10, 14))):
            world.answer(request)
            world.saved()
        assert world.tier.stats.total_evicted == 0
        world.answer(turn)
        world.saved()
        assert world.tier.stats.total_evicted > 0
        world.engine.call("flush_cache")
        again = msgspec.structs.replace(turn, id="again")
        assert world.answer(again) == (tokens_of(turn), 48)


@pytest.mark.parametrize("interruption", ["none", "restart", "eviction"])
def test_a_turn_marks_the_state_that_it_began_with_as_used_and_those_of_earlier_turns_not(tmp_path, interruption):
    tokens, used = list(PROMPT[:9]), []
    world = KeptWorld(tmp_path, **SAVED)
    for turn in range(4):
        answer, num_cached = world.answer(ask(f"turn-{turn}", tokens))
        tokens += [*answer, 60, 61, 62]
        world.saved()
        states = [tmp_path / of_state(key).hex()[:2] / of_state(key).hex() for key in keys_of(world, tokens)]
        used.append({index: path.stat().st_mtime_ns for index, path in enumerate(states, 1) if path.exists()})
        if turn > 0:
            changed = [index for index, time in used[-2].items() if used[-1][index] != time]
            assert changed == [num_cached // PAGE_SIZE]
        if interruption == "restart":
            world.engine.close()
            world = KeptWorld(tmp_path, **SAVED)
        elif interruption == "eviction":
            world.engine.call("flush_cache")
    assert len(used[-1]) > 5
    world.engine.close()


@pytest.mark.parametrize("interruption", ["none", "restart", "eviction", "lost-states", "another engine"])
def test_ten_turns_compute_only_what_is_new(tmp_path, interruption):
    tokens = list(PROMPT[:9])
    world, other = (KeptWorld(tmp_path, num_pages=100, **SAVED) for _ in range(2))
    for turn in range(10):
        request = ask(f"turn-{turn}", tokens)
        answer, num_cached = world.answer(request)
        assert answer == tokens_of(request)
        assert turn == 0 or num_cached == (len(tokens) - 3 - 1) // PAGE_SIZE * PAGE_SIZE
        tokens += [*answer, turn, 60, 61]
        world.saved()
        if interruption == "restart":
            world.engine.close()
            world = KeptWorld(tmp_path, num_pages=100, **SAVED)
        elif interruption == "another engine":
            world, other = other, world
        elif interruption == "eviction":
            world.engine.call("flush_cache")
        elif interruption == "lost-states":
            for node in list(world.engine.cache.states.held):
                world.engine.cache.states.drop(node)
    for each in (world, other):
        assert each.tier.stats.total_lost == 0
        each.engine.close()


def test_only_the_state_is_read_if_its_pages_are_in_memory(tmp_path):
    with KeptWorld(tmp_path, **SAVED) as world:
        world.answer(ask("first"))
        world.saved()
        for node in list(world.engine.cache.states.held):
            world.engine.cache.states.drop(node)
        assert world.answer(ask()) == (tokens_of(ask()), 40)
        assert world.tier.stats.total_loaded == 1


def test_samples_of_one_prompt_load_its_state_once(tmp_path):
    fill(tmp_path, **SAVED)
    requests = [ask(f"s{seed}", seed=seed, temperature=1.0) for seed in range(4)]
    longer = ask("longer", (*PROMPT, 9, 9, 9, 9, 9))
    with KeptWorld(tmp_path, **SAVED) as world:
        for request in (*requests, longer):
            world.add(request)
        world.drain()
        for request in (*requests, longer):
            assert world.answers[request.id].token_ids == tokens_of(request)
            assert world.answers[request.id].usage.cached_tokens == 40
        assert world.tier.stats.total_loaded == 11


def paths_of(world, folder, tokens):
    return [folder / key.hex()[:2] / key.hex() for key in keys_of(world, tokens)]


@pytest.mark.parametrize("fault", ["flip", "cut", "gone", "page", "other"])
def test_a_state_that_is_damaged_is_computed_again(tmp_path, fault):
    fill(tmp_path, ask("first"), ask("other", range(20, 61)), **SAVED)
    with KeptWorld(tmp_path, **SAVED) as world:
        last, others = keys_of(world, PROMPT)[-1], keys_of(world, range(20, 61))[-1]
        path, page, other = (tmp_path / key.hex()[:2] / key.hex() for key in (of_state(last), last, of_state(others)))
        content = bytearray(path.read_bytes())
        if fault == "gone":
            path.unlink()
        elif fault == "cut":
            path.write_bytes(content[:-1])
        elif fault == "flip":
            content[-1] ^= 1
            path.write_bytes(content)
        else:
            path.write_bytes((page if fault == "page" else other).read_bytes())
        assert world.answer(ask()) == (tokens_of(ask()), 0)
        assert world.tier.stats.total_damaged == (fault != "gone")
        world.check()
    with KeptWorld(tmp_path, **SAVED) as world:  # it is there again
        assert world.answer(ask()) == (tokens_of(ask()), 40)


@pytest.mark.parametrize("index", [0, 4, 9])
def test_a_page_that_is_damaged_leaves_no_state_behind_it(tmp_path, index):
    fill(tmp_path, **SAVED)
    with KeptWorld(tmp_path, **SAVED) as world:
        paths_of(world, tmp_path, PROMPT)[index].write_bytes(b"?")
        assert world.answer(ask()) == (tokens_of(ask()), 0)
        assert world.tier.stats.total_damaged == 1
        world.check()


@WITH_AND_WITHOUT
def test_a_damaged_file_that_cannot_be_removed_is_looked_past(tmp_path, monkeypatch, saved):
    fill(tmp_path, **saved)

    def refuse(path):
        raise OSError(errno.EROFS, "read-only")

    with KeptWorld(tmp_path, **saved) as world:
        for path in paths_of(world, tmp_path, PROMPT):
            path.write_bytes(b"?")
        monkeypatch.setattr(os, "unlink", refuse)
        assert world.answer(ask()) == (tokens_of(ask()), 0)
        assert world.tier.stats.total_damaged == 1
    monkeypatch.undo()


@WITH_AND_WITHOUT
def test_another_model_or_salt_finds_nothing(tmp_path, saved):
    fill(tmp_path, **saved)
    with KeptWorld(tmp_path, model=b"another", **saved) as world:
        assert world.answer(ask())[1] == 0
    with KeptWorld(tmp_path, **saved) as world:
        assert world.answer(ask(cache_salt="mine"))[1] == 0


def test_a_model_without_states_saves_none_and_reads_none(tmp_path):
    fill(tmp_path)
    with KeptWorld(tmp_path) as world:
        keys = keys_of(world, PROMPT)
        assert not any(world.tier._files.has(of_state(key)) for key in keys)


@WITH_AND_WITHOUT
def test_weights_that_were_exchanged_find_only_their_own(tmp_path, saved):
    with KeptWorld(tmp_path, **saved) as world:
        for name, weights, cached in (("a", 0, 0), ("b", 7, 0), ("c", 0, 40), ("d", 7, 40)):
            world.engine.call("update_weights", number=weights)
            request = ask(name)
            assert world.answer(request) == (tokens_of(request, weights), cached)
            world.saved()


@pytest.mark.parametrize("act", ["flush", "exchange", "abort"])
@pytest.mark.parametrize("at", [1, 2, 11])
def test_what_happens_while_a_state_is_loaded_leaves_nothing_wrong(tmp_path, act, at):
    """at: the number of the read that hangs: of the state, the first page or the last one."""
    fill(tmp_path, **SAVED)
    gate, reads = threading.Event(), []
    with KeptWorld(tmp_path, **SAVED) as world:
        files, read = world.tier._files, world.tier._files.read

        def slow(key, into):
            reads.append(key)
            if len(reads) == at:
                gate.wait()
            read(key, into)

        files.read = slow
        world.add(ask("loading"))
        wait_until(lambda: len(reads) == at, "the read that hangs")
        world.check()
        if act == "flush":
            world.engine.call("flush_cache")
        elif act == "exchange":
            world.engine.call("update_weights", number=7)
        else:
            world.engine.abort("loading")
        world.check()
        gate.set()
        world.drain()
        weights = world.runner._weights
        if act != "abort":
            assert world.answers["loading"].token_ids == tokens_of(ask(), weights)
        wait_until(lambda: all(restored.load.is_done for restored in world.restoring.loads), "the load")
        world.engine.prepare()
        assert world.answer(ask("next"))[0] == tokens_of(ask(), weights)
        assert world.engine.cache.states.taken == set()
        world.check()


def test_a_state_that_a_hung_disk_brings_at_last_is_not_written_to_a_place_that_others_have(tmp_path, hung_disk):
    fill(tmp_path, **SAVED)
    other = ask("other", range(20, 61))
    with KeptWorld(tmp_path, num_saved=1) as world:
        hung = hung_disk(world, "read")
        assert world.answer(ask()) == (tokens_of(ask()), 0)
        assert hung.has_begun.is_set()
        world.engine.call("flush_cache")
        assert world.answer(other)[0] == tokens_of(other)
        hung.answer()
        turn = ask("turn", (*range(20, 61), *tokens_of(other), 5))
        assert world.answer(turn)[0] == tokens_of(turn)
        world.check()


@pytest.mark.parametrize("is_held_again", [False, True])
def test_a_copy_of_a_state_that_was_replaced_meanwhile_is_not_kept(tmp_path, is_held_again):
    with KeptWorld(tmp_path, **SAVED) as world:
        states, read, copied = world.engine.cache.states, world.runner.read, []

        def replaced(part, number):
            copy = read(part, number)
            if part == "page":
                return copy
            copied.append(number)
            node = next(node for node in states.held if node.state.number == number)
            states.drop(node)
            if is_held_again:
                assert states.take([other for other in states.free if other != number]) == number
                states.hold(node, number)
            return copy

        world.runner.read = replaced
        world.answer(ask())
        world.saved()
        assert world.tier.stats.total_lost == len(copied) == 2  # of the prompt and of the output
        assert not any(world.tier._files.has(of_state(key)) for key in keys_of(world, PROMPT))


def test_what_a_failed_row_may_have_spoilt_is_removed_with_its_states(tmp_path):
    fill(tmp_path, **SAVED)
    with KeptWorld(tmp_path, fault=lambda call, row: "poison" if call == 0 else None, **SAVED) as world:
        world.add(ask("bad"))
        world.drain()
        assert world.answers["bad"].finish.type == "error"
        world.saved()
        assert not any(world.tier._files.has(of_state(key)) for key in keys_of(world, PROMPT))
    with KeptWorld(tmp_path, **SAVED) as world:
        assert world.answer(ask())[1] == 0


@pytest.mark.parametrize("num_tokens", [38, 40, 41])
def test_a_prompt_that_another_engine_is_to_read_is_saved_with_its_state(tmp_path, num_tokens):
    """An engine with the role prefill computes the full pages; the one that answers computes the rest."""
    full = num_tokens // PAGE_SIZE * PAGE_SIZE
    prompt = msgspec.structs.replace(make_request("prompt", PROMPT[:full], max_new_tokens=0), awaits_saving=True)
    request = ask("answer", PROMPT[:num_tokens])
    with KeptWorld(tmp_path, token_budget=8, **SAVED) as world, KeptWorld(tmp_path, **SAVED) as other:
        world.add(prompt)
        world.drain_saving()
        assert world.answers["prompt"].finish.type == "length"
        assert other.answer(request) == (tokens_of(request), (num_tokens - 1) // PAGE_SIZE * PAGE_SIZE)


def test_a_prompt_is_computed_if_no_state_can_be_saved(tmp_path):
    fill(tmp_path, **SAVED)
    with KeptWorld(tmp_path, num_saved=0) as world:
        assert world.answer(ask()) == (tokens_of(ask()), 0)


def test_a_quota_that_no_page_fits_in_with_its_state_is_refused(tmp_path):
    sizes = KvSizes(PAGE_SIZE * WIDTH, state=1000)
    least = FILE_BYTES + PREFIX_BYTES + 1000
    PageFiles(tmp_path / "fits", max_bytes=least, sizes=sizes)
    with pytest.raises(StartupError, match=f"--kv-disk-size {least - 1} is less than one page with the state"):
        PageFiles(tmp_path / "does-not", max_bytes=least - 1, sizes=sizes)


def test_states_count_towards_the_quota(tmp_path):
    with KeptWorld(tmp_path, **SAVED) as world:
        world.answer(ask())
        world.saved()
        files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "usage"]
        assert world.tier.stats.num_bytes == sum(path.stat().st_size for path in files)
        assert world.tier.stats.total_saved == len(files) == 11 + 2
