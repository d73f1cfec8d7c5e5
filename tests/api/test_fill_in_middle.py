"""`suffix` of completions: the prompt is the one that the model's makers document, as the tokenizer itself reads it."""

from __future__ import annotations

import pytest
from app_under_test import App, parse_events
from byte_tokenizer import VOCAB_SIZE

from tureen.text.fill_in import FAMILIES

BEFORE, AFTER = "def f(x):\n    ", "\n    return x"
DOCUMENTED = {
    "qwen": "<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>",
    "starcoder": "<fim_prefix>{before}<fim_suffix>{after}<fim_middle>",
    "santacoder": "<fim-prefix>{before}<fim-suffix>{after}<fim-middle>",
    "codellama": "▁<PRE>{before}▁<SUF>{after}▁<MID>",
    "deepseek": "<｜fim▁begin｜>{before}<｜fim▁hole｜>{after}<｜fim▁end｜>",
    "codestral": "[SUFFIX]{after}[PREFIX]{before}",
}
MARKS = {name: tuple(filter(None, family[:3])) for name, family in zip(DOCUMENTED, FAMILIES, strict=True)}


@pytest.fixture(scope="module", params=DOCUMENTED)
def family(request):
    marks = MARKS[request.param]
    ends = FAMILIES[list(DOCUMENTED).index(request.param)].ends
    with App(special=(*marks, *ends), facts={"vocab_size": VOCAB_SIZE + len(marks) + len(ends)}) as app:
        app.documented, app.num_special = DOCUMENTED[request.param], len(marks) + len(ends)
        yield app


@pytest.fixture(scope="module")
def plain():
    with App() as app:
        yield app


def complete(app: App, status: int = 200, **body) -> dict:
    response = app.post("/v1/completions", **{"max_tokens": 4, "seed": 1, **body})
    assert response.status_code == status, response.text
    return response.json() if status == 200 else response.json()["error"]


def tokenized(app: App, text: str) -> list[int]:
    return app.post("/tokenize", prompt=text).json()["tokens"]


@pytest.mark.parametrize("before", [BEFORE, "", "ä"])
def test_the_prompt_is_the_documented_one(family: App, before):
    answer = complete(family, prompt=before, suffix=AFTER, return_token_ids=True)["choices"][0]
    assert answer["prompt_token_ids"] == tokenized(family, family.documented.format(before=before, after=AFTER))
    assert answer["text"] == complete(family, prompt=answer["prompt_token_ids"])["choices"][0]["text"]


def test_each_prompt_of_a_batch_has_the_suffix(family: App):
    choices = complete(family, prompt=["a", "b"], suffix="c", return_token_ids=True)["choices"]
    assert [one["prompt_token_ids"] for one in choices] == [
        tokenized(family, family.documented.format(before=before, after="c")) for before in "ab"
    ]


def test_what_is_filled_in_ends_with_the_family_s_tokens(family: App, monkeypatch):
    asked, generate = [], family.client.generate

    def watched(request, *more):
        asked.append(request)
        return generate(request, *more)

    monkeypatch.setattr(family.client, "generate", watched)
    complete(family, prompt="a", suffix="b", stop_token_ids=[7])
    assert set(asked[0].params.stop_token_ids) == {7, *range(VOCAB_SIZE, VOCAB_SIZE + family.num_special)}
    complete(family, prompt="a")
    assert asked[1].params.stop_token_ids == ()


def test_a_stream_fills_in_the_same(family: App):
    whole = complete(family, prompt="a", suffix="b")["choices"][0]["text"]
    response = family.post("/v1/completions", prompt="a", suffix="b", max_tokens=4, seed=1, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in parse_events(response.text)) == whole


@pytest.mark.parametrize("nothing", ["", None])
def test_an_empty_suffix_asks_for_nothing(plain: App, nothing):
    assert complete(plain, prompt="say:a", suffix=nothing)["choices"][0]["text"] == "a"


def test_a_model_without_such_tokens_says_so(plain: App):
    error = complete(plain, 400, prompt="a", suffix="b")
    assert (error["param"], error["code"]) == ("suffix", "not_available")
    assert "<|fim_middle|>" in error["message"]


REFUSED = [
    ({"prompt": [1, 2]}, "suffix"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": "a", "echo": True}, "suffix"),
    ({"prompt": "a", "truncate_prompt_tokens": 3}, "suffix"),
    ({"prompt": []}, "prompt"),
    ({"prompt": "x" * 3000}, "prompt"),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_what_cannot_go_with_a_suffix_is_refused(family: App, body, param):
    assert complete(family, 400, suffix="b", **body)["param"].split("[")[0] == param
