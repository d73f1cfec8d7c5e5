"""Whatever a client sends that is wrong gets an answer that says what, and changes nothing for the others."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from app_under_test import App
from byte_tokenizer import VOCAB_SIZE
from fake_engine import CONTEXT_LEN

from tureen.contract.params import SamplingParams
from tureen.dialects.sglang.body import GenerateBody
from tureen.errors import InvalidRequest
from tureen.fields.body import convert

LEAK = re.compile(r'0x[0-9a-f]{6,}|/usr/|/home/|File "|Traceback|object at')
HUGE = 10**400
JSON = {"content-type": "application/json"}

# sampling parameter: values that are refused
BAD_PARAMS = {
    "regex": [5, [], "(", r"(a)\1", "a" * (300 << 10)],
    "json_schema": [5, [], "{", "5", {"type": "text"}, {"minLenght": 5}, {"$ref": "http://127.0.0.1:9/x"}],
    "ebnf": [5, "root =", 'start ::= "a"', "root ::= x", 'root ::= root "a"'],
    "structural_tag": [5, "x", {}, {"type": "structural_tag"}],
    "choice": [[], "a", [1], [""], {}],
    "dtype": ["integer", 5, ""],
    "strict_schema": [1, "true", True],
    "grammar_after": [5, "x"],
    "close_early": [0, "x"],
    "max_new_tokens": [-1, 1.5, "x", True, [], 2**31, 2**63, HUGE],
    "min_new_tokens": [-1, 1.5, "x", True, 129, 2**63, HUGE],
    "stop": [5, True, [1], {}, "", [""], ["a"] * 65, "a" * 1025, [["a"]]],
    "stop_token_ids": [5, "5", [-1], ["a"], [True], [1.5], [1] * 1025],
    "stop_regex": [5, [1], "(", "a*", "", ["a"] * 65, "(?x)a", "a{9999}{9999}", "a" * 1025],
    "temperature": [-1, -1e-9, "x", True, [], {}, HUGE],
    "top_p": [0, -0.1, 1.5, "x", True, HUGE],
    "top_k": [-2, 1.5, True, "4", 2**63, HUGE],
    "min_p": [-0.1, 1.1, "x", True],
    "typical_p": [0, -0.1, 1.1, "x", True],
    "frequency_penalty": [-2.1, 3, "x", True],
    "presence_penalty": [-2.1, 3, "x", True],
    "repetition_penalty": [-0.1, 2.1, "x", True],
    "repeat_last_n": [-2, 1.5, "x", True],
    "ignore_eos": [1, 0, "x", "true", []],
    "skip_special_tokens": [0, "x"],
    "spaces_between_special_tokens": [0, "x"],
    "no_stop_trim": [0, "x"],
    "n": [0, -1, 129, 5_000_000, 10**18, 1.5, True, "4", HUGE],
    "allowed_token_ids": [[], [-1], [VOCAB_SIZE], ["x"], [True], 5, "5"],
    "bad_words": [[""], [" "], "ab", [5], [True], {}, 5, ["a"] * 1025, ["a" * 32769]],
    "logit_bias": [
        [1],
        "x",
        {"a": 1},
        {"": 1},
        {"-1": 1},
        {"5": 101},
        {"5": -101},
        {"5": "x"},
        {"5": True},
        {str(VOCAB_SIZE): 1},
        {str(2**70): 1},
        {"5": HUGE},
        {str(i): 1 for i in range(1025)},
    ],
    "repetition_detection": [
        5,
        "x",
        [],
        {"max_pattern_size": 2},
        {"max_pattern_size": -1},
        {"most": 1},
        {"min_count": "2"},
    ],
    "custom_params": [[], "x", 5, True, {"token_id": 5}, {"x": "y" * 20000}],
    "sampling_seed": [2**63, -(2**63) - 1, "x", 1.5, True, HUGE],
    "stream_interval": [0, -1, 1.5, "x", True, HUGE],
}
# field of the body, beside the prompt "a": values that are refused
BAD_FIELDS = {
    "text": ["", [], [""], ["a", ""], ["a", 1], ["a", None], 5, True, {}, 1.5, ["a"] * 129, [["a"]]],
    "input_ids": [
        [],
        [[]],
        [[1], []],
        [1, [2]],
        [[1], 2],
        [-1],
        [VOCAB_SIZE],
        [2**31],
        [2**63],
        [HUGE],
        [True],
        [[True]],
        [1.5],
        ["1"],
        [None],
        "1",
        5,
        {},
        [[1]] * 129,
    ],
    "input_embeds": [
        [],
        [[]],
        [[[]]],
        [[1.0] * 3],
        [[1.0] * 5],
        [[1.0] * 4, [1.0] * 3],
        [[[1.0] * 4], [[1.0] * 5]],
        [[[1.0] * 4], [1.0] * 4],
        [[1.0] * 4, [[1.0] * 4]],
        [[1.0, 1.0, 1.0, 1e39]],
        [[1.0, 1.0, 1.0, "1"]],
        [[1.0, 1.0, 1.0, None]],
        [[1.0, 1.0, 1.0, True]],
        [[1.0, 1.0, 1.0, [1.0]]],
        [1.0, 1.0, 1.0, 1.0],
        [[[[1.0] * 4]]],
        [[0.0] * 4] * (CONTEXT_LEN + 1),
        [[HUGE] * 4],
        "AAAA",
        5,
        {},
    ],
    "return_entropy": [1, "x", [True]],
    "return_sampling_mask": [1, "x", True, [True], [True, True], [1]],
    "return_hidden_states": ["first", 1, "true", [True, False], [1], ["last", "last"]],
    "return_prompt_token_ids": [1, "x"],
    "return_effective": [1, "x"],
    "explain": [1, "x", 8],
    "session_params": [[], [{}, {}], 5, "x", {}, {"id": 5}, {"id": "x", "ride": "y"}, {"id": "x", "offset": 1.5}],
    "image_data": [0, True, {}, [5], [{}], ["a", "b"], "cat.png", "", "https://a.example/x.png"],
    "video_data": [0, True, {}, [5], [{}], ["a", "b"], "c", ""],
    "modalities": [0, "image", {}, [5], ["audio"]],
    "lora_path": [5, True, {}, [5], [None, None], []],
    "model": [5, True, {}, ["a"]],
    "custom_logit_processor": [5, True, "", "nobody", {}, [5], [None, None], '{"callable": "80"}', "{}"],
    "sampling_params": [[], [{}, {}], 5, "x", [5], True],
    "rid": ["", "x" * 257, "a\r\nb", "é", "a\x00", 5, True, ["q"], ["q", "r"], [5]],
    "return_logprob": ["yes", 1, [True, False], [1]],
    "logprob_start_len": [-2, 2, 1.5, "x", True, HUGE, [0, 0]],
    "top_logprobs_num": [-1, 129, 10**9, 1.5, "x", True, HUGE, [1, 1]],
    "token_ids_logprob": [[VOCAB_SIZE], [-1], ["x"], [True], [1.5], 5, "x", [HUGE], [1] * 1025, [1, [1]], [[1], [1]]],
    "return_text_in_logprobs": [1, "x"],
    "logprobs_mode": ["x", 1],
    "stream": ["yes", 1],
    "require_reasoning": [1, "x"],
    "max_thinking_tokens": [0, -1, 1.5, "x", True, HUGE],
    "log_metrics": [1, "x"],
    "priority": [1, -1, "x", 1.5, True, 2**31, HUGE],
    "cache_salt": [5, True, "x" * 1025, [], [5], ["x" * 1025], ["a", "b"]],
    "extra_key": [5, True, "x" * 1025, [], [5], ["x" * 1025], ["a", "b"]],
    "deadline_ms": [0, -1, 1.5, "x", True, 2**54, HUGE],
    "ttft_deadline_ms": [0, -1, 1.5, "x", True, 2**54, HUGE],
}
LOGPROB_FIELDS = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")


def _bodies():
    for name, values in BAD_PARAMS.items():
        for value in values:
            yield name, {"text": "a", "sampling_params": {name: value}}
    for name, values in BAD_FIELDS.items():
        for value in values:
            prompt = {} if name in ("text", "input_ids", "input_embeds") else {"text": "a"}
            asked = {"return_logprob": True} if name in LOGPROB_FIELDS else {}
            yield name, prompt | asked | {name: value}


CONTRADICTIONS = [
    ("text", {}),
    ("text", {"text": None}),
    ("text", {"sampling_params": {}}),
    ("input_ids", {"text": "a", "input_ids": [1]}),
    ("inputs", {"text": "a", "inputs": "a"}),
    ("min_new_tokens", {"text": "a", "sampling_params": {"min_new_tokens": 5, "max_new_tokens": 4}}),
    ("seed", {"text": "a", "sampling_params": {"seed": 1, "sampling_seed": 2}}),
    ("seed", {"text": "a", "sampling_params": {"sampling_seed": 1, "seed": True}}),
    ("n", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}),
    ("n", {"text": ["a"] * 100, "sampling_params": {"n": 6}}),
    ("rid", {"text": ["a", "b"], "rid": ["x", "x"]}),
    ("rid", {"text": ["a", "b"], "rid": ["x", "x_0"], "sampling_params": {"n": 2}}),
    ("top_logprobs_num", {"text": "a", "top_logprobs_num": 5}),
    ("token_ids_logprob", {"text": "a", "token_ids_logprob": [5]}),
    ("logprob_start_len", {"text": "a", "logprob_start_len": 1}),
    ("logprob_start_len", {"text": ["a", "b"], "return_logprob": [True, False], "logprob_start_len": [0, 1]}),
    ("top_logprobs_num", {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": [1, 1]}),
    ("return_text_in_logprobs", {"text": "a", "return_text_in_logprobs": True}),
    ("text", {"text": "a" * (CONTEXT_LEN + 1)}),
    ("text", {"text": "a" * 10**6}),
    ("text[1]", {"text": ["a", "a" * 10**6]}),
    ("text[1]", {"text": ["a", "a" * (CONTEXT_LEN + 1)]}),
    ("input_ids", {"input_ids": [1] * CONTEXT_LEN}),
    ("input_ids[1]", {"input_ids": [[1], [1] * CONTEXT_LEN]}),
    ("input_ids[1]", {"input_ids": [[1], [VOCAB_SIZE]]}),
    ("max_new_tokens", {"text": "a" * 2000, "sampling_params": {"max_new_tokens": 49}}),
    ("min_new_tokens", {"text": "a" * 2000, "sampling_params": {"max_new_tokens": None, "min_new_tokens": 49}}),
    ("input_embeds", {"text": "a", "input_embeds": [[1.0] * 4]}),
    ("input_embeds", {"input_embeds": [[1.0] * 4], "session_params": {"id": "x"}}),
    ("logprob_start_len", {"input_embeds": [[1.0] * 4] * 2, "return_logprob": True, "logprob_start_len": 0}),
    ("logprobs_mode", {"text": "a", "logprobs_mode": "raw"}),
    ("sampling_params[1].top_p", {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 7}]}),
]

NOT_JSON = [
    b"",
    b"   ",
    b"{",
    b"nul",
    b"null",
    b"5",
    b'"x"',
    b"[1]",
    b"[" * 100_000,
    b'{"text":' * 100_000,
    b'{"text":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"text":"\\ud800"}',
    b'{"text":"a","cache_salt":"\\udc00"}',
    b'{"text":"\xff"}',
    b'\xef\xbb\xbf{"text":"a"}',
    b'\xff\xfe{\x00"\x00',
    b'{"text":"a","sampling_params":{"n":' + b"9" * 5000 + b"}}",
    b'{"text":"a",}',
    b'{"text":"a"} x',
    b"{'text':'a'}",
    b'{"text":"a\n"}',
    b'{"text":"a\x00"}',
    b'{"text":"a","' + b"k" * 100_000 + b'":1}',
    b'{"text":"a","sampling_params":{"' + b"\\u0007" * 1000 + b'":1}}',
    *(
        f'{{"text":"a","sampling_params":{{"{name}":{number}}}}}'.encode()
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        for number in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400")
    ),
]


def check_error(response, status: int, field: str | None = None) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) <= 16 << 10
    assert not LEAK.search(response.text), response.text
    error = response.json()["error"]
    assert set(response.json()) == {"error"}
    assert set(error) == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 600
    assert "\n" not in error["message"]
    if field is not None:
        assert field in error["message"], error
        assert field in error["param"], error
    return error


def test_every_field_and_parameter_has_bad_values_in_the_tables():
    assert set(BAD_PARAMS) == {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert set(BAD_FIELDS) == {field.name for field in msgspec.structs.fields(GenerateBody)}


def test_each_bad_value_is_refused_by_the_field_s_name_and_a_good_request_still_works(app: App):
    complaints = []
    for field, body in (*_bodies(), *CONTRADICTIONS):
        response = app.request("POST", "/generate", content=json.dumps(body).encode(), headers=JSON)
        too_long = response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
        try:
            error = check_error(response, 400, None if too_long else field)
            assert error["type"] == "invalid_request_error"
            assert field in error["param"], error
        except AssertionError as complaint:
            complaints.append(f"{str(body)[:100]}: {str(complaint)[:300]}")
    assert not complaints, "\n".join(complaints)
    app.check_idle()
    assert app.generate(text="say:well")["text"] == "well"


MAPS = [
    ("/generate", {"text": "a"}, "sampling_params", "logit_bias"),
    ("/generate", {"prompt": "a"}, "", "logit_bias"),
    ("/v1/completions", {"prompt": "a"}, "", "logit_bias"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "", "logit_bias"),
]


@pytest.mark.parametrize(("route", "body", "where", "name"), MAPS)
def test_a_bad_key_or_value_in_a_map_is_named_by_its_key(app: App, route, body, where, name):
    good = {str(number): 1.0 for number in range(40)}
    for key, value, shown in (("x", 1, "as key, got 'x'"), ("1.5", 1, "as key, got '1.5'"), ("77", "b", "got 'b'")):
        bias = {name: good | {key: value} | {"5": 2}}
        answer = app.request("POST", route, json=body | ({where: bias} if where else bias)).json()
        error = answer["error"]
        message = error if isinstance(error, str) else error["message"]
        field = f"{where}.{name}" if where else name
        assert message.startswith(f"{field}['{key}']: "), message
        assert message.endswith(shown)
        assert isinstance(error, str) or error["code"] == f"invalid_{name}"


def test_a_key_in_a_map_inside_a_list_is_named_too():
    with pytest.raises(InvalidRequest) as caught:
        convert([{"a": {"b": 1}}, {"c": {"d": 1, "e]": "x"}, "f": {}}], list[dict[str, dict[str, int]]])
    assert caught.value.field == "[1]['c']['e?']"


@pytest.mark.parametrize("content", NOT_JSON, ids=lambda content: repr(content[:40]))
def test_a_body_that_is_no_json_object_of_numbers_and_text_is_refused(app: App, content):
    check_error(app.request("POST", "/generate", content=content, headers=JSON), 400)
    assert app.generate(text="say:well")["text"] == "well"


def test_an_error_of_logit_bias_names_the_key(app: App):
    for bias, part in (({"99999": 1}, "as keys, got 99999"), ({"5": 101}, "got 101.0 for 5")):
        error = app.error(text="a", sampling_params={"logit_bias": bias})
        assert (error["param"], part in error["message"]) == ("sampling_params.logit_bias", True)


@pytest.mark.parametrize(
    ("body", "hint"),
    [
        ({"text": "a", "sampling_params": {"temprature": 0}}, "did you mean 'temperature'?"),
        ({"text": "a", "sampling_params": {"max_tokens": 4}}, "did you mean 'max_new_tokens'?"),
        ({"text": "a", "sampling_parms": {}}, "did you mean 'sampling_params'?"),
        ({"text": "a", "strem": True}, "did you mean 'stream'?"),
        ({"text": "a", "cache_prompt": True}, "unknown field 'cache_prompt'; other APIs have this field, this one"),
        ({"text": "a", "store": True}, "unknown field 'store'; other APIs have this field, this one does not"),
        ({"text": "a", "max_tokens": 4}, 'send "sampling_params": {"max_new_tokens": …}'),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest_known_one(app: App, body, hint):
    error = app.error(**body)
    assert error["message"].startswith("unknown field '")
    assert hint in error["message"]
    assert error["code"] == "unknown_parameter"


def test_a_long_unknown_field_is_named_without_a_stray_quote(app: App):
    assert app.error(text="a", **{"zq" * 40: 1})["param"] == "zq" * 32 + "…"


@pytest.mark.parametrize(
    ("body", "message", "field"),
    [
        (
            {"text": "a", "temperature": 0.5},
            'temperature belongs in sampling_params: send "sampling_params": {"temperature": 0.5}',
            "temperature",
        ),
        (
            {"input_ids": [97], "seed": 7, "stream": True},
            'seed belongs in sampling_params: send "sampling_params": {"seed": 7}',
            "seed",
        ),
        (
            {"text": "a", "stop": ["x" * 100]},
            'stop belongs in sampling_params: send "sampling_params": {"stop": …}',
            "stop",
        ),
        (
            {"text": "a", "sampling_params": {"stream": True}},
            'stream belongs beside sampling_params, not in it: send {"stream": true, …}',
            "stream",
        ),
        (
            {"text": ["a", "b"], "sampling_params": [{}, {"return_logprob": True}]},
            'return_logprob belongs beside sampling_params, not in it: send {"return_logprob": true, …}',
            "return_logprob",
        ),
    ],
)
def test_a_field_in_the_wrong_place_is_refused_with_the_right_one(app: App, body, message, field):
    error = app.error(**body)
    assert (error["message"], error["param"], error["code"]) == (message, field, "misplaced_field")


def test_a_misplaced_null_is_not_sent(app: App):
    answer = app.generate(text="say:a", temperature=None, sampling_params={"stream": None})
    assert answer["text"] == "a"


def test_an_unknown_field_like_no_other_gets_no_suggestion(app: App):
    error = app.error(text="a", zzzzqqq=1)
    assert error["message"] == "unknown field 'zzzzqqq'"
    assert error["param"] == "zzzzqqq"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling_params", [{}, {}, {}]),
        ("rid", ["q", "r", "s"]),
        ("return_logprob", [True, True, True]),
        ("logprob_start_len", [0, 0, 0]),
        ("top_logprobs_num", [1, 1, 1]),
        ("token_ids_logprob", [[1], [1], [1]]),
    ],
)
def test_a_list_of_another_length_than_the_batch_is_refused_with_both_lengths(app: App, name, value):
    error = app.error(text=["a", "b"], **{"return_logprob": True, name: value})
    assert error["param"] == name
    assert name in error["message"]
    assert "3" in error["message"]
    assert "2" in error["message"]


def test_one_bad_prompt_of_a_batch_runs_none_of_them(app: App):
    before = app.client.stats.total_steps
    app.error(text=["a", "b", ""])
    app.error(text=["a", "b"], sampling_params=[{}, {"top_p": 5}])
    assert app.client.stats.total_steps == before


def test_a_long_value_is_not_echoed_back(app: App):
    secret = "s3cret" * 1000
    for body in ({"text": "a", secret: 1}, {"text": "a", "sampling_params": {"stop_regex": "(" + secret[:1000]}}):
        response = app.post(**body)
        assert response.status_code == 400
        assert response.text.count("s3cret") < 25
        assert len(response.content) < 1000


def test_twelve_thousand_unknown_fields_get_a_short_answer(app: App):
    response = app.post(text="a", **{f"field{index}": index for index in range(12_000)})
    check_error(response, 400)
    assert len(response.content) < 1000


@pytest.mark.parametrize(
    "content_type",
    ["application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x", "", "json", "x" * 1000],
)
def test_another_content_type_is_refused(app: App, content_type):
    response = app.request("POST", "/generate", content=b'{"text":"a"}', headers={"content-type": content_type})
    assert "application/json" in check_error(response, 415)["message"]


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", None])
def test_json_by_any_spelling_or_no_content_type_is_taken(app: App, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    response = app.request("POST", "/generate", content=b'{"text":"say:a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("method", ["GET", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_another_method_is_refused_with_those_that_work(app: App, method):
    response = app.request(method, "/generate")
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    if method != "HEAD":
        check_error(response, 405)


def test_put_works_as_post(app: App):
    assert app.request("PUT", "/generate", json={"text": "say:a"}).json()["text"] == "a"


@pytest.mark.parametrize("path", ["/nope", "/nope/", "//generate", "/generate/x", "/Generate", "/" + "x" * 5000])
def test_an_unknown_route_gets_a_short_404(app: App, path):
    response = app.request("POST", "http://127.0.0.1" + path, json={"text": "a"})
    assert check_error(response, 404)["code"] == "unknown_route"
    assert len(response.content) < 500


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_the_limit_is_refused_without_reading_on(declared):
    num_read = 0

    async def pieces():
        nonlocal num_read
        for _ in range(1000):
            num_read += 1
            yield b" " * 100

    with App(max_body_bytes=1024) as app:
        headers = JSON | ({"content-length": "100000"} if declared else {})
        response = app.request("POST", "/generate", content=pieces(), headers=headers)
        assert "--max-body-bytes" in check_error(response, 413)["message"]
        assert response.headers["connection"] == "close"
        assert num_read <= 12
        huge = app.request("POST", "/generate", content=pieces(), headers=JSON | {"content-length": "9" * 5000})
        assert huge.status_code == 413
        assert app.generate(text="say:a")["text"] == "a"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a/v1?", "[::2]"])
def test_a_host_header_for_another_name_is_refused_by_a_loopback_server(app: App, host):
    assert check_error(app.request("GET", "/health", headers={"host": host}), 403, "Host")["code"] == "invalid_host"
    assert app.request("POST", "/generate", json={"text": "a"}, headers={"host": host}).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:30000", "LOCALHOST", "[::1]:30000", "[::1]"])
def test_a_host_header_for_this_machine_is_taken(app: App, host):
    assert app.request("GET", "/health", headers={"host": host}).status_code == 200


@pytest.fixture(scope="module")
def locked():
    with App(api_key="k3y") as app:
        yield app


@pytest.mark.parametrize(
    "authorization", [None, "", "k3y", "Bearer", "Bearer ", "Bearer k3", "Bearer k3yy", "bearer k3", "Basic k3y", "é"]
)
def test_a_missing_or_wrong_key_is_refused_whatever_the_body(locked: App, authorization):
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    for content in (b'{"text":"say:a"}', b"nonsense"):
        response = locked.request("POST", "/generate", content=content, headers=headers)
        assert check_error(response, 401)["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert "k3y" not in response.text


def test_the_right_key_is_taken(locked: App):
    response = locked.request("POST", "/generate", json={"text": "say:a"}, headers={"authorization": "Bearer k3y"})
    assert response.json()["text"] == "a"


@pytest.mark.parametrize(
    "path",
    ["//generate", "/generate/", "/%67enerate", "/generate?x=/health", "/nope"],
)
def test_no_spelling_of_the_path_gets_around_the_key(locked: App, path):
    assert locked.request("POST", "http://127.0.0.1" + path, json={"text": "say:a"}).status_code == 401


def test_every_route_but_health_metrics_and_the_api_s_own_description_needs_the_key(locked: App):
    open_paths = set()
    for route in locked.app.routes:
        path = re.sub(r"{\w+:path}", "fake-model", route.path)
        for method in sorted(route.methods - {"HEAD"}):
            if locked.request(method, path).status_code != 401:
                open_paths.add(path)
    described = {"/docs", "/openapi.json", "/compat", "/compat.json"}
    pages = {"/playground/fake-model"}  # its files: they hold nothing of the server's
    probes = {"/health", "/health_generate", "/health_scheduler", "/ping", "/ready", "/metrics"}
    assert open_paths == probes | {"/v2/health/live", "/v2/health/ready"} | described | pages


def test_the_key_is_in_no_answer(locked: App):
    facts = locked.request("GET", "/server_info", headers={"authorization": "Bearer k3y"})
    assert facts.status_code == 200
    assert "k3y" not in facts.text
    assert "k3y" not in locked.request("GET", "/metrics").text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rid": "a", "abort_all": True},
        {"rid": None},
        {"rid": 5},
        {"abort_all": "x"},
        {"abort_all": False},
        {"x": 1},
    ],
)
def test_a_bad_abort_request_is_refused(app: App, body):
    check_error(app.post("/abort_request", **body), 400)


def test_an_abort_of_nothing_aborts_nothing(app: App):
    assert app.post("/abort_request", rid="nobody").json() == {"aborted": 0}
    assert app.post("/abort_request", abort_all=True).json() == {"aborted": 0}


def test_an_unexpected_error_in_a_handler_is_a_500_without_details(monkeypatch):
    with App() as app:
        monkeypatch.setattr(app.state.context.tokenizer.__class__, "encode", lambda *_, **__: 1 / 0)
        error = check_error(app.post(text="a"), 500)
        assert error["type"] == "server_error"
        assert "ZeroDivision" not in error["message"]
        counted = [line for line in app.request("GET", "/metrics").text.splitlines() if "http_responses_total{" in line]
        assert [line.rpartition(" ")[2] for line in counted if 'status="500"' in line] == ["1.0"]
        assert not any('status="499"' in line for line in counted), "no client has gone"
        monkeypatch.undo()
        assert app.generate(text="say:a")["text"] == "a"


@pytest.mark.parametrize(
    ("content", "status"), [(b"", 200), (b" \t\r\n", 200), (b"\f", 400), (b"\v", 400), (b"\0", 400)]
)
def test_a_body_may_be_left_out_where_nothing_is_required_and_only_blanks_are_nothing(app: App, content, status):
    headers = {"content-type": "application/json"}
    assert app.request("POST", "/configure_logging", content=content, headers=headers).status_code == status


@pytest.mark.parametrize(
    "charset",
    [
        "utf-7",
        "UTF-16",
        "utf-16le",
        "latin-1",
        "iso-8859-1",
        "shift_jis",
        '"utf-7"',
        "",
        " ",
        "utf-8,utf-7",
        "utf 8",
        "é",
    ],
)
def test_a_body_in_another_charset_is_refused_by_its_name(app: App, charset):
    content = json.dumps({"text": "say:a"}).encode()
    for kind in (f"application/json;charset={charset}", f"Application/JSON; x=y ; CHARSET={charset}"):
        for path in ("/generate", "/v1/chat/completions", "/tokenize", "/v1/messages"):
            how = {"content": content, "headers": {"content-type": kind.encode("latin-1")}}
            response = app.request("POST", path, **how)
            assert response.status_code == 400, (path, kind)
            assert "charset" in response.text


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", "utf8", '"utf-8"', "us-ascii", " utf-8 "])
def test_a_body_in_utf_8_is_taken_whatever_it_is_called(app: App, charset):
    headers = {"content-type": f"application/json; charset={charset}"}
    response = app.request("POST", "/generate", content=b'{"text":"say:a"}', headers=headers)
    assert response.json()["text"] == "a"
