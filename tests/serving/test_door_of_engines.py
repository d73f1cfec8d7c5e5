"""The door of the engine's process, over socket pairs: only fronts of its own user and of root come in, and each has
its own requests, whatever others and its own past call theirs."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading

import msgspec
import pytest
from fake_engine import make_request
from timeouts import PATIENCE_S, wait_until

from tureen.contract.types import Abort, FinishReason, FromEngine, OutputDelta, StepReport, Submit
from tureen.sandbox import framing
from tureen.serving.door import Door, Guest

STRANGER = 65534


class EndOfConnections(Exception):
    """The listener of a test has no more connections."""


class Connection(socket.socket):
    """An end of a socket pair. The kernel says that another user has the other end."""

    uid = STRANGER

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 1, self.uid, self.uid)


class Listener:
    """A listener that takes the connections it is given, until it is given None."""

    def __init__(self) -> None:
        self._connections: queue.Queue[socket.socket | None] = queue.Queue()

    def connect(self, uid: int) -> socket.socket:
        """Return the other end of a connection from a process of this user."""
        ours, theirs = socket.socketpair()
        connection = Connection(fileno=ours.detach())
        connection.uid = uid
        self._connections.put(connection)
        theirs.settimeout(PATIENCE_S)
        return theirs

    def close(self) -> None:
        self._connections.put(None)

    def accept(self) -> tuple[socket.socket, str]:
        connection = self._connections.get()
        if connection is None:
            raise EndOfConnections
        return connection, ""


@pytest.mark.parametrize(("uid", "is_let_in"), [(STRANGER, False), (os.geteuid(), True), (0, True)])
def test_the_door_lets_in_fronts_of_its_own_user_and_root_alone(uid, is_let_in):
    listener = Listener()
    with listener.connect(uid) as front:
        listener.close()
        with pytest.raises(EndOfConnections):
            Door("door", lambda _: None)._accept(listener)
        assert framing.receive(front, framing.ANY_SIZE) == (b"" if is_let_in else None)  # the engine's facts, of none


class Visitor:
    """A front at the door."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        assert framing.receive(self._socket, framing.ANY_SIZE) == b""  # the engine's facts, of which there are none

    def submit(self, request_id: str) -> None:
        self._say(Submit(make_request(request_id)))

    def abort(self, request_id: str) -> None:
        self._say(Abort(request_id))

    def hear(self) -> tuple[OutputDelta, ...]:
        report = msgspec.msgpack.decode(framing.receive(self._socket, framing.ANY_SIZE), type=FromEngine)
        return report.deltas

    def leave(self) -> None:
        self._socket.close()

    def _say(self, message: Submit | Abort) -> None:
        framing.send(self._socket, msgspec.msgpack.encode(message))


@pytest.fixture
def house():
    """A door, what the engine gets through it, and a function that makes a front at it."""
    inbox: queue.Queue = queue.Queue()
    door, listener = Door("door", inbox.put), Listener()

    def let_in() -> None:
        with contextlib.suppress(EndOfConnections):
            door._accept(listener)

    letting_in = threading.Thread(target=let_in)
    letting_in.start()
    with contextlib.ExitStack() as visitors:

        def visit() -> Visitor:
            visitor = Visitor(listener.connect(os.geteuid()))
            visitors.callback(visitor.leave)
            return visitor

        yield door, lambda: inbox.get(timeout=PATIENCE_S), visit
    listener.close()
    letting_in.join(PATIENCE_S)


def test_a_front_that_comes_again_has_its_requests_while_those_of_its_past_end(house):
    door, get, visit = house
    old = visit()
    old.submit("7:name")
    before = get().request.id
    new = visit()
    new.submit("7:name")
    again = get().request.id
    old.leave()
    ended = get()
    assert (ended.request_id, before != again) == (before, True)
    end = FinishReason(type="abort")
    own = door.share(StepReport((OutputDelta(before, finish=end), OutputDelta(again, text="hi"))))
    assert new.hear() == (OutputDelta("7:name", text="hi"),)
    assert [delta.id for delta in own.deltas] in ([], [before])  # nobody waits for it
    new.abort("7:name")
    assert get().request_id == again


def test_requests_of_the_same_name_are_told_apart_and_the_owners_stay_its_own(house):
    door, get, visit = house
    first, second = visit(), visit()
    names = []
    for visitor in (first, second):
        visitor.submit("1/7:a/b")
        names.append(get().request.id)
    mine = OutputDelta("7:1/7:a/b", text="mine")
    own = door.share(StepReport((OutputDelta(names[0], text="one"), mine, OutputDelta(names[1], text="two"))))
    assert own.deltas == (mine,)
    assert first.hear() == (OutputDelta("1/7:a/b", text="one"),)
    assert second.hear() == (OutputDelta("1/7:a/b", text="two"),)


def test_the_requests_of_a_front_that_is_not_understood_end_and_its_connection_does(house):
    _, get, visit = house
    visitor = visit()
    visitor.submit("7:name")
    name = get().request.id
    framing.send(visitor._socket, b"no message")
    assert get().request_id == name
    assert framing.receive(visitor._socket, framing.ANY_SIZE) is None


def test_nothing_of_a_front_that_was_slow_stays_when_it_leaves():
    ours, theirs = socket.socketpair()
    guest = Guest(1, ours)
    before = set(threading.enumerate())
    guest.send(bytes(1 << 20))  # more than the socket takes at once
    [writer] = set(threading.enumerate()) - before
    assert len(framing.receive(theirs, framing.ANY_SIZE)) == 1 << 20
    wait_until(lambda: not guest._unread, "all is sent")
    guest.close()
    theirs.close()
    writer.join(PATIENCE_S)
    assert not writer.is_alive()
