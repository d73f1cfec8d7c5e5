"""Messages arrive whole, however they are cut; what is not one is refused before it is read."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from tureen.sandbox import framing


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def written(connection, pieces):
    """Write them from a thread, each in a call of its own; then close."""

    def write():
        for piece in pieces:
            connection.sendall(piece)
        connection.close()

    thread = threading.Thread(target=write)
    thread.start()
    return thread


@pytest.mark.parametrize("cut", range(10))
def test_a_message_that_is_cut_anywhere_arrives_whole(pair, cut):
    ours, theirs = pair
    data = framing.HEADER.pack(5) + b"hello"
    thread = written(theirs, [data[:cut], data[cut:]])
    assert framing.receive(ours) == b"hello"
    assert framing.receive(ours) is None
    thread.join()


def test_a_message_byte_by_byte_and_one_behind_it(pair):
    ours, theirs = pair
    data = framing.HEADER.pack(3) + b"abc" + framing.HEADER.pack(0) + framing.HEADER.pack(1) + b"d"
    thread = written(theirs, [data[at : at + 1] for at in range(len(data))])
    assert [framing.receive(ours) for _ in range(4)] == [b"abc", b"", b"d", None]
    thread.join()


@pytest.mark.parametrize("cut", range(9))
def test_a_message_that_breaks_off_is_the_end(pair, cut):
    ours, theirs = pair
    written(theirs, [(framing.HEADER.pack(5) + b"hello")[:cut]]).join()
    assert framing.receive(ours) is None


def test_parts_are_one_message_also_where_they_are_larger_than_the_socket(pair):
    ours, theirs = pair
    parts = [b"a" * (3 << 20), b"", b"b" * 7]
    thread = threading.Thread(target=framing.send, args=(theirs, *parts))
    thread.start()
    assert framing.receive(ours) == b"".join(parts)
    thread.join()


@pytest.mark.parametrize(("size", "most"), [(11, 10), (0xFFFFFFFF, framing.MAX_MESSAGE_BYTES)])
def test_one_that_is_too_large_is_refused_before_any_of_it_is_read(pair, size, most):
    ours, theirs = pair
    theirs.sendall(framing.HEADER.pack(size) + b"garbage")
    with pytest.raises(framing.Oversized, match=f"{size} bytes"):
        framing.receive(ours, most)
    assert ours.recv(100) == b"garbage"


@pytest.mark.parametrize("said", [b"", b"\x05\x00", framing.HEADER.pack(5) + b"he"])
def test_what_does_not_come_in_time_is_a_time_out(pair, said):
    ours, theirs = pair
    theirs.sendall(said)
    with pytest.raises(TimeoutError):
        framing.receive(ours, until_s=time.monotonic() - 1)


def test_who_does_not_read_times_out_who_sends(pair):
    ours, _ = pair
    with pytest.raises(TimeoutError):
        framing.send(ours, bytes(64 << 20), until_s=time.monotonic() - 1)


def test_sending_to_who_is_gone_is_an_error_of_the_system(pair):
    ours, theirs = pair
    theirs.close()
    with pytest.raises(OSError, match="pipe"):
        framing.send(ours, b"x" * 100)
