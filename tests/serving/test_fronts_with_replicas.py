"""Routers of two fronts over the same engines: one owns them, and says what the other is to know. Whatever becomes of
an engine, no stream of either loses a token."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from functools import partial

import msgspec
import pytest
from fake_engine import make_request
from linked_fronts import Streams, all_well, joined, linked, streams_everywhere
from remote_engines import GRACE_S, HERE, Followed, Wire, start_engine
from resumable_requests import request
from simulated_processes import Processes, play
from timeouts import until

from tureen.api_workers.following import clients_of
from tureen.config import Config
from tureen.data_parallel.cluster_ca import ENGINE_NAME, ClusterAuthority, with_files, write_files
from tureen.data_parallel.engine_command import engine_context
from tureen.data_parallel.handshake import ModelDigests
from tureen.data_parallel.pool import Pool, Scaler
from tureen.data_parallel.router import Router
from tureen.data_parallel.start import door_of, make_client, remote_clients, remote_engines
from tureen.grammar.base import GrammarSpec
from tureen.serving import healing
from tureen.serving.client import ReplicaFacts

DIGESTS = ModelDigests("w" * 16, "t" * 16)
SETTINGS = Config(api_workers=2, log_level="error", watchdog_timeout_s=GRACE_S, freeze_grace_s=GRACE_S)
TOKENS = 6
NOBODY = ReplicaFacts(
    is_drained=False,
    is_parked=False,
    is_exchanging=False,
    weights=0,
    weight_version=None,
    failure=None,
    engine_id="",
)


@contextlib.asynccontextmanager
async def in_processes(tmp_path, factory="make_slow_engine", num_first=2):
    """Two engines with doors, of which so many are started; the owner's router and another front's."""
    owner = Router()
    doors = [door_of(tmp_path, number) for number in range(2)]
    try:
        clients = [partial(make_client, SETTINGS, f"fake_engine:{factory}", door=door) for door in doors]
        await owner.start(clients, num_first=num_first)
        async with joined(owner, clients_of(SETTINGS, tmp_path, 2)) as link:
            yield link
    finally:
        await owner.close()


@contextlib.asynccontextmanager
async def elsewhere():
    """Two engines behind sockets, the owner's router and another front's; each has wires of its own to them."""
    servers = [await start_engine(digests=DIGESTS) for _ in range(2)]
    wires, routers = [], [Router(), Router()]
    owner, other = routers
    try:
        await asyncio.gather(*(server.engine.start() for server in servers))
        for router, digests in ((owner, DIGESTS), (other, None)):
            own = [await Wire(server.address).start() for server in servers]
            wires.append(own)
            addresses = ",".join(str(wire.address) for wire in own)
            clients = remote_clients(SETTINGS, remote_engines(SETTINGS, addresses, digests))
            await router.join(clients, [each.facts for each in owner.replicas] if router is other else ())
            await until(lambda router=router: all_well(router))
        async with linked(owner, other) as link:
            yield link, servers, wires
    finally:
        for router in routers:
            await router.close()
        for wire in (wire for own in wires for wire in own):
            await wire.close()
        for server in servers:
            await server.close()


def pid_of(router, number) -> int:
    return router.replicas[number].client._host.pid


@pytest.fixture(autouse=True)
def only_simulated(processes):
    """Is for every test."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    async def scenario():
        async with in_processes(tmp_path_factory.mktemp("doors")) as link:
            return await Streams(link).end()

    with pytest.MonkeyPatch.context() as patch:
        Processes().install(patch)
        return play(scenario)


def test_requests_of_the_same_name_are_two_requests(undisturbed):
    assert undisturbed[:4] == undisturbed[4:]
    assert [len(ids) for ids in undisturbed] == [120] * 8


@pytest.mark.parametrize("number", [0, 1])
def test_a_killed_replica_loses_nothing_of_the_streams_of_two_fronts(undisturbed, tmp_path, number, processes):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = await streams_everywhere(link)
            processes.kill(pid_of(link.owner, number))
            answers = await streams.end()
            await until(lambda: all_well(link.owner) and all_well(link.other))
            return answers, [router.health.num_resumed > 0 for router in (link.owner, link.other)]

    assert play(scenario) == (undisturbed, [True, True])


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_no_stream_of_two_fronts_loses_a_token_whichever_step_of_a_replica_is_its_last(tmp_path, processes, act):
    """Each step once. A replica that is stopped goes on when the streams have ended."""

    async def scenario(victim, step):
        async with in_processes(tmp_path) as link:
            pid = pid_of(link.owner, victim) if victim is not None else 0
            processes.on_step = lambda who, count: (who, count) == (pid, step) and getattr(processes, act)(pid)
            answers = await Streams(link, tokens=TOKENS).end()
            was_disturbed = pid and (not processes.is_alive(pid) or processes.all[pid].is_stopped)
            if pid and processes.all[pid].is_stopped:
                processes.go_on(pid)
            await until(lambda: all_well(link.owner) and all_well(link.other))
            return answers, was_disturbed

    expected, _ = play(scenario, None, 0)
    assert [len(ids) for ids in expected] == [TOKENS] * 8
    for victim in (0, 1):
        steps = itertools.count(1)
        while (outcome := play(scenario, victim, next(steps)))[1]:
            assert outcome[0] == expected, (victim, steps)
        assert next(steps) > TOKENS + 1


