"""Weights as they are stored: views of the file with a name, an order of rows and what is to be added."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_models
import torch
from gguf.quants import quantize
from mapped_pages import resident_kib
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from samples import either

from tureen import extras
from tureen.errors import StartupError
from tureen.models import latents
from tureen.runner.loading import describe
from tureen.weights.gguf import GgufFile
from tureen.weights.gguf_widen import WIDENED, note
from tureen.weights.safetensors import MAX_HEADER, SafetensorsFile
from tureen.weights.source import ModelSource, model_config
from tureen.weights.stored import Stored, iter_stored, to_float32


def _make_folder(path, tensors):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text("{}")
    save_file(tensors, path / "model.safetensors")
    return ModelSource("m", path, "safetensors")


def _stored(source):
    return {stored.name: stored for stored in iter_stored(source, model_config(source))}


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "mistral-sliding", "qwen2", "qwen3", "gemma3"])
def test_values_of_a_converted_model_and_of_its_folder_are_those_of_transformers(tmp_path, variant):
    model = tiny_models.write(tmp_path / "hf", variant)
    path = tiny_gguf.write_from_transformers(tmp_path / "m.gguf", model)
    expected = dict(model.state_dict())
    for source in (ModelSource("m", path, "gguf"), ModelSource("m", tmp_path / "hf", "safetensors")):
        stored = _stored(source)
        assert stored.keys() == expected.keys() - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
        for name, one in stored.items():
            assert one.shape == tuple(expected[name].shape)
            np.testing.assert_allclose(to_float32(one), expected[name].numpy(), rtol=0, atol=2e-7)


def test_rows_of_a_quantised_matrix_are_named_and_not_moved(tmp_path):
    values = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    kind = gguf.GGMLQuantizationType.Q4_0
    raw = quantize(values, kind)
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), "blk.0.attn_q.weight": (raw, kind)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    stored = _stored(ModelSource("m", path, "gguf"))["model.layers.0.self_attn.q_proj.weight"]
    assert (stored.encoding, stored.shape) == ("Q4_0", (64, 64))
    assert stored.data.tobytes() == raw.tobytes()
    heads = np.arange(64).reshape(4, 8, 2)  # of 16 rows each: the file has rows 0 and 8 of a head side by side
    assert stored.row_order.tolist() == [*np.concatenate((heads[..., 0], heads[..., 1]), axis=1).reshape(-1)]
    np.testing.assert_array_equal(to_float32(stored), gguf.dequantize(raw, kind)[stored.row_order])


def test_a_bias_goes_with_its_rows(tmp_path):
    bias = np.arange(64, dtype=np.float32)
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), "blk.0.attn_q.bias": bias}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    stored = _stored(ModelSource("m", path, "gguf"))["model.layers.0.self_attn.q_proj.bias"]
    assert to_float32(stored)[:16].tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]


MIXTURE = {"expert_count": 3, "expert_used_count": 2}


def _write_layer(path, tensors, architecture="qwen3moe"):
    metadata = tiny_gguf.architecture_metadata(architecture, **MIXTURE)
    tensors = {f"blk.0.{name}.weight": tensor for name, tensor in tensors.items()}
    embedding = {"token_embd.weight": np.zeros((256, 64), np.float32)}
    return ModelSource("m", tiny_gguf.write_gguf(path, metadata, embedding | tensors), "gguf")


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_an_expert_is_a_view_of_its_own_bytes_in_the_stack(tmp_path, kind):
    values = np.random.default_rng(0).standard_normal((3, 48, 64), dtype=np.float32)
    raw = quantize(values.reshape(-1, 64), kind).reshape(3, 48, -1)
    stored = _stored(_write_layer(tmp_path / "m.gguf", {"ffn_up_exps": (raw, kind)}))
    for number in range(3):
        one = stored[f"model.layers.0.mlp.experts.{number}.up_proj.weight"]
        assert (one.encoding, one.shape, one.data.flags.owndata) == (kind.name, (48, 64), False)
        assert one.data.tobytes() == raw[number].tobytes()
        np.testing.assert_array_equal(to_float32(one), gguf.dequantize(raw[number], kind))


def test_experts_in_tensors_of_their_own_are_those_of_a_stack(tmp_path):
    values = np.random.default_rng(0).standard_normal((3, 64, 48), dtype=np.float32)
    stacked = _stored(_write_layer(tmp_path / "stacked.gguf", {"ffn_down_exps": values}, "llama"))
    apart = {f"ffn_down.{number}": values[number] for number in range(3)}
    alone = _stored(_write_layer(tmp_path / "apart.gguf", apart, "llama"))
    assert alone.keys() == stacked.keys()
    assert len(alone) == 4
    for name, one in alone.items():
        np.testing.assert_array_equal(to_float32(one), to_float32(stacked[name]))


def test_a_stack_of_vectors_is_refused_by_name(tmp_path):
    source = _write_layer(tmp_path / "m.gguf", {"ffn_up_exps": np.zeros(48, np.float32)})
    with pytest.raises(StartupError, match=r"m\.gguf: the tensor of .*experts.* has one dimension"):
        _stored(source)


def test_layers_that_guess_tokens_ahead_are_left_out(tmp_path):
    metadata = tiny_gguf.architecture_metadata("qwen3", block_count=3, nextn_predict_layers=1)
    tensors = {
        "token_embd.weight": np.zeros((256, 64), np.float32),
        "blk.1.attn_norm.weight": np.zeros(64, np.float32),
        "blk.2.attn_norm.weight": np.zeros(64, np.float32),
        "blk.2.nextn.eh_proj.weight": np.zeros((64, 128), np.float32),
    }
    source = ModelSource("m", tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors), "gguf")
    assert model_config(source)["num_hidden_layers"] == 2
    assert _stored(source).keys() == {"model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bytes_are_a_read_only_view_of_the_file(tmp_path, dtype):
    values = torch.randn(3, 4).to(dtype)
    stored = _stored(_make_folder(tmp_path / "m", {"a": values}))["a"]
    assert not stored.data.flags.owndata
    assert not stored.data.flags.writeable
    assert stored.data.tobytes() == values.view(torch.uint8).numpy().tobytes()
    np.testing.assert_array_equal(to_float32(stored), values.float().numpy())


def test_a_type_that_cannot_be_read_is_refused_by_file_and_name(tmp_path):
    source = _make_folder(tmp_path / "m", {"a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)})
    with pytest.raises(StartupError, match=r"model\.safetensors: tensor 'a\.weight' has type F8_E4M3, .* GGUF"):
        list(iter_stored(source, {}))


def test_weights_that_a_text_model_has_no_use_for_are_left_out_whatever_their_type(tmp_path):
    tensors = {
        "vision_tower.weight": torch.zeros(4, dtype=torch.int64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        "model.language_model.norm.weight": torch.ones(4),
    }
    assert list(_stored(_make_folder(tmp_path / "m", tensors))) == ["model.norm.weight"]


def test_pages_of_a_folder_are_given_back_after_reading(tmp_path):
    tensors = {f"w{index}": torch.ones(1 << 20) for index in range(8)}  # 4 MiB each
    source = _make_folder(tmp_path / "m", tensors)
    most = 0
    for stored in iter_stored(source, {}):
        assert stored.data.sum() > 0
        most = max(most, resident_kib(tmp_path / "m" / "model.safetensors"))
    assert 4000 < most < 3 * 4096


def _values_or_fault(source):
    try:
        return {name: to_float32(stored).tolist() for name, stored in _stored(source).items()}, ""
    except StartupError as error:
        return None, error.message


@pytest.mark.parametrize(
    ("shape", "offsets", "fault"),
    [
        ([1 << 40] * 300_000, [0, 8], "a shape that is not a list of at most 8 sizes"),
        ([0] * 9, [0, 0], "a shape that is not a list of at most 8 sizes"),
        ([1 << 49, 0], [0, 0], "a shape that is not a list of at most 8 sizes"),
        ([1 << 48] * 8, [0, 8], "8 bytes do not hold F32 of shape"),
        ([2], [0, 1 << 60], "the entry of tensor 'a' is damaged"),
        ([2], [0] * 300_000, "the entry of tensor 'a' is damaged"),
    ],
)
def test_sizes_are_bounded_before_they_are_multiplied(tmp_path, shape, offsets, fault):
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(StartupError) as refused:
        SafetensorsFile(path)
    assert fault in refused.value.message
    assert len(refused.value.message) < 400


def test_a_header_too_large_to_be_read_is_refused_before_it_is(tmp_path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:  # sparse: takes no room
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(2 * MAX_HEADER)
    with pytest.raises(StartupError, match="at most 33554432 are read"):
        SafetensorsFile(path)


@pytest.mark.sampled
def test_damaged_headers_are_refused_where_the_format_s_own_library_refuses_them(tmp_path):
    source = _make_folder(tmp_path / "m", {"a": torch.randn(2, 3), "b": torch.arange(4).to(torch.bfloat16)})
    file = source.path / "model.safetensors"
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    rng = np.random.default_rng(0)
    num_refused, num_cases = 0, either(1500, 300)
    for _ in range(num_cases):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            damaged[rng.integers(header)] = rng.choice(list(b'0123456789"{}[],:FB \x00\xff'))
        file.write_bytes(damaged)
        try:
            expected = {name: tensor.float().tolist() for name, tensor in load_file(file).items()}
        except SafetensorError:
            expected = None
        values, fault = _values_or_fault(source)
        assert values == expected, bytes(damaged[:header])
        assert "\n" not in fault
        assert expected is not None or str(file) in fault
        num_refused += expected is None
    assert 0.6 * num_cases < num_refused < num_cases


@pytest.mark.parametrize("name", sorted(WIDENED))
def test_a_type_without_kernels_is_rewritten_with_the_values_that_gguf_computes(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    raw = np.random.default_rng(0).integers(0, 64, (64, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    tensors = {"token_embd.weight": np.zeros((256, 64), np.float32), "blk.0.attn_q.weight": (raw, kind)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    stored = _stored(ModelSource("m", path, "gguf"))["model.layers.0.self_attn.q_proj.weight"]
    assert (stored.encoding, stored.shape) == (WIDENED[name][0], (64, 256))
    np.testing.assert_array_equal(to_float32(stored), gguf.dequantize(raw, kind)[stored.row_order])


def test_a_type_whose_tables_are_not_installed_names_the_package(tmp_path, monkeypatch):
    kind = gguf.GGMLQuantizationType.IQ3_S
    tensors = {"token_embd.weight": (np.zeros((256, 110), np.uint8), kind)}
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "gguf")
    with pytest.raises(StartupError, match=r"type IQ3_S needs gguf.*pip install 'tureen\[gguf\]'"):
        _stored(ModelSource("m", path, "gguf"))


def test_one_line_names_the_types_that_are_rewritten(tmp_path):
    kinds = gguf.GGMLQuantizationType
    tensors = {
        "token_embd.weight": (np.zeros((256, 110), np.uint8), kinds.IQ3_S),
        "blk.0.attn_q.weight": (np.zeros((64, 82), np.uint8), kinds.IQ2_S),
        "blk.0.attn_k.weight": (np.zeros((32, 82), np.uint8), kinds.IQ2_S),
        "blk.0.attn_v.weight": (np.zeros((32, 110), np.uint8), kinds.Q3_K),
    }
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", tiny_gguf.architecture_metadata("llama"), tensors)
    told = note(GgufFile(path).tensors.values())
    assert told == "tensors of these types use 4.56 bits per weight in memory, without loss: IQ2_S (2), IQ3_S (1)"
    assert not note([])


@pytest.mark.parametrize("encoding", ["F32", "F16", "Q8_0"])
def test_the_matrix_that_makes_keys_and_values_of_latents_is_split_by_head_and_its_keys_transposed(encoding):
    hf = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4, "kv_lora_rank": 32}
    values = np.random.default_rng(0).standard_normal((20, 32), np.float32)
    data = quantize(values, getattr(gguf.GGMLQuantizationType, encoding)).reshape(-1).view(np.uint8)
    prefix = "model.layers.0.self_attn."
    whole = Stored(f"{prefix}kv_b_proj.weight", values.shape, encoding, data)
    expected = to_float32(whole).reshape(2, 10, 32)
    config = describe(hf | {"architectures": ["MiniCPM3ForCausalLM"]})
    parts = {stored.name.removeprefix(prefix): to_float32(stored) for stored in latents.apart(whole, config)}
    for head in range(2):
        assert np.array_equal(parts.pop(f"k_b_proj.{head}.weight"), expected[head, :6].T)
        assert np.array_equal(parts.pop(f"v_b_proj.{head}.weight"), expected[head, 6:])
    assert not parts
