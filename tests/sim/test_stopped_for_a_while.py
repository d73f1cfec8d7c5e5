"""A server that was stopped for a while and goes on: what clients could not do meanwhile is not held against them."""

import asyncio
import random

from virtual_time import Clock, VirtualLoop

from tureen.api.sse import WRITE_TIMEOUT_S, EventStream


async def _events(count):
    for number in range(count):
        yield b"data: %d\n\n" % number


def _serve(takes_s, *, stopped_s=0.0):
    """What a client has of a stream of four events that takes so long for each, and when the server was done."""
    clock, taken = Clock(), []
    loop = VirtualLoop(clock, random.Random(1))

    async def receive():
        await loop.create_future()

    async def send(message):
        if message["type"] == "http.response.body":
            if len(taken) == 1:
                clock.now_s += stopped_s
            await asyncio.sleep(takes_s)
            taken.append(message["body"])

    started_s = clock.now_s
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(EventStream(_events(4))({"type": "http"}, receive, send))
    return b"".join(taken), clock.now_s - started_s


def test_a_slow_client_keeps_its_stream_though_the_server_was_stopped_for_long():
    whole = b"".join(b"data: %d\n\n" % number for number in range(4))
    assert _serve(5.0) == (whole, 25.0)
    assert _serve(5.0, stopped_s=10_000)[0] == whole


def test_a_client_that_takes_nothing_is_given_up_after_the_time_that_is_said():
    taken, seconds = _serve(1e9)
    assert taken == b""
    assert WRITE_TIMEOUT_S <= seconds <= 1.5 * WRITE_TIMEOUT_S
