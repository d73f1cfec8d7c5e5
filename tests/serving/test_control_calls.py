"""An engine checks each control operation of its fronts itself."""

from __future__ import annotations

from tureen.data_parallel.control_calls import CALLS, checked
from tureen.errors import Forbidden, InvalidRequest, NotFound


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
