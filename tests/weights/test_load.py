"""Tensors of every kind of file, under the names and in the layout of transformers' own state dictionaries."""

from __future__ import annotations

import json
import struct

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from mapped_pages import resident_kib
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tureen.errors import StartupError
from tureen.weights.gguf import GgufFile
from tureen.weights.safetensors import save_float32
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import iter_stored
from tureen.weights.tensors import as_tensor

VARIANTS = ("llama", "llama-tied", "mistral-sliding", "qwen2", "qwen3", "gemma2", "gemma3", "granite", "smollm3")
SAME_FACTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings", "model_type",
              "sliding_window", "use_sliding_window")  # fmt: skip


def _load(path, kind):
    source = ModelSource("m", path, kind)
    return {stored.name: as_tensor(stored) for stored in iter_stored(source, model_config(source))}


def _fault(path, kind, config=None):
    source = ModelSource("m", path, kind)
    with pytest.raises(StartupError) as caught:
        list(iter_stored(source, model_config(source) if config is None else config))
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_model_is_read_back_as_it_was(tmp_path, variant):
    model = tiny_models.write(tmp_path / "hf", variant)
    path = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", model)
    tensors = _load(path, "gguf")
    expected = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=2e-7), name
        assert "norm" in name or torch.equal(tensor, expected[name]), name
    config = model_config(ModelSource("m", path, "gguf"))
    for key in SAME_FACTS:
        assert key not in config or config[key] == getattr(model.config, key), key
    assert config["architectures"] == model.config.architectures


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, np.float32), (torch.float16, np.float16), (torch.bfloat16, None)]
)
def test_tensors_that_are_not_quantised_keep_their_type(tmp_path, dtype, kind):
    values = torch.randn(256, 64).to(dtype)
    stored = values.numpy() if kind else (values.view(torch.uint8).numpy(), gguf.GGMLQuantizationType.BF16)
    path = tiny_gguf.write_gguf(
        tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), {"token_embd.weight": stored}
    )
    tensor = _load(path, "gguf")["model.embed_tokens.weight"]
    assert tensor.dtype == dtype
    assert torch.equal(tensor, values)


def test_quantised_tensors_become_float32_and_rows_of_q_and_k_go_back(tmp_path):
    rng = np.random.default_rng(0)
    kind = gguf.GGMLQuantizationType.Q8_0
    names = {"attn_q": 64, "attn_k": 32, "attn_v": 32}
    stored = {
        f"blk.0.{name}.weight": (gguf.quantize(rng.standard_normal((rows, 64), dtype=np.float32), kind), kind)
        for name, rows in names.items()
    }
    embedding = {"token_embd.weight": np.zeros((256, 64), np.float32)}
    metadata = tiny_gguf.architecture_metadata("llama")
    tensors = _load(tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata, stored | embedding), "gguf")
    for name, heads in {"q": 4, "k": 2, "v": None}.items():
        expected = torch.from_numpy(gguf.dequantize(*stored[f"blk.0.attn_{name}.weight"]))
        if heads:
            rows, columns = expected.shape
            expected = expected.view(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
        tensor = tensors[f"model.layers.0.self_attn.{name}_proj.weight"]
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected)


def test_a_tensor_of_no_known_name_is_named(tmp_path):
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), "blk.0.ssm_in.weight": np.zeros(4, np.float32)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    assert "'blk.0.ssm_in.weight'" in _fault(path, "gguf")


def test_rows_that_the_heads_cannot_share_are_named(tmp_path):
    tensors = {
        "token_embd.weight": np.zeros((256, 64), np.float32),
        "blk.0.attn_q.weight": np.zeros((63, 64), np.float32),
    }
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    assert "'blk.0.attn_q.weight' has 63 rows" in _fault(path, "gguf")


def _config_with_factors(tmp_path, factors, metadata):
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), "rope_freqs.weight": factors}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors)
    source = ModelSource("m", path, "gguf")
    config = model_config(source)
    assert [stored.name for stored in iter_stored(source, config)] == ["model.embed_tokens.weight"]
    return config


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_in_a_file_become_llama3_scaling(tmp_path, factor):
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(head_dim=64, rope_parameters=rope), "cpu")
    plain = 1 / 500000.0 ** (torch.arange(0, 64, 2) / 64)
    metadata = tiny_gguf.architecture_metadata("llama", rope__freq_base=500000.0, attention__key_length=64,
                                               attention__value_length=64)  # fmt: skip
    factors = (plain / scaled).numpy()
    config = _config_with_factors(tmp_path, factors, metadata)
    assert config["rope_scaling"] == {key: value for key, value in rope.items() if key != "rope_theta"}
    with pytest.raises(StartupError, match=r"'rope_freqs\.weight' is a rotary scaling other than"):
        _config_with_factors(tmp_path, factors[::-1].copy(), metadata)


