"""OpenAI's `/v1/completions`; its own client reads the answers, its own models say whether they are right."""

from __future__ import annotations

import json
import logging
import math
import random
from itertools import accumulate

import httpx
import jsonschema
import msgspec
import openai
import pytest
from app_under_test import App, parse_events
from byte_tokenizer import EOS
from fake_engine import CONTEXT_LEN, make_request
from openai_judge import joined_texts, judge, make_client
from served_app import ServedApp
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from tureen.contract.types import FinishReason, OutputDelta, PositionLogprobs
from tureen.dialects.openai.completions import TABLE, GrowingText, parse
from tureen.requests.generation import Output
from tureen.text.tokenizer import Tokenizer

PATH = "/v1/completions"
SEEDED = {"seed": 7, "max_tokens": 12}


def ask(app: App, status: int = 200, **body):
    response = app.post(PATH, **body)
    assert response.status_code == status, response.text
    answer = response.json()
    if status == 200:
        judge(answer)
    return answer


def choice(app: App, **body):
    [one] = ask(app, **body)["choices"]
    return one


def refusal(app: App, status: int = 400, **body):
    return ask(app, status, **body)["error"]


def chunks(app: App, **body):
    response = app.post(PATH, **body, stream=True)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = parse_events(response.text)
    for chunk in found:
        judge(chunk, is_chunk=True)
    return found


@pytest.fixture(scope="module")
def client():
    with ServedApp() as server, make_client(server.url) as found:
        yield found


