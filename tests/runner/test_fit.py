"""The memory that a model takes, reckoned before it is loaded, against what it has when it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import safetensors.numpy
import tiny_gguf
import tiny_llava
import tiny_models

from tureen.config import Config
from tureen.runner import fit, loading
from tureen.runner.kv_pool import plan_capacity
from tureen.runner.load import load_runner
from tureen.weights.source import model_config, open_model

pytest.importorskip("tureen.kernels.cpu._native")
MIB = 1 << 20


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.write(folder / "hf", "llama")
    return open_model(folder / "hf")


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "float32"}, {"kv_cache_dtype": "int8"}])
def test_weights_and_a_token_of_the_cache_take_what_was_reckoned(source, settings):
    config = Config(kernels="native", device="cpu", **settings)
    need = fit.memory_need(source, config)
    runner = load_runner(source, config)
    capacity = runner.capacity()
    assert need.kv_per_token == capacity.kv_bytes_per_token
    assert need.context == capacity.context_len
    assert need.weights > 0


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
    monkeypatch.setattr(fit, "_native_sizes", lambda *_: (100 * MIB, MIB))
    monkeypatch.setattr(fit, "_context_of", lambda *_: 4096)
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


def test_the_part_that_sees_counts_in_float32_as_it_is_loaded(tmp_path, monkeypatch):
    tiny_llava.write(tmp_path / "llava", "llava-clip")
    monkeypatch.setattr(fit, "_native_sizes", lambda *_: (0, 0))  # the language model's part
    tensors = safetensors.numpy.load_file(next((tmp_path / "llava").glob("*.safetensors")))
    seeing = sum(4 * values.size for name, values in tensors.items() if "language_model" not in name)
    heads = sum(4 * values.size for name, values in tensors.items() if name.startswith("lm_head"))
    assert fit.memory_need(open_model(tmp_path / "llava"), Config()).weights == seeing - heads > 0


@pytest.mark.parametrize(("num_free", "num_rows"), [(8, 1), (64, 4), (1 << 14, 32)])
def test_states_take_a_quarter_of_the_memory_at_most_and_bound_how_many_requests_run(num_free, num_rows, tmp_path):
    tiny_models.write(tmp_path, "qwen3-5")
    model = loading.describe(model_config(open_model(tmp_path)))
    each = 4 * model.state_floats
    device = SimpleNamespace(type="cpu", name="cpu", free_bytes=lambda: num_free * each)
    config = Config(max_running_requests=32, context_length=16, max_total_tokens=16)
    capacity = plan_capacity(config, model, token_bytes=64, weight_bytes=0, device=device)
    assert capacity.max_rows == num_rows
    assert 2 * num_rows < capacity.num_states <= max(3, num_free // 4)


def test_a_model_without_such_layers_has_no_states(source):
    model = loading.describe(model_config(source))
    device = SimpleNamespace(type="cpu", name="cpu", free_bytes=lambda: 1 << 30)
    capacity = plan_capacity(Config(), model, token_bytes=64, weight_bytes=0, device=device)
    assert (capacity.num_states, capacity.max_rows) == (0, Config().max_running_requests)
