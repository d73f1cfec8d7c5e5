"""The application over a model that makes embeddings: what it answers, and what it says to who wants text."""

from __future__ import annotations

import numpy as np
import pytest
from app_under_test import App
from embedding_engine import MAX_TOKENS, make_embedding_engine


@pytest.fixture(scope="module")
def embedder():
    with App(factory=make_embedding_engine) as running:
        yield running


def _answer(app, path, **body):
    response = app.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def test_embeddings_are_the_model_s_own_scaled_to_length_one(embedder):
    answer = _answer(embedder, "/v1/embeddings", input=["aab", "dddd"])
    expected = np.array([[2, 1, 0, 0], [0, 0, 0, 4]]) / [[5**0.5], [4]]
    assert np.allclose([one["embedding"] for one in answer["data"]], expected)
    raw = _answer(embedder, "/v1/embeddings", input="aab", normalize=False, pooling="mean")
    assert raw["data"][0]["embedding"] == [2, 1, 0, 0]


def test_encode_gives_the_same_vector(embedder):
    one = _answer(embedder, "/encode", text="aab")
    assert np.allclose(one["embedding"], np.array([2, 1, 0, 0]) / 5**0.5)
    assert one["meta_info"]["prompt_tokens"] == 3


def test_rerank_sorts_documents_by_the_cosine_and_keeps_the_best(embedder):
    documents = ["dd", "abab", "aac", "b"]
    answer = _answer(embedder, "/v1/rerank", query="ab", documents=documents)
    assert [(one["index"], one["document"]) for one in answer] == [(1, "abab"), (3, "b"), (2, "aac"), (0, "dd")]
    assert [one["score"] for one in answer] == pytest.approx([1, 0.5**0.5, 2 / 10**0.5, 0])
    assert answer[0]["meta_info"]["prompt_tokens"] == 4
    best = _answer(embedder, "/v1/rerank", query="ab", documents=documents, top_n=2, return_documents=False)
    assert [one["index"] for one in best] == [1, 3]
    assert "document" not in best[0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a" * 17, "documents": ["a"]}, "query"),
        ({"query": "a", "documents": ["b", "a" * 17]}, "documents[1]"),
        ({"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_what_is_wrong_with_a_rerank_is_named(embedder, body, field):
    assert embedder.error(path="/v1/rerank", **body)["param"] == field


def test_an_unknown_field_of_a_rerank_is_told(embedder):
    body = {"query": "a", "documents": ["b"], "zebra": "b"}
    response = embedder.request("POST", "/v1/rerank", json=body)
    assert (response.status_code, response.headers["x-tureen-ignored"]) == (200, "zebra")


def test_long_documents_are_cut_where_that_is_asked(embedder):
    answer = _answer(
        embedder, "/v1/rerank", query="b", documents=["a" * 16 + "bbbb", "b" * 99], truncate_prompt_tokens=-1
    )
    assert [(one["index"], one["score"]) for one in answer] == [(1, 1.0), (0, 0.0)]


@pytest.mark.parametrize(
    "path",
    ["/generate", "/generate_stream", "/", "/v1/completions", "/v1/chat/completions", "/open_session"],
)
def test_routes_that_generate_say_what_the_model_is(embedder, path):
    error = embedder.error(path=path, text="a")
    assert "this is an embedding model" in (error["message"] if isinstance(error, dict) else error)


def test_scores_need_a_model_that_generates(embedder):
    error = embedder.error(path="/v1/score", query="a", items=["b"], label_token_ids=[1])
    assert error["code"] == "not_a_generation_model"


def test_pooling_and_input_that_the_model_does_not_have_are_refused(embedder):
    assert embedder.error(path="/v1/embeddings", input="a", pooling="last")["param"] == "pooling"
    assert embedder.error(path="/v1/embeddings", input="a" * 17)["param"] == "input"
    assert embedder.error(path="/encode", input_embeds=[[0.0] * 4])["param"] == "input_embeds"


def test_the_server_is_healthy_and_tells_what_it_serves(embedder):
    for path in ("/health", "/health_generate", "/metrics", "/server_info"):
        assert embedder.request("GET", path).status_code == 200, path
    assert embedder.request("GET", "/model_info").json()["is_generation"] is False
    [card] = embedder.request("GET", "/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("fake-embedder", MAX_TOKENS)
    assert _answer(embedder, "/tokenize", prompt="ab")["tokens"] == [97, 98]


def test_a_paused_server_answers_once_it_goes_on(embedder):
    assert embedder.post("/pause_generation", mode="in_place").status_code == 200
    assert embedder.request("POST", "/continue_generation", json={}).status_code == 200
    assert len(_answer(embedder, "/v1/embeddings", input=["a"] * 70)["data"]) == 70
    embedder.check_idle()