def test_a_stopped_replica_loses_nothing_and_what_it_says_when_it_thaws_is_not_heard(undisturbed, tmp_path, processes):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = Streams(link)
            await streams.begun()
            pid = pid_of(link.owner, 0)
            processes.stop(pid)
            try:
                answers = await streams.end()
            finally:
                processes.go_on(pid)
            await until(lambda: all_well(link.owner) and all_well(link.other))
            return answers, await Streams(link).end()

    assert play(scenario) == (undisturbed, undisturbed)


def test_a_replica_that_the_owner_drains_gets_nothing_of_any_front(undisturbed, tmp_path):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = Streams(link)
            await streams.begun()
            link.owner.replicas[1].drain(is_drained=True)
            await link.tell()
            await until(lambda: not link.other.replicas[1].passages)
            answers = await streams.end()
            again = await Streams(link).end()
            given = [router.replicas[1].num_given for router in (link.owner, link.other)]
            await Streams(link).end()
            assert given == [router.replicas[1].num_given for router in (link.owner, link.other)]
            link.owner.replicas[1].drain(is_drained=False)
            await link.tell()
            await Streams(link).end()
            assert all(
                router.replicas[1].num_given > before
                for router, before in zip((link.owner, link.other), given, strict=True)
            )
            return answers, again

    assert play(scenario) == (undisturbed, undisturbed)


def test_restarting_one_after_the_other_is_noticed_by_no_stream_of_any_front(undisturbed, tmp_path):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = Streams(link)
            await streams.begun()
            before = [pid_of(link.owner, number) for number in range(2)]
            for number in range(2):
                await link.owner.replicas[number].restart()
                state = link.other.replicas[number].health.state
                assert state in ("healthy", "suspect")  # the operator is answered after that; suspect: held up
            assert not {*before} & {pid_of(link.owner, number) for number in range(2)}
            assert not any(each.num_deaths for router in (link.owner, link.other) for each in router._passages.values())
            return await streams.end()

    assert play(scenario) == undisturbed


def test_a_replica_that_comes_and_goes_is_used_by_every_front_and_no_stream_loses_a_token(undisturbed, tmp_path):
    async def scenario():
        async with in_processes(tmp_path, num_first=1) as link:
            late = [router.replicas[1] for router in (link.owner, link.other)]
            pool = Pool(link.owner.replicas, Scaler(1, 2, 1), link.owner.company)
            assert [replica.is_parked for replica in late] == [True, True]
            streams = Streams(link)
            await streams.begun()
            await pool._grow(link.owner.replicas[:1])
            await until(lambda: not late[1].is_parked and late[1].health.state == "healthy")
            more = await streams_everywhere(link, prefix="y")
            await pool._shrink(link.owner.replicas[1:])
            await link.tell()
            assert [replica.is_parked for replica in late] == [True, True]
            return await streams.end(), await more.end(), await Streams(link).end()

    assert play(scenario) == (undisturbed, undisturbed, undisturbed)


def test_a_front_that_leaves_takes_only_its_own_requests_along(undisturbed, tmp_path):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = Streams(link)
            await streams.begun()
            for replica in link.other.replicas:
                await replica.client._host.close(at_once=True)
            answers = await streams.of[0].end()
            for task in streams.of[1]._tasks:
                task.cancel()
            await asyncio.gather(*streams.of[1]._tasks, return_exceptions=True)
            await until(lambda: not link.owner.stats.num_running)
            return answers

    assert play(scenario) == undisturbed[:4]


