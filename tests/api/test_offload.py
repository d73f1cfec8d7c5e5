"""Long work of a request is done beside the event loop: in order, a bounded number of pieces, no longer than wanted."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tureen.clients.quotas import Account, ClientWork, serving
from tureen.errors import InvalidRequest, Unavailable
from tureen.requests import offload as offloading
from tureen.requests.offload import INLINE_CHARS, LARGE, NUM_THREADS, Offload

NET_S = 60
"""For what happens at once; a test that fails waits so long."""


class Held:
    """A piece of work that lasts until it is let go."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(NET_S)


async def _occupied(offload: Offload) -> list[tuple[Held, asyncio.Task[None]]]:
    """Every thread has something to do."""
    held = [Held() for _ in range(NUM_THREADS)]
    tasks = [asyncio.create_task(offload.run(LARGE, one)) for one in held]
    for one in held:
        assert await asyncio.to_thread(one.has_begun.wait, NET_S)
    return list(zip(held, tasks, strict=True))


async def _let_go(occupied: list[tuple[Held, asyncio.Task[None]]]) -> None:
    for held, task in occupied:
        held.may_end.set()
        await task


def test_little_is_done_here_and_much_in_another_thread():
    async def found() -> tuple[int, int]:
        offload = Offload()
        return await offload.run(INLINE_CHARS, threading.get_ident), await offload.run(LARGE, threading.get_ident)

    here, there = asyncio.run(found())
    assert here == threading.get_ident() != there


def test_the_pieces_of_a_request_count_together_until_others_have_had_their_turn():
    async def places() -> list[int]:
        offload, half = Offload(), INLINE_CHARS // 2
        with serving(ClientWork(Account())):
            first = [await offload.run(half, threading.get_ident) for _ in range(3)]  # the third makes it too much
            second = [await offload.run(half, threading.get_ident) for _ in range(2)]  # the others' turn came with it
            with serving(ClientWork(Account())):
                another = await offload.run(INLINE_CHARS, threading.get_ident)
            await asyncio.sleep(0)
            return [*first, *second, another, await offload.run(INLINE_CHARS, threading.get_ident)]

    here = threading.get_ident()
    assert [place == here for place in asyncio.run(places())] == [True, True, False, True, True, True, True]


@pytest.mark.parametrize("size", [0, LARGE])
def test_every_entry_has_its_result_and_an_error_comes_through(size):
    def halved(number: int) -> int:
        if number % 2:
            raise InvalidRequest("odd")
        return number // 2

    assert asyncio.run(Offload().run_each(size, halved, range(0, 10, 2))) == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidRequest, match="odd"):
        asyncio.run(Offload().run_each(size, halved, range(10)))


def test_what_waits_begins_in_the_order_in_which_it_came():
    begun: list[int] = []

    async def work() -> None:
        offload = Offload()
        occupied = await _occupied(offload)
        last, *_ = occupied
        waiting = [asyncio.create_task(offload.run(LARGE, lambda one=one: begun.append(one))) for one in range(20)]
        await asyncio.sleep(0)
        await _let_go([last])  # one thread takes all of them
        await asyncio.gather(*waiting)
        await _let_go(occupied[1:])

    asyncio.run(work())
    assert begun == list(range(20))


def test_what_nobody_waits_for_any_more_never_begins():
    begun: list[str] = []

    async def work() -> None:
        offload = Offload()
        occupied = await _occupied(offload)
        task = asyncio.create_task(offload.run(LARGE, lambda: begun.append("left")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        after = asyncio.create_task(offload.run(LARGE, lambda: begun.append("after")))
        await _let_go(occupied)
        await after

    asyncio.run(work())
    assert begun == ["after"]


def test_of_many_entries_none_follows_once_nobody_waits():
    done: list[int] = []
    first = Held()

    def one(number: int) -> None:
        first()
        done.append(number)

    async def work() -> None:
        offload = Offload()
        task = asyncio.create_task(offload.run_each(LARGE, one, range(100)))
        assert await asyncio.to_thread(first.has_begun.wait, NET_S)
        task.cancel()
        await asyncio.wait({task})
        first.may_end.set()
        await asyncio.to_thread(offload._threads.shutdown)

    asyncio.run(work())
    assert done == [0]


def test_more_than_may_wait_is_refused(monkeypatch):
    monkeypatch.setattr(offloading, "MAX_WAITING", NUM_THREADS)

    async def work() -> None:
        offload = Offload()
        occupied = await _occupied(offload)
        with pytest.raises(Unavailable, match="waiting"):
            await offload.run(LARGE, list)
        assert await offload.run(INLINE_CHARS, list) == []  # what is short waits for nobody
        await _let_go(occupied)
        assert await offload.run(LARGE, list) == []

    asyncio.run(work())
