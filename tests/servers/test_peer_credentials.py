"""An engine without TLS takes connections of its own user and root only, and checks each control operation itself."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest

from tureen.errors import Forbidden, InvalidRequest, NotFound
from tureen.replicas.control_calls import CALLS, checked
from tureen.serving.peer_credentials import is_trusted, uid_of_peer

STRANGER = 65534
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root may act as another user")


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


def test_the_user_at_the_other_end_is_known(tmp_path):
    for family in (socket.AF_UNIX, socket.AF_INET):
        with listening(family, tmp_path) as listener, connected(listener, os.geteuid()) as (_, accepted):
            assert (uid_of_peer(accepted), is_trusted(accepted)) == (os.geteuid(), True), family


@ROOT_ONLY
def test_another_user_is_not_trusted_on_loopback_nor_after_it_has_closed_its_end(tmp_path):
    with listening(socket.AF_INET, tmp_path) as listener, connected(listener, STRANGER) as (client, accepted):
        assert uid_of_peer(accepted) == STRANGER
        assert not is_trusted(accepted)
        client.close()
        assert not is_trusted(accepted)


def valid(op):
    return {
        "pause": {"mode": "abort"},
        "update_weights": {"name": "m", "path": "/m", "format": "safetensors", "load_format": None},
        "release_memory": {"tags": ["weights"]},
        "resume_memory": {"tags": ["kv_cache"]},
        "weight": {"name": "w", "truncate_size": 1},
        "start_profile": {
            "root": "/",
            "folder": "a",
            "prefix": "p-replica1-",
            "num_steps": 3,
            "options": {"activities": (), "with_stack": False, "record_shapes": False},
        },
        "load_adapter": {"name": "a", "path": "/a"},
        "unload_adapter": {"name": "a"},
    }.get(op, {})


def test_an_engine_takes_what_its_fronts_send_and_nothing_more():
    taken = []
    for op in CALLS:
        args = valid(op)
        expected = args | ({"root": "/profiles"} if op == "start_profile" else {})
        assert checked(op, args, "/profiles") == expected
        wrong = ({**args, "path2": "/etc"}, *({**args, name: object} for name in args))
        taken += [(op, each) for each in wrong if not is_refused(op, each, InvalidRequest)]
    assert taken == []


def is_refused(op, args, error, profile_dir="/profiles"):
    try:
        checked(op, args, profile_dir)
    except error:
        return True
    return False


WRONG = ({"prefix": "../x"}, {"prefix": "a/b"}, {"num_steps": 0}, {"num_steps": 10_001}, {"folder": "a" * 1025})
"""Fields of a profile past the limits of the route."""


def test_an_unknown_operation_and_a_profile_past_its_limits_or_without_a_folder_are_refused():
    assert is_refused("shell", {}, NotFound)
    profile = valid("start_profile")
    assert [is_refused("start_profile", profile, Forbidden, folder) for folder in (None, "")] == [True, True]
    assert [wrong for wrong in WRONG if not is_refused("start_profile", profile | wrong, InvalidRequest)] == []
