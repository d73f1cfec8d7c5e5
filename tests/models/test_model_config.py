"""A ModelConfig says all there is to know of a decoder: compared with transformers and with the torch model."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tureen.layers.activation import GATED
from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.config import ACTIVATIONS
from tureen.models.torch_decoder import DecoderModel
from tureen.runner.loading import describe
from tureen.weights.source import ModelSource, model_config


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_names_and_shapes_of_the_weights_are_those_of_transformers(tmp_path, variant):
    model = tiny_models.write(tmp_path, variant)
    config = describe(model_config(ModelSource("m", tmp_path, "safetensors")))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert config.weights() == expected
    with torch.device("meta"):
        built = DecoderModel(config, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in built.weights().items()} == expected


def test_every_activation_that_a_config_may_name_exists():
    assert set(ACTIVATIONS) == set(GATED)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_rotary_frequencies_are_those_of_transformers_to_the_last_bits(kind, theta, head_dim):
    rope = {"rope_type": kind, "rope_theta": theta, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    if kind == "default":
        expected = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    else:
        hf = LlamaConfig(head_dim=head_dim, rope_parameters=rope, max_position_embeddings=65536)
        expected, _ = ROPE_INIT_FUNCTIONS[kind](hf, "cpu")
    found = frequencies(RopeConfig(theta, kind, factor=8.0), head_dim)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-7, atol=0)