def test_the_client_gets_a_completion(client):
    answer = client.completions.create(model="fake-model", prompt="say:héllo")
    assert answer.choices[0].text == "héllo"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].matched_stop == EOS
    assert answer.model == "fake-model"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len("say:héllo".encode())
    assert answer.usage.completion_tokens == len("héllo".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_client_streams_a_completion(client):
    stream = client.completions.create(
        model="fake-model", prompt="say:héllo", stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "héllo"
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert last.choices == []
    assert last.usage.completion_tokens == 7
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_the_client_understands_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake-model", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake-model", prompt="a", stream=True, extra_body={"top_kk": 3})
    assert "did you mean 'top_k'" in str(caught.value)


def test_the_client_is_told_of_an_error_inside_a_stream(client):
    stream = client.completions.create(model="fake-model", prompt="say:ab\x01cd", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="nan_logits"):
        texts += [chunk.choices[0].text for chunk in stream]
    events = httpx.post(f"{client.base_url}completions", json={"prompt": "say:ab\x01cd", "stream": True}).text.split(
        "\n\n"
    )
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "ab" in "".join(json.loads(one.removeprefix("data: "))["choices"][0]["text"] for one in events[:-3])


def test_an_error_before_the_first_event_has_its_status(app: App):
    for stream in (False, True):
        assert app.post(PATH, prompt="say:\x01", stream=stream).status_code in (200, 500)
        assert app.post(PATH, prompt="a" * (CONTEXT_LEN + 1), stream=stream).status_code == 400


def test_who_leaves_a_stream_frees_its_place():
    with ServedApp(slow=True) as server, make_client(server.url) as client:
        stream = client.completions.create(model="fake-model", prompt="abc", max_tokens=1900, stream=True)
        next(iter(stream))
        assert server.stats.num_running == 1
        stream.close()
        server.wait_until(lambda: server.stats.num_running == 0, "the abort")


COMBINATIONS = [
    {"prompt": "abc"},
    {"prompt": "say:héllo wörld"},
    {"prompt": ["abc", "say:xyz", "bcd"], "n": 2},
    {"prompt": [[97, 98], [99]], "n": 3, "logprobs": 2},
    {"prompt": "say:ab🙂cd", "logprobs": 0},
    {"prompt": "say:ab🙂cd", "logprobs": 3, "echo": True},
    {"prompt": "say:abcdefgh", "logprobs": 1, "stop": ["efx", "gh"]},
    {"prompt": "say:abcdefgh", "logprobs": 1, "stop": "de", "echo": True},
    {"prompt": "say:abcdefgh", "logprobs": 1, "stop": "de", "no_stop_trim": True},
    {"prompt": "say:abcdefgh", "logprobs": 1, "max_tokens": 4},
    {"prompt": ["abc", "say:é"], "echo": True, "n": 2, "logprobs": 1},
    {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": 1},
    {"prompt": "abc", "max_tokens": 0},
    {"prompt": "say:abcdefgh", "logprobs": 1, "stream_interval": 3},
    {"prompt": [226, 130], "echo": True, "logprobs": 1},
    {"prompt": "say:" + "ä" * 9, "stop_token_ids": [0xA4], "logprobs": 0},
]


@pytest.mark.parametrize("body", COMBINATIONS)
def test_a_stream_says_what_the_whole_answer_says(app: App, body):
    body = SEEDED | body
    whole = ask(app, **body)
    found = chunks(app, **body, stream_options={"include_usage": True})
    assert joined_texts(found) == whole["choices"]
    assert found[-1]["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[-1]["usage"][name] == whole["usage"][name]


def _offsets(token_bytes: list[bytes]) -> list[int]:
    """Characters that are complete before each token."""
    return [len(b"".join(token_bytes[:index]).decode(errors="ignore")) for index in range(len(token_bytes))]


def _bytes_of(token: str) -> bytes:
    if token.startswith("bytes:"):
        return bytes(int(code, 16) for code in token.removeprefix("bytes:").split("\\x")[1:])
    return b"" if token in ("<eos>", "<bos>") else token.encode()


@pytest.mark.parametrize("seed", range(8))
def test_text_offsets_say_where_tokens_are_in_the_text(app: App, seed):
    rng = random.Random(seed)
    said = "".join(rng.choice("ab é€🙂\n") for _ in range(rng.randrange(1, 12)))
    for echo in (False, True):
        found = choice(app, prompt=f"say:{said}", echo=echo, logprobs=0, max_tokens=60)
        front = f"say:{said}" if echo else ""
        assert found["text"] == front + said
        pieces = [_bytes_of(token) for token in found["logprobs"]["tokens"]]
        assert b"".join(pieces).decode() == found["text"]
        assert found["logprobs"]["text_offset"] == _offsets(pieces)


def test_tokens_that_are_no_text_stand_at_its_end(app: App):
    found = choice(app, prompt="say:abcdef", logprobs=0, stop="cd")
    assert found["text"] == "ab"
    assert found["logprobs"]["tokens"] == ["a", "b", "c", "d"]
    assert found["logprobs"]["text_offset"] == [0, 1, 2, 2]
    found = choice(app, prompt="say:ab", logprobs=0)
    assert found["logprobs"]["tokens"] == ["a", "b", "<eos>"]
    assert found["logprobs"]["text_offset"] == [0, 1, 2]


def test_logprobs_are_those_of_generate(app: App):
    found = choice(app, prompt="abc", seed=3, max_tokens=9, echo=True, logprobs=4)["logprobs"]
    meta = app.generate(
        text="abc",
        sampling_params={"seed": 3, "max_new_tokens": 9},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=4,
        return_text_in_logprobs=True,
    )["meta_info"]
    both = meta["input_token_logprobs"] + meta["output_token_logprobs"]
    assert found["token_logprobs"] == [value for value, _, _ in both]
    assert [_bytes_of(token) for token in found["tokens"]] == [bytes([token]) for _, token, _ in both]
    tops = meta["input_top_logprobs"] + meta["output_top_logprobs"]
    assert found["top_logprobs"][0] is None
    for shown, best, (value, token, _) in list(zip(found["top_logprobs"], tops, both, strict=True))[1:]:
        expected = {token: value} | {one: number for number, one, _ in best}
        assert {_as_id(text): number for text, number in shown.items()} == expected


def _as_id(text: str) -> int:
    return {"<eos>": 256, "<bos>": 257}.get(text) or _bytes_of(text)[0]


def test_raw_logprobs_are_asked_for_by_name(app: App):
    asked = []
    _watch(app, asked)
    ask(app, prompt="abc", logprobs=1, logprobs_mode="raw", max_tokens=1)
    assert asked[0].logprobs.mode == "raw"
    assert refusal(app, prompt="abc", logprobs_mode="raw")["param"] == "logprobs_mode"


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_text_is_scored_as_lm_eval_does_it(app: App, max_tokens):
    """The request of lm-eval's local-completions backend, and how it reads the answer."""
    context, continuation = list(b"The sky is"), list(b" blue")
    body = {"model": "fake-model", "prompt": [context + continuation], "temperature": 0, "max_tokens": max_tokens}
    found = choice(app, **body, logprobs=1, seed=1234, echo=True)["logprobs"]
    num_tokens = len(context + continuation)
    values = found["token_logprobs"][len(context) : num_tokens]
    assert len(found["tokens"]) == num_tokens + max_tokens
    meta = app.generate(
        input_ids=context + continuation,
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=0,
    )["meta_info"]
    assert math.isclose(sum(values), sum(one[0] for one in meta["input_token_logprobs"][len(context) :]))
    for token, best in list(zip(found["tokens"], found["top_logprobs"], strict=True))[len(context) : num_tokens]:
        assert token in best
        assert max(best.values()) >= best[token]


def test_prompts_are_answered_in_order(app: App):
    answer = ask(app, prompt=["say:a", "say:b", "say:c"], n=2, echo=True)
    assert [one["index"] for one in answer["choices"]] == list(range(6))
    assert [one["text"] for one in answer["choices"]] == [f"say:{c}{c}" for c in "aabbcc"]
    assert answer["usage"]["prompt_tokens"] == 15
    assert answer["usage"]["completion_tokens"] == 12
    assert [one["text"] for one in ask(app, prompt=["say:a"])["choices"]] == ["a"]
    assert [one["text"] for one in ask(app, prompt=[list(b"say:a"), list(b"say:b")])["choices"]] == ["a", "b"]
    assert choice(app, prompt=list(b"say:hey"), echo=True)["text"] == "say:heyhey"


def test_sampling_seeds_give_each_sample_again(app: App):
    for one in ask(app, prompt=["abc", "bcd"], n=2)["choices"]:
        prompt = ["abc", "bcd"][one["index"] // 2]
        assert choice(app, prompt=prompt, seed=one["sampling_seed"])["text"] == one["text"]
        assert abs(one["sampling_seed"]) < 2**53  # JavaScript's clients can say it too


def test_the_best_of_several_are_returned(app: App):
    samples = app.generate(text="abc", sampling_params={"seed": 5, "n": 6, "max_new_tokens": 4}, return_logprob=True)
    ranked = sorted(
        samples, key=lambda one: -sum(value for value, _, _ in one["meta_info"]["output_token_logprobs"]) / 4
    )
    answer = ask(app, prompt="abc", seed=5, max_tokens=4, best_of=6, n=2)
    assert [one["text"] for one in answer["choices"]] == [one["text"] for one in ranked[:2]]
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert [one["logprobs"] for one in answer["choices"]] == [None, None]
    assert answer["usage"]["completion_tokens"] == 24
    two = ask(app, prompt=["abc", "bcd"], seed=5, max_tokens=4, best_of=6)
    assert [one["index"] for one in two["choices"]] == [0, 1]
    assert two["choices"][0]["text"] == ranked[0]["text"]


def test_best_of_is_refused_where_it_cannot_be(app: App):
    assert refusal(app, prompt="abc", best_of=2, stream=True)["param"] == "best_of"
    assert refusal(app, prompt="abc", best_of=2, n=3)["param"] == "best_of"
    assert refusal(app, prompt="abc", best_of=0)["param"] == "best_of"
    assert refusal(app, prompt="abc", best_of=129)["param"] == "best_of"
    assert refusal(app, prompt=["abc"] * 5, best_of=128)["param"] == "best_of"
    assert chunks(app, prompt="say:a", best_of=1)


def test_cached_tokens_are_told(app: App):
    prompt = "0123456789" * 10
    ask(app, prompt=prompt)
    used = ask(app, prompt=prompt, n=3)["usage"]
    assert used["prompt_tokens"] == 100
    assert used["prompt_tokens_details"]["cached_tokens"] == 96  # whole pages of 16


def test_usage_is_told_in_every_chunk_where_asked(app: App):
    for at_end in (True, False):
        options = {"continuous_usage_stats": True, "include_usage": at_end}
        found = chunks(app, prompt=["abc", "say:abc"], max_tokens=200, stream_options=options)
        counts = [chunk["usage"]["completion_tokens"] for chunk in found]
        assert counts == sorted(counts)
        assert counts[-1] == 204
        assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {10}
        assert (found[-1]["choices"] == []) is at_end
    assert all("usage" not in chunk for chunk in chunks(app, prompt="say:abc", stream_options={"include_usage": None}))


def test_a_chunk_s_usage_is_what_the_chunks_up_to_it_hold(app: App):
    options = {"continuous_usage_stats": True, "include_usage": False}
    found = chunks(app, prompt="abc", max_tokens=200, logprobs=0, stream_options=options)
    told = [sum(len(choice["logprobs"]["tokens"]) for choice in chunk["choices"]) for chunk in found]
    assert [chunk["usage"]["completion_tokens"] for chunk in found] == list(accumulate(told))


def _watch(app: App, asked: list) -> None:
    """Notes what is asked of the engine from now on."""
    generate = app.client.generate

    def noting(request, *args):
        asked.append(request)
        return generate(request, *args)

    app.client.generate = noting


@pytest.fixture
def asked(app: App, monkeypatch):
    found = []
    monkeypatch.setattr(app.client, "generate", app.client.generate)
    _watch(app, found)
    return found


PARAMETERS = {
    "min_new_tokens": 2,
    "stop": ["q", "zz"],
    "stop_token_ids": [5],
    "stop_regex": "q+z",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
    "logit_bias": {"97": 1.5},
    "allowed_token_ids": [98, 99],
    "bad_words": ["ab"],
    "sampling_seed": -3,
    "stream_interval": 2,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_sampling_parameter_acts_by_its_own_name(app: App, asked, name):
    given = {"sampling_seed": 1, name: PARAMETERS[name]}
    app.generate(text="abc", sampling_params={"max_new_tokens": 3, **given})
    ask(app, prompt="abc", max_new_tokens=3, **given)
    native, ours = asked
    assert ours.params == native.params
    assert ours.seed == native.seed


@pytest.mark.parametrize(
    ("theirs", "ours", "value"),
    [
        ("max_tokens", "max_new_tokens", 5),
        ("min_tokens", "min_new_tokens", 3),
        ("seed", "sampling_seed", 12),
        ("include_stop_str_in_output", "no_stop_trim", True),
        ("stop", "stop", "x"),
        ("stop_regex", "stop_regex", ["x+"]),
    ],
)
def test_openai_s_names_mean_the_same(app: App, asked, theirs, ours, value):
    ask(app, prompt="say:ab", **{theirs: value})
    ask(app, prompt="say:ab", **{ours: value})
    assert asked[0].params == asked[1].params
    if theirs != ours:
        ask(app, prompt="say:ab", **{theirs: value, ours: value})
        assert asked[2].params == asked[0].params
        other = not value if isinstance(value, bool) else value + 1
        assert refusal(app, prompt="a", **{theirs: value, ours: other})["param"] in (theirs, ours)


CONSTRAINTS = [
    {"regex": "[a-c]{3}"},
    {"ebnf": 'root ::= "ab" | "cd"'},
    {"json_schema": {"type": "integer", "minimum": 3, "maximum": 5}},
    {"choice": ["yes", "no"]},
    {"dtype": "bool"},
]


@pytest.mark.parametrize("given", CONSTRAINTS)
def test_every_constraint_acts_by_its_own_name(app: App, asked, given):
    app.generate(text="abc", sampling_params={"sampling_seed": 1, **given})
    found = choice(app, prompt="abc", seed=1, max_tokens=128, **given)
    assert found["finish_reason"] == "stop"
    assert asked[0].grammar == asked[1].grammar is not None


def test_sixteen_tokens_are_the_default_and_null_of_the_native_name_is_the_context_end(app: App):
    assert ask(app, prompt="abc")["usage"]["completion_tokens"] == 16
    assert ask(app, prompt="abc", max_tokens=None)["usage"]["completion_tokens"] == 16
    long = "a" * (CONTEXT_LEN - 20)
    assert ask(app, prompt=long, max_new_tokens=None)["usage"]["completion_tokens"] == 20
    for name in ("max_tokens", "max_new_tokens", "max_output_tokens"):
        assert ask(app, prompt=long, **{name: -1})["usage"]["completion_tokens"] == 20
    assert ask(app, prompt=long + "a" * 10)["usage"]["completion_tokens"] == 10  # the default is clipped
    error = refusal(app, prompt=long, max_tokens=21)
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "null" not in error["message"]


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
FORMATS = [
    ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, SCHEMA),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "description": None, "schema": SCHEMA, "strict": True},
            }
        },
        SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, SCHEMA),
    ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ({"structured_outputs": {"regex": "[1-9][0-9]{2}"}}, {"type": "integer"}),
    ({"structured_outputs": {"choice": ["1", "22"]}}, {"enum": [1, 22]}),
    ({"structured_outputs": {"grammar": 'root ::= "7" | "8"'}}, {"enum": [7, 8]}),
    ({"response_format": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}}, SCHEMA),
    (
        {
            "structured_outputs": {
                "structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
            }
        },
        SCHEMA,
    ),
]


