"""What the engine and a runner agree on: a step is plain data, and what came of it may be given later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import pytest
from samples import some
from world import CheckedRunner, simulate

from tureen.contract.runner import Batch, StepOutput


class FarRunner(CheckedRunner):
    """Takes each step, and gives its output, as bytes."""

    def run(self, batch, masks=None):
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=Batch)
        assert received == batch
        output = super().run(received, masks)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=StepOutput)


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(20), 6))
def test_a_step_and_its_output_can_be_sent_to_another_process(seed):
    simulate(seed, page_size=4, make_runner=FarRunner).check_answers()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(20), 6))
def test_a_runner_may_give_its_output_after_the_step_was_submitted(seed, thread):
    simulate(seed, page_size=4, make_runner=partial(CheckedRunner, thread=thread)).check_answers()


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(20), 6))
def test_a_step_may_fail_after_it_was_submitted(seed, thread):
    world = simulate(seed, page_size=4, fault_rate=0.05, make_runner=partial(CheckedRunner, thread=thread))
    world.check_answers(may_fail=True)
