"""A server starts as soon as one of the engines that it names is there; the others join when they come."""

from __future__ import annotations

import logging

import pytest
from remote_engines import DIGESTS, GRACE_S, Followed, followed_everywhere, start_engine
from simulated_processes import play
from timeouts import until

from tureen.config import Config
from tureen.data_parallel import engine_server, start
from tureen.data_parallel.handshake import ModelDigests
from tureen.data_parallel.remote import EngineAddress
from tureen.data_parallel.router import Router
from tureen.errors import StartupError
from tureen.serving import healing


@pytest.fixture(autouse=True)
def surroundings(monkeypatch, processes):
    monkeypatch.setattr(healing, "LONGEST_DELAY_S", 0.05)
    monkeypatch.setattr(start, "digests_of", lambda _: DIGESTS)


@pytest.fixture
def nobody(processes):
    """Return addresses without a listener."""
    return lambda: EngineAddress("127.0.0.1", processes.network.free_port())


async def connect(*addresses) -> Router:
    names = ",".join(map(str, addresses))
    config = Config(replicas=names, watchdog_timeout_s=GRACE_S, freeze_grace_s=GRACE_S)
    return await start.connect(config, None)


def states(router) -> list[str]:
    return [replica.health.state for replica in router.replicas]


def test_one_engine_is_enough_and_another_joins_when_it_comes(monkeypatch, caplog, nobody):
    async def scenario(later):
        present = await start_engine(digests=DIGESTS)
        await present.engine.start()
        with caplog.at_level(logging.WARNING):
            router = await connect(present.address, later)
        assert str(later) in caplog.text
        assert states(router)[0] == "healthy"
        assert states(router)[1] != "healthy"
        calm = await Followed(router).end()
        assert not router.replicas[1].num_given
        monkeypatch.setattr("remote_engines.HERE", later)
        coming = await start_engine(digests=DIGESTS)
        await coming.engine.start()
        await until(lambda: states(router) == ["healthy", "healthy"])
        streams = await followed_everywhere(router, prefix="s")
        assert [replica.health.num_replacements for replica in router.replicas] == [0, 0]
        assert await streams.end() == calm
        await router.close()
        for server in (present, coming):
            await server.close()

    play(scenario, nobody())


def test_an_engine_that_is_being_loaded_is_not_waited_for_when_another_is_ready():
    async def scenario():
        servers = [await start_engine(digests=DIGESTS) for _ in range(2)]
        await servers[0].engine.start()
        router = await connect(*(server.address for server in servers))
        assert states(router) == ["healthy", "replacing"]
        await servers[1].engine.start()
        await until(lambda: states(router) == ["healthy", "healthy"])
        await router.close()
        for server in servers:
            await server.close()

    play(scenario)


def test_where_none_is_there_the_server_does_not_start_and_names_all(nobody):
    first, second = nobody(), nobody()

    async def scenario():
        with pytest.raises(StartupError) as refused:
            await connect(first, second)
        assert refused.value.field == "replicas"
        assert str(first) in refused.value.message
        assert str(second) in refused.value.message
        assert "tureen engine --listen" in refused.value.message

    play(scenario)


@pytest.mark.parametrize("wrong", ["weights", "tokenizer"])
def test_a_wrong_engine_is_refused_by_name_though_another_one_is_ready(wrong):
    async def scenario():
        digests = ModelDigests(**{"weights": DIGESTS.weights, "tokenizer": DIGESTS.tokenizer} | {wrong: "x" * 16})
        servers = [await start_engine(digests=each) for each in (DIGESTS, digests)]
        await servers[0].engine.start()
        with pytest.raises(StartupError, match=f"{servers[1].address}.*digest of its {wrong}"):
            await connect(*(server.address for server in servers))
        for server in servers:
            await server.close()

    play(scenario)


def test_another_version_is_refused_by_name_though_another_engine_is_ready(monkeypatch):
    async def scenario():
        servers = [await start_engine(digests=DIGESTS) for _ in range(2)]
        await servers[0].engine.start()
        monkeypatch.setattr(servers[1], "_fault_of", lambda _: "this engine is of tureen 0.0.1")
        with pytest.raises(StartupError, match=rf"{servers[1].address} refuses this server: this engine is of"):
            await connect(*(server.address for server in servers))
        for server in servers:
            await server.close()

    play(scenario)


def test_weights_that_were_exchanged_before_an_engine_came_are_its_own_too(monkeypatch):
    monkeypatch.setattr(engine_server, "checked", lambda op, args, _: args)  # the weights of a fake engine are a number

    async def scenario():
        servers = [await start_engine(digests=DIGESTS) for _ in range(2)]
        await servers[0].engine.start()
        router = await connect(*(server.address for server in servers))
        client = router.replicas[1].client
        asked = []
        replay = client._streams.restore

        async def restore(send, info):
            asked.append(dict(client._streams.journal._weights or {}))
            await replay(send, info)

        client._streams.restore = restore
        client._give_up("nobody waits for it any longer")
        await router.call("update_weights", number=7, path="/nowhere")
        assert "nobody waits" in router.replicas[1].weights_fault
        await servers[1].engine.start()
        await until(lambda: states(router) == ["healthy", "healthy"])
        assert asked == [{"number": 7, "path": "/nowhere"}]
        await router.close()
        for server in servers:
            await server.close()

    play(scenario)
