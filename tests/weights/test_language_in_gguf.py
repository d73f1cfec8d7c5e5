"""A model folder whose language model and tokenizer are a GGUF file, while the rest of its weights are safetensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_gguf
import tiny_models
from safetensors.numpy import save_file

from tureen.errors import StartupError
from tureen.weights.facts import file_facts
from tureen.weights.source import load_tokenizer, model_config, resolve_model
from tureen.weights.stored import iter_stored, to_float32

CONFIG = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_config": {"hidden_size": 4},
}


@pytest.fixture
def folder(tmp_path):
    """What `tureen models build` writes, in small."""
    made = tmp_path / "seeing"
    made.mkdir()
    model = tiny_models.write(tmp_path / "text", "llama-tied")
    tiny_gguf.write_from_transformers(made / "language.gguf", model)
    save_file({"vision_tower.layernorm.bias": np.ones(4, np.float32)}, made / "vision.safetensors")
    _write_config(made, {"gguf_file": "language.gguf"})
    return made


def _write_config(folder, text_config):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": text_config}))


def _source(path):
    return resolve_model(str(path), cache_dir=path.parent)


def test_the_text_config_is_that_of_the_gguf_file_and_the_rest_that_of_config_json(folder):
    config = model_config(_source(folder))
    alone = model_config(_source(folder / "language.gguf"))
    assert {key: config[key] for key in CONFIG} == CONFIG
    assert config["text_config"] == alone
    assert config["eos_token_id"] == alone["eos_token_id"]


def test_the_text_weights_are_those_of_the_gguf_file(folder):
    def weights(path):
        source = _source(path)
        return {stored.name: to_float32(stored) for stored in iter_stored(source, model_config(source))}

    found, alone = weights(folder), weights(folder / "language.gguf")
    assert found.keys() == alone.keys()
    assert all(np.array_equal(found[name], alone[name]) for name in alone)


def test_the_tokenizer_is_that_of_the_gguf_file(folder):
    found, alone = load_tokenizer(_source(folder)), load_tokenizer(_source(folder / "language.gguf"))
    assert found.encode("Two stars!") == alone.encode("Two stars!")


def test_the_facts_count_the_gguf_file_and_the_safetensors(folder):
    alone = file_facts(_source(folder / "language.gguf"))
    assert alone.num_parameters > 0
    assert file_facts(_source(folder)) == (alone.num_parameters + 4, alone.quantization)


def test_a_gguf_file_that_config_json_does_not_name_is_not_read(folder):
    _write_config(folder, {"hidden_size": 8})
    source = _source(folder)
    assert source.gguf is None
    assert model_config(source)["text_config"] == {"hidden_size": 8}


@pytest.mark.parametrize("name", ["../language.gguf", "/language.gguf", 7, ""])
def test_a_gguf_file_elsewhere_is_refused(folder, name):
    _write_config(folder, {"gguf_file": name})
    with pytest.raises(StartupError, match="gguf_file must name a file of that folder"):
        model_config(_source(folder))


def test_a_gguf_file_that_is_not_there_is_named(folder):
    _write_config(folder, {"gguf_file": "lost.gguf"})
    with pytest.raises(StartupError, match=r"lost\.gguf: there is no such file"):
        model_config(_source(folder))
