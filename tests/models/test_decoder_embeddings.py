"""Decoders that make embeddings or scores, against transformers' classes with the same random weights."""

from __future__ import annotations

import json
import shutil

import mutated
import numpy as np
import pytest
import torch
import transformers
from byte_tokenizer import BOS, EOS, VOCAB_SIZE, make_byte_tokenizer
from real_app import SETTINGS, RealApp
from safetensors.torch import load_file, save_file
from sentence_folders import change_config, write_appending_tokenizer, write_modules
from tiny_models import SHAPE, spread

from tureen import build
from tureen.config import Config
from tureen.errors import StartupError
from tureen.log import no_progress
from tureen.requests.pairs import INSTRUCTION
from tureen.runner.kinds import JUDGE_AFTER, JUDGE_BEFORE

CLOSE = 2e-5
LAST = {"pooling_mode_lasttoken": True, "include_prompt": True}
PROMPTS = {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}
TEXTS = ["a", "A cat sleeps.", "Taxes rise, and nobody is glad of it.", "Ü", "x" * 70]
STAGES = ("Transformer", "Pooling", "Normalize")
FAMILIES = {
    "Qwen3": {"head_dim": 32, "tie_word_embeddings": False},
    "Mistral": {"sliding_window": None},
}


def _model(family, kind, **changes):
    torch.manual_seed(5)
    facts = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS, "bos_token_id": BOS, "pad_token_id": EOS}
    config = getattr(transformers, f"{family}Config")(**(SHAPE | facts | FAMILIES[family] | changes))
    model = getattr(transformers, f"{family}{kind}")(config)
    spread(model)
    return model.eval()


def _write_embedder(folder, family, architecture):
    """Write a model without a head, whose weights have names without a beginning, as Qwen3-Embedding has."""
    model = _model(family, "Model")
    model.save_pretrained(folder)
    assert "layers.0.mlp.up_proj.weight" in load_file(folder / "model.safetensors")
    change_config(folder, architectures=[architecture])
    write_modules(folder, *STAGES, pooling=LAST, config_sentence_transformers=PROMPTS)
    return model, write_appending_tokenizer(folder)


def check_refused(folder, fault):
    with pytest.raises(StartupError, match=fault):
        build.make_engine(Config(model_path=str(folder), **SETTINGS), progress=no_progress)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    return folder, *_write_embedder(folder, "Qwen3", "Qwen3ForCausalLM")


