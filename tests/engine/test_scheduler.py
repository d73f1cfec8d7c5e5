"""Who runs when: budget, wave sharing, preemption, orders."""

import pytest
from world import World, expected, make_request

from tureen.contract.types import LogprobSpec
from tureen.engine.queue import Schedule

COMMON = [n % 60 for n in range(256)]


def _rows(world):
    return [(row.start, len(row.token_ids), row.sample) for row in world.runner.last.rows]


def _running(world):
    return [sequence.request.id for sequence in world.engine.scheduler.running]


# ---- the token budget


def test_a_long_prompt_is_computed_in_pieces_beside_running_sequences():
    world = World(token_budget=10, num_pages=100)
    world.add(make_request("short", [1, 2], max_new_tokens=20, ignore_eos=True))
    world.step()
    world.add(make_request("long", range(25), max_new_tokens=20, ignore_eos=True))
    seen = []
    for _ in range(4):
        world.step()
        seen.append(_rows(world))
    assert seen == [
        [(2, 1, True), (0, 9, False)],
        [(3, 1, True), (9, 9, False)],
        [(4, 1, True), (18, 7, True)],
        [(5, 1, True), (25, 1, True)],
    ]


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 9, 12])
@pytest.mark.parametrize("token_budget", [1, 3, 4, 5])
def test_every_chunk_and_every_cached_prefix_gives_the_same_answer(num_prompt, token_budget):
    prompt = list(range(num_prompt))
    for num_cached in range(13):
        world = World(page_size=4, token_budget=token_budget)
        if num_cached:
            world.add(make_request("warm", (prompt + [50] * 13)[:num_cached], max_new_tokens=0))
            world.drain()
        world.add(make_request("r", prompt, max_new_tokens=6, ignore_eos=True))
        world.drain()
        world.check_answers()
        full_pages = min(num_cached, num_prompt - 1) // 4
        assert world.answers["r"].usage.cached_tokens == full_pages * 4, num_cached


def test_queued_tokens_are_what_is_left_to_compute():
    world = World(token_budget=10, num_pages=100)
    world.add(make_request("a", range(25)))
    world.add(make_request("b", range(30, 37)))
    assert world.engine.scheduler.num_queued_tokens == 32
    world.step()
    assert world.engine.scheduler.num_queued_tokens == 22
    world.drain()
    assert world.engine.scheduler.num_queued_tokens == 0


# ---- wave sharing


@pytest.mark.parametrize("token_budget", [16, 128, 1024])
def test_a_wave_with_a_common_prefix_computes_it_once(token_budget):
    world = World(page_size=16, num_pages=100, max_rows=16, token_budget=token_budget)
    for index in range(16):
        world.add(make_request(f"r{index}", COMMON + [index] * 16, max_new_tokens=1))
    world.drain()
    assert world.runner.num_tokens == 256 + 16 * 16
    world.check_answers()
    assert sorted(answer.usage.cached_tokens for answer in world.answers.values()) == [0] + [256] * 15


def test_samples_of_one_prompt_share_its_full_pages():
    world = World(page_size=4, num_pages=100)
    for sample in range(8):
        world.add(make_request(f"s{sample}", range(30), seed=sample, temperature=1.0, max_new_tokens=9))
    world.step()
    assert _running(world) == ["s0"]
    world.step()
    shared = {tuple(sequence.table.pages[:7]) for sequence in world.engine.scheduler.running}
    assert len(shared) == 1
    world.drain()
    assert len({tuple(answer.token_ids) for answer in world.answers.values()}) == 8
    world.check_answers()


def test_a_common_prefix_of_less_than_a_page_is_not_waited_for():
    world = World(page_size=16)
    world.add(make_request("a", [1] * 15 + [2] * 9))
    world.add(make_request("b", [1] * 15 + [3] * 9))
    world.add(make_request("c", [1] * 16))  # its only full page cannot be reused: the last token is in it
    world.step()
    assert _running(world) == ["a", "b"]  # the budget is 32
    assert [row[1] for row in _rows(world)] == [24, 8]