@pytest.mark.parametrize(("given", "schema"), FORMATS)
def test_the_output_has_the_format_that_is_asked_for(app: App, given, schema):
    found = choice(app, prompt="abc", seed=4, max_tokens=200, **given)
    assert found["finish_reason"] == "stop"
    jsonschema.validate(json.loads(found["text"]), schema)


UNSURE = {"type": "array", "not": {"type": "array", "uniqueItems": True}}
TAGS = {"type": "object", "properties": {"a": UNSURE}, "required": ["a"]}


def test_strict_is_the_switch_between_refusing_and_telling(app: App):
    for strict in ({}, {"strict": False}, {"strict": None}):
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": TAGS} | strict}
        found = choice(app, prompt='say:{"a": [1, 2]}', max_tokens=200, response_format=asked)
        assert found["text"] == '{"a": [1, 2]}'
        assert found["unenforced"] == ["not at /a"]
        assert found["valid"] is False
    asked["json_schema"]["strict"] = True
    error = app.post("/v1/completions", prompt="a", response_format=asked).json()["error"]
    assert error["code"] == "invalid_json_schema"
    assert "not" in error["message"]


def test_the_older_structural_tag_is_taken(app: App, asked):
    tag = {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}
    ask(app, prompt="say:hello", response_format=tag)
    assert json.loads(asked[0].grammar.text) == tag