@torch.no_grad()
def _expected(model, tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert ids[-1] == EOS
    state = model(torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    return state / np.linalg.norm(state)


def _embed(app, texts, **fields):
    response = app.post("/v1/embeddings", input=texts, **fields)
    assert response.status_code == 200, response.text
    return [np.array(one["embedding"], np.float32) for one in response.json()["data"]]


def _check(app, model, tokenizer, texts=TEXTS):
    for text, vector in zip(texts, _embed(app, texts), strict=True):
        assert np.abs(vector - _expected(model, tokenizer, text)).max() < CLOSE


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize(
    ("family", "architecture"),
    [("Qwen3", "Qwen3ForCausalLM"), ("Qwen3", "Qwen3Model"), ("Mistral", "MistralModel")],
)
def test_an_embedding_is_the_last_state_of_transformers_model_scaled_to_length_one(
    family, architecture, kernels, tmp_path
):
    model, tokenizer = _write_embedder(tmp_path, family, architecture)
    with RealApp(tmp_path, kernels=kernels) as app:
        _check(app, model, tokenizer)


def test_alone_and_in_a_batch_an_embedding_has_the_same_bits(embedder):
    with RealApp(embedder[0]) as app:
        together = _embed(app, TEXTS)
        for text, vector in zip(TEXTS, together, strict=True):
            assert (_embed(app, text)[0] == vector).all()


def test_prompts_are_put_before_texts_by_their_names(embedder):
    folder, model, tokenizer = embedder
    with RealApp(folder) as app:
        [vector] = _embed(app, "cats", prompt_name="query")
        assert np.abs(vector - _expected(model, tokenizer, "Find: cats")).max() < CLOSE
        error = app.error(path="/v1/embeddings", input="a", prompt_name="passage")
        assert error["message"].startswith("prompt_name must be one of document, query")
        assert app.error(path="/v1/embeddings", input=[1], prompt_name="query")["param"] == "prompt_name"
        ranked = app.post("/rerank", query="cats", documents=TEXTS).json()
        query = _expected(model, tokenizer, "Find: cats")
        for one in ranked:
            assert one["score"] == pytest.approx(query @ _expected(model, tokenizer, one["document"]), abs=CLOSE)
        assert [one["score"] for one in ranked] == sorted((one["score"] for one in ranked), reverse=True)


def test_a_default_prompt_is_used_unless_the_client_names_another(embedder, tmp_path):
    folder, model, tokenizer = embedder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    settings = PROMPTS | {"default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with RealApp(tmp_path) as app:
        for fields, text in (({}, "Find: b"), ({"prompt_name": "document"}, "b")):
            [vector] = _embed(app, "b", **fields)
            assert np.abs(vector - _expected(model, tokenizer, text)).max() < CLOSE


def test_eos_is_appended_where_the_settings_of_the_tokenizer_ask_for_it(embedder, tmp_path):
    folder, model, tokenizer = embedder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    make_byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"add_eos_token": True, "eos_token": "<eos>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with RealApp(tmp_path) as app:
        _check(app, model, tokenizer, TEXTS[:2])


def test_noise_in_any_weight_is_noticed(embedder, tmp_path):
    folder, model, tokenizer = embedder
    unnoticed = []
    for kind in mutated.folders_with_noise(folder, tmp_path, lambda kind: True):
        with RealApp(tmp_path) as app:
            try:
                _check(app, model, tokenizer, TEXTS[1:2])
            except AssertionError:
                continue
            unnoticed.append(kind)
    assert unnoticed == []


def test_dense_stages_follow_the_pooling(embedder, tmp_path):
    folder, model, tokenizer = embedder
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    write_modules(tmp_path, "Transformer", "Pooling", "Dense", "Normalize", pooling=LAST)
    torch.manual_seed(1)
    dense = torch.nn.Linear(SHAPE["hidden_size"], 24)
    (tmp_path / "2_Dense").mkdir()
    weights = {f"linear.{name}": value.detach() for name, value in dense.named_parameters()}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    settings = {"in_features": 64, "out_features": 24, "bias": True, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(settings))
    with RealApp(tmp_path) as app, torch.no_grad():
        ids = torch.tensor([tokenizer.encode("cats").ids])
        expected = torch.tanh(dense(model(ids).last_hidden_state[0, -1]))
        [vector] = _embed(app, "cats")
        assert np.abs(vector - (expected / expected.norm()).numpy()).max() < CLOSE


def test_routes_that_generate_refuse_and_name_the_routes_that_answer(embedder):
    with RealApp(embedder[0]) as app:
        error = app.error(path="/v1/completions", prompt="a")
        assert (error["code"], "/v1/embeddings" in error["message"]) == ("not_a_generation_model", True)
        error = app.error(path="/v1/score", query="a", items=["b"], label_token_ids=[1])
        assert error["code"] == "not_a_generation_model"
        assert app.error(path="/classify", input="a")["code"] == "not_a_classification_model"
        assert app.request("GET", "/health_generate").status_code == 200
        assert app.request("GET", "/model_info").json()["is_generation"] is False


def test_a_decoder_that_its_files_call_an_encoder_is_refused(embedder, tmp_path):
    shutil.copytree(embedder[0], tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, is_causal=False)
    check_refused(tmp_path, "is_causal: false")
    change_config(tmp_path, is_causal=True)
    write_modules(tmp_path, *STAGES, pooling={"pooling_mode_cls_token": True})
    check_refused(tmp_path, "first token")


# rerankers


def _write_reranker(folder):
    """Write a generator of the form of Qwen3-Reranker, whose answers are the bytes y and n."""
    model = _model("Qwen3", "ForCausalLM")
    model.save_pretrained(folder)
    make_byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    write_modules(folder, "Transformer", "LogitScore")
    (folder / "1_LogitScore").mkdir()
    answers = {"true_token_id": ord("y"), "false_token_id": ord("n")}
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(answers))
    return model


@torch.no_grad()
def _judged(model, query, document, instruct=INSTRUCTION):
    content = f"<Instruct>: {instruct}\n<Query>: {query}\n<Document>: {document}"
    logits = model(torch.tensor([list((JUDGE_BEFORE + content + JUDGE_AFTER).encode())])).logits[0, -1]
    return torch.softmax(logits[[ord("y"), ord("n")]], -1)[0].item()


def test_a_reranker_that_generates_says_how_probable_its_yes_is(tmp_path):
    folder = tmp_path / "Qwen3-Reranker-tiny"
    folder.mkdir()
    model = _write_reranker(folder)
    with RealApp(folder) as app:
        ranked = app.post("/v1/rerank", query="pets", documents=TEXTS).json()
        assert [one["score"] for one in ranked] == sorted((one["score"] for one in ranked), reverse=True)
        for one in ranked:
            assert one["score"] == pytest.approx(_judged(model, "pets", one["document"]), abs=CLOSE)
            [alone] = app.post("/rerank", query="pets", documents=[one["document"]]).json()
            assert alone["score"] == one["score"]
        [other] = app.post("/v1/rerank", query="pets", documents=["b"], instruct="Be strict").json()
        assert other["score"] == pytest.approx(_judged(model, "pets", "b", "Be strict"), abs=CLOSE)
        scores = app.post("/v1/score", query="pets", items=TEXTS).json()["scores"]
        assert scores == pytest.approx(np.array([[_judged(model, "pets", text)] for text in TEXTS]), abs=CLOSE)
        assert app.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        labelled = app.post("/v1/score", query="a", items=["b"], label_token_ids=[1, 2]).json()
        assert len(labelled["scores"][0]) == 2


def test_a_long_document_is_cut_and_the_prompt_around_it_is_not(tmp_path):
    folder = tmp_path / "Qwen3-Reranker-tiny"
    folder.mkdir()
    model = _write_reranker(folder)
    with RealApp(folder) as app:
        assert app.error(path="/rerank", query="a", documents=["b" * 600])["param"] == "documents[0]"
        [one] = app.post("/rerank", query="a", documents=["b" * 600], truncate_prompt_tokens=-1).json()
        around = len((JUDGE_BEFORE + JUDGE_AFTER).encode())
        kept = f"<Instruct>: {INSTRUCTION}\n<Query>: a\n<Document>: " + "b" * 600
        document = kept[: 511 - around].split("<Document>: ")[1]
        assert one["score"] == pytest.approx(_judged(model, "a", document), abs=CLOSE)


def test_a_reranker_with_another_prompt_is_refused_by_name(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    _write_reranker(folder)
    check_refused(folder, "LogitScore is supported only for Qwen3-Reranker")


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_a_decoder_with_a_score_head_scores_pairs_as_transformers_does(tmp_path, kernels):
    model = _model("Qwen3", "ForSequenceClassification", num_labels=1)
    model.save_pretrained(tmp_path)
    tokenizer = write_appending_tokenizer(tmp_path)
    with RealApp(tmp_path, kernels=kernels) as app, torch.no_grad():
        ranked = app.post("/v1/rerank", query="pets", documents=TEXTS).json()
        for one in ranked:
            ids = torch.tensor([tokenizer.encode("pets", one["document"]).ids])
            expected = torch.sigmoid(model.score(model.model(ids).last_hidden_state[0, -1])).item()
            assert one["score"] == pytest.approx(expected, abs=CLOSE)
            [alone] = app.post("/v1/rerank", query="pets", documents=[one["document"]]).json()
            assert alone["score"] == one["score"]
        assert app.error(path="/v1/embeddings", input="a")["code"] == "not_an_embedding_model"
        assert "/v1/rerank" in app.error(path="/generate", text="a")["message"]
    weights = load_file(tmp_path / "model.safetensors")
    noisy = mutated.with_noise(weights["score.weight"].numpy())
    save_file(weights | {"score.weight": torch.from_numpy(noisy)}, tmp_path / "model.safetensors", {"format": "pt"})
    with RealApp(tmp_path, kernels=kernels) as app:
        assert app.post("/v1/rerank", query="pets", documents=TEXTS).json()[0]["score"] != ranked[0]["score"]
