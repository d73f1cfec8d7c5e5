import re

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tureen import transformers_classes
from tureen.errors import StartupError
from tureen.registry import declared, declaring, find_model
from tureen.weights.gguf_others import CLASSES


def test_every_architecture_is_found_in_its_own_file():
    known = declared("tureen.models", "ARCHITECTURES")
    assert known["MistralForCausalLM"] == "tureen.models.llama"
    assert known["Qwen2ForCausalLM"] == "tureen.models.qwen2"
    for architecture, module in known.items():
        assert find_model(architecture).__name__ == module


@pytest.mark.parametrize(
    ("architecture", "way"),
    [
        ("T5ForConditionalGeneration", "--model-impl transformers cannot run it either"),  # not a causal model
        ("GPT2LMHeadModel", "try --model-impl transformers"),
        ("MambaForCausalLM", "--model-impl transformers cannot run it either"),  # without attention
        ("MiMoV2FlashForCausalLM", "--model-impl transformers cannot run it either"),  # attention with sinks
        ("Gpt", "--model-impl transformers cannot run it either"),
    ],
)
def test_an_unknown_architecture_is_refused_with_what_to_do_and_the_known_ones(architecture, way):
    with pytest.raises(StartupError) as refused:
        find_model(architecture)
    message = refused.value.message
    assert message.startswith(f"architecture '{architecture}' is not supported; {way}")
    assert re.search("this version serves .*Gemma2.*Qwen3ForCausalLM", message)


def test_every_class_that_transformers_is_said_to_run_is_a_causal_model_of_it(monkeypatch):
    names = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    tried = [name for name in CLASSES.values() if "try --model-impl" in transformers_classes.advice(name)]
    assert len(tried) > 10
    assert names.issuperset(tried)
    monkeypatch.setattr(transformers_classes, "is_installed", lambda name: False)
    assert "pip install 'tureen[torch]'" in transformers_classes.advice(tried[0])


def test_the_file_that_declares_a_name_is_the_one_of_the_whole_table():
    for package, constant in (("tureen.models", "ARCHITECTURES"), ("tureen.media", "MODEL_TYPES")):
        known = declared(package, constant)
        assert {name: declaring(package, constant, name) for name in known} == known
        assert declaring(package, constant, "llam") is None
        assert declaring(package, constant, ["llama"]) is None
