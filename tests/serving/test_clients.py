"""What every engine client promises, for an engine that is simulated as if in a process, and what a thread promises
beside it. tests/servers/test_engine_clients.py has real processes."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import threading
import weakref

import fake_engine
import pytest
from client_contract import keeps_the_contract, spares_the_others
from simulated_processes import play
from stack_size import stack_bytes

from tureen.config import Config
from tureen.errors import StartupError
from tureen.sandbox.stacks import THREAD_BYTES
from tureen.serving import inproc
from tureen.serving.inproc import InprocClient
from tureen.serving.process import ProcessClient
from tureen.serving.startup_failure import OUT_OF_MEMORY


async def started(progress=lambda *_: None):
    client = ProcessClient("fake_engine:make_slow_engine", Config(log_level="error"))
    await client.start(progress)
    return client


@pytest.mark.usefixtures("processes")
def test_a_healthy_engine_keeps_the_contract():
    phases = []

    async def scenario():
        await keeps_the_contract(await started(lambda *phase: phases.append(phase)), phases)

    play(scenario)


@pytest.mark.usefixtures("processes")
def test_a_request_that_makes_the_engine_raise_is_ended_and_no_other():
    async def scenario():
        client = await started()
        await spares_the_others(client)
        await client.close()

    play(scenario)


def in_thread(factory):
    return InprocClient(lambda report: factory(Config(log_level="error"), progress=report))


def test_a_request_that_makes_an_engine_in_a_thread_raise_is_ended_and_no_other():
    async def scenario():
        client = in_thread(fake_engine.make_engine)
        await client.start()
        await spares_the_others(client)
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (fake_engine.refuse_to_start, "the model is missing; use --model-path"),
        (fake_engine.crash_at_start, "the engine could not be built: ValueError"),
        (fake_engine.run_out_of_memory, OUT_OF_MEMORY),
    ],
)
def test_an_engine_in_a_thread_that_cannot_start_says_why(factory, message, caplog):
    async def scenario():
        client = in_thread(factory)
        with pytest.raises(StartupError) as refused:
            await client.start()
        assert refused.value.message == message
        await client.close()

    asyncio.run(scenario())
    assert bool(caplog.records) is (factory is fake_engine.crash_at_start)  # of a fault of the program, a traceback


def test_the_thread_of_an_engine_has_stack_for_its_grammars_whatever_the_default_is():
    seen = []

    def make(config, progress):
        seen.append(stack_bytes())
        return fake_engine.make_engine(config, progress=progress)

    async def scenario():
        client = in_thread(make)
        default = threading.stack_size(256 << 10)
        try:
            await client.start()
        finally:
            threading.stack_size(default)
            await client.close()

    asyncio.run(scenario())
    assert seen[0] >= THREAD_BYTES


class Ring:
    """An object that holds itself."""

    def __init__(self):
        self.itself = self


def test_what_an_ended_engine_leaves_is_freed_though_it_was_kept_for_good():
    spec = importlib.util.spec_from_file_location("inproc_as_it_is", inproc.__file__)  # conftest.py replaced a part
    as_it_is = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(as_it_is)
    left = weakref.ref(Ring())
    gc.freeze()
    as_it_is._forget()
    assert left() is None
    assert gc.get_freeze_count() > 0
