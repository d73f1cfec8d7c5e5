import pytest

from tureen.errors import StartupError
from tureen.registry import declared, declaring, find_model


def test_every_architecture_is_found_in_its_own_file():
    known = declared("tureen.models", "ARCHITECTURES")
    assert known["MistralForCausalLM"] == "tureen.models.llama"
    assert known["Qwen2ForCausalLM"] == "tureen.models.qwen2"
    for architecture, module in known.items():
        assert find_model(architecture).__name__ == module


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    with pytest.raises(StartupError, match=r"T5Model is not supported; this version serves Gemma2.*Qwen3ForCausalLM"):
        find_model("T5Model")


def test_the_file_that_declares_a_name_is_the_one_of_the_whole_table():
    for package, constant in (("tureen.models", "ARCHITECTURES"), ("tureen.media", "MODEL_TYPES")):
        known = declared(package, constant)
        assert {name: declaring(package, constant, name) for name in known} == known
        assert declaring(package, constant, "llam") is None
        assert declaring(package, constant, ["llama"]) is None
