"""A client that sends slowly is told so and let go at a known time. The clock is the tests' own."""

from __future__ import annotations

import asyncio
import functools

import pytest
from wire import Wire, echoing, played

from tureen.http import connection, middleware

START = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
KEEP_ALIVE_S = 5


@pytest.fixture(scope="module")
def app():
    with echoing() as running:
        yield running.app


def trickled(app, first: bytes, part: bytes, every_s: float, count: int = 100_000) -> tuple[float, list]:
    """When the connection was closed, and the answers."""

    async def scene(wire: Wire):
        await wire.send(first)
        ended_s = await wire.trickle(part, every_s, count)
        assert wire.is_closed
        return ended_s, wire.answers()

    return played(app, scene)


@pytest.mark.parametrize(
    ("first", "part"),
    [(b"", b"\r\n"), (b"GET /", b"x"), (START, b"X: y\r\n"), (START + b"X: ", b"y"), (START + b"X:", b" ")],
    ids=["empty lines", "path", "headers", "value", "spaces"],
)
def test_a_head_that_trickles_has_a_deadline_that_no_byte_puts_off(app, first, part):
    ended_s, answers = trickled(app, first, part, every_s=0.9)
    assert connection.HEAD_TIMEOUT_S <= ended_s < connection.HEAD_TIMEOUT_S + 1
    assert [(answer.status, answer.told["error"]["code"]) for answer in answers] == [(408, "request_timeout")]


def test_the_next_head_has_the_same_deadline_from_its_first_byte_on(app):
    async def scene(wire: Wire):
        await wire.send(GET)
        await asyncio.sleep(KEEP_ALIVE_S - 1)
        await wire.send(GET[:20])
        ended_s = await wire.trickle(b"x", 0.9, 100)
        return ended_s, [answer.status for answer in wire.answers()], wire.is_closed

    ended_s, statuses, is_closed = played(app, scene)
    assert (statuses, is_closed) == ([200, 408], True)
    assert 0 <= ended_s - (KEEP_ALIVE_S - 1) - connection.HEAD_TIMEOUT_S < 1


@pytest.mark.parametrize("part", [b"", b"\r\n"])
def test_a_connection_between_requests_ends_though_empty_lines_come(app, part):
    ended_s, answers = trickled(app, GET, part, every_s=0.5, count=100)
    assert KEEP_ALIVE_S <= ended_s < KEEP_ALIVE_S + 1
    assert [answer.status for answer in answers] == [200]


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (START + b"Content-Length: 1000000\r\n\r\n", b"x"),
        (CHUNKED, b"1\r\nx\r\n"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"X: y\r\n"),
        (START + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 1000000\r\n\r\n", b"x"),
        (START + b"Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n", b"x"),
    ],
    ids=["length", "chunks", "extension", "trailers", "h2c", "continue"],
)
def test_a_body_that_trickles_ends_after_the_grace(app, first, part):
    ended_s, answers = trickled(app, first, part, every_s=1)
    assert middleware.BODY_GRACE_S <= ended_s < middleware.BODY_GRACE_S + 2
    last = answers[-1]
    assert (last.status, last.headers["connection"], last.told["error"]["code"]) == (408, "close", "request_timeout")
    assert f"{middleware.MIN_BODY_RATE} bytes a second" in last.told["error"]["message"]


