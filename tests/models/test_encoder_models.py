"""Encoders as embedding models and as classifiers, against transformers' classes with the same random weights."""

from __future__ import annotations

import json
import shutil
import warnings

import mutated
import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import EOS
from real_app import RealApp
from runner_driver import folder_source, random_tokens
from safetensors.torch import load_file, save_file
from sentence_folders import SEP, change_config, write_modules, write_pair_tokenizer

from tureen.config import Config
from tureen.contract.runner import TextToEmbed
from tureen.errors import StartupError
from tureen.kernels.cpu import native
from tureen.log import no_progress
from tureen.registry import declared
from tureen.runner.embedder import load_embedder

VOCAB_SIZE = SEP + 5
WIDTHS = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
BERT = WIDTHS | {"intermediate_size": 80, "max_position_embeddings": 96, "type_vocab_size": 2}
LATER = BERT | {"pad_token_id": 1, "max_position_embeddings": 98}
MODERN = WIDTHS | {
    "intermediate_size": 56,
    "max_position_embeddings": 96,
    "local_attention": 12,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": EOS + 1,
    "eos_token_id": EOS,
    "cls_token_id": EOS + 1,
    "sep_token_id": SEP,
}
DISTIL = {
    "vocab_size": VOCAB_SIZE,
    "dim": 48,
    "n_heads": 4,
    "n_layers": 3,
    "hidden_dim": 80,
    "max_position_embeddings": 96,
}
GEMMA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "max_position_embeddings": 96,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "use_bidirectional_attention": True,
    "pad_token_id": 0,
}
FAMILIES = {
    "Bert": ("Bert", BERT),
    "Roberta": ("Roberta", LATER),
    "XLMRoberta": ("XLMRoberta", LATER | {"type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "ModernBert": ("ModernBert", MODERN),
    "NomicBert": ("NomicBert", BERT),
    "DistilBert": ("DistilBert", DISTIL),
    "MPNet": ("MPNet", LATER),
    "Gemma3Text": ("Gemma3Text", GEMMA),
}
CLASSIFIERS = ("Bert", "Roberta", "XLMRoberta", "ModernBert", "DistilBert", "MPNet")
UNUSED_WEIGHTS = ("pooler.", "roberta.pooler.", "mpnet.pooler.")
CLOSE = 2e-5
MEAN = {"pooling_mode_mean_tokens": True}
TEXTS = [random_tokens(length, length, 250) for length in (1, 2, 7, 33, 90)]
PAIRS = [("a", "b"), ("pets", "A cat sleeps."), ("pets", "Taxes rise, and nobody is glad of it."), ("Ü", "x" * 40)]


def _write(folder, family, kind="Model", **changes):
    """Write a model in which every weight matters, and return it."""
    name, facts = FAMILIES[family]
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{name}Config")(**(facts | changes))
        model = getattr(transformers, f"{name}{kind}")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15)
        model.save_pretrained(folder)
    if family == "Gemma3Text":
        change_config(folder, sliding_window=GEMMA["sliding_window"])  # transformers halves it at each reading
    write_modules(folder, "Transformer", "Pooling", "Normalize", pooling=MEAN)
    return model


def _load(folder, dtype="float32", **settings):
    return load_embedder(folder_source(folder), Config(device="cpu", dtype=dtype, **settings), no_progress)


def _vector(embedder, token_ids, second_start=0):
    return np.frombuffer(embedder.embed([TextToEmbed(token_ids, second_start)])[0], np.float32)


@torch.no_grad()
def check_means(embedder, oracle, texts=TEXTS):
    """Compare the embeddings of texts, pooled by their mean, with those of transformers."""
    for token_ids in texts:
        expected = oracle(torch.tensor([token_ids])).last_hidden_state[0].numpy().mean(axis=0)
        assert np.abs(_vector(embedder, token_ids) - expected).max() < CLOSE


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return folder, _write(folder, request.param)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_an_embedding_is_the_mean_of_transformers_states(model, kernels):
    folder, oracle = model
    check_means(_load(folder, kernels=kernels), oracle)


def test_queries_in_pieces_of_any_length_give_the_same_embedding_in_torch(model, monkeypatch):
    folder, oracle = model
    monkeypatch.setattr("tureen.models.torch_encoder.QUERIES", 7)
    check_means(_load(folder, kernels="torch"), oracle, TEXTS[3:])


@torch.no_grad()
def test_with_matrices_of_16_bits_an_embedding_is_nearly_the_same(model):
    folder, oracle = model
    embedder = _load(folder, dtype="auto")
    assert embedder.place.dtype == native.matrix_dtype("auto")
    for token_ids in TEXTS:
        expected = oracle(torch.tensor([token_ids])).last_hidden_state[0].numpy().mean(axis=0)
        found = _vector(embedder, token_ids)
        assert np.linalg.norm(found - expected) < 1.5e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_texts_together_have_the_bits_that_they_have_alone(model, kernels, dtype):
    folder, _ = model
    embedder = _load(folder, dtype, kernels=kernels)
    texts = [TextToEmbed(token_ids, second) for token_ids, second in zip(TEXTS, (0, 1, 3, 0, 40), strict=True)]
    alone = [embedder.embed([text])[0] for text in texts]
    assert embedder.embed(texts) == alone
    assert embedder.embed(texts[::-1]) == alone[::-1]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_noise_in_any_weight_but_the_bias_of_keys_is_noticed(model, kernels, tmp_path):
    folder, oracle = model
    unnoticed = []
    for kind in mutated.folders_with_noise(folder, tmp_path, lambda kind: not kind.startswith(UNUSED_WEIGHTS)):
        try:
            check_means(_load(tmp_path, kernels=kernels), oracle, TEXTS[3:4])
        except AssertionError:
            continue
        unnoticed.append(kind)
    assert [kind for kind in unnoticed if not kind.endswith((".key.bias", ".k_lin.bias", ".attn.k.bias"))] == []


def test_a_token_of_padding_takes_no_position_in_roberta(tmp_path):
    oracle = _write(tmp_path, "XLMRoberta")
    check_means(_load(tmp_path), oracle, [[5, 1, 6, 7, 1, 8]])
    assert _load(tmp_path).max_tokens == 96


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("ModernBert", {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "global_attn_every_n_layers": 2}),
        ("Bert", {"hidden_act": "gelu_new"}),
    ],
)
def test_what_a_config_may_change_is_read(family, changes, tmp_path):
    oracle = _write(tmp_path, family, **changes)
    check_means(_load(tmp_path), oracle, TEXTS[3:])