def test_a_format_of_text_asks_for_nothing(app: App, asked):
    ask(app, prompt="say:a", response_format={"type": "text"})
    assert asked[0].grammar is None


BAD_FORMATS = [
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "format": {}}}, "response_format.format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "regex": "b"}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, None),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
]


@pytest.mark.parametrize(("given", "param"), BAD_FORMATS)
def test_a_format_that_cannot_be_is_refused_by_name(app: App, given, param):
    error = refusal(app, prompt="abc", **given)
    assert param is None or error["param"] == param


@pytest.mark.parametrize("name", [name for name in TABLE.refused if "*" not in name])
def test_what_there_is_not_is_refused_by_name_unless_it_asks_for_nothing(app: App, name):
    nothing, _ = TABLE.refused[name]
    error = refusal(app, prompt="say:a", **{name: "something"})
    assert error["param"] == name
    assert error["code"] == "not_available"
    assert name in error["message"]
    assert choice(app, prompt="say:a", **{name: nothing})["text"] == "a"


BOUNDS = [
    ("logprobs", [-1, 0, 128], [-2, 129, True, "1", 1.5]),
    ("max_tokens", [0, 2043], [-3, 1.5, "3", True]),
    ("n", [1, 3], [0, 129, 1.5, True]),
    ("temperature", [0, 0.1, 100], [-0.1, "1", True]),
    ("top_p", [0.01, 1], [0, 1.01]),
    ("top_k", [-1, 0, 1, 5000], [-2]),
    ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
    ("presence_penalty", [-2, 2], [-2.1, 2.1]),
    ("seed", [-(2**63), 0, 2**63 - 1], [2**63, 1.5, "x"]),
    ("stop", ["a", ["a"] * 64], ["", ["a"] * 65, [""], 3, "a" * 1025]),
    ("logit_bias", [{}, {"0": -100, "257": 100}], [{"258": 1}, {"-1": 1}, {"a": 1}, {"0": 101}, [1]]),
    ("echo", [True, False], ["yes", 1]),
    ("stream", [False], ["yes", 1]),
    ("user", ["", "u" * 512], ["u" * 513, 3]),
    ("safety_identifier", ["u"], [3]),
    ("metadata", [{}, {"a": "b"}, {"k" * 64: "v" * 512}], [{"a": 1}, {"k" * 65: ""}, {"a": "v" * 513}, "a"]),
    ("metadata", [{str(i): "" for i in range(16)}], [{str(i): "" for i in range(17)}]),
    ("service_tier", ["auto", "default", "flex"], [1, "k" * 513]),
    ("prompt_cache_key", ["k"], []),
    ("rid", ["r", "r" * 256], ["", "r" * 257, "a\nb", 3]),
    ("request_id", ["r"], ["é"]),
    ("priority", [0], [1, 2**31, "x"]),
    ("cache_salt", ["", "x" * 1024], ["x" * 1025]),
    ("deadline_ms", [60_000], [0, -1, 1.5]),
    ("ttft_deadline_ms", [60_000], [0]),
    ("log_metrics", [True, False], ["no"]),
    ("min_tokens", [0, 16], [17, -1]),
    ("stream_options", [], [{"include_usage": True}, {"x": 1}, 3]),
    ("custom_params", [], [{"a": 1}]),
    ("lora_path", [], [3]),
    ("prompt", ["a", ["a"], [1], [[1], [2]]], ["", [], [[]], [""], ["a", 1], [1, [1]], [258], [-1], [1.5], [True], 3]),
]


