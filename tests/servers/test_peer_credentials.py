"""An engine without TLS takes connections of its own user and root only."""

from __future__ import annotations

import contextlib
import os
import socket

from tureen.serving.peer_credentials import is_trusted, uid_of_peer

STRANGER = 65534


@contextlib.contextmanager
def acting_as(uid):
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def listening(family, tmp_path):
    with socket.socket(family) as listener:
        listener.bind(str(tmp_path / "socket") if family == socket.AF_UNIX else ("localhost", 0))
        listener.listen()
        yield listener


@contextlib.contextmanager
def connected(listener, uid):
    with contextlib.nullcontext() if uid == os.geteuid() else acting_as(uid):
        client = socket.socket(listener.family)
        client.connect(listener.getsockname())
    accepted, _ = listener.accept()
    with client, accepted:
        yield client, accepted


def test_the_user_at_the_other_end_is_known_and_another_one_is_not_trusted(tmp_path):
    the_user_at_the_other_end_is_known(tmp_path)
    if os.geteuid() == 0:  # only root may act as another user
        another_user_is_not_trusted_on_loopback_nor_after_it_has_closed_its_end(tmp_path)


def the_user_at_the_other_end_is_known(tmp_path):
    for family in (socket.AF_UNIX, socket.AF_INET):
        with listening(family, tmp_path) as listener, connected(listener, os.geteuid()) as (_, accepted):
            assert (uid_of_peer(accepted), is_trusted(accepted)) == (os.geteuid(), True), family


def another_user_is_not_trusted_on_loopback_nor_after_it_has_closed_its_end(tmp_path):
    with listening(socket.AF_INET, tmp_path) as listener, connected(listener, STRANGER) as (client, accepted):
        assert uid_of_peer(accepted) == STRANGER
        assert not is_trusted(accepted)
        client.close()
        assert not is_trusted(accepted)
