"""`/v1/score`, against `/generate`'s log-probabilities; `/v1/rerank` where it cannot be done."""

from __future__ import annotations

import math

import pytest
from app_under_test import App

LABELS = [7, 65, 200]
ITEMS = [" yes", " no", " it depends on the weather"]


def _score(app, **body):
    response = app.post("/v1/score", **body)
    assert response.status_code == 200, response.text
    return response.json()


def _probabilities(app, text):
    """Of the labels after a text."""
    answer = app.generate(
        text=text,
        return_logprob=True,
        token_ids_logprob=LABELS,
        logprobs_mode="raw",
        sampling_params={"max_new_tokens": 1},
    )
    [found] = answer["meta_info"]["output_token_ids_logprobs"]
    assert [one[1] for one in found] == LABELS
    return [math.exp(one[0]) for one in found]


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_the_probabilities_of_the_labels_after_query_and_item(app, item_first):
    answer = _score(app, query="Is it so?", items=ITEMS, label_token_ids=LABELS, item_first=item_first)
    wholes = [item + "Is it so?" if item_first else "Is it so?" + item for item in ITEMS]
    for found, whole in zip(answer["scores"], wholes, strict=True):
        assert found == pytest.approx(_probabilities(app, whole))
    assert answer["object"] == "scoring"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == sum(map(len, wholes))


def test_softmax_makes_the_labels_share_all_of_the_probability(app):
    answer = _score(app, query="Q", items=ITEMS, label_token_ids=LABELS, apply_softmax=True)
    for found, item in zip(answer["scores"], ITEMS, strict=True):
        expected = _probabilities(app, "Q" + item)
        assert found == pytest.approx([one / sum(expected) for one in expected])
        assert sum(found) == pytest.approx(1)


def test_token_ids_are_taken_as_texts_are(app):
    by_text = _score(app, query="Q", items=ITEMS, label_token_ids=LABELS)
    ids = [list(item.encode()) for item in ITEMS]
    assert _score(app, query=list(b"Q"), items=ids, label_token_ids=LABELS)["scores"] == by_text["scores"]
    one = _score(app, query="Q", items=ITEMS[0], label_token_ids=LABELS)
    assert one["scores"] == by_text["scores"][:1]


def test_the_server_s_own_sampling_parameters_change_no_score(app):
    plain = _score(app, query="Q", items=ITEMS, label_token_ids=LABELS)
    settings = '{"temperature": 0.2, "min_new_tokens": 3, "n": 2, "logit_bias": {"65": 9}}'
    with App(preferred_sampling_params=settings) as other:
        assert _score(other, query="Q", items=ITEMS, label_token_ids=LABELS)["scores"] == plain["scores"]


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"query": None}, "query", "missing"),
        ({"items": []}, "items", "empty"),
        ({"items": ["a", [1]]}, "items", "texts if query is a text"),
        ({"items": [[1]]}, "items", "texts if query is a text"),
        ({"query": [1]}, "items", "texts if query is a text"),
        ({"query": "", "items": [""]}, "items[0]", "empty"),
        ({"query": [1], "items": [[9999]]}, "items[0]", "got 9999"),
        ({"items": ["a"] * 2049}, "items", "2048"),
        ({"items": ["x" * 2048]}, "items[0]", "context"),
        ({"label_token_ids": []}, "label_token_ids", "1"),
        (
            {"label_token_ids": [1, 258]},
            "label_token_ids",
            "label_token_ids[1] must be a token id in [0, 258), got 258",
        ),
        ({"label_token_ids": [1] * 1025}, "label_token_ids", "1024"),
        ({"item": ["a"]}, "item", "unknown field"),
        ({"apply_softmax": "yes"}, "apply_softmax", "yes"),
        ({"priority": 1}, "priority", "--enable-priority-scheduling"),
    ],
)
def test_what_is_wrong_is_named(app, change, field, said):
    body = {"query": "Q", "items": ["a"], "label_token_ids": [1]} | change
    error = app.error(path="/v1/score", **body)
    assert error["param"] == field
    assert said in error["message"]


def test_a_model_that_generates_text_does_not_rerank_and_says_what_does(app):
    error = app.error(path="/v1/rerank", query="a", documents=["b"])
    assert error["code"] == "not_an_embedding_model"
    assert "--model-path minilm" in error["message"]