@pytest.mark.parametrize(("name", "good", "bad"), BOUNDS)
def test_every_field_has_its_bounds(app: App, name, good, bad):
    for value in [*good, *([None] if name != "prompt" else [])]:
        ask(app, **{"prompt": "say:a", name: value})
    for value in bad:
        error = refusal(app, **{"prompt": "say:a", name: value})
        assert error["param"] is not None
        assert error["param"].split(".")[0].split("[")[0] in (name, "rid"), (value, error)


def test_a_missing_prompt_and_an_unknown_field_are_named(app: App):
    assert refusal(app)["param"] == "prompt"
    assert refusal(app, prompt="a", temprature=1)["message"] == (
        "unknown field 'temprature'; did you mean 'temperature'?"
    )
    assert refusal(app, prompt="a", rid="x", request_id="y")["param"] == "request_id"
    assert refusal(app, 404, prompt="a", lora_path="x")["code"] == "lora_not_found"


def test_the_model_is_the_served_one_or_an_adapter():
    with App() as app:
        loaded = app.post("/load_lora_adapter", lora_name="french", lora_path="/adapters/french")
        assert loaded.status_code == 200, loaded.text
        asked = []
        _watch(app, asked)
        for model in ("french", "fake-model:french"):
            assert ask(app, prompt="say:a", model=model)["model"] == model
        ask(app, prompt="say:a", lora_path="french")
        ask(app, prompt="say:a", model="french", lora_path="/adapters/french")
        assert [request.adapter for request in asked] == ["french", "french", "french", "/adapters/french"]
        assert ask(app, prompt="say:a")["model"] == "fake-model"
        assert refusal(app, 404, prompt="say:a", model="german")["param"] == "model"


