"""An engine with pages on the disk: the same tokens as without, whatever lies there."""

from __future__ import annotations

import errno
import random
import threading
from types import SimpleNamespace

import msgspec
import pytest
from kept_world import FILE_BYTES, PAGE_SIZE, PROMPT, KeptWorld, ask, fill, tokens_of
from timeouts import PATIENCE_S, wait_until
from world import World, expected, make_request, with_media

from tureen.config import Config
from tureen.contract.runner import KvSizes
from tureen.contract.types import LogprobSpec
from tureen.errors import StartupError
from tureen.kv_offload import disk, disk_thread
from tureen.kv_offload.attach import attach
from tureen.kv_offload.page_files import PageFiles


def test_a_prompt_comes_back_after_a_restart_with_the_same_tokens(tmp_path):
    fill(tmp_path)
    with KeptWorld(tmp_path) as world:
        assert world.answer(ask()) == (tokens_of(ask()), 40)
        assert world.runner.num_tokens < 10
        assert world.tier.stats.total_loaded == 10


def test_an_output_comes_back_too_when_the_next_turn_continues_it(tmp_path):
    first = ask("first", max_new_tokens=8)
    fill(tmp_path, first)
    turn = ask("turn", (*PROMPT, *tokens_of(first), 5, 6))
    with KeptWorld(tmp_path) as world:
        assert world.answer(turn) == (tokens_of(turn), 48)  # of 49 known tokens, the last one's K/V was not computed


def test_pages_that_leave_the_cache_are_loaded_again(tmp_path):
    others = [ask(f"o{n}", range(n, n + 50)) for n in range(1, 13)]
    with KeptWorld(tmp_path, num_pages=20) as world:
        assert world.answer(ask("first"))[0] == tokens_of(ask())
        for request in others:
            assert world.answer(request)[0] == tokens_of(request)
            world.saved()
        assert len(world.engine.cache.match(("", ""), PROMPT, 40)) == 0
        assert world.answer(ask("again")) == (tokens_of(ask()), 40)
        assert world.answer(ask("cached")) == (tokens_of(ask()), 40)
        loaded = {name: world.answers[name].usage.loaded_tokens for name in ("first", "again", "cached")}
        assert loaded == {"first": 0, "again": 40, "cached": 0}


@pytest.mark.parametrize(
    "other",
    [
        {"cache_salt": "mine"},
        {"cache_salt": "min"},
        {"adapter": "red"},
    ],
)
def test_salts_and_adapters_share_nothing(tmp_path, other):
    fill(tmp_path)
    request = msgspec.structs.replace(ask("other"), **other)
    adapter = 1 if "adapter" in other else 0
    for cached in (0, 40):
        with KeptWorld(tmp_path) as world:
            assert world.answer(request) == (tokens_of(request, adapter), cached)


def test_an_adapter_of_the_same_number_is_not_the_same_adapter(tmp_path):
    request = msgspec.structs.replace(ask("r"), adapter="red")
    with KeptWorld(tmp_path) as world:
        world.answer(request)
    with KeptWorld(tmp_path) as world:
        world.tier.add_adapter("1", b"another red")
        assert world.answer(request)[1] == 0
    with KeptWorld(tmp_path) as world:
        world.tier._keys._adapters.clear()
        assert world.answer(request)[1] == 0  # one that nobody can tell from others is not kept


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.parametrize("fault", ["flip", "cut", "gone", "swapped"])
def test_a_page_that_is_damaged_is_computed_again(tmp_path, place, fault):
    fill(tmp_path)
    with KeptWorld(tmp_path) as world:
        keys = world.tier.find(("", ""), [], PROMPT, range(1, 11)).keys
        assert len(keys) == 10
        index = {"first": 0, "middle": 4, "last": 9}[place]
        path, other = (tmp_path / key.hex()[:2] / key.hex() for key in (keys[index], keys[index - 1]))
        content = bytearray(path.read_bytes())
        if fault == "gone":
            path.unlink()
        elif fault == "cut":
            path.write_bytes(content[:-1])
        elif fault == "swapped":
            path.write_bytes(other.read_bytes())
        else:
            content[-1] ^= 128
            path.write_bytes(content)
        assert world.answer(ask()) == (tokens_of(ask()), 4 * index)
        assert world.tier.stats.total_damaged == (fault != "gone")
    with KeptWorld(tmp_path) as world:  # and it is there again
        assert world.answer(ask()) == (tokens_of(ask()), 40)


