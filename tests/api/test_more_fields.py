"""Embeddings, hidden states, effective settings, names of older clients, /encode: what each changes in the answer."""

from __future__ import annotations

import math
import random

import msgspec
import numpy as np
import pytest
from app_under_test import App, parse_events
from fake_engine import HIDDEN_SIZE
from fake_hidden_states import fake_hidden

from tureen.config import Config
from tureen.contract.params import SamplingParams
from tureen.errors import StartupError

GREEDY = {"temperature": 0, "max_new_tokens": 4}


def embeds(seed, length=5):
    dice = random.Random(seed)
    return [[dice.uniform(-1, 1) for _ in range(HIDDEN_SIZE)] for _ in range(length)]


def events_of(app, **body):
    return parse_events(app.post(stream=True, **body).text)


# ---- embeddings


def test_embeddings_take_the_place_of_text_and_other_ones_give_another_output(app: App):
    one = app.generate(input_embeds=embeds(1), sampling_params=GREEDY)
    assert one["meta_info"]["prompt_tokens"] == 5
    assert len(one["output_ids"]) == 4
    again = app.generate(input_embeds=embeds(1), sampling_params=GREEDY)
    assert again["output_ids"] == one["output_ids"]
    assert app.generate(input_embeds=embeds(2), sampling_params=GREEDY)["output_ids"] != one["output_ids"]


def test_three_dimensions_are_a_batch(app: App):
    alone = [app.generate(input_embeds=embeds(i, 3 + i), sampling_params=GREEDY)["output_ids"] for i in range(3)]
    batch = app.generate(input_embeds=[embeds(i, 3 + i) for i in range(3)], sampling_params=GREEDY)
    assert [one["output_ids"] for one in batch] == alone
    assert [one["output_ids"] for one in app.generate(input_embeds=[embeds(0, 3)], sampling_params=GREEDY)] == alone[:1]


def test_embeddings_never_come_from_the_prefix_cache(app: App):
    for _ in range(2):
        answer = app.generate(input_embeds=embeds(1, 100), sampling_params=GREEDY)
        assert answer["meta_info"]["cached_tokens"] == 0
    app.check_idle()


def test_whole_numbers_are_numbers(app: App):
    by_int = app.generate(input_embeds=[[1, 0, -2, 3]], sampling_params=GREEDY)
    by_float = app.generate(input_embeds=[[1.0, 0.0, -2.0, 3.0]], sampling_params=GREEDY)
    assert by_int["output_ids"] == by_float["output_ids"]


def test_output_logprobs_go_with_embeddings(app: App):
    meta = app.generate(input_embeds=embeds(1), sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 4
    assert meta["input_token_logprobs"] == []


# ---- hidden states


def test_hidden_states_are_the_prompt_s_matrix_and_a_vector_per_token_but_the_first(app: App):
    answer = app.generate(text="abcdef", sampling_params=GREEDY, return_hidden_states=True)
    hidden = answer["meta_info"]["hidden_states"]
    assert len(hidden) == answer["meta_info"]["completion_tokens"]
    expected = fake_hidden([*b"abcdef", *answer["output_ids"][:-1]])
    assert hidden[0] == expected[:6]
    assert hidden[1:] == expected[6:]


def test_only_the_last_hidden_state(app: App):
    answer = app.generate(text="abcdef", sampling_params=GREEDY, return_hidden_states="last")
    assert answer["meta_info"]["hidden_states"] == fake_hidden([*b"abcdef", *answer["output_ids"][:-1]])[-1:]


def test_hidden_states_per_item_of_a_batch(app: App):
    answers = app.generate(text=["ab", "ab", "ab"], sampling_params=GREEDY, return_hidden_states=[True, "last", False])
    whole, last = (answer["meta_info"]["hidden_states"] for answer in answers[:2])
    assert (len(whole), len(last)) == (4, 1)
    assert last[0] == whole[-1]
    assert "hidden_states" not in answers[2]["meta_info"]


def test_a_stream_has_the_hidden_states_in_its_last_event(app: App):
    body = {"text": "abc", "sampling_params": GREEDY, "return_hidden_states": True}
    events = app.events(**body)
    assert ["hidden_states" in event["meta_info"] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1]["meta_info"]["hidden_states"] == app.generate(**body)["meta_info"]["hidden_states"]


def test_hidden_states_of_a_cached_prompt_are_all_there(app: App):
    body = {"text": "c" * 100, "sampling_params": GREEDY, "return_hidden_states": True}
    first, second = (app.generate(**body)["meta_info"]["hidden_states"] for _ in range(2))
    assert first == second
    assert len(first[0]) == 100


def test_an_answer_that_could_become_too_large_is_refused_with_the_numbers():
    with App(facts={"hidden_size": 100_000}) as app:
        error = app.error(text="a", return_hidden_states=True, sampling_params={"max_new_tokens": 200})
    assert "20100000" in error["message"]
    assert str(1 << 24) in error["message"]
    assert error["param"] == "return_hidden_states"


# ---- /encode


def test_encode_gives_the_normalised_last_hidden_state_of_the_prompt(app: App):
    answer = app.request("POST", "/encode", json={"text": "abcdef"}).json()
    expected = np.array(fake_hidden(b"abcdef")[-1])
    assert np.allclose(answer["embedding"], expected / np.linalg.norm(expected), rtol=1e-12)
    assert answer["meta_info"]["prompt_tokens"] == 6
    by_ids = app.request("PUT", "/encode", json={"input_ids": [[*b"abcdef"], [*b"x"]], "rid": ["p", "q"]}).json()
    assert by_ids[0]["embedding"] == answer["embedding"]
    assert [one["meta_info"]["id"] for one in by_ids] == ["p", "q"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": "a", "sampling_params": {"n": 2}}, "sampling_params"),
        ({"text": "a", "stream": True}, "stream"),
        ({"input_ids": [-1]}, "input_ids"),
    ],
)
def test_encode_refuses_what_it_has_no_use_for(app: App, body, field):
    response = app.request("POST", "/encode", json=body)
    assert response.status_code == 400
    assert field in response.json()["error"]["param"]


