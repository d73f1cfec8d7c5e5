"""Nobody can make the server hold, or work through, more bytes than its limits say, whatever the parser calls them."""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire import READ_BYTES, Wire, echoing, played

from tureen.http import connection
from tureen.http.listener import max_connections

START = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
H2C = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"

# what comes first, and what comes then without end
ENDLESS = {
    "empty lines": (b"", b"\r\n" * 500),
    "method": (b"", b"G" * 1000),
    "path": (b"GET /", b"x" * 1000),
    "query": (b"GET /?", b"x" * 1000),
    "host of the target": (b"GET http://", b"x" * 1000),
    "version": (b"GET / HTTP/", b"1" * 1000),
    "header name": (START, b"x" * 1000),
    "header value": (START + b"X: ", b"x" * 1000),
    "spaces before a value": (START + b"X: ", b" " * 1000),
    "header lines": (START, b"X: y\r\n" * 100),
    "empty header lines": (START, b"X:\r\n" * 100),
    "long header lines": (START, b"X: " + b"y" * 2000 + b"\r\n"),
    "header lines after those of h2c": (START + H2C, b"X: " + b"y" * 2000 + b"\r\n"),
    "chunk size": (CHUNKED, b"0" * 1000),
    "chunk extension": (CHUNKED + b"1;", b"x" * 1000),
    "value of an extension": (CHUNKED + b"1;x=", b"x" * 1000),
    "quoted value of an extension": (CHUNKED + b'1;x="', b"x" * 1000),
    "chunk extensions": (CHUNKED + b"1", b";x=y" * 250),
    "chunks with extensions": (CHUNKED, b"1;x=" + b"y" * 100 + b"\r\nz\r\n"),
    "extension of the last chunk": (CHUNKED + b"1\r\na\r\n0;", b"x" * 1000),
    "small chunks": (CHUNKED, b"1\r\nz\r\n" * 100),
    "trailers": (CHUNKED + b"1\r\na\r\n0\r\n", b"X: y\r\n" * 100),
    "trailers after h2c": (START + H2C + CHUNKED[len(START) :] + b"0\r\n", b"X: y\r\n" * 100),
    "trailer name": (CHUNKED + b"0\r\n", b"x" * 1000),
    "trailer value": (CHUNKED + b"0\r\nX: ", b"x" * 1000),
    "empty trailers": (CHUNKED + b"0\r\n", b"X:\r\n" * 100),
}


@pytest.fixture(scope="module")
def app():
    with echoing() as running:
        yield running.app


@pytest.mark.parametrize("name", ENDLESS)
def test_whatever_has_no_end_is_refused_at_the_same_count_of_bytes(app, name):
    first, part = ENDLESS[name]

    async def scene(wire: Wire):
        await wire.send(first)
        taken = await wire.send_forever(part)
        return taken, wire.is_closed, [answer.status for answer in wire.answers()], wire.server

    taken, is_closed, statuses, server = played(app, scene)
    assert is_closed
    assert set(statuses) <= {400, 431}
    assert taken <= 1.25 * connection.MAX_FRAMING_BYTES  # small chunks have a body too
    assert not server._unread
    assert sum(len(name) + len(value) for name, value in server.headers or ()) <= connection.MAX_FRAMING_BYTES