def sent_at(app, bytes_a_second: int, num_bytes: int) -> tuple[float, list[int], bool]:
    async def scene(wire: Wire):
        await wire.send(START + b"Content-Length: %d\r\n\r\n" % num_bytes)
        ended_s = await wire.trickle(b"x" * bytes_a_second, 1, num_bytes // bytes_a_second)
        return ended_s, [answer.status for answer in wire.answers()], wire.is_closed

    return played(app, scene)


def test_a_body_at_the_least_rate_is_taken_and_one_below_it_is_not(app):
    _, statuses, is_closed = sent_at(app, middleware.MIN_BODY_RATE, 100 * middleware.MIN_BODY_RATE)
    assert (statuses, is_closed) == ([200], False)
    half = middleware.MIN_BODY_RATE // 2
    ended_s, statuses, is_closed = sent_at(app, half, 200 * half)
    assert (statuses, is_closed) == ([408], True)
    assert 2 * middleware.BODY_GRACE_S - 2 <= ended_s <= 2 * middleware.BODY_GRACE_S + 2


def test_at_any_rate_a_body_has_a_deadline(app):
    rate = 2 * middleware.MIN_BODY_RATE
    ended_s, statuses, is_closed = sent_at(app, rate, 1000 * rate)
    assert (statuses, is_closed) == ([408], True)
    assert middleware.MAX_BODY_S <= ended_s < middleware.MAX_BODY_S + 2


def test_what_the_server_takes_itself_does_not_count(app):
    async def scene(wire: Wire):
        inner = wire.server.app

        async def late(scope, receive, send):
            await asyncio.sleep(10 * middleware.MAX_BODY_S)
            await inner(scope, receive, send)

        wire.server.app = late
        await wire.send(START + b"Content-Length: 200000\r\n\r\n" + b"x" * 100_000)
        assert not wire.transport.is_reading_  # who sends must wait for who reads
        await asyncio.sleep(10 * middleware.MAX_BODY_S)
        await wire.send(b"x" * 100_000)
        return [answer.status for answer in wire.answers()]

    assert played(app, scene) == [200]


def test_a_body_that_comes_after_its_answer_has_a_deadline_too(app):
    ended_s, answers = trickled(app, START.replace(b"/echo", b"/nope") + b"Content-Length: 99\r\n\r\n", b"x", 0.5)
    assert [answer.status for answer in answers] == [404]
    assert KEEP_ALIVE_S <= ended_s < KEEP_ALIVE_S + 1


def test_while_an_answer_is_made_no_deadline_runs_for_what_waits_behind_it():
    async def slow(scope, receive, send):
        await asyncio.sleep(1000)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scene(wire: Wire):
        await wire.send(GET + GET[:10])
        await asyncio.sleep(1005)
        assert [answer.status for answer in wire.answers()] == [200]
        await wire.send(GET[10:])
        await asyncio.sleep(1001)
        return [answer.status for answer in wire.answers()], wire.is_closed

    assert played(slow, scene) == ([200, 200], False)


async def told_when_gone(scope, receive, send) -> None:
    """An answer that has no end before the client has left."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


async def told_at_once(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ab"})


@pytest.mark.parametrize("request_", [GET, GET.replace(b"1.1", b"1.0"), b"nonsense\r\n"], ids=["1.1", "1.0", "refusal"])
@pytest.mark.parametrize("app", [told_when_gone, told_at_once])
def test_who_takes_nothing_of_an_answer_is_let_go_and_who_takes_it_slowly_is_not(app, request_):
    async def scene(wire: Wire, taken: int):
        wire.transport.num_untaken = 100_000  # so much waits, once something is written
        await wire.send(request_)
        if app is told_when_gone and b"HTTP" in request_:
            wire.server.pause_writing()  # as a transport says that it is full
        for _ in range(5):
            wire.transport.take(taken)
            await asyncio.sleep(connection.WRITE_TIMEOUT_S - 1)
        return wire.transport.is_lost

    assert played(app, functools.partial(scene, taken=0))
    assert not played(app, functools.partial(scene, taken=100))


def test_who_takes_what_waits_and_gets_more_has_time_for_that_too():
    async def scene(wire: Wire):
        wire.transport.num_untaken = 100_000
        await wire.send(GET)
        for _ in range(5):
            wire.server.pause_writing()
            await asyncio.sleep(connection.WRITE_TIMEOUT_S - 1)
            wire.server.resume_writing()  # what it took was written anew since
            await asyncio.sleep(10 * connection.WRITE_TIMEOUT_S)
        return wire.transport.is_lost

    assert not played(told_when_gone, scene)


STOPPED_S = 10 * middleware.BODY_GRACE_S


def stopped(app, begin: bytes, rest: bytes, *, meanwhile: bytes = b"") -> list:
    """The answers where the server does not run for long while a request is on its way. `meanwhile`: what is there when
    it runs again, before it looks at its timers or after."""

    async def scene(wire: Wire):
        await wire.send(begin)
        await asyncio.sleep(2)
        asyncio.get_running_loop().clock.now_s += STOPPED_S
        await asyncio.sleep(0)
        await wire.send(meanwhile)
        await asyncio.sleep(2)
        await wire.send(rest)
        return [answer.status for answer in wire.answers()]

    return played(app, scene)


BODY = b'{"text": "x"}'
HEAD = START + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.mark.parametrize("cut", [5, len(START), len(HEAD), len(HEAD) + 1, len(HEAD) + len(BODY) - 1])
def test_no_client_is_late_because_the_server_was_stopped(app, cut):
    whole = HEAD + BODY
    assert stopped(app, whole[:cut], whole[cut:]) == [200]
    assert stopped(app, whole[:cut], whole[cut + 1 :], meanwhile=whole[cut : cut + 1]) == [200]


def test_a_server_that_is_stopped_again_and_again_still_has_an_end_for_who_sends_nothing(app):
    async def scene(wire: Wire):
        await wire.send(HEAD)
        for count in range(1000):
            asyncio.get_running_loop().clock.now_s += STOPPED_S
            await asyncio.sleep(1)
            if wire.is_closed:
                return count
        return None

    assert played(app, scene) is not None


def test_who_takes_his_answer_while_the_server_is_stopped_is_not_cut_off(app):
    async def scene(wire: Wire):
        wire.transport.num_untaken = 1000
        await wire.send(GET)
        await asyncio.sleep(2)
        asyncio.get_running_loop().clock.now_s += 10 * connection.WRITE_TIMEOUT_S
        await asyncio.sleep(2)
        assert not wire.transport.is_lost
        await asyncio.sleep(connection.WRITE_TIMEOUT_S)
        return wire.transport.is_lost

    assert played(app, scene)
