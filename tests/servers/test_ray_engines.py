"""Engines as Ray actors: they are killed and ended in mid-stream, come and go, and outputs are those of an undisturbed
run. tests/serving simulates fronts that follow an engine to the node where Ray rebuilds it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path

import httpx
import msgspec
import process_state
import pytest
import tiny_gguf
import tiny_models
from followers import states as states_of
from front_streams import begin, kill_front
from server_process import ServerProcess
from timeouts import PATIENCE_S, until, wait_until

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from linked_fronts import Streams, all_well, joined, streams_everywhere

from tureen.api_workers.following import clients_of
from tureen.build import find_model
from tureen.config import Config
from tureen.data_parallel.pool import Pool, Scaler
from tureen.data_parallel.router import Router
from tureen.serving import healing

pytestmark = [
    # What Ray leaves of a start that failed, which is tried again.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ONE = "ray://local?num_cpus=1"


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
    """The processes of the actors of this cluster."""
    return descendants(os.getpid(), b"ray::EngineHost")


def descendants(pid: int, name: bytes) -> list[int]:
    """The descendants of a process whose command has this name in it, the oldest first."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name in place.read_bytes().partition(b"\0")[0] and pid in ancestors(int(place.parent.name)):
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
    from tureen.data_parallel.ray_engines import ray_clients

    router = Router()
    try:
        clients = await asyncio.to_thread(ray_clients, config, f"{ONE}&n={count}", find_model(config), folder)
        await router.start(clients, **how)
        yield router
    finally:
        await router.close()


@contextlib.asynccontextmanager
async def served_by_two_fronts(config, folder, count=2, **how):
    """Serve `count` actors, of at most two, through the owner's router and another front's."""
    shared = msgspec.structs.replace(config, api_workers=2, replicas=f"{ONE}&n={count}", max_replicas=2)
    async with (
        served(shared, count, folder, num_first=count, **how) as owner,
        joined(owner, clients_of(shared, folder, 2)) as link,
    ):
        yield link


@pytest.mark.ray
def test_an_actor_that_comes_ends_and_goes_is_used_by_both_fronts(cluster, config, tmp_path):
    async def scenario():
        async with served_by_two_fronts(config, tmp_path, count=1) as link:
            late = [router.replicas[1] for router in (link.owner, link.other)]
            assert [replica.is_parked for replica in late] == [True, True]
            alone = await Streams(link, tokens=400).end()
            pool = Pool(link.owner.replicas, Scaler(1, 2, 1), link.owner.company)
            await pool._grow(link.owner.replicas[:1])
            await until(lambda: not late[1].is_parked and all_well(link.other), "the other front has it")
            streams = await streams_everywhere(link, tokens=400)
            cluster.kill(link.owner.replicas[1].client._actor, no_restart=False)
            assert await streams.end() == alone
            await until(lambda: all_well(link.owner) and all_well(link.other), "both have the new one")

            streams = await streams_everywhere(link, tokens=400)
            await pool._shrink(link.owner.replicas[1:])
            await link.tell()
            assert [replica.is_parked for replica in late] == [True, True]
            assert await streams.end() == alone
            await until(lambda: len(actors()) == 1, "its actor is gone")

    asyncio.run(scenario())
    wait_until(lambda: actors() == [], "they end with their server")


@pytest.mark.ray
def test_a_server_with_two_fronts_and_its_own_cluster_goes_on_when_an_actor_or_a_front_is_killed(
    default_model_source, tmp_path
):
    """As on a machine that has never had a cluster. Ray may fail to start where it is too busy: it is tried twice."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    how = "--api-workers", "2", "--replicas", f"{ONE}&n=2", "--num-threads", "1", "--freeze-grace-s", str(PATIENCE_S)
    how += "--model-path", str(default_model_source.path)
    for attempt in (1, 2):
        with ServerProcess(*how, env={"HOME": str(tmp_path)}) as server:
            wait_until(lambda: "ready at" in server.output or server.process.poll() is not None, "a start")
            if server.process.poll() is not None and attempt == 1:
                continue
            goes_on(server.wait_ready())
            goes_on_without_the_head(server)
            break
    wait_until(lambda: actors() == [], "they end with their server")
    assert (tmp_path / ".ray" / "auth_token").stat().st_size


def goes_on(server: ServerProcess) -> None:
    params = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 0}
    body = {"text": "Once upon a time", "sampling_params": params}
    expected = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).json()["output_ids"]
    streams = begin(server, body)
    os.kill(actors()[0], signal.SIGKILL)
    assert [stream.join().ids for stream in streams] == [expected] * len(streams)
    wait_until(lambda: states_of(server) == ["healthy", "healthy"], "Ray has rebuilt the actor")
    kill_front(server, body, expected)


def goes_on_without_the_head(server: ServerProcess) -> None:
    """It says of an engine that Ray cannot replace what an operator is to do, and serves on the other."""
    [head] = descendants(server.process.pid, b"/gcs_server")
    os.kill(head, signal.SIGKILL)
    os.kill(actors()[0], signal.SIGKILL)
    wait_until(lambda: sorted(states_of(server)) == ["down", "healthy"], "it gives up on one")
    assert "gcs_server" in httpx.get(f"{server.url}/status").text
    wait_until(lambda: "Start the head again, then this server" in server.output, "what to do, in the log")
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    assert httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE_S).status_code == 200
