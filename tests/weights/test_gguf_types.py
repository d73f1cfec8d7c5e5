"""A model whose matrices have every block type of GGUF, against transformers with the values that `gguf` computes."""

from __future__ import annotations

import itertools

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from runner_driver import PROMPT, Running, distance, generate
from transformers import Qwen3Config, Qwen3ForCausalLM

from tureen.config import Config
from tureen.contract.types import LogprobSpec
from tureen.runner.load import load_runner
from tureen.weights.gguf_widen import WIDENED
from tureen.weights.source import open_model

TYPES = ("MXFP4", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", *WIDENED)
HALVES = {"Q3_K": (108,), "Q2_K": (80, 82), "TQ1_0": (52,), "TQ2_0": (64,)}
SPREAD = 0.06


def _set_scales(name, raw, scale):
    """raw: [rows, blocks, bytes]"""
    bits = int(np.float16(scale).view(np.uint16))
    if name == "MXFP4":
        raw[..., 0] = 128 + np.round(np.log2(scale))
    elif name == "IQ1_M":  # four bits in each of the last four words
        for part in range(4):
            raw[..., 49 + 2 * part] = raw[..., 49 + 2 * part] & 15 | (bits >> 4 * part & 15) << 4
    else:
        for at in HALVES.get(name, (0,)):
            raw[..., at : at + 2] = bits & 255, bits >> 8


def _random_blocks(name, shape, rng):
    """Returns rows of a type whose values are about as large as those of a model, and these values."""
    kind = gguf.GGMLQuantizationType[name]
    length, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (shape[0], shape[1] // length, num_bytes), np.uint8)
    _set_scales(name, raw, 1.0)
    _set_scales(name, raw, SPREAD / gguf.dequantize(raw.reshape(shape[0], -1), kind).std())
    rows = raw.reshape(shape[0], -1)
    return (rows, kind), gguf.dequantize(rows, kind)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A GGUF file, and the model of transformers."""
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    oracle, rng, types = Qwen3ForCausalLM(config).eval(), np.random.default_rng(0), itertools.cycle(TYPES)
    stored = {}
    for name, parameter in oracle.named_parameters():
        stored[name] = parameter.detach().numpy()
        if parameter.ndim == 2:
            stored[name], values = _random_blocks(next(types), parameter.shape, rng)
            parameter.data = torch.from_numpy(values)
    path = tmp_path_factory.mktemp("types") / "m.gguf"
    return tiny_gguf.write_from_transformers(path, oracle, stored=stored.get), oracle


@pytest.mark.parametrize(
    ("settings", "close"),
    [
        ({"kernels": "torch", "dtype": "float32"}, 1e-4),
        ({"kernels": "native", "dtype": "float32"}, 1e-4),
        ({"kernels": "native", "activations": "int16"}, 2e-3),
        ({"kernels": "native", "activations": "int8"}, 0.3),
    ],
    ids=["torch", "float32", "int16", "int8"],
)
def test_every_type_gives_the_log_probabilities_of_transformers(model, settings, close):
    path, oracle = model
    runner = load_runner(open_model(path), Config(device="cpu", max_total_tokens=256, num_threads=1, **settings))
    sequence = Running(0, PROMPT, range(8), logprobs=LogprobSpec(prompt_start=0, top=256))
    generate(runner, sequence, 4, score=True)
    expected = tiny_models.logprobs(oracle, sequence.token_ids[:-1])
    reports = sequence.prompt_logprobs + sequence.output_logprobs
    far = [distance(report, row) for report, row in zip(reports, expected.tolist(), strict=True)]
    assert max(far) < close