def test_what_a_failed_row_may_have_spoilt_is_removed(tmp_path):
    fill(tmp_path)
    with KeptWorld(tmp_path, fault=lambda call, row: "poison" if call == 0 else None) as world:
        world.add(ask("bad"))
        world.drain()
        assert world.answers["bad"].finish.type == "error"
    with KeptWorld(tmp_path) as world:
        assert world.answer(ask())[1] == 0
    with KeptWorld(tmp_path) as world:
        assert world.answer(ask()) == (tokens_of(ask()), 40)


def test_samples_of_one_prompt_load_it_once(tmp_path):
    fill(tmp_path)
    requests = [ask(f"s{seed}", seed=seed, temperature=1.0) for seed in range(4)]
    longer = ask("longer", (*PROMPT, 9, 9, 9, 9, 9))
    with KeptWorld(tmp_path) as world:
        for request in (*requests, longer):
            world.add(request)
        world.drain()
        for request in (*requests, longer):
            assert world.answers[request.id].token_ids == tokens_of(request)
            assert world.answers[request.id].usage.cached_tokens == 40
        assert world.tier.stats.total_loaded == 10


def test_others_go_on_while_pages_are_loaded(tmp_path):
    fill(tmp_path)
    gate = threading.Event()
    with KeptWorld(tmp_path, gate=gate) as world:
        world.add(ask("loading"))
        other = ask("other", range(30, 50), max_new_tokens=20)
        world.add(other)
        while world.answers["other"].finish is None:
            world.step()
        assert world.answers["other"].token_ids == tokens_of(other)
        assert world.answers["loading"].finish is None
        gate.set()
        world.drain()
        assert world.answers["loading"].token_ids == tokens_of(ask())
        assert world.answers["loading"].usage.cached_tokens == 40


def _flush(world):
    world.engine.call("flush_cache")


def _exchange(world):
    world.engine.call("update_weights", number=7)


def _abort(world):
    world.engine.abort("loading")


@pytest.mark.parametrize("act", [_flush, _exchange, _abort])
def test_what_happens_while_pages_are_loaded_leaves_nothing_wrong(tmp_path, act):
    fill(tmp_path)
    gate = threading.Event()
    with KeptWorld(tmp_path, gate=gate) as world:
        world.add(ask("loading"))
        load = world.restoring.loads[0].load
        opener = threading.Thread(
            target=lambda: (wait_until(load._cancelled.is_set, "the end of the load"), gate.set())
        )
        opener.start()
        act(world)
        load.cancel()
        opener.join()
        world.drain()
        weights = world.runner._weights
        if act is not _abort:
            assert world.answers["loading"].token_ids == tokens_of(ask(), weights)
        request = ask("next")
        wait_until(lambda: all(restored.load.is_done for restored in world.restoring.loads), "the load")
        world.engine.prepare()
        assert world.answer(request)[0] == tokens_of(request, weights)
        world.check()


def test_what_is_asked_of_a_prompt_is_computed_and_not_loaded(tmp_path):
    fill(tmp_path)
    with KeptWorld(tmp_path) as world:
        scored = ask("scored", logprobs=LogprobSpec(top=0, prompt_start=14))
        assert world.answer(scored)[1] == 12
        assert world.answers["scored"].prompt_logprobs == expected(scored, 10_000)[3]


def test_pictures_are_told_apart_on_the_disk(tmp_path):
    one, other = (with_media(ask(name), (4, 6, digest * 32)) for name, digest in (("one", "1a"), ("other", "2b")))
    with KeptWorld(tmp_path) as world:
        assert world.answer(one) == (tokens_of(one), 0)
    with KeptWorld(tmp_path) as world:
        assert world.answer(other) == (tokens_of(other), 4)
        assert world.answer(one) == (tokens_of(one), 40)


