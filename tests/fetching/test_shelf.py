"""The shelf of known models: complete, pinned, and the source of what the makers of a GGUF file's model recommend."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
import tiny_gguf
from byte_tokenizer import make_byte_tokenizer
from fake_engine import make_engine

from tureen.config import DEFAULT_MODEL, Config
from tureen.errors import StartupError
from tureen.fetching import pypi
from tureen.fetching import shelf as shelf_module
from tureen.fetching.shelf import shelf
from tureen.requests.state import make_context
from tureen.weights.source import ModelSource, generation_defaults

NAMES = ["smollm2:135m", "qwen2.5-coder:0.5b", "minilm", "shapes-vlm"]
SHELF = Path(shelf_module.__file__).with_suffix(".toml")
SMOLLM2 = {"temperature": 0.2, "top_p": 0.9}


def test_the_shelf_has_these_models():
    assert list(shelf().models) == NAMES
    assert NAMES[0] == DEFAULT_MODEL


@pytest.mark.parametrize("name", NAMES)
def test_a_model_says_its_licence_and_every_wheel_of_it_is_pinned(name):
    model = shelf().models[name]
    assert model.licence
    assert model.title
    assert model.wheels
    for requirement in model.wheels:
        assert re.fullmatch("[0-9a-f]{64}", shelf().wheels[requirement].sha256)
        assert pypi.parse(f"pypi:{requirement}").sha256 == shelf().wheels[requirement].sha256
    assert sum([bool(model.source), bool(model.recipe), bool(model.joined_sha256)]) == 1
    assert bool(model.sampling) == bool(model.sampling_source)


def _of_gguf(tmp_path, **metadata):
    path = tiny_gguf.write_gguf(tmp_path / "m.gguf", metadata)
    return generation_defaults(ModelSource("m", path, "gguf"))


@pytest.mark.parametrize("name", ["Smollm2 135M 8k Lc100K Mix1 Ep2", "SmolLM2-135M-Instruct", "smollm2_135m instruct"])
def test_a_known_model_is_recognised_by_its_general_name_however_it_was_quantised(tmp_path, name):
    assert _of_gguf(tmp_path, **{"general.name": name}) == SMOLLM2


@pytest.mark.parametrize("name", [name for name in NAMES if shelf().models[name].sampling])
def test_a_server_of_a_known_model_starts_with_what_its_makers_recommend(tmp_path, name):
    known = shelf().models[name]
    recommended = _of_gguf(tmp_path, **{"general.name": known.gguf_names[0]})
    info = msgspec.structs.replace(make_engine()[1], generation_defaults=recommended)
    [_, defaults] = make_context(make_byte_tokenizer(), info, Config()).defaults
    written = tomllib.loads(SHELF.read_text())["models"][name]["sampling"]
    assert [(name, type(value), value) for name, value in defaults.items()] == [
        (name, type(value), value) for name, value in written.items()
    ]


@pytest.mark.parametrize("name", ["SmolLM2 135M", "SmolLM2 135M Instruct Pirate", ""])
def test_a_model_that_is_not_known_has_no_recommendation(tmp_path, name):
    assert _of_gguf(tmp_path, **{"general.name": name}) == {}


def test_what_the_file_itself_recommends_goes_before_the_shelf(tmp_path):
    own = {"general.sampling.temp": 0.5, "general.sampling.top_k": 7, "general.sampling.penalty_repeat": 1.25}
    expected = {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    assert _of_gguf(tmp_path, **{"general.name": "SmolLM2 135M Instruct", **own}) == expected


def test_zero_is_greedy_as_a_temperature_and_off_as_anything_else(tmp_path):
    own = {"general.sampling.temp": 0.0, "general.sampling.top_k": 0, "general.sampling.min_p": 0.0}
    assert _of_gguf(tmp_path, **own) == {"temperature": 0.0}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": None, "top_k": 0, "top_p": 0.8}))
    assert generation_defaults(ModelSource("m", tmp_path, "safetensors")) == {"top_p": 0.8}


@pytest.mark.parametrize("value", [True, "0.5", [1], 2**63])
def test_a_recommendation_that_is_no_number_is_named_with_its_file(tmp_path, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": value}))
    with pytest.raises(StartupError, match=r"generation_config.json: temperature must be a number"):
        generation_defaults(ModelSource("m", tmp_path, "safetensors"))


@pytest.mark.model
def test_the_default_model_has_what_its_page_recommends(default_model_source):
    assert generation_defaults(default_model_source) == SMOLLM2