def test_nomic_s_own_names_of_settings_are_read(tmp_path):
    oracle = _write(tmp_path, "NomicBert")
    own = {
        "n_embd": 48,
        "n_head": 4,
        "n_inner": 80,
        "n_layer": 3,
        "n_positions": 8192,
        "max_trained_positions": 96,
        "layer_norm_epsilon": 1e-12,
        "rotary_emb_base": 1000,
        "rotary_scaling_factor": 2,
        "activation_function": "swiglu",
    }
    kept = {"architectures": ["NomicBertModel"], "vocab_size": VOCAB_SIZE, "type_vocab_size": 2}
    (tmp_path / "config.json").write_text(json.dumps(kept | own))
    embedder = _load(tmp_path)
    check_means(embedder, oracle)
    assert embedder.max_tokens == 96
    change_config(tmp_path, num_experts=8)
    with pytest.raises(StartupError, match="num_experts: must be 0, got 8"):
        _load(tmp_path)


def test_every_encoder_is_tested():
    tested = {f"{name}Model" for name, _ in FAMILIES.values()}
    tested |= {f"{name}ForSequenceClassification" for name in CLASSIFIERS}
    known = declared("tureen.models", "ENCODER_ARCHITECTURES")
    assert tested == {name for name in known if not name.endswith("ForMaskedLM")}  # the weights of the model, renamed


# classifiers