def test_followers_do_not_block_unrelated_requests_behind_them():
    world = World(page_size=4, token_budget=8, num_pages=200)
    world.add(make_request("leader", COMMON[:40]))
    world.add(make_request("follower", [*COMMON[:40], 1]))
    world.add(make_request("other", [9, 9, 9]))
    world.add(make_request("another salt", COMMON[:4], cache_salt="x"))
    for _ in range(4):
        world.step()
        assert _running(world) == ["leader"]
    world.step()
    assert _running(world) == ["leader"]
    world.step()
    assert "follower" in _running(world)
    assert world.runner.num_tokens <= 40 + 1 + 3 + 4 + 4
    world.drain()
    world.check_answers()


def test_unrelated_requests_pass_a_waiting_follower():
    world = World(page_size=4, token_budget=16, num_pages=200)
    world.add(make_request("leader", COMMON[:28], max_new_tokens=9, ignore_eos=True))
    world.add(make_request("follower", COMMON[:28], max_new_tokens=9, seed=1, ignore_eos=True))
    world.add(make_request("other", [9, 9, 9], max_new_tokens=9, ignore_eos=True))
    world.step()
    world.step()  # 12 tokens of the leader, then 3 of the other: the follower's pages are not there yet
    assert _running(world) == ["leader", "other"]
    world.step()
    assert _running(world) == ["leader", "other", "follower"]
    world.drain()
    world.check_answers()


def test_each_follower_waits_only_for_what_it_shares():
    world = World(page_size=4, token_budget=64, num_pages=200)
    world.add(make_request("leader", COMMON[:40]))
    world.add(make_request("near", [*COMMON[:8], 50, 51]))
    world.step()
    near = next(s for s in world.engine.scheduler.queue.candidates() if s.request.id == "near")
    assert near.leader[1] == 2
    assert not near.is_following
    world.drain()
    assert world.answers["near"].usage.cached_tokens == 8
    world.check_answers()


@pytest.mark.parametrize("num_steps", range(1, 9))
def test_followers_of_a_leader_that_is_aborted_go_on_with_what_it_computed(num_steps):
    world = World(page_size=4, token_budget=8, num_pages=200)
    for index in range(4):
        world.add(make_request(f"r{index}", [*COMMON[:40], index]))
    for _ in range(num_steps):
        world.step()
    world.engine.abort("r0")
    world.drain()
    assert world.runner.num_tokens <= 41 + 3 * 1 + 4 * 3 + 8
    world.check_answers()


def test_a_request_that_scores_its_prompt_does_not_wait_for_pages_it_cannot_use():
    world = World(page_size=4, token_budget=200, num_pages=200)
    world.add(make_request("a", COMMON[:40]))
    world.add(make_request("b", COMMON[:40], logprobs=LogprobSpec(prompt_start=0)))
    world.step()
    assert _running(world) == ["a", "b"]
    pages = [sequence.table.pages[:10] for sequence in world.engine.scheduler.running]
    assert pages[0] == pages[1]  # computed twice, kept once
    world.drain()
    world.check_answers()


def test_nothing_is_shared_without_the_prefix_cache():
    world = World(page_size=4, token_budget=200, num_pages=200, prefix_cache=False)
    for index in range(3):
        world.add(make_request(f"r{index}", COMMON[:40]))
    world.step()
    assert len(_running(world)) == 3
    world.drain()
    world.check_answers()


# ---- who sits out


def test_who_is_to_rest_sits_out_a_step_beside_others_and_nobody_rests_where_all_would():
    world = World(num_pages=100, token_budget=64)
    for name in "abc":
        world.add(make_request(name, [ord(name) % 60] * 3, max_new_tokens=9, ignore_eos=True))
    world.step()
    scheduler = world.engine.scheduler
    counts = []
    for resting in ("", "b", "ac", "abc", "c"):
        scheduler.rests = lambda sequence, resting=resting: sequence.request.id in resting
        world.step()
        counts.append([sequence.num_tokens for sequence in scheduler.running])
    assert counts == [[5, 5, 5], [6, 5, 6], [6, 6, 6], [7, 7, 7], [8, 8, 7]]
    world.drain()
    world.check_answers()


