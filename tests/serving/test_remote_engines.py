"""Engines behind sockets are lost, frozen, cut off and are other ones: outputs are the same, and operators are told."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import msgspec
import pytest
from fake_engine import make_request
from remote_engines import (
    DIGESTS,
    Followed,
    followed_everywhere,
    make_client,
    pid_of,
    place_of,
    served,
    start_engine,
)
from simulated_processes import play
from throwaway_ca import Authority
from timeouts import until
from warm_structs import is_warm, new_struct

import tureen
from tureen.config import Config
from tureen.data_parallel import engine_server, handshake
from tureen.data_parallel.engine_command import engine_context
from tureen.data_parallel.handshake import Hello
from tureen.data_parallel.remote import EngineAddress, parse_address
from tureen.data_parallel.router import Router
from tureen.data_parallel.start import front_context, remote_engines
from tureen.errors import InvalidRequest, NotFound, RequestFailed, StartupError, TureenError
from tureen.sandbox.framing import HEADER, MAX_MESSAGE_BYTES, framed
from tureen.serving import dry_run, healing
from tureen.weights.source import open_model, weights_digest


@pytest.fixture(autouse=True)
def no_delay(monkeypatch, processes):
    monkeypatch.setattr(healing, "FIRST_DELAY_S", 0.05)


def states(router):
    return [replica.health.state for replica in router.replicas]


async def disturbed(disturb, **how):
    """Eight streams over two engines without and with what `disturb(servers, router, wires)` does to them."""
    async with served(**how) as (servers, routers, wires):
        alone = await Followed(routers[0]).end()
        followed = await followed_everywhere(routers[0], prefix="s")
        await disturb(servers, routers[0], wires)
        assert await followed.end() == alone
        assert [replica.load for replica in routers[0].replicas] == [0, 0]


def test_streams_of_an_engine_that_is_killed_go_on_in_the_other_and_it_comes_back(processes):
    async def kill(servers, router, _):
        before = pid_of(servers[0])
        processes.kill(before)
        await until(lambda: router.health.num_replacements == 1, "it is noticed and back")
        await until(lambda: states(router) == ["healthy"] * 2, "both are well")
        assert pid_of(servers[0]) != before

    play(disturbed, kill)


def test_streams_of_an_engine_that_is_stopped_go_on_and_it_takes_requests_again_when_it_thaws(processes):
    async def stop(servers, router, _):
        pid = pid_of(servers[1])
        processes.stop(pid)
        try:
            await until(lambda: states(router)[1] == "suspect", "it is noticed")
            await until(lambda: not router.replicas[1].passages, "its streams are elsewhere")
        finally:
            processes.go_on(pid)
        await until(lambda: states(router) == ["healthy"] * 2, "it answers")
        assert pid_of(servers[1]) == pid

    play(disturbed, stop)


def test_a_cut_connection_loses_nothing_and_is_made_again():
    async def cut(servers, router, wires):
        wires[0].cut()
        await until(lambda: states(router)[0] == "replacing", "it is noticed")
        await until(lambda: not servers[0]._fronts, "the engine notices it too")
        await until(lambda: servers[0].engine.num_relayed == 0, "and ends what it did for the front")
        wires[0].is_cut = False
        await until(lambda: states(router) == ["healthy"] * 2, "it is back")

    play(disturbed, cut, through_wires=True)


def test_what_the_network_holds_back_is_not_heard_later():
    async def hold_back(_, router, wires):
        wires[1].hold()
        await until(lambda: states(router)[1] == "suspect", "it is noticed")
        await until(lambda: not router.replicas[1].passages, "its streams are elsewhere")
        wires[1].let_go()
        await until(lambda: states(router) == ["healthy"] * 2, "it answers")

    play(disturbed, hold_back, through_wires=True)


def test_two_fronts_share_engines_and_the_same_names_of_requests_are_two_requests():
    async def scenario():
        async with served(num_fronts=2) as (servers, routers, _):
            alone = await Followed(routers[0]).end()
            both = [Followed(router) for router in routers]
            assert [await one.end() for one in both] == [alone, alone]
            leaving = Followed(routers[1], tokens=1500)
            await leaving.begun.wait()
            await routers[1].close()
            await until(lambda: all(len(server._fronts) == 1 for server in servers), "it has left")
            await until(lambda: all(server.engine.num_relayed == 0 for server in servers), "nothing runs for it")
            await asyncio.gather(*leaving._tasks, return_exceptions=True)
            assert await Followed(routers[0], prefix="t").end() == alone

    play(scenario)


def test_operations_reach_all_and_a_front_that_comes_back_does_not_repeat_them():
    async def scenario():
        async with served(through_wires=True) as (servers, (router,), wires):
            assert type(await router.call("flush_cache")) is int
            with pytest.raises(NotFound, match="nope"):
                await router.call("nope")
            await router.call("pause", mode="in_place")
            assert all(server.engine.stats.is_paused for server in servers)
            await servers[0].engine.call("resume")
            wires[0].cut()
            await until(lambda: states(router)[0] == "replacing", "it is noticed")
            wires[0].is_cut = False
            await until(lambda: states(router) == ["healthy"] * 2, "it is back")
            assert not servers[0].engine.stats.is_paused, "nobody has paused it again"

    play(scenario)


def test_an_engine_reads_files_in_a_process_of_its_own_machine_first(monkeypatch):
    orders = []

    async def fail(order):
        orders.append(order["path"])
        return "was ended by SIGSEGV"

    monkeypatch.setattr(dry_run, "read_in_child", fail)

    async def scenario():
        async with served(1) as (servers, (router,), _):
            with pytest.raises(InvalidRequest, match="was ended by SIGSEGV") as caught:
                await router.call("load_adapter", name="a", path="/there")
            assert caught.value.field == "lora_path"
            assert orders == ["/there"]
            assert servers[0].engine.stats.num_running == 0
            assert len(await Followed(router, 1).end()) == 1

    play(scenario)


def test_after_new_weights_an_engine_reads_adapters_for_these_until_an_operator_restarts_it(
    monkeypatch, tmp_path, processes
):
    monkeypatch.setattr(engine_server, "checked", lambda op, args, _: args)  # the weights of a fake engine are a number
    read_for = []

    async def note(order):
        if order["op"] == "load_adapter":
            read_for.append(order["config"]["model_path"])
        return ""

    monkeypatch.setattr(dry_run, "read_in_child", note)

    async def scenario():
        async with served(1, num_fronts=2) as ([server], [router, leaving], _):
            first = server.config.model_path

            async def load() -> str:
                await router.call("load_adapter", name="a", path="/there")
                await router.call("unload_adapter", name="a")
                return read_for.pop()

            assert await load() == first
            await router.call("update_weights", number=2, path=str(tmp_path))
            assert await load() == str(tmp_path)
            processes.kill(pid_of(server))
            await until(lambda: router.health.num_replacements == 1, "it is replaced")
            await until(lambda: states(router) == ["healthy"], "it is well")
            assert await load() == str(tmp_path)
            server.restart()
            assert server.config.model_path == first
            await until(lambda: states(router) == ["healthy"], "it is well")
            held = server.engine.call

            async def hold_up(op, **args):
                await leaving.close()
                return await held(op, **args)

            monkeypatch.setattr(server.engine, "call", hold_up)
            with contextlib.suppress(TureenError):
                await leaving.call("update_weights", number=3, path="/later")
            await until(lambda: server.config.model_path == "/later", "the front has left, the weights are there")

    play(scenario)


def test_an_operation_that_fails_at_an_engine_in_a_way_that_nobody_expects_is_answered_all_the_same(monkeypatch):
    monkeypatch.setattr(engine_server, "checked", lambda op, args, _: args)

    async def scenario():
        async with served(1) as (_, (router,), _):
            with pytest.raises(RequestFailed, match=r"update_weights failed at its engine: KeyError: 'path'"):
                await router.call("update_weights", number=2)  # which no server does
            assert type(await router.call("flush_cache")) is int

    play(scenario)


def test_an_engine_takes_requests_again_when_a_server_that_held_them_back_is_gone():
    async def scenario():
        async with served(1, num_fronts=2) as (servers, routers, _):
            alone = await Followed(routers[0], 1).end()
            assert await routers[0].call("hold") == 0
            waiting = Followed(routers[1], 1, prefix="s")
            await routers[0].close()
            assert await waiting.end() == alone
            assert len(servers[0]._fronts) == 1

    play(scenario)


def test_a_server_that_does_not_know_the_weights_which_an_engine_was_given_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_server, "checked", lambda op, args, _: args)  # the weights of a fake engine are a number
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    given = msgspec.structs.replace(DIGESTS, weights=weights_digest(open_model(tmp_path)))

    async def scenario():
        async with served(1, through_wires=True) as ([server], [router], [wire]):
            source = {"number": 2, "path": str(tmp_path)}
            await router.call("update_weights", **source)
            wire.cut()
            await until(lambda: states(router) == ["replacing"], "it is noticed")
            wire.is_cut = False
            await until(lambda: states(router) == ["healthy"], "who gave them comes back")
            late = Router()
            with pytest.raises(StartupError, match="another model: the digest of its weights"):
                await late.start([make_client(place_of(server.address))])
            with_them = Router()
            await with_them.start([make_client(place_of(server.address, digests=given))])
            await with_them.close()
            await router.replicas[0].restart()
            again = Router()
            with pytest.raises(StartupError, match="another model"):  # it has been given them again
                await again.start([make_client(place_of(server.address))])

    play(scenario)


def test_an_engine_that_is_restarted_is_a_new_one_in_the_state_that_the_front_knows():
    async def restart(servers, router, _):
        pids = [pid_of(server) for server in servers]
        await router.replicas[0].restart()
        assert "replacing" not in states(router)
        await until(lambda: states(router) == ["healthy"] * 2, "both get to run")
        assert pid_of(servers[0]) != pids[0]
        assert pid_of(servers[1]) == pids[1]

    play(disturbed, restart)


def test_a_request_that_kills_engines_spares_the_others():
    async def scenario():
        async with served() as (_, (router,), _):
            alone = await Followed(router, 4).end()
            followed = Followed(router, 4, prefix="s")
            with pytest.raises(Exception, match="the engine died 3 times"):
                async for _ in router.generate(make_request("killer", max_new_tokens=500, cache_salt="die")):
                    pass
            assert await followed.end() == alone

    play(scenario)


# ---- who is there


def connected(place):
    """What comes of connecting to an engine there."""

    async def scenario():
        server = await place() if callable(place) else place
        router = Router()
        try:
            await router.start([make_client(server[1])])
            return router.info.model_name
        except StartupError as error:
            return error.message
        finally:
            await router.close()
            await server[0].close()

    return play(scenario)


@pytest.mark.parametrize("name", ["weights", "tokenizer"])
def test_an_engine_with_another_model_is_refused_by_name(name):
    async def place():
        server = await start_engine(digests=msgspec.structs.replace(DIGESTS, **{name: "0" * 16}))
        return server, place_of(server.address)

    said = connected(place)
    assert f"has another model: the digest of its {name} is {'0' * 16}, here it is {name[0] * 16}" in said


def test_another_version_is_refused_and_both_are_named(monkeypatch):
    monkeypatch.setattr("tureen.data_parallel.remote.hello", lambda: Hello("other", "0.0.7"))

    async def place():
        server = await start_engine()
        return server, place_of(server.address)

    said = connected(place)
    assert f"is of tureen {tureen.__version__}, that server of 0.0.7" in said
    assert "install the same version on both" in said


def test_a_server_of_another_user_is_refused_unless_it_has_a_certificate(monkeypatch):
    monkeypatch.setattr(engine_server, "is_trusted", lambda _: False)

    async def place():
        server = await start_engine()
        return server, place_of(server.address)

    said = connected(place)
    assert "this server belongs to another" in said
    assert "--replica-tls-cert" in said


def test_a_change_of_any_message_changes_the_contract(monkeypatch):
    before = handshake.contract_digest()
    handshake.contract_digest.cache_clear()
    monkeypatch.setattr(handshake, "ToChild", Hello)
    assert handshake.contract_digest() != before
    handshake.contract_digest.cache_clear()


def test_where_nobody_listens_the_address_is_named():
    async def scenario():
        with pytest.raises(StartupError, match=r"tcp://127.0.0.1:1: .*tureen engine --listen"):
            await Router().start([make_client(place_of(EngineAddress("127.0.0.1", 1)))])

    play(scenario)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x02\x00\x00\x00{}", b""])
def test_what_is_no_engine_is_told_apart(answer):
    async def scenario():
        async def reply(reader, writer):
            await reader.read(1)
            writer.write(answer)
            writer.close()

        other = await asyncio.start_server(reply, "127.0.0.1", 0)
        with pytest.raises(StartupError, match=r"not a tureen engine|closed the connection"):
            await Router().start([make_client(place_of(EngineAddress(*other.sockets[0].getsockname())))])
        other.close()

    play(scenario)


async def said_to(server, *frames):
    """What an engine answers to raw bytes before it ends the connection."""
    reader, writer = await asyncio.open_connection(*server.address[:2])
    writer.write(b"".join(frames))
    answer = await reader.read()
    writer.close()
    return answer


def test_lengths_and_nonsense_end_the_connection_before_anything_is_made_of_them():
    async def scenario():
        server = await start_engine()
        await server.engine.start()
        hello = framed(msgspec.msgpack.encode(handshake.hello()))
        assert await said_to(server, HEADER.pack(1 << 31), b"x" * 100) == b""
        assert await said_to(server, framed(b"\x80\x04pickle")) == b""
        welcomed = await said_to(server, hello, HEADER.pack(MAX_MESSAGE_BYTES + 1), b"x" * 100)
        assert b"welcome" in welcomed
        assert b"welcome" in await said_to(server, hello, framed(b"\x80\x04pickle"))
        assert not server._fronts
        await until(lambda: server.engine.health.state == "healthy")
        await server.close()

    play(scenario)


def test_more_fronts_than_there_is_room_for_are_told_so(monkeypatch):
    monkeypatch.setattr(engine_server, "MAX_FRONTS", 0)

    async def place():
        server = await start_engine()
        return server, place_of(server.address)

    assert "0 servers already use this engine" in connected(place)


# ---- certificates


@pytest.fixture(scope="module")
def authorities(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca")), Authority(tmp_path_factory.mktemp("other"))


def over_tls(engine_ca, engine_pair, front_ca, front_pair):
    """What comes of connecting with these certificates; None = without any."""

    async def place():
        config = Config(tls_cert=engine_pair.cert, tls_key=engine_pair.key, tls_ca=engine_ca.cert)
        server = await start_engine(context=engine_context(config, EngineAddress("0.0.0.0", 0)))
        starting = asyncio.create_task(server.engine.start())
        await until(starting.done)
        context = None
        if front_pair is not None:
            context = front_context(
                Config(replica_tls_cert=front_pair.cert, replica_tls_key=front_pair.key, replica_tls_ca=front_ca.cert)
            )
        return server, place_of(server.address, context)

    return connected(place)


def test_certificates_of_one_authority_let_in_and_others_are_refused_on_either_side(authorities):
    ours, theirs = authorities
    engine, front = ours.issue("engine", for_server=True), ours.issue("front")
    assert over_tls(ours, engine, ours, front) == "fake-model"
    assert "may not accept this server's certificate" in over_tls(ours, engine, ours, theirs.issue("stranger"))
    assert "its certificate is not accepted" in over_tls(ours, engine, theirs, front)
    assert "its certificate is not accepted" in over_tls(ours, front, ours, front), "a server's is asked for"
    assert "may need certificates" in over_tls(ours, engine, None, None)


def test_outside_this_machine_certificates_must_be_there(authorities, tmp_path):
    ours, _ = authorities
    pair = ours.issue("half", for_server=True)
    with pytest.raises(StartupError, match="--tls-cert, --tls-key and --tls-ca"):
        engine_context(Config(), EngineAddress("0.0.0.0", 7000))
    with pytest.raises(StartupError, match="give --tls-ca"):
        engine_context(Config(tls_cert=pair.cert, tls_key=pair.key), EngineAddress("127.0.0.1", 7000))
    assert engine_context(Config(), EngineAddress("::1", 7000)) is None
    with pytest.raises(StartupError, match=r"tcp://10.0.0.1:7000: outside this machine.*--replica-tls-cert"):
        remote_engines(Config(), "tcp://10.0.0.1:7000", None)
    with pytest.raises(StartupError, match="tcp://localhost:7000 is a duplicate"):
        remote_engines(Config(), "tcp://localhost:7000,tcp://localhost:7000", None)
    with pytest.raises(StartupError, match="--replica-tls-key is missing"):
        front_context(Config(replica_tls_cert=pair.cert, replica_tls_ca=ours.cert))
    open_key = tmp_path / "open.pem"
    open_key.write_bytes(Path(pair.key).read_bytes())
    open_key.chmod(0o644)
    with pytest.raises(StartupError, match="every user of this machine may read"):
        front_context(Config(replica_tls_cert=pair.cert, replica_tls_key=str(open_key), replica_tls_ca=ours.cert))


def test_an_engine_speaks_no_less_than_tls_1_3_to_a_front(authorities):
    ours, _ = authorities
    pair = ours.issue("front-2")
    context = front_context(Config(replica_tls_cert=pair.cert, replica_tls_key=pair.key, replica_tls_ca=ours.cert))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname


@pytest.mark.parametrize("wrong", ["tcp://host", "host:70000", "tcp://a:1:2", "udp://a:1", "::1:7000", "tcp://:1", ""])
def test_an_address_that_is_none_is_refused(wrong):
    with pytest.raises(StartupError, match=r"--listen .*must be tcp://HOST:PORT"):
        parse_address(wrong, "--listen")


def test_addresses_are_read_with_and_without_their_scheme():
    assert parse_address("tcp://[::1]:7000", "--x") == parse_address("[::1]:7000", "--x") == EngineAddress("::1", 7000)
    assert str(parse_address("engine-0.engines:7000/", "--x")) == "tcp://engine-0.engines:7000"


def test_an_engine_listens_once_no_two_threads_can_build_the_same_type():
    kind = new_struct()

    async def scenario():
        server = await start_engine()
        await server.close()

    assert not is_warm(kind)
    play(scenario)
    assert is_warm(kind)
