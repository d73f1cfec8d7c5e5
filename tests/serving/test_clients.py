"""What every engine client promises, checked for the one with a thread and the one with a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import subprocess
import sys
import threading
from hashlib import blake2b
from pathlib import Path

import fake_engine
import msgspec
import pytest
from fake_engine import SLOW_STEP_S, make_request
from patience import PATIENCE_S, until, wait_until
from stack_size import stack_bytes

from tureen.config import Config
from tureen.contract.types import NO_TOKEN, EngineStats
from tureen.errors import InvalidRequest, NotFound, RequestFailed, StartupError, TureenError, Unavailable
from tureen.log import no_progress
from tureen.sandbox.stacks import THREAD_BYTES
from tureen.serving.inproc import InprocClient
from tureen.serving.process import ProcessClient

TESTS = str(Path(fake_engine.__file__).parent)
KINDS = ("thread", "process")
WATCHDOG_TIMEOUT_S = 1.0
ENDLESS = 2000
"""Tokens of an answer that ends before a test does only where a test is held up for twenty seconds."""


@pytest.fixture(autouse=True)
def child_finds_our_factories(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", TESTS)


def make_client(kind: str, factory: str = "make_slow_engine", config: Config | None = None):
    config = config or Config(log_level="error")
    if kind == "process":
        return ProcessClient(f"fake_engine:{factory}", config)
    make = getattr(fake_engine, factory)
    return InprocClient(lambda report: make(config, progress=report), watchdog_timeout_s=config.watchdog_timeout_s)


@contextlib.asynccontextmanager
async def running(kind, factory="make_slow_engine", config=None, progress=no_progress):
    client = make_client(kind, factory, config)
    try:
        await client.start(progress)
        yield client
    finally:
        await client.close()


async def collect(client, request):
    """(text, token ids, finish) of a request."""
    text, ids = "", []
    async for delta in client.generate(request):
        assert delta.id == request.id
        text += delta.text
        ids += delta.token_ids
        last = delta
    return text, ids, last.finish


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_the_contract_of_a_healthy_engine(kind):
    phases = []

    async def scenario():
        async with running(kind, progress=lambda *phase: phases.append(phase)) as client:
            assert (client.info.model_name, client.info.vocab_size) == ("fake-model", 258)
            assert ("load weights", 1, 1) in phases
            await generating(client)
            await spacing(client)
            await aborting(client)
            await leaving(client)
            await calling(client)
            await refusing(client)
            if kind == "process":
                assert await client.call("cold_structs") == []  # else two threads of it may decode at once, and crash
            assert client.failure is None
        await client.close()  # idempotent
        with pytest.raises(Unavailable):
            await collect(client, make_request("late"))

    asyncio.run(scenario())


async def generating(client):
    text, ids, finish = await collect(client, make_request("one", "say:héllo"))
    assert (text, bytes(ids[:-1]).decode()) == ("héllo", "héllo")
    assert (finish.type, finish.matched) == ("stop", 256)
    alone = await collect(client, make_request("alone", "abc"))
    together = await asyncio.gather(*(collect(client, make_request(f"{i}", "abc")) for i in range(30)))
    assert [one[:2] for one in together] == [alone[:2]] * 30
    await until(lambda: client.stats.num_running == 0)
    assert client.stats.total_output_tokens == 31 * 20 + 7
    assert client.stats.step_ms >= SLOW_STEP_S * 1000


async def spacing(client):
    sizes = [len(delta.token_ids) async for delta in client.generate(make_request("spaced", "abc"), 8)]
    assert (sizes[0], sum(sizes)) == (1, 20)
    assert all(size >= 8 for size in sizes[1:-1])


async def aborting(client):
    task = asyncio.create_task(collect(client, make_request("abort-me", max_new_tokens=ENDLESS)))
    await until(lambda: client.stats.num_running == 1)
    client.abort("abort")  # nobody's: a beginning of an id is none
    client.abort("nobody")
    seen = client.stats.total_output_tokens
    await until(lambda: client.stats.total_output_tokens > seen + 3)
    assert not task.done()
    client.abort("abort-me", "why")
    client.abort("abort-me")
    text, ids, finish = await task
    assert (finish.type, finish.reason) == ("abort", "why")
    assert len(text) == len(ids) < ENDLESS
    client.abort("abort-me")
    assert (await collect(client, make_request("abort-me", "say:a")))[0] == "a"


async def leaving(client):
    stream = client.generate(make_request("leave", max_new_tokens=1000))
    await anext(stream)
    await stream.aclose()
    await until(lambda: client.stats.num_running == 0)
    tasks = [asyncio.create_task(collect(client, make_request(f"leave{i}", max_new_tokens=1000))) for i in range(40)]
    await until(lambda: client.stats.num_running > 1 and client.stats.num_queued)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: client.stats.num_running == client.stats.num_queued == 0)


async def calling(client):
    freed = await client.call("flush_cache")
    assert type(freed) is int
    assert msgspec.convert(await client.call("stats"), EngineStats).num_pages == 256
    with pytest.raises(NotFound, match="nope"):
        await client.call("nope")
    answers = await asyncio.gather(*(client.call("stats") for _ in range(20)))
    assert len(answers) == 20
    task = asyncio.create_task(collect(client, make_request("busy", max_new_tokens=ENDLESS)))
    await until(lambda: client.stats.num_running == 1)
    with pytest.raises(InvalidRequest):
        await client.call("flush_cache")
    client.abort("busy")
    assert (await task)[2].type == "abort"


async def refusing(client):
    with pytest.raises(InvalidRequest) as refused:
        await collect(client, make_request("long", max_new_tokens=5000))
    assert refused.value.field == "max_new_tokens"
    with pytest.raises(RequestFailed) as failed:
        await collect(client, make_request("wrong", "say:ab\x01c"))
    assert failed.value.code == "nan_logits"
    first = client.generate(make_request("twice", max_new_tokens=ENDLESS))
    await anext(first)
    with pytest.raises(InvalidRequest):
        await collect(client, make_request("twice"))
    assert (await anext(first)).finish is None
    await first.aclose()


def test_a_request_that_makes_the_engine_raise_is_ended_and_nobody_else_is(kind):
    async def scenario():
        async with running(kind) as client:
            alone = [await collect(client, make_request(f"r{i}", "ab" * i + "c", max_new_tokens=30)) for i in range(4)]
            tasks = [
                asyncio.create_task(collect(client, make_request(f"s{i}", "ab" * i + "c", max_new_tokens=30)))
                for i in range(4)
            ]
            killer = asyncio.create_task(collect(client, make_request("killer", cache_salt="die")))
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.gather(*tasks) == alone
                with pytest.raises(RequestFailed) as failed:
                    await killer
            assert failed.value.code == "poison"
            assert "scripted" not in str(failed.value)
            await until(lambda: client.health.state == "healthy")
            assert (await collect(client, make_request("after", "say:a")))[0] == "a"
            assert client.failure is None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("refuse_to_start", "the model is missing; use --model-path"),
        ("crash_at_start", "the engine could not be built: ValueError"),
    ],
)
def test_an_engine_that_cannot_start_says_why(kind, factory, message):
    async def scenario():
        client = make_client(kind, factory)
        with pytest.raises(StartupError) as refused:
            await client.start()
        assert refused.value.message == message
        await client.close()

    asyncio.run(scenario())


def test_a_step_that_never_ends_is_noticed(kind):
    """A process is replaced, and the request that made it hang is found; a thread cannot be, and says so."""

    async def scenario():
        async with running(kind, "make_hanging_engine") as client:
            assert (await collect(client, make_request("fine", "say:a")))[0] == "a"
            patience_s, client._watchdog._timeout_s = client._watchdog._timeout_s, WATCHDOG_TIMEOUT_S
            reason = asyncio.Event()
            turn = client._turn
            client._turn = lambda state, why="": (
                reason.set() if f"{WATCHDOG_TIMEOUT_S:g} s" in why else None,
                turn(state, why),
            )
            with pytest.raises(TureenError) as failed:
                async with asyncio.timeout(PATIENCE_S):
                    await collect(client, make_request("hang", "say:" + 8 * "\x02"))
            assert failed.value.code == ("poison" if kind == "process" else "engine_dead")
            assert reason.is_set()
            client._watchdog._timeout_s = patience_s  # what does not hang may be held up
            async with asyncio.timeout(PATIENCE_S):
                while client.health.state != "healthy":
                    await asyncio.sleep(0.01)
                assert (await collect(client, make_request("again", "say:a")))[0] == "a"

    asyncio.run(scenario())


def test_closing_aborts_what_runs(kind):
    async def scenario():
        client = make_client(kind)
        await client.start()
        task = asyncio.create_task(collect(client, make_request("r", max_new_tokens=ENDLESS)))
        await until(lambda: client.stats.num_running == 1)
        await client.close()
        with contextlib.suppress(TureenError):
            finish = (await task)[2]
            assert (finish.type, finish.reason) == ("abort", "shutdown")

    asyncio.run(scenario())


# ---- the process


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def disturbed(disturb, config=None):
    """Four requests with and without `disturb(client)`, which is called when each has brought something."""
    async with running("process", config=config) as client:
        asked = [make_request(f"r{i}", "ab" * i + "c", max_new_tokens=60) for i in range(4)]
        alone = [await collect(client, one) for one in asked]
        begun = [asyncio.Event() for _ in asked]

        async def follow(request, event):
            text, ids = "", []
            async for delta in client.generate(request):
                text += delta.text
                ids += delta.token_ids
                event.set()
            return text, ids, delta.finish

        tasks = [asyncio.create_task(follow(*one)) for one in zip(asked, begun, strict=True)]
        await asyncio.gather(*(event.wait() for event in begun))
        async with asyncio.timeout(PATIENCE_S):
            pid = await disturb(client)
            assert await asyncio.gather(*tasks) == alone
        await until(lambda: client.health.state == "healthy")
        return pid, client.health


def test_a_killed_child_is_replaced_and_nothing_is_lost():
    async def kill(client):
        pid = client._host.pid
        call = asyncio.create_task(client.call("stats"))
        os.kill(pid, signal.SIGKILL)
        assert msgspec.convert(await call, EngineStats).num_pages == 256
        return pid

    pid, health = asyncio.run(disturbed(kill))
    assert (health.state, health.num_replacements) == ("healthy", 1)
    assert not is_alive(pid)


def test_a_stopped_child_goes_on_where_it_was():
    async def stop(client):
        pid = client._host.pid
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.health.state == "suspect" and "stopped" in client.health.reason)
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.health.state == "healthy")
        return pid

    _, health = asyncio.run(disturbed(stop))
    assert (health.state, health.num_replacements) == ("healthy", 0)


def test_a_child_that_stays_stopped_is_cleared_away_and_replaced():
    async def stop(client):
        pid, before = client._host.pid, client.health.num_replacements  # none, where it was not held up itself
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.health.num_replacements > before)
        return pid

    pid, health = asyncio.run(disturbed(stop, Config(log_level="error", freeze_grace_s=0)))
    assert health.state == "healthy"
    assert not is_alive(pid)


def test_a_child_that_is_killed_while_it_is_idle_or_starts_is_replaced():
    async def killed_twice(client) -> bool:
        """Idle, and then as it starts. Says whether it was not too late for that: what was ready is replaced, too."""
        first, before = client._host, client.health.num_replacements
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: client._host not in (None, first) and client._host._child is not None)
        os.kill(client._host.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(collect(client, make_request("a", "say:a")), PATIENCE_S))[0] == "a"
        return client.health.num_replacements == before + 1

    async def scenario():
        async with running("process") as client:
            for _ in range(20):
                if await killed_twice(client):
                    break
            else:
                raise AssertionError("it was never killed as it started")

    asyncio.run(scenario())


def test_closing_leaves_no_child():
    async def scenario():
        async with running("process") as client:
            pid = client._host.pid
            assert is_alive(pid)
        assert not is_alive(pid)

    asyncio.run(scenario())


def test_the_child_ends_when_its_parent_is_killed():
    code = """