@pytest.mark.parametrize("front", ["owner", "other"])
def test_a_replica_that_dies_while_a_grammar_compiles_has_it_compiled_by_the_other(tmp_path, front, processes):
    asked = request("json", grammar=GrammarSpec("json_schema", '{"enum": ["abcdefgh", "abcxyz"]}'))
    said = []

    async def follow(router):
        async for delta in router.generate(asked):
            said.append(delta.text)

    async def scenario():
        async with in_processes(tmp_path, "make_slow_compiling_engine") as link:
            pids = {pid_of(link.owner, number) for number in range(2)}
            following = asyncio.create_task(follow(getattr(link, front)))
            compiling = await compiles(pids)
            processes.kill(compiling)
            other = await compiles(pids - {compiling})
            assert not said
            compiler_of(other).is_held = False
            await following

    def compiler_of(pid):
        return processes.all[pid].engine.preparing.grammars._compiler

    async def compiles(pids):
        def where():
            return [pid for pid in pids if compiler_of(pid).is_asked]

        await until(where)
        return where()[0]

    play(scenario)
    assert json.loads("".join(said)) in ("abcdefgh", "abcxyz")


def test_a_partition_between_one_front_and_one_replica_is_noticed_by_no_stream():
    async def scenario():
        async with elsewhere() as (link, _, wires):
            calm = await Streams(link).end()
            streams = await streams_everywhere(link)
            wires[1][0].hold()  # nothing passes between the other front and engine 0, and no connection ends
            answers = await streams.end()
            assert link.other.replicas[0].health.state != "healthy"
            await until(lambda: link.owner.replicas[0].health.state == "healthy")
            wires[1][0].let_go()
            await until(lambda: all_well(link.other))
            return calm, answers, await Streams(link).end()

    calm, cut, again = play(scenario)
    assert cut == again == calm


def test_a_killed_engine_elsewhere_loses_nothing_of_the_streams_of_two_fronts(processes):
    async def scenario():
        async with elsewhere() as (link, servers, _):
            calm = await Streams(link).end()
            streams = Streams(link)
            await streams.begun()
            processes.kill(servers[0].engine._host.pid)
            answers = await streams.end()
            await until(lambda: all_well(link.owner) and all_well(link.other))
            return calm, answers

    calm, answers = play(scenario)
    assert answers == calm


def test_a_new_engine_elsewhere_is_used_by_no_front_before_the_owner_has_brought_it_to_its_state():
    async def scenario():
        async with elsewhere() as (link, _, _):
            restored = []
            client = link.owner.replicas[0].client
            may_go_on = asyncio.Event()
            restore = client._streams.restore

            async def slowly(send, info):
                await may_go_on.wait()
                await restore(send, info)
                restored.append(0)

            client._streams.restore = slowly
            restarting = asyncio.create_task(link.owner.replicas[0].restart())
            other = link.other.replicas[0].client
            await until(lambda: other.health.state == "replacing" and other._host is not None and other._ready.done())
            assert await Streams(link).end()
            assert (restored, link.other.replicas[0].num_given) == ([], 0) or other.health.state != "healthy"
            assert other.health.state == "replacing"
            may_go_on.set()
            await restarting
            assert (restored, other.health.state) == ([0], "healthy")

    play(scenario)


def engine_at(server) -> ReplicaFacts:
    return msgspec.structs.replace(NOBODY, engine_id=server._engine_id, address=str(server.address))


def test_a_front_goes_with_an_engine_to_wherever_its_owner_says_that_it_is(undisturbed, tmp_path):
    """As with an engine in a Ray actor, which is made anew elsewhere while the first one still answers."""
    authority = ClusterAuthority()
    for name in (ENGINE_NAME, "front"):
        (tmp_path / name).mkdir()
        write_files(authority.issue(name), tmp_path / name)
    settings = msgspec.structs.replace(SETTINGS, replicas="ray://auto?n=1")
    context = engine_context(with_files(Config(), tmp_path / ENGINE_NAME), HERE)

    async def scenario():
        servers = [await start_engine(digests=DIGESTS, context=context) for _ in range(2)]
        router = Router()
        try:
            await asyncio.gather(*(server.engine.start() for server in servers))
            joining = asyncio.create_task(router.join(clients_of(settings, tmp_path / "front", 1), [NOBODY]))
            await until(lambda: router.replicas, "it looks for one")
            router.follow([engine_at(servers[0])])
            await joining
            streams = Followed(router, count=4, prefix="x")
            await streams.begun.wait()
            router.follow([engine_at(servers[1])])
            answers = await streams.end()
            await until(lambda: not servers[0]._fronts, "it has left")

            streams = Followed(router, count=4, prefix="x")
            await streams.begun.wait()
            router.follow([NOBODY])
            await servers[1].close()
            await until(lambda: router.replicas[0].health.state == "replacing", "the engine is gone")
            servers[1] = await start_engine(digests=DIGESTS, context=context)
            await servers[1].engine.start()
            router.follow([engine_at(servers[1])])
            await until(lambda: router.replicas[0].health.state == "healthy", "the third one")
            return answers, await streams.end(), router.health.num_replacements
        finally:
            await router.close()
            for server in servers:
                await server.close()

    assert play(scenario) == (undisturbed[:4], undisturbed[:4], 2)


