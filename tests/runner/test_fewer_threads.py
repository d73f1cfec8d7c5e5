"""A pool that adapts tries fewer threads between steps: no bit of a result depends on it."""

import random

import numpy as np
import pytest
from runner_driver import folder_source
from tiny_models import write

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.devices import base
from tureen.runner.load import load_runner

pytest.importorskip("tureen.kernels.cpu._native")

PAGE = 16
STEPS = 29
"""Steps before fewer threads are tried, and those that a trial takes."""


@pytest.fixture(params=["llama", "qwen2-moe"])
def source(request, tmp_path):
    write(tmp_path, request.param)
    return folder_source(tmp_path)


def _load(source, threads):
    config = Config(kernels="native", num_threads=threads, page_size=PAGE, max_total_tokens=32768, quantization="int8")
    return load_runner(source, config).forward


def _make_batch(rows, length):
    rng = random.Random(5)
    ids = [tuple(rng.randrange(256) for _ in range(length)) for _ in range(rows)]
    return Batch(tuple(Row(i, ids[i], 0, tuple(range(i * 8, i * 8 + 8)), True) for i in range(rows)))


@pytest.mark.parametrize(("rows", "length"), [(1, 1), (1, 7), (5, 1), (16, 1), (2, 30)])
def test_every_number_of_threads_that_is_tried_gives_the_same_bits(monkeypatch, source, rows, length):
    monkeypatch.setattr(base.cpu, "num_threads", lambda: 4)
    batch = _make_batch(rows, length)
    alone = _load(source, 1)
    expected = alone.run(batch).logits.copy()
    adapting = _load(source, None)
    used = set()
    for _ in range(STEPS):
        logits = adapting.run(batch).logits
        used.add(adapting.threads)
        assert np.array_equal(logits, expected)
    assert len(used) > 1
    assert max(used) == 4


def test_a_number_of_threads_that_was_asked_for_is_kept(source):
    forward = _load(source, 2)
    batch = _make_batch(1, 1)
    for _ in range(2 * STEPS):
        forward.run(batch)
        assert forward.threads == 2
