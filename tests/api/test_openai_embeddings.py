"""`/v1/embeddings` of a model that generates text, and what it refuses by name."""

from __future__ import annotations

import asyncio
import base64
import struct
from functools import partial

import numpy as np
import openai
import pytest
import tiny_gguf
import torch
from app_under_test import App
from byte_tokenizer import BOS, EOS
from fake_engine import HIDDEN_SIZE, make_engine
from openai_judge import make_client
from real_app import RealApp
from served_app import ServedApp
from timeouts import until
from tiny_models import write

TEXTS = ["one", "a second text", "the third of them"]


def _states(app, prompt):
    """The hidden states of the prompt, [tokens, hidden size], as `/generate` returns them."""
    body = {"input_ids": prompt} if isinstance(prompt, list) else {"text": prompt}
    answer = app.generate(**body, return_hidden_states=True, sampling_params={"max_new_tokens": 0})
    return np.array(answer["meta_info"]["hidden_states"][0])


def _embed(app, **body):
    response = app.post("/v1/embeddings", **body)
    assert response.status_code == 200, response.text
    return response.json()


def _vectors(answer):
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    assert {one["object"] for one in answer["data"]} == {"embedding"}
    return np.array([one["embedding"] for one in answer["data"]])


def _scaled(vector):
    return vector / np.linalg.norm(vector)


def test_the_default_is_the_last_token_s_state_scaled_to_length_one(app):
    found = _vectors(_embed(app, model="fake-model", input=TEXTS))
    expected = [_scaled(_states(app, text)[-1]) for text in TEXTS]
    assert np.abs(found - expected).max() < 1e-6
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_mean_pooling_is_the_mean_over_all_tokens(app):
    found = _vectors(_embed(app, input=TEXTS, pooling="mean"))
    expected = [_scaled(_states(app, text).mean(axis=0)) for text in TEXTS]
    assert np.abs(found - expected).max() < 1e-6


@pytest.mark.parametrize(("kind", "pooling"), [(1, "mean"), (3, "last")])
def test_a_gguf_file_says_how_embeddings_are_made_and_whether_eos_ends_a_text(kind, pooling, tmp_path):
    oracle = write(tmp_path / "hf", "qwen3", vocab_size=300)
    more = {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 257}
    more |= {"qwen3.pooling_type": kind}
    texts = ["one", "a second one"]
    with RealApp(tiny_gguf.write_from_transformers(tmp_path / "m.gguf", oracle, more)) as app:
        found = _vectors(_embed(app, input=texts))
        encoded = [each["embedding"] for each in app.post("/encode", text=texts).json()]
        [second] = _vectors(_embed(app, input=texts[1], pooling=pooling))
        ids = [app.post("/tokenize", prompt=text).json()["tokens"] for text in texts]
    assert ids == [[*text.encode(), 257] for text in texts]
    states = [oracle.model(torch.tensor([each])).last_hidden_state[0].detach().numpy() for each in ids]
    expected = [_scaled(each.mean(axis=0) if pooling == "mean" else each[-1]) for each in states]
    assert np.abs(found - expected).max() < 1e-4
    assert np.abs(np.array(encoded) - expected).max() < 1e-4
    assert np.abs(second - expected[1]).max() < 1e-4


def test_numbers_that_are_not_scaled_are_the_model_s_own(app):
    [found] = _vectors(_embed(app, input=TEXTS[1], pooling="mean", normalize=False))
    assert np.allclose(found, _states(app, TEXTS[1]).mean(axis=0), rtol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_base64_holds_the_same_numbers_as_little_endian_float32(app, pooling):
    answer = _embed(app, input=TEXTS, encoding_format="base64", pooling=pooling)
    decoded = [
        struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(one["embedding"], validate=True)) for one in answer["data"]
    ]
    assert (np.array(decoded) == _vectors(_embed(app, input=TEXTS, pooling=pooling))).all()


def test_texts_and_their_token_ids_give_the_same(app):
    ids = [list(text.encode()) for text in TEXTS]
    by_text = _embed(app, input=TEXTS)
    assert (_vectors(_embed(app, input=ids)) == _vectors(by_text)).all()
    assert (_vectors(_embed(app, input=ids[1])) == _vectors(by_text)[1]).all()


def test_the_answer_tells_the_model_and_counts_every_token(app):
    answer = _embed(app, input=TEXTS, model="fake-model", user="somebody")
    assert answer["object"] == "list"
    assert answer["model"] == "fake-model"
    num_tokens = sum(map(len, TEXTS))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_a_body_of_more_texts_than_the_queue_holds_is_answered():
    with App(max_queued_requests=80) as app:
        answer = _embed(app, input=[f"text {number}" for number in range(300)], pooling="mean")
        assert len(answer["data"]) == 300
        assert (_vectors(answer)[271] == _vectors(_embed(app, input="text 271", pooling="mean"))[0]).all()
        app.check_idle()


