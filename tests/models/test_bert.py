"""Models that make embeddings, against transformers' BertModel with the same random weights."""

from __future__ import annotations

import itertools
import json
import warnings

import mutated
import numpy as np
import pytest
import torch
import transformers
from runner_driver import folder_source, random_tokens
from safetensors.torch import load_file, save_file

from tureen.config import Config
from tureen.contract.runner import TextToEmbed
from tureen.errors import RequestFailed, StartupError
from tureen.log import no_progress
from tureen.runner.elementwise import gelu
from tureen.runner.embedder import load_embedder
from tureen.weights.sentence_files import SentenceConfig, embedding_sizes, read_sentence_config

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
}
CLOSE = 1e-5
MEAN = {"pooling_mode_mean_tokens": True}
TEXTS = [random_tokens(length, length, 128) for length in (1, 2, 7, 33, 64)]


def _write_modules(folder, pooling, max_seq_length=40):
    types = ("Transformer", "Pooling", "Normalize")
    modules = [{"type": f"sentence_transformers.models.{one}", "path": f"{n}_{one}"} for n, one in enumerate(types)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))


def _make_model(folder, kind=transformers.BertModel):
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = kind(transformers.BertConfig(**SHAPE)).eval()
        oracle.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    return oracle


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    return folder, _make_model(folder)


def _load(folder, dtype="float32", **settings):
    return load_embedder(folder_source(folder), Config(device="cpu", dtype=dtype, **settings), no_progress)


def _vector(embedder, token_ids):
    [vector] = embedder.embed([TextToEmbed(token_ids)])
    return np.frombuffer(vector, np.float32)


@torch.no_grad()
def _expected(oracle, token_ids):
    """The last layer's output, [tokens, hidden size]."""
    return oracle(torch.tensor([token_ids])).last_hidden_state[0].numpy()


def check_means(embedder, oracle):
    """Compare the embeddings of all texts, pooled by their mean, with those of transformers."""
    for token_ids in TEXTS:
        expected = _expected(oracle, token_ids).mean(axis=0)
        assert np.abs(_vector(embedder, token_ids) - expected).max() < CLOSE


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_embedding_is_the_pooled_output_of_transformers_model(tiny, pooling):
    folder, oracle = tiny
    _write_modules(folder, {f"pooling_mode_{'cls_token' if pooling == 'cls' else 'mean_tokens'}": True})
    embedder = _load(folder)
    assert embedder.pooling == pooling
    for token_ids in TEXTS:
        states = _expected(oracle, token_ids)
        expected = states.mean(axis=0) if pooling == "mean" else states[0]
        assert np.abs(_vector(embedder, token_ids) - expected).max() < CLOSE


def test_weights_of_a_checkpoint_with_more_than_the_encoder_are_found(tmp_path):
    oracle = _make_model(tmp_path, transformers.BertForMaskedLM)
    assert any(name.startswith("bert.") for name in load_file(tmp_path / "model.safetensors"))
    expected = _expected(oracle.bert, TEXTS[2]).mean(axis=0)
    assert np.abs(_vector(_load(tmp_path), TEXTS[2]) - expected).max() < CLOSE


def test_numbers_of_positions_that_older_checkpoints_have_are_not_read(tmp_path):
    oracle = _make_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"embeddings.position_ids": torch.arange(64)[None]}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    expected = _expected(oracle, TEXTS[2]).mean(axis=0)
    assert np.abs(_vector(_load(tmp_path), TEXTS[2]) - expected).max() < CLOSE


def test_half_precision_is_near(tiny):
    folder, oracle = tiny
    _write_modules(folder, MEAN)
    expected = _expected(oracle, TEXTS[3]).mean(axis=0)
    found = _vector(_load(folder, dtype="bfloat16"), TEXTS[3])
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine > 0.999
    assert (found != expected).any()


def test_a_text_has_the_same_bits_whatever_was_computed_before(tiny):
    folder, _ = tiny
    embedder = _load(folder)
    alone = [embedder.embed([TextToEmbed(token_ids)]) for token_ids in TEXTS]
    for token_ids, bits in zip(reversed(TEXTS), reversed(alone), strict=True):
        assert embedder.embed([TextToEmbed(token_ids)]) == bits
    assert embedder.embed([TextToEmbed(token_ids) for token_ids in TEXTS]) == list(itertools.chain(*alone))


def test_numbers_that_are_none_fail_the_text(tmp_path):
    _make_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    embedder = _load(tmp_path)
    [alone] = embedder.embed([TextToEmbed([1, 2])])
    vectors = embedder.embed([TextToEmbed([1, 5]), TextToEmbed([1, 2])])
    assert isinstance(vectors[0], RequestFailed)
    assert vectors[1] == alone


