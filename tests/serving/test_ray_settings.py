"""What is asked of a Ray cluster, and what its actors are given, without one."""

from __future__ import annotations

import asyncio
import os
import stat
from unittest import mock

import lanes
import msgspec
import process_state
import pytest
from remote_engines import DIGESTS

from tureen.config import Config
from tureen.config_facts import without_secrets
from tureen.data_parallel.ray_address import RayCluster, parse_cluster, prepare_environment
from tureen.data_parallel.remote import RemoteEngine
from tureen.errors import StartupError

ONE = "ray://local?num_cpus=1"
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"


@pytest.mark.parametrize(
    "wrong", ["ray://", "ray://auto?n=0", "ray://auto?n=65", "ray://auto?n=x", "ray://auto/a", "ray://auto?gpus=1"]
)
def test_a_cluster_that_is_none_is_refused(wrong):
    with pytest.raises(StartupError, match=r"--replicas .*must be ray://local"):
        parse_cluster(wrong)


def test_a_cluster_is_read_with_what_each_engine_takes():
    assert parse_cluster("ray://head:6379?n=8&num_gpus=1") == RayCluster("head:6379", 8, 1, 1)


class PlacelessActor:
    """An actor that Ray finds no place for."""

    address = property(lambda self: self)

    def remote(self) -> asyncio.Future[tuple[str, int]]:
        return asyncio.get_running_loop().create_future()


def test_engines_that_wait_for_a_place_keep_no_thread_from_others(monkeypatch):
    before = process_state.read()
    with lanes.WATCH.pause():  # urllib3, which Ray imports, tries sockets
        pytest.importorskip("ray", reason="the extra ray is not installed")
        from tureen.data_parallel import ray_engines

    process_state.restore(before)  # Ray sets variables as it is imported

    async def scenario():
        places = [RemoteEngine(None, DIGESTS, None) for _ in range(64)]
        for place in places:
            ray_engines.RayClient(PlacelessActor, place, lambda *_: None, Config())
        finding = [asyncio.create_task(place.find()) for place in places]
        assert await asyncio.to_thread(lambda: "free") == "free"
        for task in finding:
            task.cancel()
        monkeypatch.setattr(ray_engines, "PLACE_S", 0.001)
        with pytest.raises(OSError, match="no place for the actor"):
            await places[0].find()

    asyncio.run(scenario())


@pytest.mark.parametrize("there", [None, 0o644])
def test_only_its_owner_may_read_the_token_whether_or_not_it_was_there(tmp_path, monkeypatch, there):
    token = tmp_path / ".ray" / "auth_token"
    if there is not None:
        token.parent.mkdir()
        token.write_text("kept")
        token.chmod(there)
    with mock.patch.dict(os.environ, {"HOME": str(tmp_path)}):
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            os.environ.pop(name, None)
        prepare_environment(parse_cluster(ONE))
        assert int(os.environ[RECONNECT]) > 30 * 86400
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text() == "kept" if there else len(token.read_text()) == 64


def test_actors_get_no_keys():
    """Each secret setting is in the list of settings that are never shown."""
    keys = {"api_key": "k-user", "admin_api_key": "k-admin", "api_key_file": "/keys"}
    own = msgspec.msgpack.encode(without_secrets(Config(**keys, num_threads=3)))
    assert not any(key.encode() in own for key in keys.values())
    assert msgspec.msgpack.decode(own, type=Config).num_threads == 3