def test_begun_are_those_that_run_or_ran_before_they_were_preempted():
    world = World(num_pages=100, max_rows=2)
    scheduler = world.engine.scheduler
    for name in "abc":
        world.add(make_request(name, [ord(name) % 60] * 3, max_new_tokens=9, ignore_eos=True))
    assert scheduler.num_begun == 0
    world.step()
    assert (scheduler.num_begun, scheduler.num_free_slots) == (2, 0)
    scheduler.preempt_all()
    assert (scheduler.num_begun, scheduler.num_free_slots, scheduler.running) == (2, 2, [])
    assert [sequence.request.id for sequence in scheduler.queue.waiting] == ["a", "b", "c"]
    world.engine.abort("a")
    assert scheduler.num_begun == 1
    world.drain()
    world.check_answers()


# ---- preemption


def _squeeze(**options):
    """32 long outputs in 64 pages of 4 tokens."""
    world = World(num_pages=64, page_size=4, max_rows=32, token_budget=64, **options)
    for index in range(32):
        spec = LogprobSpec(prompt_start=index % 4) if index % 2 else None
        world.add(
            make_request(
                f"r{index}",
                [index] * 5,
                seed=index,
                temperature=index % 3 / 2,
                max_new_tokens=60,
                ignore_eos=True,
                logprobs=spec,
                priority=index % 3,
            )
        )
    return world


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("priority_scheduling", [True, False])
def test_preempted_sequences_answer_as_if_undisturbed(prefix_cache, priority_scheduling):
    world = _squeeze(prefix_cache=prefix_cache, schedule=Schedule(by_priority=priority_scheduling))
    world.drain()
    total = world.engine.stats().total_preemptions
    assert total > 10
    assert sum(answer.usage.preemptions for answer in world.answers.values()) == total
    world.check_answers()


def test_preemption_does_not_ping_pong():
    world = _squeeze()
    world.drain()
    useful = 32 * (5 + 60 - 1)
    assert world.engine.stats().total_preemptions < 2 * 32
    assert world.runner.num_tokens < 1.5 * useful


def test_throughput_recovers_after_a_burst():
    world = World(num_pages=64, page_size=4, max_rows=32, token_budget=64)

    def tokens_per_step(prefix):
        """Four arrivals every fifty steps: what the pool holds at ease."""
        steps, start = world.num_steps, world.engine.stats().total_output_tokens
        for wave in range(4):
            for index in range(4):
                name = f"{prefix}{wave}.{index}"
                world.add(make_request(name, [index, wave], max_new_tokens=40, ignore_eos=True))
            for _ in range(50):
                world.step()
        return (world.engine.stats().total_output_tokens - start) / (world.num_steps - steps)

    before = tokens_per_step("before")
    for index in range(32):
        world.add(make_request(f"burst{index}", [index, 60], max_new_tokens=60, ignore_eos=True))
    world.drain()
    assert world.engine.stats().total_preemptions > 0
    assert tokens_per_step("after") >= 0.8 * before
    world.drain()


def test_the_newest_is_preempted_and_comes_back_before_those_that_never_ran():
    world = World(num_pages=8, page_size=4, max_rows=4, token_budget=64)
    for name in "abc":
        world.add(make_request(name, [ord(name) % 60] * 7, max_new_tokens=20, ignore_eos=True))
    world.step()
    assert _running(world) == ["a", "b"]  # 2 + 2 pages; c would leave too few
    while len(_running(world)) == 2:
        world.step()
    assert _running(world) == ["a"]
    assert [s.request.id for s in world.engine.scheduler.queue.candidates()] == ["b", "c"]
    world.drain()
    world.check_answers()


def test_the_lowest_priority_is_preempted_whenever_it_came():
    world = World(num_pages=10, page_size=4, token_budget=64, schedule=Schedule(by_priority=True))
    for name, priority in (("low", 0), ("high", 2), ("middle", 1)):
        world.add(make_request(name, [priority] * 7, priority=priority, max_new_tokens=20, ignore_eos=True))
        world.step()
    assert _running(world) == ["high", "middle", "low"]
    while len(_running(world)) == 3:
        world.step()
    assert _running(world) == ["high", "middle"]
    world.drain()
    world.check_answers()


