"""With weights of eight bits the native kernels predict a text nearly as float32 does.

tests/ledgers/models/test_native_perplexity.py measures every type of weights and inputs, over more text.
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
TEXT = Path(__file__).parents[1] / "data" / "perplexity.txt"


def _measure(token_ids, **settings):
    with tureen.Engine(max_total_tokens=1024, num_threads=1, **settings) as engine:
        return token_logprobs(engine, token_ids)


def test_weights_of_eight_bits_predict_a_text_nearly_as_float32_does(default_model_source):
    token_ids = find_model(Config()).tokenizer.encode(TEXT.read_text(encoding="utf-8"))[: CHUNK // 4]
    reference = _measure(token_ids, kernels="torch", dtype="float32")
    found = _measure(token_ids, kernels="native", quantization="int8")
    moved = [abs(one - other) for one, other in zip(found, reference, strict=True)]
    assert 5 < perplexity(reference) < 100
    assert math.fsum(moved) / len(moved) < 0.15
    assert perplexity(found) == pytest.approx(perplexity(reference), rel=0.04)
