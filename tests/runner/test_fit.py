"""The memory that a model takes, reckoned before it is loaded, against what it has when it is."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import pytest
import safetensors.numpy
import tiny_gguf
import tiny_llava
import tiny_models
import tiny_qwen_vl
from converted_vision import write_pair

from tureen.config import Config
from tureen.kernels.cpu import native as kernels_module
from tureen.runner import fit, loading, native
from tureen.runner.kv_pool import KvBytes, bytes_of_kv, plan_capacity
from tureen.runner.load import load_runner
from tureen.weights.source import model_config, open_model

kernels = pytest.importorskip("tureen.kernels.cpu._native")
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write(folder / "hf", "llama")
    return open_model(folder / "hf")


@pytest.mark.parametrize(
    "settings",
    [{}, {"quantization": "int8"}, {"dtype": "float32"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}],
)
def test_weights_and_a_token_of_the_cache_take_what_was_reckoned(source, settings):
    config = Config(kernels="native", device="cpu", **settings)
    need = fit.memory_need(source, config)
    runner = load_runner(source, config)
    capacity = runner.capacity()
    assert need.kv_per_token == capacity.kv_bytes_per_token
    assert need.context == capacity.context_len
    assert need.weights > 0


def test_a_long_context_of_four_billion_weights_fits_in_two_gib_with_int4(tmp_path):
    """The layers of Qwen3 4B."""
    tiny_models.write(tmp_path, "qwen3")
    hf = json.loads((tmp_path / "config.json").read_text())
    hf |= {"num_hidden_layers": 36, "num_key_value_heads": 8, "num_attention_heads": 32, "head_dim": 128}
    model = loading.describe(hf | {"max_position_embeddings": 40960})
    takes = {dtype: native.bytes_of_kv(kernels, Config(kv_cache_dtype=dtype), model) for dtype in ("int8", "int4")}
    assert takes["int4"].per_token == 36 * 8 * (128 + 64 + 2 * 4)
    assert takes["int4"].per_token * 32768 <= 2 << 30 < takes["int8"].per_token * 32768


def test_int4_takes_what_int8_takes_if_values_are_in_the_keys(tmp_path, caplog):
    tiny_models.write(tmp_path, "deepseek-v2")
    model = loading.describe(model_config(open_model(tmp_path)))
    eight, four = (native.bytes_of_kv(kernels, Config(kv_cache_dtype=dtype), model) for dtype in ("int8", "int4"))
    assert eight == four
    assert caplog.text.count("int4 takes what int8 takes") == 1


def test_fewer_bits_and_fewer_tokens_take_less(source):
    need = fit.memory_need(source, Config(dtype="float32"))
    assert fit.memory_need(source, Config(quantization="int8")).weights < need.weights
    shorter = fit.memory_need(source, Config(dtype="float32", context_length=16))
    assert shorter.kv_cache == need.kv_cache * 16 // need.context
    assert shorter.needed == need.needed - need.kv_cache + shorter.kv_cache


@pytest.mark.parametrize(
    ("spare", "expected"),
    [
        (0, ""),
        (-1, "--context-length"),
    ],
)
def test_what_is_a_little_too_large_fits_with_a_shorter_context(source, monkeypatch, spare, expected):
    config = Config(dtype="float32")
    monkeypatch.setattr(fit, "_sizes", lambda *_: (100 * MIB, KvBytes(MIB)))
    monkeypatch.setattr(fit, "_context_of", lambda config, model: config.context_length or 4096)
    need = fit.memory_need(source, config)
    monkeypatch.setattr(fit.cpu, "free_bytes", lambda: need.needed + spare)
    need = fit.memory_need(source, config)
    assert need.fits is (spare >= 0)
    told = fit.advice(source, config, need)
    assert told.startswith(expected)
    if expected:
        assert told == "--context-length 3840"


def test_a_gguf_file_takes_what_its_blocks_take(tmp_path):
    model = tiny_models.write(tmp_path / "hf", "llama")
    source = open_model(tiny_gguf.write_from_transformers(tmp_path / "m.gguf", model))
    tensors = source.gguf.tensors.values()
    matrices = sum(tensor.num_bytes for tensor in tensors if len(tensor.shape) == 2)
    need = fit.memory_need(source, Config(dtype="float32"))
    assert need.weights >= matrices


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_part_that_sees_counts_in_the_type_of_its_matrices(dtype, tmp_path, monkeypatch):
    width = {"int16": 2, "float32": 4}[kernels_module.matrix_dtype(dtype)]
    tiny_llava.write(tmp_path / "llava", "llava-clip")
    monkeypatch.setattr(fit, "_sizes", lambda *_: (0, KvBytes(0)))  # the language model's part
    tensors = safetensors.numpy.load_file(next((tmp_path / "llava").glob("*.safetensors")))
    seeing = sum(width * values.size for name, values in tensors.items() if "language_model" not in name)
    heads = sum(width * values.size for name, values in tensors.items() if name.startswith("lm_head"))
    need = fit.memory_need(open_model(tmp_path / "llava"), Config(dtype=dtype))
    assert need.weights == seeing - heads > 0


def test_the_part_that_sees_of_an_mmproj_file_counts_as_that_of_a_folder(tmp_path, monkeypatch):
    oracle = tiny_qwen_vl.write(tmp_path / "hf", "qwen2.5")
    path = write_pair(tmp_path / "m", oracle, tiny_qwen_vl.PREPROCESSOR, {"<|image_pad|>": tiny_qwen_vl.IMAGE})
    monkeypatch.setattr(fit, "_sizes", lambda *_: (0, KvBytes(0)))
    folder, pair = (fit.memory_need(open_model(one, Config()), Config()).weights for one in (tmp_path / "hf", path))
    assert pair == folder > 0
    assert fit.memory_need(open_model(path, Config(language_model_only=True)), Config()).weights == 0


@pytest.mark.parametrize(("num_free", "num_rows"), [(8, 1), (64, 4), (1 << 14, 32)])
def test_states_take_a_quarter_of_the_memory_at_most_and_bound_how_many_requests_run(num_free, num_rows, tmp_path):
    tiny_models.write(tmp_path, "qwen3-5")
    model = loading.describe(model_config(open_model(tmp_path)))
    each = 4 * model.state_floats
    device = SimpleNamespace(type="cpu", name="cpu", free_bytes=lambda: num_free * each)
    config = Config(max_running_requests=32, context_length=16, max_total_tokens=16)
    capacity = plan_capacity(config, model, kv_bytes=KvBytes(64), weight_bytes=0, device=device)
    assert capacity.max_rows == num_rows
    assert 2 * num_rows < capacity.num_states <= max(3, num_free // 4)


OF_GEMMA3 = {"head_dim": 256, "num_key_value_heads": 4, "num_hidden_layers": 34, "sliding_window": 1024}


def _gemma3(folder, **changes):
    """The sizes of Gemma 3 4B that the KV cache depends on: 29 layers with a window, 5 without."""
    tiny_models.write(folder, "gemma3")
    config = json.loads((folder / "config.json").read_text())
    del config["layer_types"]
    config |= OF_GEMMA3 | {"sliding_window_pattern": 6, "max_position_embeddings": 131072} | changes
    return loading.describe(config)


@pytest.mark.parametrize(("context", "share"), [(4096, 0.7), (8192, 0.53), (32768, 0.41), (131072, 0.38)])
def test_a_context_takes_less_memory_the_more_layers_have_a_window(context, share, tmp_path):
    config, model = Config(context_length=context), _gemma3(tmp_path)
    now = native.bytes_of_kv(kernels, config, model)
    whole = now.together()
    assert (whole.fixed, whole.in_window_pages) == (0, 0)
    assert now.in_pages + now.in_window_pages == whole.in_pages
    assert now.in_pages == whole.in_pages * 5 // 34
    assert now.per_token * context + now.fixed < share * whole.per_token * context


def test_window_pages_hold_a_sequence_and_a_quarter_of_the_pool(tmp_path):
    model = _gemma3(tmp_path)
    config = Config(context_length=32768, max_total_tokens=65536)
    kv_bytes = native.bytes_of_kv(kernels, config, model)
    device = SimpleNamespace(type="cpu", name="cpu", free_bytes=lambda: 8 << 30)
    capacity = plan_capacity(config, model, kv_bytes=kv_bytes, weight_bytes=0, device=device)
    assert (capacity.num_pages, capacity.window) == (4096, 1024)
    assert capacity.num_window_pages == 4096 // 4 + (1024 + config.chunked_prefill_size) // 16 + 2
    total = 65536 * kv_bytes.in_pages + 16 * capacity.num_window_pages * kv_bytes.in_window_pages
    assert capacity.kv_bytes_per_token == total // 65536
    cache = kernels.KvCache(
        model.kv_layers, capacity.num_pages, 16, "int16", num_window_pages=capacity.num_window_pages
    )
    assert cache.nbytes == total


@pytest.mark.parametrize(
    "settings",
    [
        {"context_length": 1024},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"kernels": "tree"},
        {"model_impl": "transformers"},
    ],
)
def test_layers_with_a_window_keep_all_tokens_where_pages_must_hold_all_layers_or_little_is_saved(settings, tmp_path):
    model = _gemma3(tmp_path)
    assert bytes_of_kv(Config(context_length=32768), model, 2).window_tokens > 0
    assert bytes_of_kv(Config(**{"context_length": 32768, **settings}), model, 2).window_tokens == 0


def test_a_longer_context_takes_more_memory_and_no_jump_is_left_where_window_pages_begin(tmp_path):
    model = _gemma3(tmp_path)
    needs = []
    for context in range(1800, 2400, 10):
        kv = bytes_of_kv(Config(context_length=context), model, 2)
        needs.append(kv.fixed + kv.per_token * context)
    assert needs == sorted(needs)
    assert (
        max(later - earlier for earlier, later in pairwise(needs))
        <= 11 * bytes_of_kv(Config(), model, 2).together().in_pages
    )


@pytest.mark.parametrize(("free_mib", "settings"), [(100, {}), (180, {}), (220, {}), (150, {"max_total_tokens": 512})])
def test_a_small_memory_holds_as_many_tokens_as_with_one_pool(free_mib, settings, tmp_path):
    config, model = Config(**settings), _gemma3(tmp_path)
    kv = bytes_of_kv(config, model, 2)
    device = SimpleNamespace(type="cuda", name="cuda", free_bytes=lambda: free_mib << 20)
    windows, whole = (
        plan_capacity(config, model, kv_bytes=each, weight_bytes=0, device=device) for each in (kv, kv.together())
    )
    assert windows.num_pages >= whole.num_pages
    assert windows.num_pages * windows.kv_bytes_per_token * 16 <= free_mib << 20


@pytest.mark.parametrize("spare_mib", [1, 20, 60, 100, 150, 200, 300, 500])
def test_the_context_that_is_advised_fits(spare_mib, tmp_path, monkeypatch):
    tiny_models.write(tmp_path, "gemma3")
    source, model = open_model(tmp_path), _gemma3(tmp_path)
    monkeypatch.setattr(loading, "describe", lambda hf: model)
    monkeypatch.setattr(fit, "_sizes", lambda source, config, model: (0, bytes_of_kv(config, model, 2)))
    least = fit.memory_need(source, Config(context_length=256))
    monkeypatch.setattr(fit.cpu, "free_bytes", lambda: least.needed + (spare_mib << 20))
    advice = fit.advice(source, Config(), fit.memory_need(source, Config()))
    flag, _, context = advice.partition(" ")
    assert flag == "--context-length"
    assert fit.memory_need(source, Config(context_length=int(context))).fits
    assert not fit.memory_need(source, Config(context_length=int(context) + 512)).fits


def test_a_model_without_such_layers_has_no_states(source):
    model = loading.describe(model_config(source))
    device = SimpleNamespace(type="cpu", name="cpu", free_bytes=lambda: 1 << 30)
    capacity = plan_capacity(Config(), model, kv_bytes=KvBytes(64), weight_bytes=0, device=device)
    assert (capacity.num_states, capacity.max_rows) == (0, Config().max_running_requests)
