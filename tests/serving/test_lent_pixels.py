"""Pixels cross to a child process once, however many requests show them at a time, and are gone after the last."""

import asyncio
from pathlib import Path

import fake_engine
import msgspec
import pytest
from fake_engine import make_request

from tureen.config import Config
from tureen.contract.types import Abort, MediaItem, Submit
from tureen.serving import pixels
from tureen.serving.pixels import Forget, Keep, PixelReceiver, PixelSender, ToChild
from tureen.serving.process import ProcessClient

CAT, DOG = "1" * 64, "2" * 64
SIZE = 3 << 20


def _make_request(name, *digests, start=0):
    media = tuple(
        MediaItem(digest, start + at, 1, bytes([int(digest[0])]) * SIZE, (1, 1024, 1024, 3))
        for at, digest in enumerate(digests)
    )
    return make_request(name, "abc", max_new_tokens=4, media=media)


def _make_pair():
    """A sender whose messages a receiver gets through msgpack; what was sent, and what the engine is to have."""
    receiver, sent, received = PixelReceiver(), [], []

    def send(message):
        sent.append(message)
        found = receiver.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToChild))
        if found is not None:
            received.append(found)

    return PixelSender(send), receiver, send, sent, received


def test_requests_arrive_as_they_were_and_each_picture_crosses_once():
    sender, receiver, send, sent, received = _make_pair()
    requests = [_make_request("one", CAT, DOG, CAT), _make_request("two", DOG), _make_request("three", CAT)]
    for request in requests:
        send(Submit(sender.send_pixels(request)))
    send(Abort("two"))
    assert [one.request for one in received[:3]] == requests
    assert received[3] == Abort("two")
    assert [one.digest for one in sent if isinstance(one, Keep)] == [CAT, DOG]
    first, second, third = (one.request.media for one in received[:3])
    assert first[0].pixels is first[2].pixels is third[0].pixels
    assert first[1].pixels is second[0].pixels
    assert len(receiver._pixels) == 2


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_a_picture_goes_with_the_last_request_that_shows_it_and_comes_again_with_the_next(order):
    sender, receiver, send, sent, received = _make_pair()
    stripped = [sender.send_pixels(_make_request(str(i), CAT, CAT)) for i in range(3)]
    for i in order:
        assert list(receiver._pixels) == [CAT]
        sender.release(stripped[i])
    assert receiver._pixels == {} == dict(sender._counts)
    assert [type(one) for one in sent] == [Keep, Forget]
    send(Submit(sender.send_pixels(again := _make_request("again", CAT))))
    assert received[-1].request == again


def test_many_samples_in_a_process_cost_the_bytes_of_one(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent))

    async def scenario():
        client = ProcessClient("fake_engine:make_engine", Config(log_level="error"))
        await client.start()
        try:
            host = client._host
            written, write = [], host._socket._writer.write
            monkeypatch.setattr(host._socket._writer, "write", lambda data: written.append(len(data)) or write(data))

            async def collect(request):
                return [token async for delta in client.generate(request) for token in delta.token_ids]

            alone = await collect(_make_request("alone", CAT))
            before = sum(written)
            found = await asyncio.gather(*(collect(_make_request(f"n{i}", CAT)) for i in range(16)))
            assert found == [alone] * 16
            assert SIZE < sum(written) - before < SIZE + 100_000
            left = client.generate(_make_request("left", DOG))
            await anext(left)
            await left.aclose()
            await collect(_make_request("after"))  # its end comes with, or after, the end of the one that was left
            assert not host._socket._pixel_sender._counts
        finally:
            await client.close()

    asyncio.run(scenario())


def test_the_lender_holds_no_pixels():
    sender = PixelSender(lambda message: None)
    assert all(item.pixels == b"" for item in sender.send_pixels(_make_request("one", CAT)).media)
    assert pixels._with_pixels(make_request("text"), {}.__getitem__) == make_request("text")
