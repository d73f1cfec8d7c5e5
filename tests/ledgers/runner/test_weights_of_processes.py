"""Packed weights in memory that processes share: nothing is lost when a process is."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "runner"))
from shared_arrays import VALUES, array, is_empty, never

from tureen.runner.shared_weights import SharedWeights

GUARDS = ("runner", "kernels")

kernels = pytest.importorskip("tureen.kernels.cpu._native")


@pytest.fixture
def shared():
    weights = SharedWeights()
    yield weights
    os.close(weights.descriptor)


class Other:
    """A process that calls `body(weights)` and stays until the test ends it."""

    def __init__(self, shared, body):
        ready, at_ready = os.pipe()
        end, at_end = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(at_end)
            try:
                kept = body(SharedWeights(shared.descriptor))  # noqa: F841 - it is in use as long as it lives
                os.write(at_ready, b"!")
                os.read(end, 1)
            finally:
                os._exit(0)
        os.close(at_ready)
        os.close(end)
        self._at_end = at_end
        self.is_ready = os.read(ready, 1) == b"!"
        os.close(ready)

    def end(self) -> int:
        os.close(self._at_end)
        return os.waitpid(self.pid, 0)[1]


def test_what_one_process_has_made_another_finds(shared):
    other = Other(shared, lambda weights: weights.take("origin", kernels, array))
    assert shared.has("origin")
    assert np.array_equal(shared.take("origin", kernels, never)["a"], VALUES)
    assert other.end() == 0


def test_weights_that_were_there_for_one_who_looked_are_there_when_it_takes_them(shared):
    """What was reckoned with them, such as the room for the KV cache, is right then."""
    other = Other(shared, lambda weights: weights.take("origin", kernels, array))
    assert shared.has("origin")
    assert other.end() == 0
    assert Other(shared, lambda weights: weights.free()).end() == 0
    assert np.array_equal(shared.take("origin", kernels, never)["a"], VALUES)


def test_weights_stay_while_a_process_uses_them_and_go_with_the_last(shared):
    other = Other(shared, lambda weights: weights.take("origin", kernels, array))
    mine = shared.take("origin", kernels, never)
    shared.free()
    assert not is_empty(shared)
    del mine
    shared.free()
    assert not is_empty(shared)
    other.end()
    shared.free()
    assert is_empty(shared)
    assert np.array_equal(shared.take("origin", kernels, array)["a"], VALUES)


def test_other_weights_do_not_replace_those_in_use(shared):
    other = Other(shared, lambda weights: weights.take("origin", kernels, array))
    later = {"a": VALUES + 1}
    assert shared.take("later", kernels, lambda: later) is later
    assert shared.has("origin")
    other.end()
    assert np.array_equal(shared.take("later", kernels, lambda: {"a": VALUES + 1})["a"], VALUES + 1)
    assert not shared.has("origin")


@pytest.mark.parametrize("moment", ["making", "writing"])
def test_a_process_that_is_killed_before_all_is_there_leaves_nothing_half_done(shared, monkeypatch, moment):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def body(weights):
        if moment == "making":
            return weights.take("origin", kernels, die)
        monkeypatch.setattr("tureen.runner.shared_weights.msgspec.json.encode", die)
        return weights.take("origin", kernels, array)

    other = Other(shared, body)
    assert not other.is_ready
    assert os.WTERMSIG(other.end()) == signal.SIGKILL
    assert not shared.has("origin")
    assert np.array_equal(shared.take("origin", kernels, array)["a"], VALUES)
