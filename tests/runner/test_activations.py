"""How many bits the inputs of matrices in block formats have: who chooses, and that the choice is told."""

from __future__ import annotations

import pytest
from runner_driver import folder_source
from tiny_models import write

from tureen.config import Config
from tureen.contract.types import EngineInfo
from tureen.errors import StartupError
from tureen.runner import native
from tureen.runner.load import load_runner
from tureen.terminal import Access, banner

pytest.importorskip("tureen.kernels.cpu._native")


def told(source, **settings):
    config = Config(kernels="native", device="cpu", num_threads=1, max_total_tokens=256, **settings)
    return load_runner(source, config).call("device")["activations"]


@pytest.mark.model
def test_a_small_model_as_its_file_has_it_gets_sixteen_bits_unless_the_operator_says_otherwise(default_model_source):
    assert told(default_model_source) == "int16"
    assert told(default_model_source, activations="int8") == "int8"


@pytest.mark.model
def test_a_larger_model_gets_eight_bits_unless_the_operator_says_otherwise(default_model_source, monkeypatch):
    monkeypatch.setattr(native, "SMALL_MODEL", 134_000_000)  # it has 134.5 million
    assert told(default_model_source) == "int8"
    assert told(default_model_source, activations="int16") == "int16"


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write(folder, "llama")
    return folder_source(folder)


def test_quantization_asks_for_speed_and_gets_eight_bits(floats):
    assert told(floats, quantization="int8") == "int8"
    assert told(floats, quantization="int4", activations="int16") == "int16"


@pytest.mark.parametrize("activations", ["int8", "int16"])
def test_a_choice_for_a_model_without_such_matrices_is_refused(floats, activations):
    assert told(floats, dtype="float32") == ""
    with pytest.raises(StartupError, match=f"--activations {activations}: no matrix .* --quantization"):
        told(floats, activations=activations, dtype="float32")


def test_the_banner_tells_them():
    facts = {"model_path": "m", "model_name": "m", "architecture": "A", "model_type": "a", "device": "cpu"}
    sizes = dict.fromkeys(
        ("vocab_size", "context_len", "max_total_tokens", "page_size", "hidden_size", "kv_bytes_per_token"), 1
    )
    info = EngineInfo(**facts, **sizes, dtype="q4_1", max_running_requests=1, eos_token_ids=(2,), activations="int16")
    shown = banner(info, Access("http://x"), 1.0)
    assert "(A, q4_1 on cpu, int16 activations)" in shown
    assert [line.split()[:2] for line in shown.strip().splitlines()[:3]] == [
        ["Open", "http://x/"],
        ["status", "http://x/status"],
        ["API", "http://x/docs"],
    ]
    assert "a browser" not in banner(info, Access("http://x", uds="/run/s"), 1.0)