def test_encode_past_its_deadline_is_an_error_not_an_empty_vector():
    with App(slow=True, chunked_prefill_size=4) as app:
        response = app.request("POST", "/encode", json={"text": "a" * 2000, "deadline_ms": 50})
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        app.check_idle()


# ---- effective settings


def effective(app, **body):
    return app.generate(text="abc", return_effective=True, **body)["meta_info"]["effective"]


def test_every_sampling_parameter_is_told_with_its_value_and_origin(app: App):
    found = effective(app, sampling_params={"temperature": 0.5, "stop": "zz", "seed": 7, "max_new_tokens": 3})
    assert set(found) == {field.name for field in msgspec.structs.fields(SamplingParams)}
    given = {"temperature": 0.5, "stop": ["zz"], "sampling_seed": 7, "max_new_tokens": 3}
    defaults = {field.name: getattr(SamplingParams(), field.name) for field in msgspec.structs.fields(SamplingParams)}
    expected = msgspec.json.decode(msgspec.json.encode(defaults | given | {"stream_interval": 1}))
    assert {name: entry["value"] for name, entry in found.items()} == expected
    assert {name for name, entry in found.items() if entry["from"] == "request"} == set(given)
    assert {entry["from"] for entry in found.values()} == {"request", "default"}


def test_without_being_asked_for_they_are_not_there(app: App):
    assert "effective" not in app.generate(text="abc", sampling_params=GREEDY)["meta_info"]


def test_a_value_that_the_model_s_context_limits_comes_from_the_model(app: App):
    found = effective(app, sampling_params={"max_new_tokens": None, "stop": "a"})
    assert found["max_new_tokens"] == {"value": 2048 - 3, "from": "model"}
    answer = app.generate(text="say:" + "y" * 1990, return_effective=True)
    assert answer["meta_info"]["effective"]["max_new_tokens"] == {"value": 2048 - 1994, "from": "model"}


def test_each_sample_tells_its_own_seed(app: App):
    samples = app.generate(text="abc", sampling_params={"n": 3, "seed": 5, **GREEDY}, return_effective=True)
    assert [one["meta_info"]["effective"]["sampling_seed"]["value"] for one in samples] == [5, 6, 7]
    free = app.generate(text="abc", sampling_params=GREEDY, return_effective=True)["meta_info"]
    assert free["effective"]["sampling_seed"] == {"value": free["sampling_seed"], "from": "default"}


