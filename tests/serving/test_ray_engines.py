"""Engines as Ray actors: they are killed, stopped and ended in mid-stream, and outputs are those of an undisturbed
run. One cluster serves all tests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import stat
import sys
from pathlib import Path
from unittest import mock

import httpx
import msgspec
import process_state
import pytest
import tiny_gguf
import tiny_models
from fake_engine import make_request
from linked_fronts import Streams, all_well, joined, streams_everywhere
from patience import PATIENCE_S, until, wait_until
from remote_engines import DIGESTS, Followed

from tureen.build import find_model
from tureen.config import Config
from tureen.config_facts import without_secrets
from tureen.errors import StartupError
from tureen.fronts.following import clients_of
from tureen.replicas.pool import Pool, Scaler
from tureen.replicas.ray_address import RayCluster, parse_cluster, prepare_environment
from tureen.replicas.remote import RemoteEngine
from tureen.replicas.router import Router
from tureen.serving import healing

sys.path.append(str(Path(__file__).parents[1] / "servers"))
from followers import states as states_of
from front_streams import begin, kill_front
from server_process import ServerProcess

ONE = "ray://local?num_cpus=1"
RECONNECT = "RAY_gcs_rpc_server_reconnect_timeout_s"
JOINING: dict[str, str] = {}
"""Variables of a process that is to join the cluster."""


@pytest.fixture(scope="module")
def cluster():
    """A cluster of loopback alone, whose start fails on machines that are too busy for it."""
    before = process_state.read()
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for attempt in (1, 2):
        try:
            ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
            break
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no cluster
            ray.shutdown()
            if attempt == 2:
                pytest.skip(f"Ray does not start here: {error}")
    JOINING.update({name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")})
    process_state.restore(before)  # Ray sets variables for processes that it starts later, which is none here
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    path = tiny_gguf.write_from_transformers(folder / "m.gguf", tiny_models.write(folder / "hf", "llama"))
    return Config(model_path=str(path), device="cpu", num_threads=1, max_total_tokens=4096, log_level="error")


@pytest.fixture(autouse=True)
def no_delay(monkeypatch):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0.05)


def actors() -> list[int]:
    """The processes of the actors of this cluster, whose processes descend from this one, the oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if place.read_bytes().startswith(b"ray::EngineHost") and os.getpid() in ancestors(int(place.parent.name)):
                found.append(int(place.parent.name))
    return sorted(found)


