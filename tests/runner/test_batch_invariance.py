"""Logits are the same to the last bit whatever else is computed, and however it is cut into steps."""

import functools
import random

import numpy as np
import pytest
from runner_driver import folder_source, random_tokens
from samples import some
from tiny_models import write

from tureen.config import Config
from tureen.contract.runner import Batch, Row
from tureen.lora.adapter import Factors
from tureen.runner.load import load_runner

pytest.importorskip("tureen.kernels.cpu._native")

PROMPT = tuple(random_tokens(83, 3))
PAGE = 16
KINDS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8, inputs of 16 bits": {"quantization": "int8", "activations": "int16"},
    "int4, inputs of 16 bits": {"quantization": "int4", "activations": "int16"},
    "experts, inputs of 16 bits": {"quantization": "int8", "activations": "int16"},
    "bfloat16 cache": {"quantization": "int8", "kv_cache_dtype": "bfloat16"},
    "int4, int8 cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "int4 cache": {"quantization": "int8", "kv_cache_dtype": "int4"},
    "experts": {"quantization": "int8"},
    "softcaps": {"dtype": "bfloat16"},
    "latents": {"quantization": "int8"},
    "latents, int8 cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "layers that differ": {"quantization": "int8"},
    "streams": {"quantization": "int4"},
    "keys as values, int8 cache": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "keys as values, int4 cache": {"quantization": "int4", "kv_cache_dtype": "int4"},
    "adapters": {"quantization": "int8"},
}
VARIANTS = {
    "bfloat16": "gemma3",
    "experts": "qwen2-moe",
    "experts, inputs of 16 bits": "qwen2-moe",
    "softcaps": "gemma2-softcaps",
    "latents": "deepseek-v3",
    "latents, int8 cache": "deepseek-v2",
    "layers that differ": "gemma4-moe",
    "streams": "gemma3n",
    "keys as values, int8 cache": "gemma4",
    "keys as values, int4 cache": "gemma4",
}
"""Of models; the others are llama."""
ADAPTERS = (0, 0, 1, 2)
"""Of rows; the row that is looked at has the last where there are any."""


@pytest.fixture(scope="module", params=KINDS)
def forward(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write(folder, VARIANTS.get(request.param, "llama"))
    config = Config(kernels="native", num_threads=2, page_size=PAGE, max_total_tokens=32768, **KINDS[request.param])
    forward = load_runner(folder_source(folder), config).forward
    for number, rank in ((1, 3), (2, 8)):
        forward.load_adapter(number, _make_adapter(number, rank) if request.param == "adapters" else {})
    return forward


def _make_adapter(seed, rank):
    """For the tiny llama: its hidden size is 64, its mlp's 96, and q has 64 outputs, k 32."""
    rng = np.random.default_rng(seed)
    sizes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 32), "mlp.up_proj": (64, 96)}
    sizes |= {"self_attn.o_proj": (64, 64), "mlp.down_proj": (96, 64)}
    return {
        f"model.layers.{layer}.{name}": Factors(
            rng.standard_normal((rank, inputs), np.float32) * 0.1, rng.standard_normal((outputs, rank), np.float32)
        )
        for layer in range(2)
        for name, (inputs, outputs) in sizes.items()
    }


def _make_mates(count, seed=0):
    """Rows of other sequences, of many lengths and at many positions, on pages of their own."""
    rng = random.Random(seed)
    for index in range(count):
        start, length = rng.randrange(60), rng.choice((1, 1, 1, 2, 7, 16, 30))
        pages = tuple(range(100 + 8 * index, 108 + 8 * index))
        token_ids = tuple(rng.randrange(256) for _ in range(length))
        yield Row(1 + index, token_ids, start, pages, bool(index % 3), ADAPTERS[index % len(ADAPTERS)])


def _scored_row(token_ids, start, pages):
    """A row of which all logits are asked for."""
    targets = (0,) * len(token_ids)
    return Row(0, token_ids, start, pages, True, ADAPTERS[-1], score_targets=targets)


def _all_of(pieces):
    return np.concatenate([np.array(piece) for piece in pieces])


def _compute(forward, cuts, *, mates=0, pages=tuple(range(10)), at=0, token_ids=PROMPT):
    """Logits of every position [tokens, vocab], computed in chunks that end at `cuts`, at place `at` in each batch."""
    found, start = [], 0
    for end in (*cuts, len(token_ids)):
        others = list(_make_mates(mates, seed=end))
        rows = [*others[:at], _scored_row(token_ids[start:end], start, pages), *others[at:]]
        output = forward.run(Batch(tuple(rows)))
        scored = _all_of(output.scored)
        assert np.array_equal(scored[-1], output.logits[sum(row.sample for row in rows[:at])])
        found.append(scored)
        start = end
    return np.concatenate(found)


@pytest.fixture(scope="module")
def alone(forward):
    return _compute(forward, ())


MATES = (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63)
CHUNKS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 32, 33, 63, 64, 65, 82)


@pytest.mark.sampled
@pytest.mark.parametrize("mates", [*MATES, *some(sorted({*range(1, 64)} - {*MATES}), 0)])
def test_logits_do_not_depend_on_the_number_of_rows_in_a_batch(forward, alone, mates):
    last = len(PROMPT) - 1
    assert np.array_equal(_compute(forward, (last,), mates=mates, at=mates // 2), alone)


@pytest.mark.sampled
@pytest.mark.parametrize("chunk", [*CHUNKS, *some(sorted({*range(1, 83)} - {*CHUNKS}), 0)])
def test_logits_do_not_depend_on_how_a_prompt_is_cut_into_chunks(forward, alone, chunk):
    assert np.array_equal(_compute(forward, range(chunk, len(PROMPT), chunk)), alone)


def test_logits_of_a_long_sequence_are_the_same_where_threads_share_its_keys(forward):
    """Alone, one token's attention is dealt out in pieces of 512 keys; in company, and in a long chunk, it is not."""
    token_ids = tuple(random_tokens(1300, 4))
    compute = functools.partial(_compute, forward, pages=tuple(range(700, 782)), token_ids=token_ids)
    at_once = compute(())
    assert np.array_equal(compute((1297, 1298, 1299)), at_once)
    assert np.array_equal(compute((1200, 1299), mates=20), at_once)


def test_logits_do_not_depend_on_which_pages_are_used(forward, alone):
    assert np.array_equal(_compute(forward, (40,), pages=(7, 90, 3, 55, 21, 8), mates=5), alone)


@pytest.mark.parametrize("shared", [16, 48, 80])
def test_logits_after_a_prefix_that_another_sequence_computed_are_the_same(forward, alone, shared):
    _compute(forward, (), pages=tuple(range(20, 30)), token_ids=PROMPT[:shared])
    pages = tuple(range(20, 20 + shared // PAGE)) + tuple(range(40, 50))
    row = _scored_row(PROMPT[shared:], shared, pages)
    assert np.array_equal(_all_of(forward.run(Batch((row, *_make_mates(3)))).scored), alone[shared:])


def test_logits_of_a_sequence_that_was_preempted_and_computed_again_are_the_same(forward, alone):
    token_by_token = _compute(forward, range(40, len(PROMPT)), mates=9)
    resumed = _compute(forward, (64,), pages=tuple(range(60, 70)), mates=2)
    assert np.array_equal(token_by_token, alone)
    assert np.array_equal(resumed, alone)