def test_weights_are_exchanged_under_streams_of_two_fronts_and_no_output_is_a_mixture(tmp_path):
    """The fake engine's output depends on prompt and seed alone, so what is looked at is who computes when."""

    async def scenario():
        async with in_processes(tmp_path) as link:
            exchanged = []
            for replica in link.owner.replicas:

                async def call(op, replica=replica, **args):
                    assert op == "update_weights"
                    assert not link.other.replicas[replica.number].num_live
                    assert link.other.replicas[replica.number].is_closed  # it is given nothing, whatever happens
                    assert not link.owner.replicas[replica.number].num_live
                    exchanged.append(replica.number)
                    return 0

                replica.client.call = call
            streams = Streams(link)
            await streams.begun()
            await link.owner.call("roll_weights", version="step-2", name="n", path="p", format="f", load_format=None)
            await link.tell()
            assert [replica.weights for replica in link.other.replicas] == [1, 1]
            assert not any(replica.is_closed or replica.is_drained for replica in link.other.replicas)
            named = {facts[0].weight_version for facts in link.told}
            return exchanged, named, await streams.end()

    exchanged, named, answers = play(scenario)
    assert exchanged == [0, 1]
    assert named == {None, "step-2"}
    assert [len(ids) for ids in answers] == [120] * 8


def test_a_request_under_which_three_engines_died_is_ended_and_none_is_called_poison(tmp_path, monkeypatch):
    async def scenario():
        async with in_processes(tmp_path) as link:
            monkeypatch.setattr(healing, "FIRST_DELAY_S", 0)
            deadly = make_request("deadly", "x", max_new_tokens=200, cache_salt="die")

            async def follow():
                async for _ in link.other.generate(deadly):
                    pass

            with pytest.raises(Exception, match="send it again") as ended:
                await follow()
            await until(lambda: all_well(link.owner) and all_well(link.other))
            return ended.value.code, link.other.health.num_poison, [len(ids) for ids in await Streams(link).end()]

    assert play(scenario) == ("engine_dead", 0, [120] * 8)


def test_the_load_of_other_fronts_counts_where_a_replica_is_chosen(tmp_path):
    async def scenario():
        async with in_processes(tmp_path) as link:
            link.other.company.hear_others([500, 0], [])
            streams = Followed(link.other, count=1, prefix="y")
            await streams.begun.wait()
            at = [replica.num_given > 0 for replica in link.other.replicas]
            await streams.end()
            return at

    assert play(scenario) == [False, True]


@pytest.mark.parametrize("is_told", [True, False])
def test_a_prompt_that_one_front_has_given_to_a_replica_is_found_there_by_another(tmp_path, is_told):
    """Without being told the other front takes the replica that was given less."""
    prompt = "one page is sixteen tokens: this prompt has more than four of them"

    async def scenario():
        async with in_processes(tmp_path) as link:
            company = link.owner.company
            company.prefixes.share()
            for number, router in enumerate((link.owner, link.other)):
                router.replicas[1 - number].num_given = 1000
                before = [each.num_given for each in router.replicas]
                async for _ in router.generate(make_request(f"r{number}", prompt + "!" * number)):
                    pass
                [chosen] = [each.number for each in router.replicas if each.num_given > before[each.number]]
                if is_told:
                    link.other.company.hear_others([0, 0], [company.prefixes.take_news()])
            return chosen

    assert play(scenario) == (0 if is_told else 1)


def test_streams_that_wait_for_a_replica_that_cannot_be_started_end_at_every_front(tmp_path, processes):
    async def scenario():
        async with in_processes(tmp_path) as link:
            streams = await streams_everywhere(link, tokens=900)
            for replica in link.owner.replicas:
                replica.client._make_host = partial(_hopeless, link)
            for number in range(2):
                processes.kill(pid_of(link.owner, number))
            outcomes = await asyncio.gather(
                *(task for followed in streams.of for task in followed._tasks), return_exceptions=True
            )
            return {getattr(outcome, "code", outcome) for outcome in outcomes}

    assert play(scenario) == {"engine_dead"}


def _hopeless(link, *_):
    class Host:
        can_be_killed = True

        async def start(self):
            raise OSError(12, "Cannot allocate memory")

        async def close(self, *, at_once):
            pass

        def sign(self):
            raise AssertionError("it never began")

    return Host()