@pytest.mark.parametrize("name", ENDLESS)
def test_what_comes_in_one_read_is_refused_too_and_nothing_of_it_runs(app, name):
    first, part = ENDLESS[name]

    async def scene(wire: Wire):
        await wire.send((first + part * (READ_BYTES // len(part) + 1))[:READ_BYTES])
        return wire.is_closed, [answer.status for answer in wire.answers()]

    is_closed, statuses = played(app, scene)
    assert is_closed
    assert set(statuses) <= {400, 431}


def test_a_head_up_to_the_limit_is_taken_and_one_byte_more_is_not(app):
    frame = START + b"X: \r\n\r\n"
    for size, status in ((0, 200), (1, 431)):
        value = b"x" * (connection.MAX_FRAMING_BYTES - len(frame) + size)
        head = START + b"X: " + value + b"\r\n\r\n"

        async def scene(wire: Wire, *parts: bytes):
            await wire.send(*parts)
            return [answer.status for answer in wire.answers()], wire.is_closed

        for parts in ((head,), (head[:100], head[100:]), (head[:-1], head[-1:])):
            assert played(app, lambda wire, parts=parts, scene=scene: scene(wire, *parts)) == ([status], status != 200)


def test_so_many_header_lines_are_taken_and_one_more_is_not(app):
    async def scene(wire: Wire, count: int):
        await wire.send(START + b"X: y\r\n" * (count - 1) + b"\r\n")
        return [answer.status for answer in wire.answers()]

    for count, status in ((connection.MAX_HEADERS, 200), (connection.MAX_HEADERS + 1, 431)):
        assert played(app, lambda wire, count=count: scene(wire, count)) == [status]


def test_each_request_of_a_connection_has_the_whole_budget(app):
    head = START + b"X: " + b"x" * 60_000 + b"\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n"

    async def scene(wire: Wire):
        for part in (head + b"\r\n", chunked, head + H2C + b"\r\n", chunked) * 3:
            await wire.send(part)
        await wire.send((head + b"\r\n" + chunked) * 2)
        return [answer.status for answer in wire.answers()]

    assert played(app, scene) == [200] * 16


@pytest.mark.parametrize("size", [64, 1000, 4096, 100_000])
def test_a_long_body_in_chunks_as_clients_cut_them_is_taken(app, size):
    data = b"x" * 3_000_000
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(part), part) for part in (data[at : at + size] for at in range(0, len(data), size))
    )
    message = CHUNKED + chunks + b"0\r\n\r\n"

    async def scene(wire: Wire):
        for at in range(0, len(message), READ_BYTES):
            await wire.send(message[at : at + READ_BYTES])
        return [len(answer.told["body"]) for answer in wire.answers()]

    assert played(app, scene) == [len(data)]


def test_a_key_in_a_trailer_opens_nothing_and_a_host_there_changes_nothing():
    with echoing(api_key="k3y", admin_api_key="4dm1n") as locked:

        async def scene(wire: Wire):
            for path in (b"/echo", b"/flush_cache"):
                for line in (b"Authorization: Bearer 4dm1n", b"X-Api-Key: 4dm1n", b"Host: evil.example"):
                    await wire.send(CHUNKED.replace(b"/echo", path) + b"2\r\n{}\r\n0\r\n" + line + b"\r\n\r\n")
                    await wire.send(GET)
            return {answer.status for answer in wire.answers()}, len(wire.answers())

        assert played(locked.app, scene) == ({401}, 12)


def test_others_have_their_turn_between_few_pieces_of_what_one_client_sends():
    """An end of a head wherever one looks: each may be the end of the request."""
    ends = b"\r\n\r\n" * 10_000
    pieces, turns = [], []

    async def scene(wire: Wire):
        wire.server.app = _not_found
        parse = wire.server._parse_piece
        wire.server._parse_piece = lambda: (pieces.append(1), parse())
        wire.server.data_received(CHUNKED + b"%x\r\n" % len(ends) + ends)
        while wire.server._turn is not None:
            turns.append(len(pieces))
            await asyncio.sleep(0)
        await wire.send(b"\r\n0\r\n\r\n" + GET)
        return [answer.status for answer in wire.answers()]

    assert played(_not_found, scene) == [404, 404]
    assert len(turns) > 100
    assert max(after - before for before, after in itertools.pairwise(turns)) <= connection.MAX_PIECES


class Held:
    """An application whose answers end when they are told to."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.num_begun = 0
        self.num_messages = 0

    async def __call__(self, scope, receive, send) -> None:
        self.num_begun += 1
        leaving = asyncio.ensure_future(self._listen(receive))
        await self.end.wait()
        leaving.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def _listen(self, receive) -> None:
        """As those do who want to know when the client leaves."""
        while (await receive())["type"] != "http.disconnect":
            self.num_messages += 1


@pytest.mark.parametrize(
    "request_",
    [GET, START + b"Content-Length: 3\r\n\r\nabc", CHUNKED + b"1\r\na\r\n0\r\nX: y\r\n\r\n", b"\0nonsense", b"\r\n"],
    ids=["no body", "length", "chunks", "nonsense", "empty lines"],
)
def test_while_a_request_runs_what_was_sent_behind_it_waits_unread(request_):
    async def scene(wire: Wire):
        app = wire.server.app = Held()
        await wire.send(GET)
        part = request_ * (10_000 // len(request_))
        taken = await wire.send_forever(part)
        assert taken <= connection.MAX_UNREAD_BYTES + len(part)
        assert not wire.transport.is_reading_
        assert len(wire.server._unread) == taken
        assert not wire.server.pipeline
        assert app.num_begun == 1
        app.end.set()
        await wire.settle()
        await wire.settle()
        return app.num_begun, len(wire.answers()), wire.transport.is_reading_ or wire.is_closed

    num_begun, num_answers, is_reading = played(_placeholder, scene)
    assert is_reading
    assert num_answers == num_begun + (b"HTTP" not in request_)
    assert (num_begun > 100) == (b"HTTP" in request_)


async def _placeholder(scope, receive, send) -> None:
    raise AssertionError("the scene puts its own application here")


def test_a_client_that_leaves_while_others_wait_behind_its_request_is_noticed():
    async def scene(wire: Wire):
        app = wire.server.app = Held()
        await wire.send(GET + GET + GET)
        assert app.num_begun == 1
        wire.transport.close()
        await wire.settle()
        app.end.set()
        await wire.settle()
        return app.num_begun, wire.transport.written

    assert played(_placeholder, scene) == (1, b"")


def test_a_body_that_nobody_reads_waits_in_the_network(app):
    async def scene(wire: Wire):
        held = wire.server.app = Held()
        held._listen = lambda receive: asyncio.sleep(0)
        await wire.send(CHUNKED)
        taken = await wire.send_forever(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        held.end.set()
        await wire.settle()
        return taken, wire.transport.is_reading_

    taken, is_reading = played(_placeholder, scene)
    assert taken < 3 * 65536
    assert is_reading


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_of_a_body_that_comes_after_its_answer_so_much_is_thrown_away_and_then_the_connection_closed(
    framing, monkeypatch
):
    monkeypatch.setattr(connection, "MAX_DISCARDED_BYTES", 1 << 20)
    part = b"2710\r\n" + b"x" * 10_000 + b"\r\n"

    async def scene(wire: Wire):
        await wire.send(START.replace(b"/echo", b"/nowhere").replace(b"POST", b"GET") + framing)
        return await wire.send_forever(part), wire.is_closed, [answer.status for answer in wire.answers()]

    taken, is_closed, statuses = played(_not_found, scene)
    assert is_closed
    assert statuses == [404]
    assert taken <= connection.MAX_DISCARDED_BYTES + 2 * len(part)


@pytest.mark.parametrize("framing", [b"Content-Length: 1000000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"])
def test_a_body_over_the_limit_is_refused_and_the_connection_closed(framing):
    with echoing(max_body_bytes=2000) as small:

        async def scene(wire: Wire):
            await wire.send(START.replace(b"/echo", b"/generate") + framing)
            await wire.send_forever(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            return [(answer.status, answer.headers["connection"]) for answer in wire.answers()], wire.is_closed

        assert played(small.app, scene) == ([(413, "close")], True)


def test_three_in_four_of_the_files_that_may_be_open_may_be_connections(monkeypatch):
    for num_files, expected in ((1024, 768), (20, 15), (1, 1), (resource.RLIM_INFINITY, sys.maxsize)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=num_files: (soft, resource.RLIM_INFINITY))
        assert max_connections() == expected


async def _not_found(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


CHUNK_PARTS = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda extension, data: b"%x%b\r\n%b\r\n" % (len(data), extension, data),
        st.sampled_from([b"", b";x=y", b';x="y"', b";" + b"x" * 5000, b';x="' + b"y" * 20_000 + b'"']),
        st.binary(min_size=1, max_size=3000),
    ),
    st.sampled_from(
        [b"0\r\n", b"0;x=y\r\n", b"\r\n", b"\r\n\r\n", b"X: y\r\n", b"X: " + b"y" * 9000 + b"\r\n", b"X:\r\n"]
    ),
    st.sampled_from([b"0" * 9000, b"Host: evil.example\r\n", b"Content-Length: 5\r\n", CHUNKED, GET, START + H2C]),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    parts=st.lists(st.tuples(CHUNK_PARTS, st.integers(1, 60)), max_size=30),
    head=st.sampled_from([b"", CHUNKED, START + H2C + CHUNKED[len(START) :], START + b"Content-Length: 70000\r\n\r\n"]),
    read_size=st.sampled_from([1 << 10, 7919, READ_BYTES]),
)
def test_bytes_that_are_no_body_never_exceed_the_budget(parts, head, read_size):
    """Counted from outside: what was taken in, less what applications got as bodies, for each request that began."""
    sent = head + b"".join(part * count for part, count in parts)
    begun, got = 1, 0  # the request that has not reached an application counts too

    async def sink(scope, receive, send) -> None:
        nonlocal begun, got
        begun += 1
        assert ("host", "evil.example") not in scope["headers"]
        message = {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            got += len(message.get("body", b""))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def scene(wire: Wire):
        for at in range(0, len(sent), read_size):
            await wire.send(sent[at : at + read_size])
            assert len(wire.server._unread) <= connection.MAX_UNREAD_BYTES + read_size
            if wire.is_closed:
                break
            budget = begun * connection.MAX_FRAMING_BYTES + got / connection.BODY_BYTES_PER_FRAMING_BYTE
            assert wire.num_sent - got <= budget
        assert {answer.status for answer in wire.answers()} <= {200, 400, 431}

    played(sink, scene)
