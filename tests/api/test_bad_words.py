"""Words that may not be written: their tokens, as vLLM makes them, are never drawn one after the other."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from app_under_test import App
from real_app import RealApp, write_model
from samples import either
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from tureen.kernels.cpu import native
from tureen.requests.planning import Names, make_sampling
from tureen.text.tokenizer import BYTE_OF_CHAR, Tokenizer

PROMPT = [9, 40, 77, 200, 31]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, 1)
    return folder


@pytest.fixture(scope="module", params=["native", "torch"])
def app(request, folder):
    if request.param == "native" and native.load() is None:
        pytest.skip("no native kernels")
    with RealApp(folder, kernels=request.param, grammar_backend="tureen") as app:
        yield app


def outputs(app, **params):
    sampling = {"max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 5} | params
    answers = app.generate(input_ids=PROMPT, sampling_params=sampling)
    return [answer["output_ids"] for answer in (answers if isinstance(answers, list) else [answers])]


def has(output, sequence):
    return any(tuple(output[i : i + len(sequence)]) == tuple(sequence) for i in range(len(output)))


def words_in(output):
    """All that stands in the output, in two to three letters."""
    return [bytes(output[i : i + size]).decode() for size in (2, 3) for i in range(len(output) - size + 1)]


@pytest.mark.sampled
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("n", [1, 3])
def test_no_sequence_of_tokens_of_a_bad_word_is_in_an_output(app, temperature, n):
    how = {"temperature": temperature, "n": n, "allowed_token_ids": list(range(97, 123))}
    bad_words, seen = [], 0
    for _ in range(either(6, 3)):
        answers = outputs(app, bad_words=bad_words, **how)
        assert not any(has(answer, word.encode()) for answer in answers for word in bad_words)
        news = [word for answer in answers for word in words_in(answer)]
        bad_words += news[:2]
        seen += len(news[:2])
    assert seen, "the outputs had nothing that could be forbidden"


def test_a_word_that_is_not_written_anyway_changes_nothing(app):
    plain = outputs(app, temperature=1.0)
    absent = next(
        "".join(word) for word in itertools.product("qxz", repeat=3) if not has(plain[0], "".join(word).encode())
    )
    assert outputs(app, temperature=1.0, bad_words=[absent]) == plain


@pytest.mark.sampled
def test_a_constrained_output_keeps_to_both(app):
    pattern = {"regex": "[abc]{30}"}
    bad_words = ["a", "bb", "bcb"]
    for seed in range(either(4, 2)):
        [output] = outputs(app, **pattern, bad_words=bad_words, sampling_seed=seed)
        text = bytes(output[:30]).decode()
        assert set(text) <= set("bc")
        assert len(text) == 30
        assert not any(word in text for word in bad_words)


@pytest.mark.parametrize("constraint", [{"regex": "x[ab]"}, {"regex": "(xy|ab)ab"}, {"choice": ["ab", "bb"]}])
def test_a_word_that_the_constraint_demands_is_refused_by_name(app, constraint):
    bad_words = ["x", "b"]
    refused = app.post("/generate", input_ids=PROMPT, sampling_params={"bad_words": bad_words, **constraint})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "sampling_params.bad_words"), refused.text


def test_words_that_leave_no_allowed_token_are_refused_by_name(app):
    sampling = {"bad_words": ["a", "b"], "allowed_token_ids": [97, 98]}
    refused = app.post("/generate", input_ids=PROMPT, sampling_params=sampling)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.bad_words")
    later = {"bad_words": ["aa", "ab", "ba", "bb"], "allowed_token_ids": [97, 98]}
    refused = app.post("/generate", input_ids=PROMPT, sampling_params=later)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "sampling_params.bad_words")


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
def test_the_dialects_of_vllm_take_it(app, route):
    body = {"prompt": "abc", "max_tokens": 30, "temperature": 0, "ignore_eos": True}

    def text(**more):
        answer = app.post(route, **body, **more).json()
        return answer["choices"][0]["text"] if route.startswith("/v1") else answer["text"][0].removeprefix("abc ")

    word = next(char for char in text() if char.isascii() and char.isprintable() and char != " ")
    assert word not in text(bad_words=[word])


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("cat", [["cat"], ["Ġcat"]]),
        (" cat", [["cat"], ["Ġcat"]]),  # a space before it is no part of it
        ("dog", [["d", "o", "g"]]),  # a space would be a token of its own
        ("cats", [["cat", "s"], ["Ġcat", "s"]]),
    ],
)
def test_a_word_is_forbidden_with_a_space_before_it_where_that_is_another_token(word, texts):
    """As vLLM says: at the beginning of a text and within it."""
    merges = [("c", "a"), ("ca", "t"), ("Ġ", "cat")]
    vocab = {**BYTE_OF_CHAR, "ca": 256, "cat": 257, "Ġcat": 258}
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with App() as app:
        context = msgspec.structs.replace(app.app.state.server.context, tokenizer=Tokenizer(backend))
    banned = make_sampling({"bad_words": [word]}, context, Names()).banned
    assert banned.field == "bad_words"
    assert [[backend.id_to_token(token) for token in sequence] for sequence in banned.sequences] == texts