def test_a_disk_that_is_full_costs_the_pages_and_nothing_else(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PageFiles, "_write", full)
    with KeptWorld(tmp_path) as world:
        assert world.answer(ask()) == (tokens_of(ask()), 0)
        world.saved()
        assert world.tier.stats.total_failed == 1
        assert world.answer(ask("again")) == (tokens_of(ask()), 40)


@pytest.mark.parametrize("seed", range(12))
def test_any_conversations_any_quota_and_any_restarts_give_the_same_tokens(tmp_path, seed):
    """Many turns of several clients in a small KV cache over a small disk, with restarts and damage."""
    rng = random.Random(seed)
    talks = {
        (salt, n): [rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))] for salt in ("", "a") for n in range(3)
    }
    number = 0
    for _ in range(4):
        options = {"num_kept": rng.choice((3, 30, 500)), "num_pages": rng.choice((24, 40))}
        with KeptWorld(tmp_path, **options) as world:
            for _ in range(rng.randrange(2, 6)):
                batch = []
                for salt, n in rng.sample(sorted(talks), rng.randrange(1, 4)):
                    number += 1
                    request = ask(
                        f"r{number}", talks[salt, n][-60:], cache_salt=salt, max_new_tokens=rng.randrange(1, 9)
                    )
                    batch.append((talks[salt, n], request))
                    world.add(request)
                for _ in range(rng.randrange(3)):
                    world.step()
                world.drain()
                for talk, request in batch:
                    answer = world.answers[request.id].token_ids
                    assert answer == tokens_of(request)
                    talk += [*answer, rng.randrange(3, 60)]
                world.saved()
                paths = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "usage"]
                if paths and rng.random() < 0.3:
                    with rng.choice(paths).open("r+b") as file:
                        file.write(b"?")


def test_what_others_computed_on_top_of_a_page_that_failed_does_not_stay_on_the_disk(tmp_path):
    world = KeptWorld(tmp_path, page_size=PAGE_SIZE)
    cache, files = world.engine.cache, world.tier._files
    namespace, tokens = ("", ""), PROMPT[: 3 * PAGE_SIZE]
    first = cache.open(namespace, [], PAGE_SIZE, headroom=0)
    cache.publish(first, tokens, PAGE_SIZE)
    second = cache.open(namespace, list(first.nodes), len(tokens), headroom=0)
    cache.publish(second, tokens, len(tokens))
    keys = world.tier._keys.of_nodes(second.nodes)
    cache.close(second)
    wait_until(lambda: all(map(files.has, keys)), "they are saved")
    cache.close(first, distrust_from=0)
    wait_until(lambda: not any(map(files.has, keys)), "they are gone")
    world.check()


def _prompt_only():
    return msgspec.structs.replace(make_request("prompt", PROMPT[:40], max_new_tokens=0), awaits_saving=True)


def test_a_prompt_that_others_are_to_read_ends_when_its_pages_are_on_the_disk(tmp_path):
    gate = threading.Event()
    with KeptWorld(tmp_path) as world:
        world.tier._saving.give(gate.wait)  # the disk is slow
        world.engine.add(_prompt_only())
        world.engine.step()
        world.engine.step()
        assert world.engine.is_preparing
        world.engine.prepare()
        assert not world.engine.has_work
        gate.set()
        wait_until(lambda: (world.engine.prepare(), world.engine.has_work)[1], "its end")
        [delta] = world.engine.step()
        assert (delta.id, delta.token_ids, delta.finish.type) == ("prompt", (), "length")
        assert not world.engine.is_preparing
        with KeptWorld(tmp_path) as other:
            assert other.answer(ask()) == (tokens_of(ask()), 40)


def test_its_pages_are_saved_while_the_rest_of_it_is_computed(tmp_path):
    with KeptWorld(tmp_path, token_budget=8) as world:
        world.engine.add(_prompt_only())
        world.engine.step()
        world.engine.step()
        world.saved()
        assert world.tier.stats.total_saved == 4