def _logits(model, tokenizer, pair):
    encoding = tokenizer.encode(*pair)
    inputs = {"input_ids": torch.tensor([encoding.ids])}
    if type(model).__name__.removesuffix("ForSequenceClassification") == "Bert":
        inputs["token_type_ids"] = torch.tensor([encoding.type_ids])
        assert max(encoding.type_ids) == len(pair) - 1
    with torch.no_grad():
        return model(**inputs).logits[0]


def check_scores(app, model, tokenizer, pairs=PAIRS):
    """Compare the scores of pairs with the sigmoid of transformers' logits."""
    for query, document in pairs:
        [one] = app.post("/v1/rerank", query=query, documents=[document]).json()
        expected = torch.sigmoid(_logits(model, tokenizer, (query, document))).item()
        assert one["score"] == pytest.approx(expected, abs=CLOSE)


@pytest.fixture(scope="module", params=CLASSIFIERS)
def cross_encoder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = _write(folder, request.param, "ForSequenceClassification", num_labels=1)
    (folder / "modules.json").unlink()
    return folder, model, write_pair_tokenizer(folder)


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_cross_encoder_scores_pairs_as_transformers_does(cross_encoder, kernels):
    folder, model, tokenizer = cross_encoder
    with RealApp(folder, kernels=kernels, **UNSET) as app:
        check_scores(app, model, tokenizer)


UNSET = {"max_total_tokens": None, "dtype": "float32"}
"""Settings of RealApp that encoders have, for numbers near those of transformers."""


def test_noise_in_any_weight_of_a_cross_encoder_is_noticed(cross_encoder, tmp_path):
    folder, model, tokenizer = cross_encoder
    ids = tokenizer.encode(*PAIRS[2])
    expected = _logits(model, tokenizer, PAIRS[2]).numpy()
    start = ids.type_ids.index(1)
    assert np.abs(_vector(_load(folder), ids.ids, start) - expected).max() < CLOSE
    unnoticed = []
    for kind in mutated.folders_with_noise(folder, tmp_path, lambda kind: not kind.startswith(UNUSED_WEIGHTS)):
        if np.abs(_vector(_load(tmp_path), ids.ids, start) - expected).max() < CLOSE:
            unnoticed.append(kind)
    assert [kind for kind in unnoticed if not kind.endswith((".key.bias", ".k_lin.bias", ".attn.k.bias"))] == []


