"""Fields of the documentation pages that need a model's own logits: over HTTP, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from app_under_test import App
from real_app import RealApp, write_model

from tureen.contract.types import LEAST_LOGPROB


@pytest.fixture(scope="module")
def app(tmp_path_factory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=5)
    with RealApp(folder) as running:
        yield running


def test_both_kinds_of_logprobs_stand_side_by_side(app: App):
    body = {"text": "abcd", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    body["sampling_params"] = {"max_new_tokens": 3, "sampling_seed": 3, "temperature": 0.5}
    metas = {mode: app.generate(**body, logprobs_mode=mode)["meta_info"] for mode in ("processed", "raw", "both")}
    for kind in ("token_logprobs", "top_logprobs"):
        assert metas["both"][f"output_{kind}"] == metas["processed"][f"output_{kind}"]
        assert metas["both"][f"raw_output_{kind}"] == metas["raw"][f"output_{kind}"]
        assert metas["raw"][f"output_{kind}"] != metas["processed"][f"output_{kind}"]
        assert metas["both"][f"input_{kind}"] == metas["raw"][f"input_{kind}"]
    assert not [name for mode in ("processed", "raw") for name in metas[mode] if name.startswith("raw_")]
    assert (
        app.events(**body, logprobs_mode="both")[-1]["meta_info"]["raw_output_token_logprobs"]
        == (metas["both"]["raw_output_token_logprobs"])
    )


def test_ollama_s_log_probabilities_are_the_model_s_own(app: App):
    """As Ollama's are since its version 0.12.11: those of the model's logits, whatever the temperature is."""
    params = {"temperature": 0.5, "top_k": 4, "seed": 3}
    body = {"text": "abcd", "return_logprob": True, "top_logprobs_num": 2}
    metas = {
        mode: app.generate(**body, sampling_params=params | {"max_new_tokens": 3, "top_p": 0.9}, logprobs_mode=mode)[
            "meta_info"
        ]
        for mode in ("raw", "processed")
    }
    asked = {"model": "default", "prompt": "abcd", "raw": True, "stream": False, "logprobs": True, "top_logprobs": 2}
    answer = app.post("/api/generate", **asked, options=params | {"num_predict": 3}).json()
    values = [[entry["logprob"], [one["logprob"] for one in entry["top_logprobs"]]] for entry in answer["logprobs"]]
    expected = {
        mode: [
            [token[0], [one[0] for one in top]]
            for token, top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        ]
        for mode, meta in metas.items()
    }
    assert values == expected["raw"] != expected["processed"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"text": ["a", "b", "c"], "custom_params": [{"ids": [5]}, None, {"ids": [6]}]}, [{5}, set(), {6}]),
        ({"text": "a", "n": 3, "custom_params": [{"ids": [5]}, None, {"ids": [6]}]}, [{5}, set(), {6}]),
        ({"text": ["a", "b"], "n": 2, "custom_params": [{"ids": [5]}, None]}, [{5}, {5}, set(), set()]),
        (
            {"text": ["a", "b"], "n": 2, "custom_params": [{"ids": [5]}, {"ids": [6]}, None, {"ids": [7]}]},
            [{5}, {6}, set(), {7}],
        ),
        ({"text": "a", "custom_params": [{"ids": [5]}]}, [{5}]),
    ],
)
def test_a_list_of_custom_params_gives_each_prompt_or_each_output_its_own(app: App, fields, expected):
    body = dict(fields)
    params = {"max_new_tokens": 1, "sampling_seed": 1, "n": body.pop("n", 1)}
    bias = [None if entry is None else {"token_ids": entry["ids"]} for entry in body.pop("custom_params")]
    params["custom_params"] = [entry or {"token_ids": []} for entry in bias]
    body |= {"return_logprob": True, "token_ids_logprob": [5, 6, 7], "custom_logit_processor": "disallowed_tokens"}
    answers = app.generate(**body, sampling_params=params)
    answers = answers if isinstance(answers, list) else [answers]
    forbidden = [
        {token for value, token, _ in answer["meta_info"]["output_token_ids_logprobs"][0] if value == LEAST_LOGPROB}
        for answer in answers
    ]
    assert forbidden == expected


def test_each_entry_of_sampling_params_may_have_a_list_for_its_own_samples(app: App):
    entries = [{"max_new_tokens": 1, "n": 2, "custom_params": [{"token_ids": [i]}, {"token_ids": []}]} for i in (5, 6)]
    answers = app.generate(
        text=["a", "b"],
        sampling_params=entries,
        return_logprob=True,
        token_ids_logprob=[5, 6],
        custom_logit_processor="disallowed_tokens",
    )
    values = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in answers]
    assert [[token for value, token, _ in entry if value == LEAST_LOGPROB] for entry in values] == [[5], [], [6], []]


def test_a_list_of_custom_params_of_another_length_is_refused_with_the_lengths(app: App):
    params = {"n": 3, "custom_params": [{"token_ids": []}] * 4}
    error = app.error(text=["a", "b"], sampling_params=params, custom_logit_processor="disallowed_tokens")
    assert error["param"] == "sampling_params.custom_params"
    assert error["message"] == (
        "sampling_params.custom_params has 4 entries; send one for each of the 2 prompts, or for each of the 6 outputs"
    )


@pytest.mark.parametrize(
    ("setting", "path", "body", "field"),
    [
        ("max_batch_size", "/generate", {"text": ["a"] * 3}, "text"),
        ("max_batch_size", "/generate", {"input_ids": [[97]] * 3}, "input_ids"),
        ("max_batch_size", "/v1/completions", {"prompt": ["a"] * 3}, "prompt"),
        ("max_n", "/generate", {"text": "a", "sampling_params": {"n": 3}}, "sampling_params.n"),
        ("max_n", "/v1/completions", {"prompt": "a", "n": 3}, "n"),
        ("max_n", "/v1/completions", {"prompt": "a", "best_of": 3}, "best_of"),
        ("max_n", "/generate", {"prompt": "a", "n": 3}, "n"),
        ("max_n", "/generate", {"prompt": "a", "best_of": 3}, "best_of"),
        ("max_n", "/generate", {"inputs": "a", "parameters": {"best_of": 3, "do_sample": True}}, "parameters.best_of"),
        (
            "max_stop_strings",
            "/generate",
            {"text": "a", "sampling_params": {"stop": ["x"] * 3}},
            "sampling_params.stop",
        ),
        ("max_stop_strings", "/generate", {"text": "a", "sampling_params": {"stop_regex": ["x"] * 3}}, "stop_regex"),
        ("max_stop_strings", "/v1/completions", {"prompt": "a", "stop": ["x"] * 3}, "stop"),
        ("max_stop_strings", "/generate", {"inputs": "a", "parameters": {"stop": ["x"] * 3}}, "parameters.stop"),
    ],
)
def test_a_limit_is_a_setting_that_its_refusal_names(setting, path, body, field):
    with App(**{setting: 2}) as app:
        response = app.post(path, **body)
        assert response.status_code in (400, 422)
        assert field in response.text
        assert f"2 entries (--{setting.replace('_', '-')})" in response.text or f"2 {_named(setting)}" in response.text
    with App(**{setting: 3}) as app:
        assert app.post(path, **body).status_code == 200


def _named(setting: str) -> str:
    return {"max_batch_size": "prompts (--max-batch-size)", "max_n": "(--max-n)"}.get(setting, "")
