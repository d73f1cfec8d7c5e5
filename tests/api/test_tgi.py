"""TGI's dialect: `/generate` with `inputs`, `/generate_stream`, `POST /`; its own client reads the answers."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from app_under_test import App
from byte_tokenizer import EOS
from fake_engine import CONTEXT_LEN, make_request
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError, ValidationError
from served_app import ServedApp
from timeouts import until
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from tureen.contract.types import FinishReason, OutputDelta
from tureen.dialects.tgi.generate import TokenTexts
from tureen.requests.generation import Output
from tureen.requests.state import Context
from tureen.text.tokenizer import Tokenizer


def ask(app, path="/generate", status=200, **body):
    response = app.request("POST", path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def detailed(app, inputs, **parameters):
    return ask(app, inputs=inputs, parameters={"details": True, **parameters})


def events(text: str) -> list:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


def stream(app, inputs, path="/generate_stream", **parameters):
    response = app.request("POST", path, json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_the_shortest_request(app: App):
    assert ask(app, inputs="say:hello") == {"generated_text": "hello"}
    assert ask(app, "/", inputs="say:hello") == [{"generated_text": "hello"}]


def test_twenty_tokens_are_the_default(app: App):
    assert detailed(app, "abc")["details"]["generated_tokens"] == 20


def test_details_tell_every_token(app: App):
    details = detailed(app, "say:héy")["details"]
    assert details["finish_reason"] == "eos_token"
    assert details["generated_tokens"] == 5
    assert details["prefill"] == []
    assert [token["id"] for token in details["tokens"]] == [*"héy".encode(), EOS]
    assert [token["text"] for token in details["tokens"]] == ["h", "", "é", "y", ""]
    assert [token["special"] for token in details["tokens"]] == [False] * 4 + [True]
    plain = app.generate(text="say:héy", sampling_params={"temperature": 0}, return_logprob=True)["meta_info"]
    assert [token["logprob"] for token in details["tokens"]] == [one[0] for one in plain["output_token_logprobs"]]


def test_the_prompt_s_tokens_with_logprobs(app: App):
    prefill = detailed(app, "abc", decoder_input_details=True)["details"]["prefill"]
    body = {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
    expected = app.generate(**body)["meta_info"]["input_token_logprobs"]
    assert [(one["logprob"], one["id"]) for one in prefill] == [(value, token) for value, token, _ in expected]
    assert [one["text"] for one in prefill] == ["a", "b", "c"]
    assert prefill[0]["logprob"] is None


def test_alternatives_of_each_token(app: App):
    off = detailed(app, "abc", top_n_tokens=0, max_new_tokens=4)["details"]
    assert "top_tokens" not in off
    assert app.post("/generate", inputs="abc", parameters={"top_n_tokens": 0}).status_code == 200
    details = detailed(app, "abc", top_n_tokens=3, max_new_tokens=4)["details"]
    assert [len(one) for one in details["top_tokens"]] == [3] * 4
    params = {"temperature": 0, "max_new_tokens": 4}
    meta = app.generate(text="abc", sampling_params=params, return_logprob=True, top_logprobs_num=3)["meta_info"]
    for ours, expected in zip(details["top_tokens"], meta["output_top_logprobs"], strict=True):
        assert [(one["logprob"], one["id"]) for one in ours] == [(value, token) for value, token, _ in expected]


@pytest.mark.parametrize(
    ("inputs", "parameters", "text", "reason"),
    [
        ("say:one two", {"stop": [" t"]}, "one t", "stop_sequence"),
        ("say:one", {}, "one", "eos_token"),
        ("say:one two", {"max_new_tokens": 3}, "one", "length"),
    ],
)
def test_the_finish_reason_and_the_stop_sequence_that_stays(app: App, inputs, parameters, text, reason):
    answer = detailed(app, inputs, **parameters)
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == (text, reason)
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == text
    *_, last = stream(app, inputs, **parameters)
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, reason)


def test_the_full_text_has_the_prompt_in_front(app: App):
    assert ask(app, inputs="say:hi", parameters={"return_full_text": True}) == {"generated_text": "say:hihi"}


def test_truncation_keeps_the_last_tokens(app: App):
    cut = detailed(app, "xyzabc", truncate=3, decoder_input_details=True, seed=1)
    assert cut["generated_text"] == detailed(app, "abc", seed=1)["generated_text"]
    assert [one["text"] for one in cut["details"]["prefill"]] == ["a", "b", "c"]
    long = detailed(app, "a" * (3 * CONTEXT_LEN), truncate=10)
    assert long["generated_text"] == detailed(app, "a" * 10)["generated_text"]


def test_without_a_sampling_parameter_the_best_token_is_taken(app: App):
    greedy = app.generate(text="abc", sampling_params={"temperature": 0, "max_new_tokens": 20})["text"]
    assert detailed(app, "abc", seed=1)["generated_text"] == greedy
    assert detailed(app, "abc")["details"]["seed"] is None
    for parameters in ({"do_sample": True}, {"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.9}, {"typical_p": 0.9}):
        answer = detailed(app, "abc", seed=1, **parameters)
        assert answer["details"]["seed"] == 1
        assert answer["generated_text"] != greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 0.5), ("top_k", 7), ("top_p", 0.75), ("typical_p", 0.25), ("repetition_penalty", 1.5),
     ("frequency_penalty", 0.5),
     ("max_new_tokens", 3), ("seed", 9), ("stop", ["q"])],
)  # fmt: skip
def test_a_parameter_reaches_the_engine_under_its_name(app: App, monkeypatch, name, value):
    seen = []
    generate = app.client.generate
    monkeypatch.setattr(app.client, "generate", lambda request, *how: seen.append(request) or generate(request, *how))
    ask(app, inputs="a", parameters={name: value})
    ours = getattr(seen[0].params, {"seed": "sampling_seed"}.get(name, name))
    assert (list(ours) if name == "stop" else ours) == value


def test_best_of_answers_the_most_probable_and_lists_the_others(app: App):
    answer = detailed(app, "abc", best_of=3, do_sample=True, seed=5)
    others = answer["details"].pop("best_of_sequences")
    ranked = [answer["details"], *others]
    totals = [sum(token["logprob"] for token in one["tokens"]) for one in ranked]
    assert totals == sorted(totals, reverse=True)
    assert sorted(one["seed"] for one in ranked) == [5, 6, 7]


BAD = {
    "inputs": ["", 5, ["a"], {}, True],
    "parameters": [5, [], "x"],
    "stream": [1, "x"],
}
BAD_PARAMETERS = {
    "max_new_tokens": [0, -1, 1.5, "5", True, CONTEXT_LEN],
    "do_sample": [1, "x"],
    "temperature": [0, -1, "1"],
    "top_k": [0, -1, 1.5],
    "top_p": [0, 1, 1.0, 1.5],
    "typical_p": [0, 1.5],
    "repetition_penalty": [0, -1, 2.5],
    "frequency_penalty": [-2.5, 2.5],
    "seed": [-1, 2**64, "x"],
    "stop": ["x", [""], [5], ["a"] * 65],
    "return_full_text": [1],
    "truncate": [0, -1, 1.5],
    "watermark": [True, 1],
    "details": [1],
    "decoder_input_details": [True, 1],
    "top_n_tokens": [-1, 6, 2],
    "best_of": [0, 129, 2],
    "adapter_id": [5, ["x"]],
    "grammar": [
        "a",
        {},
        {"type": "lark", "value": "a"},
        {"type": "regex", "value": {}},
        {"type": "regex", "value": "("},
        {"type": "json", "value": {"minLenght": 1}},
        {"type": "json", "value": "{"},
    ],
    "max_tokens": [5],
}
CASES = [(name, {name: value}) for name, values in BAD.items() for value in values] + [
    (name, {"parameters": {name: value}}) for name, values in BAD_PARAMETERS.items() for value in values
]


@pytest.mark.parametrize("path", ["/generate", "/", "/generate_stream"])
def test_a_wrong_field_is_refused_by_name_in_this_dialect_s_shape(app: App, path):
    for name, fields in CASES:
        error = ask(app, path, 422, **({"inputs": "a"} | fields))
        assert set(error) == {"error", "error_type"}
        assert error["error_type"] == "validation"
        assert name in error["error"], (fields, error)


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ({"type": "regex", "value": "[ab]c{3}"}, "[ab]c{3}"),
        ({"type": "json", "value": {"enum": ["x", "yz"]}}, '"x"|"yz"'),
        ({"type": "json", "value": '{"type": "boolean"}'}, "true|false"),
        ({"type": "json_object", "value": {"const": 5}}, "5"),
    ],
)
def test_a_grammar_constrains_the_text(app: App, grammar, fits):
    answer = ask(app, inputs="a", parameters={"grammar": grammar, "max_new_tokens": 50, "details": True})
    assert re.fullmatch(fits, answer["generated_text"])
    assert len(answer["details"]["tokens"]) == answer["details"]["generated_tokens"]
    found = stream(app, "a", grammar=grammar, max_new_tokens=50)
    assert found[-1]["generated_text"] == answer["generated_text"]


def test_an_output_that_can_only_be_empty_ends_as_others_that_are_complete(app: App):
    answer = ask(app, inputs="a", parameters={"grammar": {"type": "regex", "value": "()"}, "details": True})
    assert (answer["generated_text"], answer["details"]["finish_reason"]) == ("", "eos_token")


def test_a_stream_cannot_have_several_sequences_or_the_prompt_s_details(app: App):
    for parameters in ({"best_of": 2, "do_sample": True}, {"details": True, "decoder_input_details": True}):
        assert "stream" in ask(app, "/generate_stream", 422, inputs="a", parameters=parameters)["error"]


@pytest.mark.parametrize("path", ["/generate", "/"])
def test_a_stream_is_one_event_a_token_wherever_it_is_asked_for(app: App, path):
    response = app.request("POST", path, json={"inputs": "say:héy", "stream": True})
    found = events(response.text)
    assert found == stream(app, "say:héy")
    assert [one["index"] for one in found] == [1, 2, 3, 4, 5]
    assert "".join(one["token"]["text"] for one in found) == "héy"
    assert [one["generated_text"] for one in found] == [None] * 4 + ["héy"]
    assert found[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 5,
        "seed": None,
        "input_length": len("say:héy".encode()),
    }


def test_an_error_in_a_stream_is_its_last_event(app: App):
    found = stream(app, "say:abc\x01def")
    assert found[-1]["error_type"] == "generation"
    assert "nan_logits" in found[-1]["error"]
    assert ask(app, status=424, inputs="say:abc\x01def") == found[-1]


def test_an_abort_is_an_incomplete_generation():
    with App(slow=True) as app:

        async def scenario():
            body = {"inputs": "abc", "parameters": {"max_new_tokens": 1500}}
            paths = ("/generate", "/generate_stream")
            tasks = [asyncio.create_task(app.http.post(path, json=body)) for path in paths]
            await until(lambda: app.client.stats.num_running >= 2)
            await app.http.post("/abort_request", json={"abort_all": True})
            return await asyncio.gather(*tasks)

        whole, streamed = app.run(scenario())
        assert (whole.status_code, whole.json()["error_type"]) == (500, "incomplete_generation")
        assert events(streamed.text)[-1]["error_type"] == "incomplete_generation"


@pytest.mark.parametrize("path", ["/", "/generate_stream"])
@pytest.mark.parametrize(
    ("content_type", "content", "status"),
    [("application/json", b"{", 422), ("application/json", b"[]", 422), ("text/plain", b"{}", 415)],
)
def test_what_is_no_json_object_is_refused_in_this_dialect_s_shape(app: App, path, content_type, content, status):
    response = app.request("POST", path, content=content, headers={"content-type": content_type})
    assert response.status_code == status
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == "validation"


def test_null_is_the_default_also_where_the_context_has_less_room(app: App):
    prompt = "a" * (CONTEXT_LEN - 8)
    assert detailed(app, prompt, max_new_tokens=None) == detailed(app, prompt)
    assert detailed(app, prompt)["details"]["generated_tokens"] == 8


def test_the_operator_s_temperature_holds_for_requests_without_one():
    with App(preferred_sampling_params='{"temperature": 0.7}') as app:
        assert detailed(app, "abc", seed=4)["details"]["seed"] == 4
        assert len(detailed(app, "abc", best_of=2)["details"]["best_of_sequences"]) == 1
    with App(preferred_sampling_params='{"temperature": 0}') as app:
        assert "best_of" in ask(app, status=422, inputs="a", parameters={"best_of": 2, "do_sample": True})["error"]


def test_a_text_that_no_truncation_should_have_to_read_is_refused(app: App):
    error = ask(app, status=422, inputs="a" * (10 * CONTEXT_LEN), parameters={"truncate": 1})
    assert f"({10 * CONTEXT_LEN} characters)" in error["error"]


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["the", "abc"], "theab", "theab"),
        (["a", "bab"], "ba", "aba"),
        (["bab", "bab"], "bb", "babb"),
        (["stop"], "s", "s"),
        (["abc"], EOS, "abc"),
    ],
)
def test_the_text_ends_with_the_stop_sequence_though_its_last_token_goes_on(pieces, stop, expected):
    vocab = {text: token_id for token_id, text in enumerate(["a", "bab", "abc", "the", "stop"])}
    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    output = Output(make_request("x"), 0, "x")
    ids = tuple(vocab[piece] for piece in pieces)
    output.add(OutputDelta(id="x", token_ids=ids, finish=FinishReason(type="stop", matched=stop)))
    texts = TokenTexts(output, Context(Tokenizer(backend), None, None))
    assert texts.catch_up() == range(len(ids))
    assert texts.whole == expected


def test_an_engine_with_a_full_queue_is_overloaded():
    with App(slow=True, max_queued_requests=1) as app:

        async def scenario():
            tasks = [asyncio.create_task(app.http.post("/generate", json={"inputs": "abc"})) for _ in range(40)]
            done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            return next(iter(done)).result()

        response = app.run(scenario())
        assert (response.status_code, response.json()["error_type"]) == (503, "overloaded")


def test_a_client_that_leaves_a_stream_frees_its_place():
    with ServedApp(slow=True) as server:
        body = {"inputs": "abc", "parameters": {"max_new_tokens": 1500}}
        with httpx.stream("POST", f"{server.url}/generate_stream", json=body) as response:
            next(response.iter_raw())
        server.wait_until(lambda: server.stats.num_running == 0, "the abort")


def test_the_hub_s_own_client_reads_all_of_it():
    with ServedApp() as server:
        client = InferenceClient(server.url)
        assert client.text_generation("say:héllo") == "héllo"
        answer = client.text_generation("say:one two", details=True, stop=[" t"], decoder_input_details=True)
        assert (answer.generated_text, answer.details.finish_reason) == ("one t", "stop_sequence")
        assert [token.text for token in answer.details.tokens] == list("one t")
        assert len(answer.details.prefill) == len("say:one two")
        assert "".join(client.text_generation("say:one two", stream=True)) == "one two"
        *_, last = client.text_generation("say:one two", stream=True, details=True)
        assert (last.generated_text, last.details.generated_tokens) == ("one two", 8)
        with pytest.raises(ValidationError, match="top_p"):
            client.text_generation("a", top_p=1.0)
        with pytest.raises(GenerationError, match="nan_logits"):
            client.text_generation("say:abc\x01def")
        with pytest.raises(GenerationError, match="nan_logits"):
            list(client.text_generation("say:abc\x01def", stream=True))