@pytest.mark.model
def test_the_default_model_has_every_weight_of_its_architecture(default_model_source):
    config = model_config(default_model_source)
    with torch.device("meta"):
        expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    shapes = {stored.name: stored.shape for stored in iter_stored(default_model_source, config)}
    assert shapes == {name: tensor.shape for name, tensor in expected.items() if name != "lm_head.weight"}


@pytest.mark.model
def test_pages_of_the_default_model_are_given_back_after_reading(default_model_source):
    file = GgufFile(default_model_source.path)
    before = resident_kib(default_model_source.path)
    for info in file.tensors.values():
        file.raw(info).sum()
        file.release(info)
    assert resident_kib(default_model_source.path) - before < 4096


# folders


def _folder(path, tensors):
    path.mkdir()
    (path / "config.json").write_text("{}")
    for name, content in tensors.items():
        save_file(content, path / name)
    return path


def test_a_file_of_float32_that_is_written_here_is_read_by_safetensors(tmp_path):
    generator = np.random.default_rng(0)
    tensors = {"b": generator.normal(size=(3, 4)), "a": generator.normal(size=5), "empty": np.empty((0, 7))}
    tensors = {name: values.astype(np.float32) for name, values in tensors.items()}
    tensors["turned"] = tensors["b"].T
    save_float32(tensors, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(np.array_equal(values.numpy(), tensors[name]) for name, values in found.items())


def test_one_file_of_safetensors_is_read_as_it_is(tmp_path):
    tensors = {"a": torch.randn(3, 4), "b": torch.arange(5).to(torch.bfloat16)}
    loaded = _load(_folder(tmp_path / "m", {"model.safetensors": tensors}), "safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_files_named_by_an_index_are_read_and_no_others(tmp_path):
    files = {"x-1.safetensors": {"a": torch.ones(2)}, "x-2.safetensors": {"b": torch.zeros(3)},
             "consolidated.safetensors": {"other": torch.ones(1)}}  # fmt: skip
    folder = _folder(tmp_path / "m", files)
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(_load(folder, "safetensors")) == ["a", "b"]
    (folder / "x-2.safetensors").unlink()
    assert "x-2.safetensors: there is no such file" in _fault(folder, "safetensors")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "model.bin", 5])
def test_an_index_that_names_other_places_is_refused(tmp_path, name):
    folder = _folder(tmp_path / "m", {})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "names a file outside the folder" in _fault(folder, "safetensors")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}'])
def test_a_damaged_index_is_named(tmp_path, content):
    folder = _folder(tmp_path / "m", {})
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json: corrupt" in _fault(folder, "safetensors")


def test_a_folder_without_weights_is_named(tmp_path):
    assert "has no *.safetensors" in _fault(_folder(tmp_path / "m", {}), "safetensors")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:4],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: data[:8] + b"x" + data[9:],
        lambda data: data.replace(b"F32", b"Z99"),
        lambda data: data.replace(b'"shape":[2,3]', b'"shape":[2,9]'),
    ],
)
def test_a_damaged_file_of_safetensors_is_named(tmp_path, damage):
    folder = _folder(tmp_path / "m", {"model.safetensors": {"a": torch.randn(2, 3)}})
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert "model.safetensors: corrupt" in _fault(folder, "safetensors")


def test_quantised_checkpoints_are_refused_by_their_method(tmp_path):
    folder = _folder(tmp_path / "m", {"model.safetensors": {"a": torch.ones(1)}})
    assert "'aqlm'" in _fault(folder, "safetensors", {"quantization_config": {"quant_method": "aqlm"}})


def test_a_folder_written_by_transformers_is_read_back(tmp_path):
    model = tiny_models.write(tmp_path, "llama")
    loaded = _load(tmp_path, "safetensors")
    expected = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert loaded.keys() == dict(model.state_dict()).keys()
