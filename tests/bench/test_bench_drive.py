"""Loads are sent as they should be, times are noted in order, and a server that does other work is caught."""

import asyncio
import time

import pytest

from tureen.bench.backends import BACKENDS
from tureen.bench.drive import run_load
from tureen.bench.http import Address, BenchError, ClientConnection
from tureen.bench.workloads import BenchRequest, Dice, OfferedLoad, TimedPass, make_load

SHAPE = TimedPass(name="small", prompt_len=5, output_len=4, requests=6, concurrency=2)


def _run(server, backend="tureen", *, shape=SHAPE, **changes):
    load = make_load(shape, Dice(1000, 1))
    load = OfferedLoad(name="small", jobs=load.jobs, concurrency=shape.concurrency, **changes)
    return asyncio.run(run_load(Address(server.url), BACKENDS[backend](), load))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_counts_tokens_and_notes_their_times(fake_server, backend):
    fake_server.first_token_s, fake_server.token_s = 0.02, 0.01
    answers = _run(fake_server, backend)
    assert len(answers) == 6
    for answer in answers:
        assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 4, 3)
        assert len(answer.token_times_s) == 4
        assert answer.token_times_s == sorted(answer.token_times_s)
        assert answer.started_s + 0.015 <= answer.token_times_s[0] < answer.token_times_s[-1] <= answer.ended_s
        assert answer.ended_s >= answer.started_s + 0.04


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("extra", [-1, 1])
def test_another_number_of_tokens_than_asked_for_is_an_error(fake_server, backend, extra):
    fake_server.extra_tokens = extra
    with pytest.raises(BenchError, match=f"asked for 4 output tokens, the server counted {4 + extra}"):
        _run(fake_server, backend)


def test_a_closed_loop_keeps_exactly_as_many_running_as_asked(fake_server):
    fake_server.together = 3
    _run(fake_server, shape=TimedPass(name="small", prompt_len=5, output_len=4, requests=12, concurrency=3))
    assert fake_server.most_running == 3
    assert len(fake_server.requests) == 12


def test_an_open_loop_sends_at_its_times_whatever_is_running(fake_server):
    fake_server.together = 6
    arrivals = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    for _ in range(20):  # until the machine was not held up meanwhile
        fake_server.requests.clear()
        answers = _run(fake_server, arrivals_s=arrivals)
        delays = [answer.started_s - answers[0].started_s for answer in answers]
        late = [delay - arrival for delay, arrival in zip(delays, arrivals, strict=True)]
        assert min(late) >= -0.02
        if max(late) <= 0.1:
            break
    assert max(late) <= 0.1
    assert fake_server.most_running == 6


def test_a_refusal_is_an_answer_in_a_load_that_may_be_refused(fake_server):
    fake_server.together, fake_server.refuse_after = 6, 1
    answers = _run(fake_server, arrivals_s=[0.0] * 6, may_refuse=True)
    assert sorted(a.refused for a in answers) == [False, True, True, True, True, True]


def test_a_refusal_is_an_error_in_any_other_load(fake_server):
    fake_server.together, fake_server.refuse_after = 2, 1
    with pytest.raises(BenchError, match=r"503.*queue full"):
        _run(fake_server)


def test_an_error_event_ends_the_measurement(fake_server):
    fake_server.error_after = 2
    with pytest.raises(BenchError, match="the model failed"):
        _run(fake_server)


def test_a_cut_connection_ends_the_measurement(fake_server):
    fake_server.die_after = 2
    with pytest.raises(BenchError, match="closed the connection in the middle"):
        _run(fake_server)


def test_a_server_that_is_not_there_is_named():
    load = OfferedLoad(name="x", jobs=[BenchRequest([1], 1)], concurrency=1)
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:9"):
        asyncio.run(run_load(Address("http://127.0.0.1:9"), BACKENDS["tureen"](), load))


def test_an_unknown_route_is_an_error_with_its_status(fake_server):
    load = OfferedLoad(name="x", jobs=[BenchRequest([1], 1)], concurrency=1)
    with pytest.raises(BenchError, match="HTTP 404"):
        asyncio.run(run_load(Address(fake_server.url + "/nowhere"), BACKENDS["tureen"](), load))


def test_a_connection_that_the_server_closed_meanwhile_is_opened_again():
    async def main():
        answered = 0

        async def handle(reader, writer):
            nonlocal answered
            await reader.readuntil(b"\r\n\r\n")
            answered += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()  # although it did not say so

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        connection = ClientConnection(Address(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        for _ in range(3):
            assert await connection.request("GET", "/") == (200, b"ok")
        connection.close()
        server.close()
        await server.wait_closed()
        return answered

    assert asyncio.run(main()) == 3


def test_events_are_found_whatever_pieces_they_come_in():
    events = b'data: {"a": 1}\r\n\r\n: comment\ndata: \xc3\xa9\n\n'

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for byte in events:
            writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        connection = ClientConnection(Address(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        found = [data async for data in connection.events("/", b"")]
        connection.close()
        server.close()
        await server.wait_closed()
        return found

    assert asyncio.run(main()) == [b'{"a": 1}', "é".encode()]


def test_the_time_to_the_first_token_is_not_that_of_the_head(fake_server):
    fake_server.first_token_s = 0.2
    started = time.perf_counter()
    (answer,) = _run(fake_server, shape=TimedPass(name="one", prompt_len=1, output_len=1, requests=1, concurrency=1))
    assert 0.19 <= answer.token_times_s[0] - answer.started_s <= time.perf_counter() - started