import asyncio
from fake_engine import make_request
from tureen.config import Config
from tureen.serving.process import ProcessClient
from tureen.contract.types import NO_TOKEN, EngineStats

async def main():
    client = ProcessClient("fake_engine:make_slow_engine", Config())
    await client.start()
    print(client._host.pid, flush=True)
    async for delta in client.generate(make_request("r", max_new_tokens=1900)):
        pass

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    wait_until(lambda: not is_alive(child), "the end of the child")


def test_the_server_s_side_imports_no_torch():
    code = (
        "import sys, tureen.front.app, tureen.http.server, tureen.serving.process, tureen.text.tokenizer, "
        "tureen.build, tureen.cli.command_line; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_embeddings_and_hidden_states_cross_to_the_engine_and_back(kind):
    width = fake_engine.HIDDEN_SIZE
    embeds = struct.pack(f"<{3 * width}f", *range(3 * width))
    given = msgspec.structs.replace(
        make_request("e", max_new_tokens=2), token_ids=(NO_TOKEN,) * 3, embeds=embeds, hidden_states="all"
    )

    async def states(client, request):
        return [state async for delta in client.generate(request) for state in delta.hidden_states]

    async def scenario():
        async with running(kind) as client:
            one = await states(client, given)
            other = await states(client, msgspec.structs.replace(given, id="f", embeds=bytes(len(embeds))))
            assert [len(state) for state in one] == [4 * width] * 4
            assert one != other
            return one

    stored = blake2b((-1).to_bytes(8, "little", signed=True) + embeds[: 4 * width], digest_size=8).digest()
    first = blake2b(stored, digest_size=8).digest()[:width]  # what the fake runner makes of its first position
    assert struct.unpack(f"<{width}f", asyncio.run(scenario())[0]) == tuple(map(float, first))


def test_the_thread_of_an_engine_has_stack_for_its_grammars_whatever_the_default_is():
    seen = []

    def make(report):
        seen.append(stack_bytes())
        return fake_engine.make_engine(progress=report)

    async def scenario():
        client = InprocClient(make)
        default = threading.stack_size(256 << 10)
        try:
            await client.start()
        finally:
            threading.stack_size(default)
            await client.close()

    asyncio.run(scenario())
    assert seen[0] >= THREAD_BYTES