def test_it_ends_though_the_disk_is_full(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with KeptWorld(tmp_path) as world:
        monkeypatch.setattr(PageFiles, "write", refuse)
        world.engine.add(_prompt_only())
        world.engine.step()
        world.engine.step()
        wait_until(lambda: (world.engine.prepare(), world.engine.has_work)[1], "its end")
        assert [delta.finish.type for delta in world.engine.step()] == ["length"]


def test_it_ends_at_once_where_no_pages_are_kept():
    world = World()
    world.engine.add(_prompt_only())
    deltas = [delta for _ in range(2) for delta in world.engine.step()]
    assert [delta.finish.type for delta in deltas] == ["length"]


@pytest.mark.parametrize(
    ("settings", "mode", "message"),
    [
        ({"disable_radix_cache": True}, 0o700, "--kv-disk needs the prefix cache"),
        ({}, 0o755, "chmod 700"),
    ],
)
def test_a_start_without_a_prefix_cache_or_with_a_folder_that_others_may_read_is_refused(
    tmp_path, settings, mode, message
):
    folder = tmp_path / "kv"
    folder.mkdir(mode=mode)
    with pytest.raises(StartupError, match=message):
        attach(World().engine, None, Config(kv_disk=str(folder), **settings), [])


def test_a_folder_is_told_from_others_by_all_who_use_it(tmp_path):
    def folder_id(name):
        return PageFiles(tmp_path / name, sizes=KvSizes(10), max_bytes=10_000).folder_id

    assert len(folder_id("one")) == 16
    assert folder_id("one") == folder_id("one")
    assert folder_id("one") != folder_id("two")


@pytest.mark.parametrize("call", ["has", "read"])
def test_prompts_are_computed_while_the_disk_hangs_and_read_once_it_answers(
    tmp_path, hung_disk, monkeypatch, caplog, call
):
    fill(tmp_path)
    with KeptWorld(tmp_path) as world:
        hung = hung_disk(world, call)
        if call == "has":
            monkeypatch.setattr(disk, "LOOK_S", 0.01)
        for number in range(3):
            assert world.answer(ask(f"r{number}"))[0] == tokens_of(ask())
            _flush(world)
        assert hung.has_begun.is_set()
        world.check()
        assert world.tier.stats.total_loaded == 0
        assert caplog.text.count("does not answer (kv-look)" if call == "has" else "does not answer (kv-load)") == 1
        hung.answer()
        assert "answers again" in caplog.text
        monkeypatch.setattr(disk, "LOOK_S", PATIENCE_S)
        assert world.answer(ask("again")) == (tokens_of(ask()), 40)


def test_a_page_that_a_hung_disk_brings_at_last_is_not_written_to_a_place_that_others_have(tmp_path, hung_disk):
    """The places of a load that was given up are used again at once."""
    fill(tmp_path)
    other = ask("other", range(50, 91))
    with KeptWorld(tmp_path, num_pages=16) as world:
        hung = hung_disk(world, "read")
        assert world.answer(ask())[0] == tokens_of(ask())
        assert hung.has_begun.is_set()
        _flush(world)
        world.add(other)
        world.step()
        hung.answer()
        world.drain()
        assert world.answers["other"].token_ids == tokens_of(other)
        world.check()


def test_a_prompt_that_others_are_to_read_ends_though_the_disk_hangs(tmp_path, hung_disk):
    with KeptWorld(tmp_path) as world:
        hung = hung_disk(world, "write")
        world.engine.add(_prompt_only())
        world.engine.step()
        world.engine.step()
        wait_until(lambda: (world.engine.prepare(), world.engine.has_work)[1], "its end")
        assert hung.has_begun.is_set()
        assert [delta.finish.type for delta in world.engine.step()] == ["length"]


def test_a_disk_that_is_slow_and_answers_is_waited_for(tmp_path, monkeypatch):
    """Each answer in time counts, however long all of them take together."""
    now_s = [0.0]
    monkeypatch.setattr(disk_thread, "STUCK_S", 5.0)
    monkeypatch.setattr(disk_thread, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    files = PageFiles(tmp_path, sizes=KvSizes(8), max_bytes=10 * FILE_BYTES)
    thread = disk_thread.DiskThread("slow")
    seen = []

    def job():
        for number in range(4):
            now_s[0] += 4
            seen.append(thread.is_stuck())
            files.has(bytes([number]) * 32)
        now_s[0] += 6
        seen.append(thread.is_stuck())

    thread.give(job)
    assert thread.mark().wait(PATIENCE_S)
    thread.end(PATIENCE_S)
    assert seen == [False, False, False, False, True]