def ancestors(pid: int) -> list[int]:
    """Raises OSError where one has ended meanwhile."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


@contextlib.asynccontextmanager
async def served(config, count=2, folder=None, **how):
    from tureen.replicas.ray_engines import ray_clients

    router = Router()
    try:
        clients = await asyncio.to_thread(ray_clients, config, f"{ONE}&n={count}", find_model(config), folder)
        await router.start(clients, **how)
        yield router
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def served_by_two_fronts(config, folder, count=2, **how):
    """So many actors of at most two, the owner's router and another front's."""
    shared = msgspec.structs.replace(config, api_workers=2, replicas=f"{ONE}&n={count}", max_replicas=2)
    async with (
        served(shared, count, folder, num_first=count, **how) as owner,
        joined(owner, clients_of(shared, folder, 2)) as link,
    ):
        yield link


def states(router):
    return [replica.health.state for replica in router.replicas]


@pytest.mark.ray
def test_actors_are_killed_stopped_and_drained_and_no_stream_loses_a_token(cluster, config):
    async def scenario():
        async with served(config) as router:
            alone = await Followed(router, tokens=400).end()
            assert min(map(len, alone)) > 0

            followed = Followed(router, tokens=400, prefix="k")
            await followed.begun.wait()
            os.kill(actors()[0], signal.SIGKILL)
            assert await followed.end() == alone
            await until(lambda: states(router) == ["healthy"] * 2, "Ray has made it anew")

            followed = Followed(router, tokens=400, prefix="s")
            await followed.begun.wait()
            stopped = actors()[0]
            os.kill(stopped, signal.SIGSTOP)
            try:
                assert await followed.end() == alone
            finally:
                os.kill(stopped, signal.SIGCONT)
            await until(lambda: states(router) == ["healthy"] * 2, "it answers")

            followed = Followed(router, tokens=400, prefix="d")
            await followed.begun.wait()
            router.replicas[0].drain(is_drained=True)
            assert await followed.end() == alone

    asyncio.run(scenario())
    wait_until(lambda: actors() == [], "they end with their server")


@pytest.mark.ray
def test_actors_come_under_load_and_go_without_it(cluster, config, monkeypatch):
    monkeypatch.setattr("tureen.replicas.pool.GROW_AFTER_S", 0)
    monkeypatch.setattr("tureen.replicas.pool.SHRINK_AFTER_S", 0)
    grown = msgspec.structs.replace(config, max_replicas=2)

    async def scenario():
        async with served(grown, 1, num_first=1, scaler=Scaler(1, 2, 100)) as router:
            assert states(router) == ["healthy", "unloaded"]
            while "unloaded" in states(router):
                async for _ in router.generate(make_request("one", max_new_tokens=450)):
                    pass
            await until(lambda: states(router).count("unloaded") == 1, "one less")
            await until(lambda: len(actors()) == 1, "its actor is gone")

    asyncio.run(scenario())


@pytest.mark.ray
def test_two_fronts_follow_actors_that_end_and_no_stream_of_either_loses_a_token(cluster, config, tmp_path):
    async def scenario():
        async with served_by_two_fronts(config, tmp_path) as link:
            alone = await Streams(link, tokens=400).end()
            assert min(map(len, alone)) > 0

            for end in (kill, end_by_ray):
                streams = await streams_everywhere(link, tokens=400)
                before = addresses(link.owner)
                end(link.owner)
                assert await streams.end() == alone
                await until(lambda: all_well(link.owner) and all_well(link.other), "both have the new one")
                assert len({*before} - {*addresses(link.owner)}) == 1
                assert addresses(link.other) == addresses(link.owner)
                assert await Streams(link, tokens=400).end() == alone

            streams = await streams_everywhere(link, tokens=400)
            link.owner.replicas[0].drain(is_drained=True)
            await link.tell()
            await until(lambda: not link.other.replicas[0].passages, "its requests go on elsewhere")
            assert await streams.end() == alone
            given = [router.replicas[0].num_given for router in (link.owner, link.other)]
            assert await Streams(link, tokens=400).end() == alone
            assert given == [router.replicas[0].num_given for router in (link.owner, link.other)]

    def addresses(router):
        return [replica.client.address for replica in router.replicas]

    def kill(_):
        os.kill(actors()[0], signal.SIGKILL)

    def end_by_ray(owner):
        cluster.kill(owner.replicas[1].client._actor, no_restart=False)

    asyncio.run(scenario())
    wait_until(lambda: actors() == [], "they end with their server")


@pytest.mark.ray
def test_an_actor_that_comes_and_goes_is_used_by_both_fronts(cluster, config, tmp_path):
    async def scenario():
        async with served_by_two_fronts(config, tmp_path, count=1) as link:
            late = [router.replicas[1] for router in (link.owner, link.other)]
            assert [replica.is_parked for replica in late] == [True, True]
            alone = await Streams(link, tokens=400).end()
            pool = Pool(link.owner.replicas, Scaler(1, 2, 1), link.owner.company)
            await pool._grow(link.owner.replicas[:1])
            await until(lambda: not late[1].is_parked and all_well(link.other), "the other front has it")
            streams = await streams_everywhere(link, tokens=400)
            await pool._shrink(link.owner.replicas[1:])
            await link.tell()
            assert [replica.is_parked for replica in late] == [True, True]
            assert await streams.end() == alone
            await until(lambda: len(actors()) == 1, "its actor is gone")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "wrong", ["ray://", "ray://auto?n=0", "ray://auto?n=65", "ray://auto?n=x", "ray://auto/a", "ray://auto?gpus=1"]
)
def test_a_cluster_that_is_none_is_refused(wrong):
    with pytest.raises(StartupError, match=r"--replicas .*must be ray://local"):
        parse_cluster(wrong)


def test_a_cluster_is_read_with_what_each_engine_takes():
    assert parse_cluster("ray://head:6379?n=8&num_gpus=1") == RayCluster("head:6379", 8, 1, 1)


@pytest.mark.ray
@pytest.mark.e2e
def test_a_server_with_two_fronts_goes_on_when_an_actor_or_a_front_is_killed(cluster, default_model_source):
    where = f"ray://{cluster.get_runtime_context().gcs_address}?n=2"
    how = "--api-workers", "2", "--replicas", where, "--num-threads", "1", "--freeze-grace-s", str(PATIENCE_S)
    params = {"max_new_tokens": 250, "ignore_eos": True, "temperature": 0}
    body = {"text": "Once upon a time", "sampling_params": params}
    with ServerProcess(*how, env=JOINING) as server:
        server.wait_ready()
        expected = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).json()["output_ids"]
        assert len(expected) == 250

        streams = begin(server, body)
        os.kill(actors()[0], signal.SIGKILL)
        assert [stream.join().ids for stream in streams] == [expected] * len(streams)
        wait_until(lambda: states_of(server) == ["healthy", "healthy"], "Ray has made it anew")

        kill_front(server, body, expected)

        streams = begin(server, body)
        assert [stream.join().ids for stream in streams] == [expected] * len(streams)
    wait_until(lambda: actors() == [], "they end with their server")


class PlacelessActor:
    """An actor that Ray finds no place for."""

    address = property(lambda self: self)

    def remote(self) -> asyncio.Future[tuple[str, int]]:
        return asyncio.get_running_loop().create_future()


def test_engines_that_wait_for_a_place_keep_no_thread_from_others(monkeypatch):
    before = process_state.read()
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from tureen.replicas import ray_engines

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
    """Each secret setting is in the settings' list of what is never shown."""
    keys = {"api_key": "k-user", "admin_api_key": "k-admin", "api_key_file": "/keys"}
    own = msgspec.msgpack.encode(without_secrets(Config(**keys, num_threads=3)))
    assert not any(key.encode() in own for key in keys.values())
    assert msgspec.msgpack.decode(own, type=Config).num_threads == 3


@pytest.mark.ray
@pytest.mark.e2e
def test_a_server_starts_a_cluster_of_its_own_which_asks_for_a_token(cluster, config, tmp_path):
    """As on a machine that has never had one. Ray may fail to start where it is too busy: it is tried twice, and only
    where it has started for the other tests."""
    flags = "--model-path", config.model_path, "--device", "cpu", "--num-threads", "1", "--replicas", ONE
    for attempt in (1, 2):
        with ServerProcess(*flags, env={"HOME": str(tmp_path)}) as server:
            wait_until(lambda: "ready at" in server.output or server.process.poll() is not None, "a start")
            if server.process.poll() is not None and attempt == 1:
                continue
            body = {"text": "a", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S)
            assert len(answer.json()["output_ids"]) == 4
            break
    assert (tmp_path / ".ray" / "auth_token").stat().st_size
