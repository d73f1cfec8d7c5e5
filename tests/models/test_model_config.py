"""A ModelConfig says all there is to know of a decoder: compared with transformers and with the torch model."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_models
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tureen.errors import StartupError
from tureen.layers.activation import GATED
from tureen.layers.rope import RopeConfig, frequencies
from tureen.models.config import ACTIVATIONS
from tureen.models.torch_decoder import DecoderModel
from tureen.runner.loading import describe
from tureen.weights.source import ModelSource, model_config

LOW_IS_HIGH = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 4,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_names_and_shapes_of_the_weights_are_those_of_transformers(tmp_path, variant):
    model = tiny_models.write(tmp_path, variant)
    config = describe(model_config(ModelSource("m", tmp_path, "safetensors")))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = dict(part for pair in shapes.items() for part in _apart(*pair, model.config))
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert config.weights() == expected
    with torch.device("meta"):
        built = DecoderModel(config, torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in built.weights().items()} == expected


def _apart(name, shape, config):
    """Names and shapes of the matrices that transformers keeps in one."""
    if name.endswith("experts.gate_up_proj"):
        num_experts, rows, columns = shape
        halves = ("gate_proj", "up_proj")
        stem = name.removesuffix("gate_up_proj")
        return [(f"{stem}{i}.{half}.weight", (rows // 2, columns)) for i in range(num_experts) for half in halves]
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return [(f"{stem}{index}.down_proj.weight", shape[1:]) for index in range(shape[0])]
    if "gate_up_proj" in name:
        halves = (name.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj"))
        return [(half, (shape[0] // 2, shape[1])) for half in halves]
    if "qkv_proj" in name:
        size = shape[0] // (config.num_attention_heads + 2 * config.num_key_value_heads)
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        return [(name.replace("qkv", letter), (size * count, shape[1])) for letter, count in heads.items()]
    return [(name, shape)]


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
    found = frequencies(RopeConfig(theta, kind, factor=8.0), head_dim, 65536)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.numpy(), rtol=5e-7, atol=0)


@pytest.mark.parametrize(
    ("architecture", "changes", "key"),
    [
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling"),
        ("LlamaForCausalLM", {"rope_theta": float("inf")}, "rope_theta"),
        ("LlamaForCausalLM", {"rope_scaling": LOW_IS_HIGH}, "low_freq_factor"),
        ("Qwen2ForCausalLM", {"layer_types": 5, "use_sliding_window": True}, "layer_types"),
        ("Qwen2ForCausalLM", {"layer_types": [["a"], ["b"]], "use_sliding_window": True}, "layer_types"),
        ("Qwen3ForCausalLM", {"max_window_layers": "2"}, "max_window_layers"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers"),
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("MixtralForCausalLM", {"num_local_experts": 1}, "num_experts_per_tok"),
        ("Gemma3ForConditionalGeneration", {"text_config": "x"}, "text_config"),
        ("Phi3ForCausalLM", {"rope_scaling": [1]}, "rope_scaling"),
    ],
)
def test_a_config_that_cannot_be_is_refused_by_the_key_at_fault(architecture, changes, key):
    hf = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    hf |= {"num_attention_heads": 4, "num_key_value_heads": 2, "architectures": [architecture]}
    with pytest.raises(StartupError, match=key):
        describe(hf | changes)


def test_qwen_has_no_windows_where_its_config_switches_them_off():
    hf = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    hf |= {"num_attention_heads": 4, "layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
    hf["architectures"] = ["Qwen2ForCausalLM"]
    assert describe(hf | {"use_sliding_window": False}).windows == (None, None)
    assert describe(hf | {"use_sliding_window": True}).windows == (8, 8)
