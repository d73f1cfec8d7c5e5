"""What is a proper HTTP/1.1 message, wherever the network cuts it, and what the server makes of everything else."""

from __future__ import annotations

import asyncio
import functools

import pytest
from samples import some
from wire import Wire, all_played, echoing, played

from tureen.errors import InvalidRequest
from tureen.http.head import body_length

HOST = "127.0.0.1:30000"
START = b"POST /echo HTTP/1.1\r\nHost: 127.0.0.1:30000\r\n"
CHUNKED = START + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /echo?n=2 HTTP/1.1\r\nHost: 127.0.0.1:30000\r\n\r\n"
H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAA\r\n"


def seen(body: str = "", *headers: tuple[str, str], method: str = "POST", path: str = "/echo", query: str = "") -> dict:
    """What the application must see; `headers` beside Host."""
    told = [["host", HOST], *map(list, headers)]
    return {"method": method, "path": path, "query": query, "headers": told, "body": body}


SECOND = seen(method="GET", query="n=2")
IN_CHUNKS, H2C_SEEN = (
    ("transfer-encoding", "chunked"),
    (
        ("connection", "Upgrade, HTTP2-Settings"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAMAAABkAAQBAAAA"),
    ),
)

# name: bytes, what the application sees of each request in them
VALID: dict[str, tuple[bytes, list[dict]]] = {
    "no body": (GET, [SECOND]),
    "known length": (START + b"Content-Length: 5\r\n\r\nhello", [seen("hello", ("content-length", "5"))]),
    "length with zeros": (START + b"Content-Length: 005 \r\n\r\nhello", [seen("hello", ("content-length", "005 "))]),
    "length 0": (START + b"Content-Length: 0\r\n\r\n", [seen("", ("content-length", "0"))]),
    "empty lines before": (b"\r\n\r\n" + GET, [SECOND]),
    "an empty header": (START + b"X:\r\nY:  \t\r\n\r\n", [seen("", ("x", ""), ("y", ""))]),
    "bytes above ASCII": (START + b"X: \xe9\xff\r\n\r\n", [seen("", ("x", "\xe9\xff"))]),
    "chunks": (CHUNKED + b"3\r\nhel\r\nA\r\nlo\r\n0\r\n\r\n!\r\n0\r\n\r\n", [seen("hello\r\n0\r\n\r\n!", IN_CHUNKS)]),
    "chunk sizes with zeros": (CHUNKED + b"0000000000000000003\r\nhel\r\n000\r\n\r\n", [seen("hel", IN_CHUNKS)]),
    "Chunked": (
        CHUNKED.replace(b"chunked", b"Chunked") + b"0\r\n\r\n",
        [seen("", ("transfer-encoding", "Chunked"))],
    ),
    "chunk extensions": (CHUNKED + b'3;a=b;c="d\\"e"\r\nhel\r\n0;x\r\n\r\n', [seen("hel", IN_CHUNKS)]),
    "trailers": (
        CHUNKED + b"3\r\nhel\r\n0\r\nAuthorization: Bearer x\r\nHost: evil\r\nExpect: 100-continue\r\n"
        b"Connection: close\r\nX:\r\n\r\n" + GET,
        [seen("hel", IN_CHUNKS), SECOND],
    ),
    "ends of heads in a body": (
        START + b"Content-Length: 11\r\n\r\n\r\n\r\n\r\n\r\nabc" + GET,
        [seen("\r\n\r\n\r\n\r\nabc", ("content-length", "11")), SECOND],
    ),
    "a request in a body": (
        START + b"Content-Length: %d\r\n\r\n" % len(GET) + GET + GET,
        [seen(GET.decode(), ("content-length", str(len(GET)))), SECOND],
    ),
    "a pipeline": (
        GET + CHUNKED + b"1\r\na\r\n0\r\n\r\n" + START + b"Content-Length: 1\r\n\r\nb" + GET,
        [SECOND, seen("a", IN_CHUNKS), seen("b", ("content-length", "1")), SECOND],
    ),
    "h2c": (
        START + H2C + b"Content-Length: 5\r\n\r\nhello" + GET,
        [seen("hello", *H2C_SEEN, ("content-length", "5")), SECOND],
    ),
    "h2c in chunks": (
        START + H2C + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nX: y\r\n\r\n" + GET,
        [seen("hi", *H2C_SEEN, IN_CHUNKS), SECOND],
    ),
    "h2c without a body": (
        GET.replace(b"\r\n\r\n", b"\r\n" + H2C + b"\r\n") * 2,
        [seen("", *H2C_SEEN, method="GET", query="n=2")] * 2,
    ),
    "websocket": (
        GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n")
        + GET,
        [
            seen(
                "",
                ("connection", "Upgrade"),
                ("upgrade", "websocket"),
                ("sec-websocket-version", "13"),
                method="GET",
                query="n=2",
            ),
            SECOND,
        ],
    ),
    "an upgrade in trailers": (
        CHUNKED + b"0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n" + GET,
        [seen("", IN_CHUNKS), SECOND],
    ),
    "absolute form": (
        b"GET http://localhost:1/echo?n=2 HTTP/1.1\r\nHost: evil.example\r\n\r\n" + GET,
        [SECOND | {"headers": [["host", "localhost:1"]]}, SECOND],
    ),
    "HTTP/1.0": (
        START.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi",
        [seen("hi", ("expect", "100-continue"), ("content-length", "2"))],
    ),
    "close, and more": (START + b"Connection: close\r\n\r\n" + GET, [seen("", ("connection", "close"))]),
}

# name: bytes; the field that the answer names, "" = none
INVALID: dict[str, tuple[bytes, str]] = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", ""),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
    "no method": (b"/echo HTTP/1.1\r\n\r\n", ""),
    "method in small letters": (GET.replace(b"GET", b"get"), ""),
    "CONNECT": (b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n" + GET, ""),
    "no version": (b"GET /echo\r\n\r\n", ""),
    "HTTP/0.9": (GET.replace(b"1.1", b"0.9"), ""),
    "HTTP/1.2": (GET.replace(b"1.1", b"1.2"), ""),
    "HTTP/2.0": (GET.replace(b"1.1", b"2.0"), ""),
    "HTTP/9.9": (GET.replace(b"1.1", b"9.9"), ""),
    "HTTP/1.11": (GET.replace(b"1.1", b"1.11"), ""),
    "a space after the version": (GET.replace(b"1.1", b"1.1 "), ""),
    "a bare LF after the request line": (GET.replace(b"1.1\r\n", b"1.1\n"), ""),
    "a target that is no path": (GET.replace(b"/echo", b"echo"), ""),
    "the target *": (GET.replace(b"/echo?n=2", b"*"), ""),
    "a target of another scheme": (GET.replace(b"/echo", b"ftp://127.0.0.1/echo"), ""),
    "a fragment in the target": (GET.replace(b"/echo", b"/echo#a"), ""),
    "a fragment in a target with a host": (GET.replace(b"/echo", b"http://127.0.0.1:30000/#/echo"), ""),
    "a target without a host": (GET.replace(b"/echo", b"http:///echo"), "Host"),
    "a target with a user": (GET.replace(b"/echo", b"http://me@127.0.0.1/echo"), "Host"),
    "a target with a bad host": (GET.replace(b"/echo", b"http://[::1].evil/echo"), "Host"),
    "NUL in the target": (GET.replace(b"/echo", b"/\0echo"), ""),
    "bytes above ASCII in the target": (GET.replace(b"/echo", b"/\xc3\xa9"), ""),
    "a space before a colon": (START + b"X : a\r\n\r\n", ""),
    "no colon": (START + b"X\r\n\r\n", ""),
    "no name": (START + b": a\r\n\r\n", ""),
    "a folded header": (START + b"X: a\r\n b\r\n\r\n", ""),
    "a folded first header": (b"GET /echo HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n", ""),
    "NUL in a header": (START + b"X: a\0b\r\n\r\n", ""),
    "a bare CR in a header": (START + b"X: a\rb\r\n\r\n", ""),
    "a bare LF after a header": (START + b"X: a\nY: b\r\n\r\n", ""),
    "a bare LF at the end": (START + b"X: a\r\n\n", ""),
    "no Host": (b"GET /echo HTTP/1.1\r\n\r\n", "Host"),
    "two Hosts": (START + b"Host: evil.example\r\n\r\n", "Host"),
    "the same Host twice": (START + b"HOST: 127.0.0.1:30000\r\n\r\n", "Host"),
    "two lengths": (START + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", ""),
    "one length twice": (START + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\na", ""),
    "lengths in a list": (START + b"Content-Length: 1, 1\r\n\r\na", ""),
    "an empty length": (START + b"Content-Length:\r\n\r\n", ""),
    "length +1": (START + b"Content-Length: +1\r\n\r\na", ""),
    "length -1": (START + b"Content-Length: -1\r\n\r\na", ""),
    "length 0x1": (START + b"Content-Length: 0x1\r\n\r\na", ""),
    "length 1_0": (START + b"Content-Length: 1_0\r\n\r\n" + b"a" * 10, ""),
    "length 1.0": (START + b"Content-Length: 1.0\r\n\r\na", ""),
    "a length beyond all": (START + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n", ""),
    "length, then chunks": (START + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", ""),
    "chunks, then length": (CHUNKED[:-2] + b"Content-Length: 1\r\n\r\n0\r\n\r\n", ""),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", "Transfer-Encoding"),
    "chunks, in two headers": (START + b"Transfer-Encoding: identity\r\n" + CHUNKED[len(START) :] + b"0\r\n\r\n", "*"),
    "chunks twice": (CHUNKED[:-2] + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", ""),
    "repeated Authorization": (START + b"Authorization: a\r\nAuthorization: b\r\n\r\n", "Authorization"),
    "repeated X-Api-Key": (START + b"X-Api-Key: a\r\nX-Api-Key: a\r\n\r\n", "X-Api-Key"),
    "repeated Content-Type": (START + b"Content-Type: a/b\r\nContent-Type: a/c\r\n\r\n", "Content-Type"),
    "repeated Origin": (START + b"Origin: null\r\nOrigin: http://127.0.0.1:30000\r\n\r\n", "Origin"),
}
CODINGS = [
    "gzip, chunked",
    "gzip",
    "identity",
    "identity, chunked",
    "chunked, chunked",
    "chunked, gzip",
    "xchunked",
    "",
]
CODINGS += ["chunked;q=1", '"chunked"', "chun ked", "chunked,", ",chunked", "\x0bchunked", "chunked\x0c"]
SIZES = [
    "",
    " 1",
    "1 ",
    "0x1",
    "+1",
    "-1",
    "g",
    "1;",
    "1; a",
    "1;a b",
    "1;\0",
    '1;a="\n"',
    "f" * 17,
    "1\t",
    "1,1",
    "１",
]
AFTER_DATA = [b"xy\r\n", b"x\n", b"x\r", b"x0\r\n", b"x"]
LAST = [b"0\n\n", b"0\r\n\n", b"0\r\nA: b\n\n", b"0\r\nA: b\r\n c\r\n\r\n", b"0\r\nA\r\n\r\n", b"0\r\n: b\r\n\r\n"]
LAST += [b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b"0\r\nA: \0\r\n\r\n"]
HOSTS = [
    "",
    " ",
    "[::1].evil.example",
    "[::1]evil",
    "[::1",
    "::1",
    "[]",
    "[::g]",
    "[127.0.0.1]",
    "[::1]:x",
    "[::1%25eth0]",
]
HOSTS += [
    "a:",
    "a:x",
    "a:-1",
    "a:+1",
    "a:65536",
    "a:1:2",
    "a: 1",
    "a:1 ",
    "me@a",
    "me:pass@127.0.0.1",
    "127.0.0.1@evil",
]
HOSTS += [
    "a/b",
    "a?b",
    "a#b",
    "a\\b",
    "a b",
    "a,b",
    "a\tb",
    "http://a",
    "é",
    "a%00",
    "*",
    "127.0.0.1/",
    "127.0.0.1:80#",
]
INVALID |= {f"Transfer-Encoding: {one}": (START + f"Transfer-Encoding: {one}\r\n\r\n".encode(), "*") for one in CODINGS}
INVALID |= {f"chunk size {one!r}": (CHUNKED + one.encode() + b"\r\nx\r\n0\r\n\r\n", "") for one in SIZES}
INVALID |= {f"chunk data {one!r}": (CHUNKED + b"1\r\n" + one + b"0\r\n\r\n", "") for one in AFTER_DATA}
INVALID |= {f"last chunk {one!r}": (CHUNKED + one, "") for one in LAST}
INVALID |= {
    f"Host: {one!r}": (f"GET /echo HTTP/1.1\r\nHost: {one}\r\n\r\n".encode(), "Host") for one in HOSTS if one != "a:1 "
}


@pytest.fixture(scope="module")
def app():
    with echoing() as running:
        yield running.app


def cuts(message: bytes, size: int) -> list[tuple[bytes, ...]]:
    """Return the message whole, byte by byte, and cut in two at each byte; the gate cuts at `size` bytes."""
    halves = some([(message[:cut], message[cut:]) for cut in range(1, len(message))], size)
    return [(message,), *halves, tuple(message[index : index + 1] for index in range(len(message)))]


@pytest.mark.sampled
@pytest.mark.parametrize("name", VALID)
def test_a_message_means_the_same_wherever_it_is_cut(app, name):
    message, expected = VALID[name]

    async def scene(wire: Wire, parts: tuple[bytes, ...]):
        await wire.send(*parts)
        return [answer.told for answer in wire.answers()], wire.is_closed

    expected_of_all = expected, name in ("HTTP/1.0", "close, and more")
    every = cuts(message, 24)
    told = all_played(app, [functools.partial(scene, parts=parts) for parts in every])
    assert [parts for parts, one in zip(every, told, strict=True) if one != expected_of_all] == []


@pytest.mark.sampled
@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_proper_message_gets_400_and_the_connection_is_closed(app, name):
    message, field = INVALID[name]

    async def scene(wire: Wire, parts: tuple[bytes, ...]):
        await wire.send(*parts)
        assert wire.is_closed, parts
        (answer,) = wire.answers()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        error = answer.told["error"]
        assert error["type"] == "invalid_request_error"
        assert field == "*" or (error["param"] or "") == field
        assert error["message"].isprintable()

    all_played(app, [functools.partial(scene, parts=parts) for parts in cuts(message, 12)])


def test_who_may_not_be_sure_to_send_a_body_gets_no_second_request_in(app):
    """A client that was told 401 instead of 100 may leave the body out, or send it: what follows is unknown."""
    with echoing(api_key="k3y") as locked:

        async def scene(wire: Wire):
            await wire.send(START + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(GET), GET, GET)
            return [(answer.status, answer.headers.get("connection")) for answer in wire.answers()], wire.is_closed

        assert played(locked.app, scene) == ([(401, "close")], True)

    async def leave(wire: Wire):
        await wire.send(START + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        first = wire.transport.written
        await wire.send(b"hi")
        return first, wire.answers()[-1].told["body"]

    assert played(app, leave) == (b"HTTP/1.1 100 Continue\r\n\r\n", "hi")


def test_of_a_pipeline_the_answers_come_in_order_and_no_error_comes_into_another_answer(app):
    async def scene(wire: Wire):
        await wire.send(GET + START + b"Content-Length: 1\r\n\r\na" + b"nonsense\r\n\r\n" + GET)
        return [answer.status for answer in wire.answers()], wire.is_closed

    assert played(app, scene) == ([200, 200, 400], True)


ERRORS = {
    b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}": 404,
    b"DELETE /echo HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n": 405,
    b"POST /generate/ HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n\r\n{}": 307,
    START.replace(b"/echo", b"/generate") + b"Content-Type: application/json\r\nContent-Length: 3\r\n\r\n{{{": 400,
    START.replace(b"/echo", b"/generate") + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}": 415,
}
"""Proper messages that the application refuses, and the status of each."""


def test_a_connection_is_used_on_after_an_error_also_by_a_client_that_pipelines(app):
    async def scene(wire: Wire, parts: tuple[bytes, ...]):
        await wire.send(*parts)
        return [answer.status for answer in wire.answers()], wire.is_closed

    orders = [(bad + GET + bad + GET,) for bad in ERRORS] + [(bad, GET, bad, GET) for bad in ERRORS]
    told = all_played(app, [functools.partial(scene, parts=parts) for parts in orders])
    assert told == [([status, 200, status, 200], False) for status in ERRORS.values()] * 2


def test_nonsense_behind_a_request_waits_until_its_answer_is_whole():
    async def slow(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        for more_body in (True, False):
            await asyncio.sleep(1)
            await send({"type": "http.response.body", "body": b"a", "more_body": more_body})

    async def scene(wire: Wire):
        await wire.send(GET + b"nonsense\r\n\r\n")
        assert b"400" not in wire.transport.written
        await asyncio.sleep(3)
        return [(answer.status, answer.body[:2]) for answer in wire.answers()], wire.is_closed

    assert played(slow, scene) == ([(200, b"aa"), (400, b'{"')], True)


def test_a_method_without_a_body_in_its_answer_does_not_confuse_what_follows(app):
    async def scene(wire: Wire):
        await wire.send(GET.replace(b"GET", b"HEAD") + GET)
        return [answer.status for answer in wire.answers("H")]

    assert played(app, scene) == [200, 200]


@pytest.mark.parametrize(
    "rest", [b"nonsense\r\n", b"0\r\n" + b"X: y\r\n" * 20_000], ids=["no chunk", "endless trailers"]
)
def test_an_answer_that_has_begun_before_its_request_goes_wrong_is_cut_off_and_not_written_into(rest):
    async def early(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
        await send({"type": "http.response.body", "body": b"so far", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def scene(wire: Wire):
        await wire.send(CHUNKED)
        await wire.send(rest)
        return wire.transport.written.partition(b"\r\n\r\n")[2], wire.is_closed

    assert played(early, scene) == (b"so far", True)


def test_a_parser_that_goes_on_into_the_next_request_is_stopped():
    """One that takes a bare LF for the end of a request, as older ones do, finds it before the server does."""

    async def waits(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def scene(wire: Wire):
        await wire.send(GET)
        with pytest.raises(InvalidRequest, match="must end with CR LF"):
            wire.server.on_message_begin()

    played(waits, scene)


@pytest.mark.parametrize("order", [1, -1])
def test_a_head_with_a_length_and_chunks_leaves_doubt_whatever_the_parser_says_of_it(order):
    framing = [(b"content-length", b"5"), (b"transfer-encoding", b"chunked")][::order]
    with pytest.raises(InvalidRequest, match="without Content-Length"):
        body_length(b"POST", "1.1", [(b"host", b"a"), *framing])
