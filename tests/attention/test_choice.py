"""A backend of attention is one file that says what it can do; nothing else lists it."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest
import torch
from runner_driver import Running, folder_source, generate
from tiny_models import greedy, write

import tureen.attention
from tureen.attention.base import AttentionNeeds, LayerShape
from tureen.attention.choice import find_backend
from tureen.attention.reference import ReferenceAttention
from tureen.config import Config
from tureen.errors import StartupError
from tureen.kernels import fused
from tureen.kernels.cpu import native
from tureen.runner.load import load_runner

NEEDS = AttentionNeeds("cpu", "float32", (LayerShape(4, 2, 16, 0.25, None),), 16)
PLAIN = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024, "num_threads": 1}
TOY = '''
    from tureen.attention.reference import ReferenceAttention
    ATTENTION_BACKENDS = ("toy",)
    PREFERENCE = 5
    def why_unsupported(needs):
        if any(layer.window is not None for layer in needs.layers):
            return "it has no sliding windows"
        return "" if needs.device == "cpu" and needs.page_size >= 16 else "it wants pages of 16 tokens or more"
    class ToyAttention(ReferenceAttention):
        """Is told from the other by its name."""
    def make_backend(layers, keys, values):
        return ToyAttention(layers, keys, values)
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A file beside those of the package."""
    (tmp_path / "toy_attention.py").write_text(dedent(TOY))
    monkeypatch.setattr(tureen.attention, "__path__", [*tureen.attention.__path__, str(tmp_path)])
    monkeypatch.setattr(tureen.attention.__spec__, "submodule_search_locations", tureen.attention.__path__)
    yield
    sys.modules.pop("tureen.attention.toy_attention", None)
    if hasattr(tureen.attention, "toy_attention"):
        del tureen.attention.toy_attention


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, write(folder, "llama")


def _attention(folder, **settings):
    return load_runner(folder_source(folder), Config(**PLAIN, **settings)).forward._attention


@pytest.mark.usefixtures("toy")
def test_a_file_that_is_added_serves_and_is_preferred_where_it_says_so(llama):
    folder, model = llama
    runner = load_runner(folder_source(folder), Config(**PLAIN, kernels="torch"))
    assert type(runner.forward._attention).__name__ == "ToyAttention"
    prompt = [1, 2, 3]
    assert generate(runner, Running(0, prompt, range(8)), 4) == greedy(model, prompt, 4)
    assert type(_attention(folder, kernels="torch", attention_backend="reference")) is ReferenceAttention


@pytest.mark.usefixtures("toy")
def test_auto_passes_over_what_cannot_do_what_the_model_needs():
    windowed = NEEDS._replace(layers=(NEEDS.layers[0]._replace(window=8),))
    assert find_backend("auto", NEEDS).ATTENTION_BACKENDS == ("toy",)
    assert find_backend("auto", windowed).ATTENTION_BACKENDS == ("reference",)
    with pytest.raises(StartupError, match=r"--attention-backend toy: .*no sliding windows") as caught:
        find_backend("toy", windowed)
    assert caught.value.field == "attention_backend"


def test_an_unknown_name_is_refused_with_the_known_ones(llama):
    with pytest.raises(StartupError, match=r"--attention-backend .*flash.*: known in torch: reference"):
        _attention(llama[0], kernels="torch", attention_backend="flash")


def test_a_backend_of_torch_that_is_named_makes_torch_compute(llama):
    assert type(_attention(llama[0], attention_backend="reference")) is ReferenceAttention


def test_triton_s_attention_says_what_is_missing_and_the_server_runs_without(monkeypatch, caplog):
    needs = NEEDS._replace(device="cuda", dtype="bfloat16")
    monkeypatch.setattr(fused, "is_installed", lambda _: False)
    with pytest.raises(StartupError, match="--attention-backend triton: triton: Triton is not installed"):
        find_backend("triton", needs)
    assert find_backend("auto", needs).ATTENTION_BACKENDS == ("reference",)
    assert fused.find_fused(torch.device("cpu"), torch.float32, 64) is None
    monkeypatch.setattr(fused, "is_installed", lambda _: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    assert fused.why_no_triton().startswith("Triton cannot be imported: ")
    assert fused.find_draw(torch.device("cpu"), 64) is None
    assert caplog.messages == [
        "Triton's kernels are not used, which makes steps slower: Triton is not installed: pip install triton"
    ]


def test_native_kernels_have_their_own(llama):
    if native.load() is None:
        pytest.skip("no native kernels")
    with pytest.raises(StartupError, match=r"--kernels native: they have their own attention"):
        _attention(llama[0], kernels="native", attention_backend="reference")
    with pytest.raises(StartupError, match=r"--attention-backend native: --kernels torch does not have it"):
        _attention(llama[0], kernels="torch", attention_backend="native")
    runner = load_runner(folder_source(llama[0]), Config(**PLAIN, attention_backend="native"))
    assert type(runner.forward).__name__ == "TapeForward"
