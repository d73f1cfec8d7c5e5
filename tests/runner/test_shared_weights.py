"""Packed weights in memory that processes share: the same bytes, one copy, and nothing is lost when a process is."""

import os

import numpy as np
import pytest
from runner_driver import folder_source
from shared_arrays import VALUES, array, is_empty, never
from tiny_models import write

from tureen.config import Config
from tureen.runner import native
from tureen.runner.load import load_runner
from tureen.runner.packed_copy import bytes_of
from tureen.runner.shared_weights import SharedWeights

kernels = pytest.importorskip("tureen.kernels.cpu._native")


@pytest.fixture
def shared():
    weights = SharedWeights()
    yield weights
    os.close(weights.descriptor)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_weights_that_are_shared_are_those_that_are_packed_alone(tmp_path, monkeypatch, shared, quantization):
    write(tmp_path, "qwen2")  # has biases: vectors that are not norms
    seen, record = [], native.record

    def recording(tape, model, context, weights):
        seen.append({name: bytes_of(weight).tobytes() for name, weight in weights.items()})
        record(tape, model, context, weights)

    monkeypatch.setattr(native, "record", recording)
    config = Config(device="cpu", num_threads=1, max_total_tokens=512, quantization=quantization, packed_cache=False)
    source, phases = folder_source(tmp_path), []

    def load(where, **settings):
        phases.append(set())
        return load_runner(source, config, progress=lambda phase, *_: phases[-1].add(phase), shared=where)

    kept = [load(None), load(shared), load(shared)]
    assert seen[0] == seen[1] == seen[2]
    assert phases == [{"load weights"}, {"load weights"}, set()]
    del kept


def test_weights_that_are_shared_cannot_be_written_to(shared):
    with pytest.raises(ValueError, match="read-only"):
        shared.take("origin", kernels, array)["a"][0] = 1


def test_a_process_that_has_them_mapped_keeps_them_when_it_gets_others(shared):
    first = shared.take("origin", kernels, array)
    second = shared.take("later", kernels, lambda: {"a": VALUES + 1})
    shared.free()
    assert np.array_equal(first["a"], VALUES)
    assert np.array_equal(second["a"], VALUES + 1)
    assert np.array_equal(shared.take("origin", kernels, never)["a"], VALUES)


def test_where_there_is_no_room_each_has_its_own(shared, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tureen.runner.shared_weights._write_all", full)
    assert np.array_equal(shared.take("origin", kernels, array)["a"], VALUES)
    assert "No space left" in caplog.text
    assert is_empty(shared)