def test_scores_alone_are_those_in_a_batch_and_on_every_route(tmp_path):
    model = _write(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    tokenizer = write_pair_tokenizer(tmp_path)
    documents = [document for _, document in PAIRS]
    with RealApp(tmp_path, **UNSET) as app:
        ranked = app.post("/rerank", query="pets", documents=documents).json()
        assert [one["score"] for one in ranked] == sorted((one["score"] for one in ranked), reverse=True)
        scores = app.post("/v1/score", query="pets", items=documents).json()["scores"]
        for one in ranked:
            [alone] = app.post("/v1/rerank", query="pets", documents=[one["document"]]).json()
            assert alone["score"] == one["score"] == scores[one["index"]][0]
        turned = app.post("/v1/score", query="pets", items=["b"], item_first=True).json()["scores"]
        expected = torch.sigmoid(_logits(model, tokenizer, ("b", "pets"))).item()
        assert turned[0][0] == pytest.approx(expected, abs=CLOSE)
        assert app.error(path="/v1/score", query="a", items=["b"], label_token_ids=[1])["param"] == "label_token_ids"
        for path, name in (("/v1/embeddings", "input"), ("/encode", "text")):
            error = app.error(path=path, **{name: "a"})
            assert (error["code"], "/v1/rerank" in error["message"]) == ("not_an_embedding_model", True)
        assert app.error(path="/v1/completions", prompt="a")["code"] == "not_a_generation_model"
        assert app.request("GET", "/health_generate").status_code == 200


@pytest.mark.parametrize(
    ("changes", "activate"),
    [
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, lambda x: x),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, torch.sigmoid),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ({}, torch.sigmoid),
    ],
)
def test_the_activation_of_a_score_is_the_one_in_the_files(changes, activate, tmp_path):
    model = _write(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    tokenizer = write_pair_tokenizer(tmp_path)
    change_config(tmp_path, **changes)
    with RealApp(tmp_path, **UNSET) as app:
        [one] = app.post("/v1/rerank", query="pets", documents=["cat"]).json()
    assert one["score"] == pytest.approx(activate(_logits(model, tokenizer, ("pets", "cat"))).item(), abs=CLOSE)


@pytest.mark.parametrize(
    ("problem", "activate"), [("single_label_classification", torch.softmax), ("multi_label_classification", None)]
)
def test_labels_come_with_their_probabilities_and_pairs_too(problem, activate, tmp_path):
    labels = {0: "contradiction", 1: "entailment", 2: "neutral"}
    model = _write(tmp_path, "Roberta", "ForSequenceClassification", id2label=labels, problem_type=problem)
    tokenizer = write_pair_tokenizer(tmp_path)
    inputs = ["A cat.", ["A cat sleeps.", "An animal rests."]]
    with RealApp(tmp_path, **UNSET) as app:
        data = app.post("/classify", input=inputs).json()["data"]
        assert app.post("/v1/classify", input=inputs).json()["data"] == data
        for one, texts in zip(data, [inputs[:1], inputs[1]], strict=True):
            logits = _logits(model, tokenizer, texts)
            expected = torch.softmax(logits, 0) if activate else torch.sigmoid(logits)
            assert one["probs"] == pytest.approx(expected.tolist(), abs=CLOSE)
            assert one["label"] == labels[int(expected.argmax())]
        error = app.error(path="/v1/rerank", query="a", documents=["b"])
        assert (error["code"], "/classify" in error["message"]) == ("not_a_reranker", True)


@pytest.mark.parametrize("limit", [-1, 30, 9])
def test_a_long_pair_is_cut_as_transformers_cuts_it(limit, tmp_path):
    model = _write(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    tokenizer = write_pair_tokenizer(tmp_path)
    with RealApp(tmp_path, **UNSET) as app:
        for query, document in (("pets", "x" * 200), ("y" * 200, "z"), ("y" * 200, "z" * 201), ("abc", "de")):
            if len(query + document) > 96:
                assert app.error(path="/v1/rerank", query=query, documents=[document])["param"] == "documents[0]"
            body = {"query": query, "documents": [document], "truncate_prompt_tokens": limit}
            [one] = app.post("/v1/rerank", **body).json()
            tokenizer.enable_truncation(96 if limit == -1 else limit, strategy="longest_first")
            expected = torch.sigmoid(_logits(model, tokenizer, (query, document))).item()
            assert one["score"] == pytest.approx(expected, abs=CLOSE)


def test_dense_stages_follow_the_mean(tmp_path):
    oracle = _write(tmp_path, "Gemma3Text")
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize", pooling=MEAN)
    torch.manual_seed(1)
    layers = [torch.nn.Linear(48, 64, bias=False), torch.nn.Linear(64, 24, bias=False)]
    for number, layer in zip((2, 3), layers, strict=True):
        folder = tmp_path / f"{number}_Dense"
        folder.mkdir()
        save_file({"linear.weight": layer.weight.detach()}, folder / "model.safetensors")
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": False}
        settings = sizes | {"activation_function": "torch.nn.modules.linear.Identity"}
        (folder / "config.json").write_text(json.dumps(settings))
    embedder = _load(tmp_path)
    for token_ids in TEXTS:
        with torch.no_grad():
            mean = oracle(torch.tensor([token_ids])).last_hidden_state[0].mean(dim=0)
            expected = layers[1](layers[0](mean)).numpy()
        assert np.abs(_vector(embedder, token_ids) - expected).max() < CLOSE
    shutil.copytree(tmp_path / "3_Dense", tmp_path / "4_Dense")
    weights = load_file(tmp_path / "3_Dense" / "model.safetensors")
    save_file({"linear.weight": weights["linear.weight"][:, :8].contiguous()}, tmp_path / "3_Dense/model.safetensors")
    with pytest.raises(StartupError, match=r"linear\.weight has shape \[24, 8\]"):
        _load(tmp_path)