def test_notes_come_back(app: App):
    answer = ask(app, prompt="say:a", metadata={"run": "7"}, service_tier="auto")
    assert answer["metadata"] == {"run": "7", "weight_version": "default"}
    assert answer["service_tier"] == "default"
    assert chunks(app, prompt="say:a", metadata={"run": "7"})[-1]["metadata"]["run"] == "7"


def test_who_it_is_for_is_logged_on_one_line(app: App, caplog):
    with caplog.at_level(logging.DEBUG, "tureen.api"):
        ask(app, prompt="say:a", user="eve\r\nadmin", rid="r1")
    [line] = [record.getMessage() for record in caplog.records if "eve" in record.getMessage()]
    assert "r1" in line
    assert "\n" not in line
    assert "\r" not in line


def test_a_request_is_aborted_by_its_id_and_says_so():
    with ServedApp(slow=True) as server, make_client(server.url) as client:
        stream = client.completions.create(model="fake-model", prompt="abc", max_tokens=1900, stream=True)
        chunks = iter(stream)
        first = next(chunks)
        httpx.post(f"{server.url}/abort_request", json={"rid": first.id})
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"
        more = {"deadline_ms": 300, "rid": "mine"}
        answer = client.completions.create(model="fake-model", prompt="abc", max_tokens=1900, extra_body=more)
        assert answer.id == "mine"
        assert answer.choices[0].finish_reason == "abort"
        assert 0 < len(answer.choices[0].text) < 1900