def test_the_server_s_defaults_act_below_the_request_s_and_say_so():
    preferred = '{"temperature": 0, "max_new_tokens": 7, "stop": "q"}'
    facts = {"generation_defaults": {"temperature": 0.7, "top_k": 40}}
    with App(preferred_sampling_params=preferred, sampling_defaults="model", stream_interval=3, facts=facts) as app:
        found = effective(app)
        assert found["temperature"] == {"value": 0.0, "from": "server"}
        assert found["max_new_tokens"] == {"value": 7, "from": "server"}
        assert found["stop"] == {"value": ["q"], "from": "server"}
        assert found["top_k"] == {"value": -1, "from": "default"}  # the model has a say on the chat dialects only
        assert found["stream_interval"] == {"value": 3, "from": "server"}
        assert effective(app, sampling_params={"temperature": 1.0})["temperature"] == {"value": 1.0, "from": "request"}
        assert len(app.generate(text="abc")["output_ids"]) <= 7
        runs = [app.generate(text="abc")["output_ids"] for _ in range(3)]
        assert runs[0] == runs[1] == runs[2]


def test_the_model_s_defaults_do_not_act_on_generate():
    with App(facts={"generation_defaults": {"temperature": 0.7}}) as app:
        assert effective(app)["temperature"] == {"value": 1.0, "from": "default"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not valid JSON"),
        ("5", "must be a JSON object"),
        ('{"temprature": 1}', "did you mean 'temperature'"),
        ('{"top_p": 2}', "top_p"),
        ('{"min_new_tokens": 500}', "min_new_tokens"),
    ],
)
def test_wrong_server_defaults_stop_the_start(text, complaint):
    with pytest.raises(StartupError, match=complaint) as caught:
        App(preferred_sampling_params=text)
    assert "--preferred-sampling-params" in caught.value.message
    assert Config().preferred_sampling_params is None


# ---- names of older clients


def test_the_names_of_older_versions_hold_the_same_values(app: App):
    body = {"text": "abcd", "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
    meta = app.generate(sampling_params=GREEDY, **body)["meta_info"]
    for new, old in (("input", "prefill"), ("output", "decode")):
        for kind in ("token_logprobs", "top_logprobs"):
            assert meta[f"{old}_{kind}"] == meta[f"{new}_{kind}"]
    values = [value for value, _, _ in meta["input_token_logprobs"][1:]]
    assert meta["normalized_prompt_logprob"] == pytest.approx(math.fsum(values) / len(values))


def test_a_mean_over_no_tokens_is_null(app: App):
    meta = app.generate(text="abcd", sampling_params=GREEDY, return_logprob=True)["meta_info"]
    assert meta["normalized_prompt_logprob"] is None


# ---- namespaces of the prefix cache, ids of the prompt, figures of the end


def test_an_extra_key_separates_the_cache_and_both_may_be_given_per_prompt(app: App):
    def cached(prompts=2, **fields) -> list[int]:
        answers = app.generate(text=["k" * 100] * prompts, sampling_params=GREEDY, **fields)
        return [answer["meta_info"]["cached_tokens"] for answer in answers]

    cached(1, extra_key="a")
    assert cached(1, extra_key=["a"]) == [96]
    assert cached(extra_key=["b", "a"]) == [0, 96]
    assert cached(extra_key=["b", None]) == [96, 0]
    assert cached(cache_salt=["s", "t"]) == [0, 0]
    assert cached(cache_salt=[None, "s"]) == [96, 96]
    assert cached(cache_salt="s", extra_key=["a", "c"]) == [0, 0]


@pytest.mark.parametrize("prompt", [{"text": "say:ab"}, {"input_ids": list(b"say:ab")}])
def test_the_prompt_s_ids_are_returned_when_asked_for_in_the_first_and_last_event_of_a_stream(app: App, prompt):
    assert app.generate(**prompt, return_prompt_token_ids=True)["prompt_token_ids"] == list(b"say:ab")
    assert "prompt_token_ids" not in app.generate(**prompt)
    events = events_of(app, **prompt, return_prompt_token_ids=True)
    assert [event.get("prompt_token_ids") for event in events] == [list(b"say:ab"), None, list(b"say:ab")]


def test_the_end_tells_how_it_was_cached_and_sampled(app: App):
    asked = {
        "text": "d" * 100,
        "cache_salt": "end",
        "sampling_params": {"max_new_tokens": 2, "top_p": 0.5, "min_p": 0.1},
    }
    app.generate(**asked)
    meta = app.generate(**asked)["meta_info"]
    assert meta["cached_tokens_details"] == {"device": 96, "host": 0}
    assert meta["num_retractions"] == 0
    told = {name: meta[f"sampling_{name}"] for name in ("temperature", "top_k", "top_p", "min_p")}
    assert told == {"temperature": 1.0, "top_k": -1, "top_p": 0.5, "min_p": 0.1}
    first, *_, last = events_of(app, **asked)
    assert first["meta_info"].keys() < last["meta_info"].keys() == meta.keys()