@pytest.mark.parametrize(("num_pages", "is_back"), [(10, True), (9, False)])
def test_a_preempted_sequence_comes_back_where_there_is_room_for_what_it_and_others_may_still_write(num_pages, is_back):
    """Each has 10 of its 16 tokens, in 3 pages of 4, and 2 pages to go: 3 + 3 + 2 + 2."""
    world = World(num_pages=num_pages, page_size=4, token_budget=64, prefix_cache=False)
    for name in "ab":
        world.add(make_request(name, [ord(name) % 60] * 7, max_new_tokens=9, ignore_eos=True))
    while [sequence.num_tokens for sequence in world.engine.scheduler.running] != [10, 10]:
        world.step()
    world.engine.scheduler.preempt_all()
    world.step()
    assert _running(world) == (["a", "b"] if is_back else ["a"])
    world.drain()
    world.check_answers()


def test_nothing_is_admitted_in_a_step_that_preempted():
    world = _squeeze()
    num_checked = 0
    while world.engine.has_work:
        before, running = world.engine.stats().total_preemptions, set(_running(world))
        world.step()
        num_preempted = world.engine.stats().total_preemptions - before
        if num_preempted:
            waiting = {sequence.request.id for sequence in world.engine.scheduler.queue.waiting}
            assert set(_running(world)) <= running
            assert len(waiting & running) == num_preempted
            num_checked += 1
    assert num_checked > 10


# ---- orders


def test_waiting_requests_come_in_order_of_arrival():
    world = World(max_rows=1)
    for index in range(5):
        world.add(make_request(f"r{index}", [index], priority=index))
    assert _order_of_ends(world) == ["r0", "r1", "r2", "r3", "r4"]


def test_higher_priority_comes_first():
    world = World(max_rows=1, schedule=Schedule(by_priority=True))
    for name, priority in (("a", 0), ("b", 5), ("c", 5), ("d", -1)):
        world.add(make_request(name, [1], priority=priority))
    assert _order_of_ends(world) == ["b", "c", "a", "d"]


def test_the_longest_cached_prefix_comes_first():
    world = World(max_rows=1, page_size=4, schedule=Schedule("lpm"), num_pages=200)
    world.add(make_request("warm", COMMON[:40], max_new_tokens=0))
    world.drain()
    for name, length in (("none", 0), ("some", 8), ("most", 32), ("half", 16)):
        world.add(make_request(name, [*COMMON[:length], 1, 2, 3], max_new_tokens=1))
    assert _order_of_ends(world) == ["warm", "most", "half", "some", "none"]


def test_a_request_without_cached_prefix_is_not_passed_over_for_ever():
    world = World(max_rows=1, page_size=4, schedule=Schedule("lpm"), num_pages=200)
    world.add(make_request("warm", COMMON[:40], max_new_tokens=0))
    world.drain()
    world.add(make_request("unlucky", [50, 51, 52], max_new_tokens=1))
    for index in range(200):
        world.add(make_request(f"r{index}", COMMON[:40], max_new_tokens=1))
        world.step()
    position = _order_of_ends(world).index("unlucky")
    assert position <= 65


def _order_of_ends(world):
    world.drain()
    return world.ended


def test_the_answers_do_not_depend_on_batch_mates():
    alone = expected(make_request("r", [1, 2, 3], seed=5, temperature=1.0, max_new_tokens=20), 10_000)[0]
    world = World(max_rows=32, num_pages=400, token_budget=13)
    world.add(make_request("r", [1, 2, 3], seed=5, temperature=1.0, max_new_tokens=20))
    for index in range(30):
        world.add(make_request(f"r{index}", [1, 2, 3, index], seed=index, temperature=1.0, max_new_tokens=index))
        world.step()
    world.drain()
    assert world.answers["r"].token_ids == alone