def test_a_prompt_that_is_cached_has_the_same_embedding(app):
    text = "a text that is long enough to fill some pages of the cache"
    for pooling in ("mean", "last"):
        first, second = (_embed(app, input=text, pooling=pooling) for _ in range(2))
        assert first["data"] == second["data"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_text_is_cut_to_its_first_tokens_where_that_is_asked(app):
    for given, first in ((TEXTS[2], TEXTS[2][:5]), (list(TEXTS[2].encode()), TEXTS[2][:5])):
        cut = _embed(app, input=given, truncate_prompt_tokens=5)
        assert cut["data"] == _embed(app, input=first)["data"]
        assert cut["usage"]["prompt_tokens"] == 5
    assert _embed(app, input="x" * 5000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 2048


def test_sizes_are_cut_and_scaled_again_where_the_model_was_trained_for_it():
    with App(facts={"embedding_sizes": (2, 3)}) as app:
        whole = _vectors(_embed(app, input=TEXTS, normalize=False))
        for size in (2, 3, HIDDEN_SIZE):
            found = _vectors(_embed(app, input=TEXTS, dimensions=size))
            assert np.abs(found - [_scaled(one[:size]) for one in whole]).max() < 1e-6
        error = app.error(path="/v1/embeddings", input="a", dimensions=1)
        assert error["param"] == "dimensions"
        assert "2, 3, 4" in error["message"]


def test_openai_s_own_client_reads_the_answers_and_the_errors():
    with ServedApp() as server, make_client(server.url) as client:
        by_default, as_floats = (
            client.embeddings.create(model="fake-model", input=TEXTS, **format_)
            for format_ in ({}, {"encoding_format": "float"})
        )
        assert [one.embedding for one in by_default.data] == [one.embedding for one in as_floats.data]
        assert len(as_floats.data[2].embedding) == HIDDEN_SIZE
        assert as_floats.usage.total_tokens == sum(map(len, TEXTS))
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="fake-model", input="a", dimensions=3)
        assert (caught.value.param, caught.value.code) == ("dimensions", "invalid_dimensions")


@pytest.mark.parametrize(
    ("body", "field", "said"),
    [
        ({}, "input", "missing"),
        ({"input": ""}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ["a", ""]}, "input[1]", "empty"),
        ({"input": [[]]}, "input[0]", "empty"),
        ({"input": ["a", 3]}, "input", "mixes"),
        ({"input": [3, [4]]}, "input", "mixes"),
        ({"input": [[4], 3]}, "input", "mixes"),
        ({"input": [BOS + 1]}, "input", "token id in [0, 258)"),
        ({"input": [-1]}, "input", "token id in [0, 258)"),
        ({"input": [[5], [EOS, 9999]]}, "input[1]", "got 9999"),
        ({"input": [1.5]}, "input[0]", "got 1.5"),
        ({"input": {"text": "a"}}, "input", "got"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 prompts, got 2049"),
        ({"input": "x" * 2049}, "input", "2049 tokens"),
        ({"input": "a", "dimensions": 3}, "dimensions", "must be 4"),
        ({"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "a", "pooling": "max"}, "pooling", "max"),
        ({"input": "a", "pooling": "cls"}, "pooling", "mean or last"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 2048"),
        ({"input": "a", "truncate_prompt_tokens": 2049}, "truncate_prompt_tokens", "got 2049"),
        ({"input": "a", "priority": 3}, "priority", "--enable-priority-scheduling"),
        ({"input": "a", "inputs": "a"}, "inputs", "did you mean 'input'?"),
        ({"input": "a", "rid": "\n"}, "rid", "ASCII"),
    ],
)
def test_what_is_wrong_is_named(app, body, field, said):
    error = app.error(path="/v1/embeddings", **body)
    assert error["param"] == field
    assert said in error["message"]


def test_nothing_runs_on_after_the_answers(app):
    app.check_idle()


def test_a_client_can_abort_its_embeddings_by_their_rid():
    async def both():
        asked = asyncio.create_task(app.http.post("/v1/embeddings", json={"input": ["text"] * 300, "rid": "mine"}))
        await until(lambda: app.state.num_running)
        aborted = await app.http.post("/abort_request", json={"rid": "mine"})
        return aborted.json(), await asked

    with App(factory=partial(make_engine, step_s=0.5)) as app:
        aborted, answer = app.run(both())
        assert aborted["aborted"] > 0
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "aborted"
        app.check_idle()
