"""The native kernels, also with activations and weights of eight bits, predict a text as float32 does.

The default model has inputs of 16 bits, which are nearly exact. Rounding to eight bits moves each logarithm of a
probability by some hundredths, at random: over 2,000 tokens the perplexity then moves by a quarter of a per cent either
way, beside what is lost.
"""

import importlib.util
import math
from pathlib import Path

import pytest

import tureen
from tureen.bench.perplexity import CHUNK, perplexity, token_logprobs
from tureen.build import find_model
from tureen.config import Config

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        importlib.util.find_spec("tureen.kernels.cpu._native") is None, reason="the native kernels were not built"
    ),
]
GUARDS = ("kernels", "models", "runner", "weights")

TEXT = Path(__file__).parents[2] / "data" / "perplexity.txt"


def _measure(token_ids, **settings):
    with tureen.Engine(max_total_tokens=8192, num_threads=2, **settings) as engine:
        return token_logprobs(engine, token_ids)


@pytest.fixture(scope="module")
def token_ids(default_model_source):
    """Four chunks from all parts of the text: prose, documents, law, code."""
    found = find_model(Config()).tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert len(found) > 20 * CHUNK
    return [token_id for chunk in (0, 5, 10, 15) for token_id in found[chunk * CHUNK : (chunk + 1) * CHUNK]]


@pytest.fixture(scope="module")
def reference(token_ids):
    """torch in float32, from the same dequantised weights."""
    found = _measure(token_ids, kernels="torch", dtype="float32")
    assert 5 < perplexity(found) < 100  # the model, not noise
    return found


@pytest.mark.parametrize(
    ("settings", "ratio", "difference"),
    [
        ({"dtype": "float32"}, 1e-4, 1e-3),
        ({"dtype": "bfloat16"}, 2e-3, 0.03),
        ({}, 1e-3, 0.01),
        ({"activations": "int8"}, 0.01, 0.08),
        ({"quantization": "int8"}, 0.02, 0.15),
        ({"kv_cache_dtype": "int8"}, 0.003, 0.022),
        ({"kv_cache_dtype": "int4"}, 0.02, 0.12),
    ],
    ids=["float32", "bfloat16", "as stored", "as stored, inputs of 8 bits", "int8", "int8 cache", "int4 cache"],
)
def test_the_native_kernels_predict_a_text_as_float32_does(token_ids, reference, settings, ratio, difference):
    found = _measure(token_ids, kernels="native", **settings)
    moved = [abs(one - other) for one, other in zip(found, reference, strict=True)]
    assert math.fsum(moved) / len(moved) < difference
    assert perplexity(found) == pytest.approx(perplexity(reference), rel=ratio)
