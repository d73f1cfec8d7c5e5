"""Whose turn it is: many batches of one client take no more turns from others than one of it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeouts import until

from tureen.batches.turns import Turns


async def order_of(turns: Turns, waiting: list[tuple[str, int]], most_at_once: int) -> list[str]:
    """Whose turns came in which order, while each that came first ends first."""
    order: list[tuple[str, int]] = []
    tasks = []

    async def take(client: str, num_bytes: int) -> None:
        await turns.take(client, num_bytes)
        order.append((client, num_bytes))

    for client, num_bytes in waiting:
        tasks.append(asyncio.create_task(take(client, num_bytes)))
    for number, _ in enumerate(waiting):
        await until(lambda number=number: len(order) > number)
        assert len(order) - number <= most_at_once
        turns.free(*order[number])
    await asyncio.gather(*tasks)
    assert (turns.num_waiting, turns._num_held, turns._num_bytes, turns._shares) == (0, 0, 0, {})
    return [client for client, _ in order]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_client_with_few_waits_no_longer_for_the_many_of_another(most):
    waiting = [("anna", 1)] * 30 + [("bert", 1)] * 5 + [("cleo", 1)] * 5
    order = asyncio.run(order_of(Turns(most), waiting, most))
    assert order[:most] == ["anna"] * most  # nobody else was there
    counts = Counter(order[most : most + 15])
    assert counts["bert"] == counts["cleo"] == 5
    assert Counter(order) == Counter(client for client, _ in waiting)


def test_a_client_holds_no_more_than_it_may_while_others_have_theirs():
    async def run() -> None:
        turns = Turns(8, most_of_client=3)
        tasks = [asyncio.create_task(turns.take("anna")) for _ in range(5)]
        await until(lambda: sum(task.done() for task in tasks) == 3)
        await turns.take("bert")
        assert turns.num_waiting == 2
        turns.free("anna")
        await until(lambda: turns.num_waiting == 1)
        tasks[-1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns.num_waiting == 0

    asyncio.run(run())


def test_what_is_larger_than_the_room_runs_alone_and_is_not_overtaken_for_ever():
    waiting = [("anna", 4)] * 3 + [("anna", 100)] + [("anna", 4)] * 3 + [("bert", 4)] * 40
    order = asyncio.run(order_of(Turns(9, 10), waiting, 2))
    assert order.index("bert") < 4
    assert "anna" not in order[-20:]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.booleans()), max_size=14), st.integers(1, 3))
def test_whoever_leaves_whenever_nothing_stays_held(waiting, most):
    """Some are cancelled before their turn, some in the moment in which it comes."""

    async def run() -> None:
        turns = Turns(most, 8)
        tasks = []

        async def hold(client: str, num_bytes: int) -> None:
            await turns.take(client, num_bytes)
            try:
                await asyncio.sleep(0)
            finally:
                turns.free(client, num_bytes)

        for client, num_bytes, leaves in waiting:
            tasks.append((asyncio.create_task(hold(client, num_bytes)), leaves))
            if num_bytes % 2:
                await asyncio.sleep(0)
        for task, leaves in tasks:
            if leaves:
                task.cancel()
                if most % 2:
                    await asyncio.sleep(0)
        ended = await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        assert all(one is None or isinstance(one, asyncio.CancelledError) for one in ended)
        assert all(leaves for (_, leaves), one in zip(tasks, ended, strict=True) if one is not None)
        assert (turns.num_waiting, turns._num_held, turns._num_bytes, turns._shares) == (0, 0, 0, {})

    asyncio.run(run())
