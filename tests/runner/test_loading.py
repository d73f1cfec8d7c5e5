import json
import shutil

import numpy as np
import pytest
import torch
from runner_driver import folder_source
from safetensors.torch import load_file, save_file
from tiny_models import GEMMA, write

from tureen.config import Config
from tureen.devices.base import resolve_device
from tureen.errors import StartupError
from tureen.log import no_progress
from tureen.models import gemma3
from tureen.runner import loading, torch_pool
from tureen.runner.load import load_runner
from tureen.weights.stored import to_float32


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write(folder, "llama")
    return folder


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(folder):
    return load_runner(
        folder_source(folder), Config(device="cpu", dtype="float32", max_total_tokens=512, num_threads=1)
    )


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def test_a_missing_weight_is_named(folder):
    change_weights(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(StartupError, match=r"lacks 1 weights: model\.layers\.1\.mlp\.up_proj\.weight$"):
        load(folder)


def test_an_unknown_weight_is_named(folder):
    change_weights(folder, lambda weights: weights.update({"model.layers.1.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(StartupError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(folder)


def test_an_unknown_bias_that_adds_nothing_is_no_fault(folder):
    change_weights(folder, lambda weights: weights.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))
    load(folder)


def test_a_misshapen_weight_is_named_with_both_shapes(folder):
    change_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(StartupError, match=r"model\.norm\.weight has shape \[63\], config.json says \[64\]"):
        load(folder)


def test_a_tied_head_that_the_file_repeats_is_no_fault(folder):
    change_config(folder, tie_word_embeddings=True)
    load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, r"rope_scaling: 'dynamic' is not supported"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": -0.5}}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.5}},
            "partial_rotary_factor.*at most 1",
        ),
        ({"hidden_act": "relu"}, r"hidden_act: 'relu' is not supported; known: silu"),
        ({"num_hidden_layers": None}, r"num_hidden_layers: is missing"),
        ({"num_hidden_layers": "two"}, r"num_hidden_layers: must be a positive integer, got 'two'"),
        ({"hidden_size": -64}, r"hidden_size: must be a positive integer, got -64"),
        ({"num_key_value_heads": 3}, r"num_attention_heads: 4 is not a multiple of num_key_value_heads, 3"),
        ({"architectures": []}, r"architecture \(none in config.json\)"),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_key(folder, changes, message):
    change_config(folder, **changes)
    with pytest.raises(StartupError, match=message):
        load(folder)


def test_gemma3_configs_of_both_styles_mean_the_same():
    shape = {
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    new = gemma3.parse(shape | {"rope_parameters": GEMMA["rope_parameters"], "sliding_window": 12})
    older = {"rope_local_base_freq": 10000.0, "rope_theta": 100000.0, "sliding_window_pattern": 6, "sliding_window": 12}
    assert gemma3.parse(shape | older | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}) == new
    assert new.windows == (12, 12, 12, 12, 12, None)


def _write_larger(folder, variant, family, prefix, others):
    """Write a larger model of this family around a text model; its weights' names get the prefix. others: names."""
    write(folder / "text", variant)
    text = json.loads((folder / "text" / "config.json").read_text())
    whole = {"architectures": [f"{family}ForConditionalGeneration"], "model_type": family.lower(), "text_config": text}
    (folder / "config.json").write_text(json.dumps(whole))
    weights = load_file(folder / "text" / "model.safetensors")
    renamed = {f"{prefix}{name.removeprefix('model.')}": tensor for name, tensor in weights.items()}
    save_file(renamed | {name: torch.zeros(3) for name in others}, folder / "model.safetensors")


def test_the_text_part_of_a_larger_gemma3_is_served(tmp_path, original):
    _write_larger(tmp_path, "gemma3", "Gemma3", "language_model.model.", ["vision_tower.weight"])
    load(tmp_path)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_text_part_of_a_larger_gemma4_is_served(tmp_path, prefix):
    parts = [f"{prefix}{part}.x.weight" for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")]
    unused = [
        f"model.language_model.layers.5.self_attn.{name}_proj.weight" for name in "kv"
    ]  # of a layer with shared keys
    _write_larger(tmp_path, "gemma4-shared", "Gemma4", "model.language_model.", [*parts, *unused])
    load(tmp_path)


def test_random_weights_are_those_of_the_config_and_the_same_at_every_start():
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 64}
    config = gemma3.parse({"architectures": ["Gemma3ForCausalLM"], **small})
    first, second = (
        {one.name: one for one in loading.weights(None, {}, config, load_format="dummy", progress=no_progress)}
        for _ in range(2)
    )
    assert {name: one.shape for name, one in first.items()} == config.weights()
    for name, one in first.items():
        values = to_float32(one)
        assert np.array_equal(values, to_float32(second[name]))
        assert (values == 1).all() if "norm" in name else 0.019 < values.std() < 0.021


def test_large_random_weights_are_soon_there_and_no_row_is_like_another(monkeypatch):
    monkeypatch.setattr(loading, "MOST_DRAWN", 61)
    (stored,) = loading.random_weights({"large.weight": (20, 64)})
    values = to_float32(stored)
    assert values.shape == (20, 64)
    assert len(np.unique(values)) == 61
    assert len(np.unique(values, axis=0)) == 20


def test_untouched_pages_of_the_pool_take_no_memory():
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    model = gemma3.parse({"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2})
    cpu = resolve_device("cpu")
    before = resident()
    pool = torch_pool.allocate(model.kv_layers, torch.bfloat16, num_pages=4096, page_size=16, device=cpu)
    assert sum(tensor.nbytes for tensor in (*pool.keys, *pool.values)) > 1 << 28
    assert resident() - before < 1 << 24
    assert not pool.keys[1][4000].any()
    assert pool.keys[0].dtype == torch.bfloat16