def test_the_length_is_the_trained_one_unless_the_operator_says_another(tiny):
    folder, _ = tiny
    _write_modules(folder, MEAN, max_seq_length=40)
    assert _load(folder).max_tokens == 40
    assert _load(folder, context_length=64).max_tokens == 64
    _write_modules(folder, MEAN, max_seq_length=4000)
    assert _load(folder).max_tokens == 64
    with pytest.raises(StartupError, match=r"--context-length 65 .* 64 positions"):
        _load(folder, context_length=65)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"hidden_act": "mish"}, "hidden_act: must be one of gelu, .*got 'mish'"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "hidden_size 48 cannot be shared by 5 heads"),
        ({"layer_norm_eps": [1]}, "layer_norm_eps: must be a positive number, got a list of 1"),
        ({"vocab_size": "many"}, "vocab_size: must be a positive integer, got 'many'"),
        ({"intermediate_size": 81}, r"has shape \[80\], config.json says \[81\]"),
        ({"num_hidden_layers": 4}, "lacks 16 weights"),
        ({"num_hidden_layers": 2}, "config.json says it is absent"),
    ],
)
def test_a_config_that_the_weights_do_not_fit_or_that_is_not_supported_names_its_fault(tmp_path, change, fault):
    _make_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(StartupError, match=fault):
        _load(tmp_path)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lora_paths", ("a=b",)),
        ("quantization", "int8"),
        ("model_impl", "transformers"),
        ("load_format", "dummy"),
        ("kv_cache_dtype", "int8"),
        ("max_total_tokens", 1000),
    ],
)
def test_settings_that_could_do_nothing_are_refused(tiny, setting, value):
    with pytest.raises(StartupError, match=f"--{setting.replace('_', '-')} .*embedding"):
        _load(tiny[0], **{setting: value})


@pytest.mark.parametrize(
    ("pooling", "fault"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "mean_tokens, pooling_mode_cls_token"),
        ({}, "no pooling"),
    ],
)
def test_a_pooling_that_is_not_known_is_refused_by_name(tmp_path, pooling, fault):
    _write_modules(tmp_path, pooling)
    with pytest.raises(StartupError, match=fault):
        read_sentence_config(tmp_path)


def test_a_stage_that_is_not_known_is_refused_by_name(tmp_path):
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}])
    )
    with pytest.raises(StartupError, match="'LSTM' is not supported"):
        read_sentence_config(tmp_path)


def test_newer_files_and_none_at_all_are_understood(tmp_path):
    assert read_sentence_config(tmp_path) == SentenceConfig()
    _write_modules(tmp_path, {"pooling_mode": "cls"}, max_seq_length=9)
    assert read_sentence_config(tmp_path) == SentenceConfig("cls", 9)
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(StartupError, match=r"modules\.json: not valid JSON"):
        read_sentence_config(tmp_path)


def test_a_pooling_folder_outside_of_the_model_is_not_read(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    outside = tmp_path / "1_Pooling"
    outside.mkdir()
    (outside / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (model / "modules.json").write_text(json.dumps([{"type": "a.Pooling", "path": "../1_Pooling"}]))
    with pytest.raises(StartupError, match="no pooling"):
        read_sentence_config(model)


def test_sizes_are_those_that_the_config_allows():
    assert embedding_sizes({}, 8) == ()
    assert embedding_sizes({"matryoshka_dimensions": [2, 4, 900, "x"]}, 8) == (2, 4)
    assert embedding_sizes({"is_matryoshka": True}, 3) == (1, 2, 3)


def test_the_gate_without_torch_is_the_one_of_torch():
    x = np.concatenate([np.linspace(-12, 12, 100_001), [0.0, -0.0, 1e-30, 50.0, -50.0]]).astype(np.float32)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    assert np.abs(gelu(x) - expected).max() < 2e-6


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_native_kernels_and_torch_make_the_same_embedding(tiny, kernels):
    folder, oracle = tiny
    _write_modules(folder, MEAN)
    check_means(_load(folder, kernels=kernels), oracle)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_noise_in_any_weight_but_the_bias_of_keys_is_noticed(tiny, kernels, tmp_path):
    folder, oracle = tiny
    _write_modules(folder, MEAN)
    unnoticed = []
    for kind in mutated.folders_with_noise(folder, tmp_path, lambda kind: not kind.startswith("pooler.")):
        embedder = _load(tmp_path, kernels=kernels)
        try:
            check_means(embedder, oracle)
        except AssertionError:
            continue
        unnoticed.append(kind)
    key_bias = "encoder.layer.*.attention.self.key.bias"  # adds the same to all scores of a query
    assert unnoticed == [key_bias]


def test_a_half_type_without_torch_names_the_extra(tiny, monkeypatch):
    monkeypatch.setattr("tureen.extras.is_installed", lambda module: False)
    with pytest.raises(StartupError, match=r"--dtype bfloat16, .* needs torch.*: pip install 'tureen\[torch\]'"):
        _load(tiny[0], dtype="bfloat16")
