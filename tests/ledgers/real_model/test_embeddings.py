"""Embeddings in place of tokens, hidden states and /encode on the real server."""

from __future__ import annotations

import math

import gguf
import httpx
import numpy as np
import pytest

from tureen.weights.source import load_tokenizer

GUARDS = ("models", "runner", "engine", "dialects")


PROMPT = "The lighthouse keeper wrote in his book that the"
PARAMS = {"temperature": 0, "max_new_tokens": 16}


@pytest.fixture(scope="module")
def embedding_table(default_model_source):
    """float32 [vocabulary, hidden size], read by another reader than ours."""
    reader = gguf.GGUFReader(default_model_source.path)
    [tensor] = [tensor for tensor in reader.tensors if tensor.name == "token_embd.weight"]
    return gguf.dequantize(tensor.data, tensor.tensor_type)


def post(server, path, **body):
    response = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def prompt_ids(default_model_source):
    return load_tokenizer(default_model_source).encode(PROMPT)


def test_embeddings_of_tokens_give_what_the_tokens_give(server, prompt_ids, embedding_table):
    by_ids = post(server, "/generate", input_ids=prompt_ids, sampling_params=PARAMS, return_logprob=True)
    vectors = embedding_table[prompt_ids].tolist()
    for _ in range(2):
        answer = post(server, "/generate", input_embeds=vectors, sampling_params=PARAMS, return_logprob=True)
        assert answer["output_ids"] == by_ids["output_ids"]
        assert answer["meta_info"]["output_token_logprobs"] == by_ids["meta_info"]["output_token_logprobs"]
        assert answer["meta_info"]["cached_tokens"] == 0
    batch = post(server, "/generate", input_embeds=[vectors, vectors[:5]], sampling_params=PARAMS)
    assert batch[0]["output_ids"] == by_ids["output_ids"]
    assert batch[1]["meta_info"]["prompt_tokens"] == 5


def test_the_hidden_state_before_a_token_has_that_token_s_embedding_nearest(server, embedding_table):
    """The head is the embedding table: logits are products of a hidden state with it."""
    answer = post(server, "/generate", text=PROMPT, sampling_params=PARAMS, return_hidden_states=True)
    matrix, *vectors = answer["meta_info"]["hidden_states"]
    states = np.array([matrix[-1], *vectors], dtype=np.float32)
    logits = states @ embedding_table.T
    margins = np.sort(logits, axis=1)[:, -1] - np.sort(logits, axis=1)[:, -2]
    clear = margins > 0.25  # the rest may round another way
    assert clear.sum() > len(clear) / 2
    assert (logits.argmax(axis=1)[clear] == np.array(answer["output_ids"])[clear]).all()


def test_similar_sentences_are_nearer_than_others(server):
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a percent."]
    vectors = np.array([one["embedding"] for one in post(server, "/encode", text=texts)])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    alike, unlike = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert alike > unlike
    assert not math.isclose(alike, 1)


def test_openai_s_embeddings_are_the_hidden_states_pooled_and_the_same_bits_alone(server):
    texts = [PROMPT, "A cat sleeps on the sofa.", "x"]
    for pooling in ("mean", "last"):
        answer = post(server, "/v1/embeddings", input=texts, pooling=pooling)
        for one, text in zip(answer["data"], texts, strict=True):
            body = {"return_hidden_states": True, "sampling_params": {"max_new_tokens": 0}}
            states = np.array(post(server, "/generate", text=text, **body)["meta_info"]["hidden_states"][0])
            vector = states.mean(axis=0) if pooling == "mean" else states[-1]
            assert np.abs(one["embedding"] - vector / np.linalg.norm(vector)).max() < 1e-5
            [alone] = post(server, "/v1/embeddings", input=text, pooling=pooling)["data"]
            assert alone["embedding"] == one["embedding"]


def test_the_likelier_answer_has_the_higher_score(server, default_model_source):
    tokenizer = load_tokenizer(default_model_source)
    labels = [tokenizer.encode(word)[0] for word in (" France", " Germany")]
    query = "is the capital of"
    answer = post(
        server, "/v1/score", query=query, items=["Paris ", "Berlin "], item_first=True, label_token_ids=labels
    )
    (paris_france, paris_germany), (berlin_france, berlin_germany) = answer["scores"]
    assert paris_france > paris_germany
    assert berlin_germany > berlin_france
