"""What every engine client promises, with a real thread and a real process, which is killed and stopped. Each moment
at which that may happen is simulated in tests/serving."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import fake_engine
import msgspec
import pytest
from fake_engine import make_request
from timeouts import until, wait_until

sys.path.append(str(Path(__file__).parents[1] / "serving"))
from client_contract import collect, keeps_the_contract, spares_the_others

from tureen.config import Config
from tureen.contract.types import NO_TOKEN, EngineStats
from tureen.errors import StartupError
from tureen.serving.inproc import InprocClient
from tureen.serving.process import ProcessClient

CONFIG = Config(log_level="error")


@pytest.fixture(autouse=True)
def child_finds_our_factories(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(fake_engine.__file__).parent), prepend=os.pathsep)


def make_client(kind: str, factory: str = "make_slow_engine"):
    if kind == "process":
        return ProcessClient(f"fake_engine:{factory}", CONFIG)
    make = getattr(fake_engine, factory)
    return InprocClient(lambda report: make(CONFIG, progress=report), watchdog_timeout_s=CONFIG.watchdog_timeout_s)


def test_a_healthy_engine_keeps_the_contract():
    for kind in ("thread", "process"):
        keeps_what_a_client_promises(kind)


def keeps_what_a_client_promises(kind: str) -> None:
    phases = []

    async def scenario():
        client = make_client(kind)
        await client.start(lambda *phase: phases.append(phase))
        if kind == "process":
            await crosses_with_embeddings(client)
            assert await client.call("cold_structs") == []  # else two threads of it may decode at once, and crash
            await spares_the_others(client, salt="abort")  # test_clients.py has one that raises
        await keeps_the_contract(client, phases)
        assert client.stats.step_ms >= fake_engine.SLOW_STEP_S * 1000

    asyncio.run(scenario())


async def crosses_with_embeddings(client):
    """Embeddings reach the engine, and hidden states come back."""
    width = fake_engine.HIDDEN_SIZE
    embeds = struct.pack(f"<{3 * width}f", *range(3 * width))
    given = msgspec.structs.replace(
        make_request("e", max_new_tokens=2), token_ids=(NO_TOKEN,) * 3, embeds=embeds, hidden_states="all"
    )
    states = [state async for delta in client.generate(given) for state in delta.hidden_states]
    stored = blake2b((-1).to_bytes(8, "little", signed=True) + embeds[: 4 * width], digest_size=8).digest()
    first = blake2b(stored, digest_size=8).digest()[:width]  # what the fake runner makes of its first position
    assert struct.unpack(f"<{width}f", states[0]) == tuple(map(float, first))
    assert [len(state) for state in states] == [4 * width] * 4


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_child_that_is_killed_or_stopped_loses_nothing_and_closing_leaves_none():
    async def scenario():
        client = make_client("process")
        await client.start()
        asked = [make_request(f"r{i}", "ab" * i + "c", max_new_tokens=60) for i in range(4)]
        alone = [await collect(client, one) for one in asked]
        for disturb in (kill, stop):
            streams = [asyncio.create_task(collect(client, one)) for one in asked]
            await until(lambda: client.stats.num_running == len(asked), "all run")
            await disturb(client)
            assert await asyncio.gather(*streams) == alone
            await until(lambda: client.health.state == "healthy", "it is well")
        pid = client._host.pid
        await client.close()
        return pid

    async def kill(client):
        pid, before = client._host.pid, client.health.num_replacements
        call = asyncio.create_task(client.call("stats"))
        os.kill(pid, signal.SIGKILL)
        assert msgspec.convert(await call, EngineStats).num_pages == 256
        await until(lambda: client.health.num_replacements > before, "it is replaced")
        assert not is_alive(pid)

    async def stop(client):
        pid, before = client._host.pid, client.health.num_replacements
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.health.state == "suspect" and "stopped" in client.health.reason, "it is noticed")
        os.kill(pid, signal.SIGCONT)
        await until(lambda: client.health.state == "healthy", "it goes on")
        assert (client._host.pid, client.health.num_replacements) == (pid, before)

    assert not is_alive(asyncio.run(scenario()))


WHY = {
    "refuse_to_start": "the model is missing; use --model-path",
    "crash_at_start": "the engine could not be built: ValueError",
}


def test_a_child_that_cannot_start_says_why():
    async def reason(factory):
        client = make_client("process", factory)
        with pytest.raises(StartupError) as refused:
            await client.start()
        await client.close()
        return refused.value.message

    assert {factory: asyncio.run(reason(factory)) for factory in WHY} == WHY


def test_the_child_ends_when_its_parent_is_killed():
    code = """
import asyncio
from fake_engine import make_request
from tureen.config import Config
from tureen.serving.process import ProcessClient

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


def test_the_server_s_side_imports_no_torch_and_nothing_that_decodes_pictures():
    code = (
        "import sys, tureen.app.application, tureen.http.server, tureen.serving.process, tureen.text.tokenizer, "
        "tureen.build, tureen.cli.command_line, tureen.media.loader; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'PIL', 'av')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