def test_ids_are_never_the_same_twice(app: App):
    assert len({ask(app, prompt="say:a")["id"] for _ in range(5)}) == 5


def test_a_prompt_s_special_tokens_have_places_in_the_echo(app: App):
    found = choice(app, prompt="say:a<eos>b", echo=True, logprobs=0, max_tokens=1)
    assert found["text"].startswith("say:a<eos>b")
    places = dict(zip(found["logprobs"]["tokens"], found["logprobs"]["text_offset"], strict=True))
    assert places["<eos>"] == 5
    assert places["b"] == 10


def test_what_a_tokenizer_puts_around_a_prompt_has_no_place_of_its_own(app: App):
    """A tokenizer of words that puts `<s>` and a space in front, as those of Llama 2 do."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁The": 3, "▁cat": 4, "▁sat": 5}
    backend = Backend(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    context = msgspec.structs.replace(app.state.context, tokenizer=Tokenizer(backend))
    assert context.tokenizer.encode("The cat") == [1, 3, 4, 2]
    body = parse({"prompt": "The cat", "echo": True, "logprobs": 0})
    request = make_request("x", "", max_new_tokens=1)
    output = Output(msgspec.structs.replace(request, token_ids=(1, 3, 4, 2)), 0, "x")
    text = GrowingText(output, "The cat", body, context)
    logprobs = tuple(
        PositionLogprobs((None if index == 0 else -1.0, token)) for index, token in enumerate((1, 3, 4, 2))
    )
    end = FinishReason(type="length", length=1)
    output.add(
        OutputDelta("x", (5,), " sat", None, (PositionLogprobs((-2.0, 5)),), prompt_logprobs=logprobs, finish=end)
    )
    found = text.catch_up()
    assert found["text"] == "The cat sat"
    assert found["logprobs"]["tokens"] == ["<s>", " The", " cat", "</s>", " sat"]
    assert found["logprobs"]["text_offset"] == [0, 0, 3, 7, 7]


def test_nothing_is_left_behind(app: App):
    app.check_idle()
