"""llama.cpp's API, as tools/server/README.md has it."""

from __future__ import annotations

from typing import Any

import pytest
from app_under_test import App, parse_events
from byte_tokenizer import VOCAB_SIZE
from fake_engine import CONTEXT_LEN

from tureen.requests import tokenising
from tureen.requests.generation import WHOLE_INTERVAL, Run

FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
SEVERAL_FILES = (*FIM, "<|repo_name|>", "<|file_sep|>")
LAST = ("content", "stop_type", "stopping_word", "tokens_predicted", "tokens_evaluated", "truncated")


@pytest.fixture(scope="module")
def app():
    with App(chat_template="chatml") as running:
        yield running


def complete(app: App, path: str = "/completion", **body: Any) -> Any:
    response = app.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def refusal(app: App, status: int = 400, path: str = "/completion", **body: Any) -> dict[str, Any]:
    response = app.post(path, **body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status
    return response.json()["error"]


def test_the_request_of_the_page_works(app):
    answer = complete(app, prompt="Building a website can be done in 10 simple steps:", n_predict=128)
    assert (answer["stop"], answer["stop_type"], answer["tokens_predicted"]) == (True, "limit", 128)
    assert answer["tokens_evaluated"] == len("Building a website can be done in 10 simple steps:")
    assert answer["generation_settings"]["n_predict"] == 128
    assert answer["tokens"] == []
    assert answer["timings"].keys() >= {"prompt_n", "prompt_ms", "predicted_n", "predicted_per_second"}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, {"content": "a b", "stop_type": "eos", "stopping_word": ""}),
        ({"stop": ["b"]}, {"content": "a ", "stop_type": "word", "stopping_word": "b"}),
        ({"stop": "b"}, {"content": "a ", "stop_type": "word", "stopping_word": "b"}),
        ({"n_predict": 2}, {"content": "a ", "stop_type": "limit", "stopping_word": ""}),
        ({"n_predict": 0}, {"content": "", "stop_type": "limit", "tokens_predicted": 0}),
        ({"n_predict": -1, "return_tokens": True}, {"tokens": [97, 32, 98, 256]}),
        ({"max_tokens": 1}, {"content": "a"}),
    ],
)
def test_the_end_is_told_as_llama_cpp_tells_it(app, change, expected):
    answer = complete(app, prompt="say:a b", **change)
    assert {name: answer[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "token_ids"),
    [
        ("abc", [b"abc"]),
        ([97, 98, 99], [b"abc"]),
        ([97, "bc"], [b"abc"]),
        (["a", 98, "c"], [b"abc"]),
        ({"prompt_string": "abc"}, [b"abc"]),
        (["ab", "c"], [b"ab", b"c"]),
        (["ab", [97, "b"], {"prompt_string": "c"}], [b"ab", b"ab", b"c"]),
    ],
)
def test_a_prompt_has_any_of_the_documented_forms(app, prompt, token_ids):
    answer = complete(app, prompt=prompt, n_predict=1)
    answers = answer if isinstance(answer, list) else [answer]
    assert [one["prompt"].encode() for one in answers] == token_ids
    assert [one["index"] for one in answers] == list(range(len(token_ids)))


def test_each_prompt_has_as_many_outputs_as_asked_for(app):
    answers = complete(app, prompt=["a", "b"], n_cmpl=2, n_predict=2, seed=5)
    assert [one["index"] for one in answers] == [0, 1, 2, 3]
    assert [one["prompt"] for one in answers] == ["a", "a", "b", "b"]
    assert [one["generation_settings"]["seed"] for one in answers] == [5, 6, 5, 6]


@pytest.mark.parametrize("seed", [-1, 2**32 - 1, None])
def test_a_seed_that_says_random_is_drawn_anew(app, seed):
    first, second = (complete(app, prompt="a", n_predict=1, seed=seed)["generation_settings"]["seed"] for _ in "ab")
    assert first != second
    assert {first, second}.isdisjoint({-1, 2**32 - 1})


def test_a_stream_is_the_answer_in_pieces(app):
    body = {"prompt": "say:héllo", "seed": 1, "return_tokens": True}
    whole = complete(app, **body)
    response = app.post("/completion", **body, stream=True, timings_per_token=True)
    events = parse_events(response.text + "data: [DONE]\n\n")  # it has no such end of its own
    *pieces, last = events
    assert "".join(piece["content"] for piece in pieces) == whole["content"] == "héllo"
    assert [token_id for event in events for token_id in event["tokens"]] == whole["tokens"]
    assert not any(piece["stop"] for piece in pieces)
    assert all(piece["timings"]["predicted_n"] == piece["tokens_predicted"] for piece in pieces)
    assert {name: last[name] for name in LAST} == {name: whole[name] for name in LAST} | {"content": ""}


def test_a_stream_says_how_much_of_each_long_prompt_is_computed():
    with App(chunked_prefill_size=32) as app:
        body = {"prompt": ["a" * 80, "b" * 40], "n_predict": 2, "stream": True}
        response = app.post("/completion", **body, return_progress=True)
        events = parse_events(response.text + "data: [DONE]\n\n")
        for index, total in ((0, 80), (1, 40)):
            mine = [event for event in events if event["index"] == index]
            told = [event for event in mine if "prompt_progress" in event]
            assert told == mine[: len(told)]  # before the first token
            assert all((event["content"], event["tokens"], event["stop"]) == ("", [], False) for event in told)
            done = [event["prompt_progress"]["processed"] for event in told]
            assert len(done) > 1
            assert done == sorted(set(done))
            assert (done[-1], {event["prompt_progress"]["total"] for event in told}) == (total, {total})
        assert "prompt_progress" not in app.post("/completion", **body).text


def test_probabilities_are_the_model_s_own(app):
    probabilities = complete(app, prompt="abc", n_predict=3, n_probs=2, seed=1)["completion_probabilities"]
    theirs = app.generate(
        text="abc",
        return_logprob=True,
        top_logprobs_num=2,
        logprobs_mode="raw",
        sampling_params={"max_new_tokens": 3, "sampling_seed": 1},
    )["meta_info"]
    assert [one["id"] for one in probabilities] == [token for _, token, _ in theirs["output_token_logprobs"]]
    best = [[entry["id"] for entry in one["top_logprobs"]] for one in probabilities]
    assert best == [[token for _, token, _ in place] for place in theirs["output_top_logprobs"]]
    assert [one["bytes"] for one in probabilities] == [[one["id"]] for one in probabilities]


def test_the_fields_that_are_asked_for_are_returned_alone(app):
    fields = ["content", "generation_settings/n_predict", "nothing/there"]
    assert complete(app, prompt="say:a", n_predict=4, response_fields=fields) == {
        "content": "a", "generation_settings/n_predict": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([[120, 5]], {120: 5}),
        ([["xy", -2.5]], {120: -2.5, 121: -2.5}),
        ([[120, False]], {120: -100}),
        ({"120": 1, "y": False}, {120: 1, 121: -100}),
    ],
)
def test_a_bias_has_any_of_the_documented_forms(app, bias, expected):
    settings = complete(app, prompt="a", n_predict=1, logit_bias=bias)["generation_settings"]
    assert {one["token"]: one["bias"] for one in settings["logit_bias"]} == expected


@pytest.mark.parametrize(
    ("sent", "acted"),
    [
        ({}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}),
        ({"temperature": -1, "top_k": 0}, {"temperature": 0.0, "top_k": -1}),
        ({"typ_p": 0.5}, {"typical_p": 0.5}),
        ({}, {"repeat_last_n": 64}),
        ({"repeat_last_n": 0}, {"repeat_last_n": 0}),
        ({"repeat_last_n": -1, "repeat_penalty": 1.5}, {"repeat_last_n": -1, "repeat_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "presence_penalty": 1}, {"repeat_penalty": 1.5, "presence_penalty": 1.0}),
    ],
)
def test_parameters_act_as_llama_cpp_has_them(app, sent, acted):
    settings = complete(app, prompt="a", n_predict=1, **sent)["generation_settings"]
    assert {name: settings[name] for name in acted} == acted


@pytest.mark.parametrize("listed", [["top_k", "typical_p"], ["typ_p", "top_k"], "ky"])
def test_samplers_that_are_not_listed_are_off(app, listed):
    settings = complete(app, prompt="a", n_predict=1, samplers=listed, typ_p=0.5, min_p=0.1)["generation_settings"]
    off = {"top_p": 1.0, "min_p": 0.0, "temperature": 1.0, "repeat_last_n": 0}
    assert {name: settings[name] for name in off} == off
    assert (settings["top_k"], settings["typical_p"]) == (40, 0.5)
    assert "got 'zebra'" in refusal(app, prompt="a", samplers=["top_k", "zebra"])["message"]
    assert "got 'z'" in refusal(app, prompt="a", samplers="kz")["message"]


@pytest.mark.parametrize(
    ("indent", "content"),
    [(1, "a\n  b"), (2, "a\n  b"), (3, "a"), (0, "a\n  b\nc")],
)
def test_an_output_ends_before_a_line_that_is_indented_too_little(app, indent, content):
    answer = complete(app, prompt="say:a\n  b\nc", n_indent=indent)
    assert (answer["content"], answer["stop_type"]) == (content, "limit" if indent else "eos")


LINES = "say:" + "ab\n" * 20


def test_an_output_ends_at_the_first_line_break_after_its_time():
    """The engine takes 10 ms a token of the virtual clock."""
    with App(chat_template="chatml", slow=True) as app:
        assert complete(app, prompt=LINES, t_max_predict_ms=0)["stop_type"] == "eos"
        whole = complete(app, prompt=[LINES, "say:abcdefghijkl"], t_max_predict_ms=70)
        assert [one["stop_type"] for one in whole] == ["limit", "eos"], "there is no line break in the second"
        assert 9 <= whole[0]["tokens_predicted"] <= 12
        assert whole[0]["content"].startswith("ab\nab\nab\n")
        response = app.post("/completion", prompt=LINES, t_max_predict_ms=70, stream=True)
        assert parse_events(response.text + "data: [DONE]\n\n")[-1]["stop_type"] == "limit"
        counts = app.metrics()
        assert [counts[f"num_requests_total[{reason}]"] for reason in ("stop", "length", "abort")] == [2, 2, 0]
        assert counts["num_aborted_requests_total"] == 0


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, WHOLE_INTERVAL),
        ({"stream": True}, 1),
        ({"t_max_predict_ms": 1}, 1),
        ({"t_max_predict_ms": -1}, WHOLE_INTERVAL),
    ],
)
def test_only_a_stream_and_a_time_limit_look_at_every_token(app, monkeypatch, fields, interval):
    intervals, updates = [], Run.updates

    def recorded(run, interval=None):
        intervals.append(interval)
        return updates(run, interval)

    monkeypatch.setattr(Run, "updates", recorded)
    assert app.post("/completion", prompt="say:abc", **fields).status_code == 200
    assert intervals == [interval]


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}])
@pytest.mark.parametrize("path", ["/completion", "/tokenize"])
def test_a_body_has_any_content_type(app, headers, path):
    body = b'{"prompt": "say:a"}' if path == "/completion" else b'{"content": "a"}'
    assert app.request("POST", path, content=body, headers=headers).status_code == 200


def test_a_grammar_and_a_schema_constrain_the_output(app):
    assert complete(app, prompt="a", grammar='root ::= "xy"')["content"] == "xy"
    assert complete(app, prompt="a", json_schema={"const": 5})["content"] == "5"
    assert complete(app, prompt="say:a", grammar="")["content"] == "a"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [97, [98]]}, "prompt[0]"),
        ({"prompt": [999]}, "prompt[0]"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["x"]}}, "prompt.multimodal_data"),
        ({"n_predict": 9999}, "n_predict"),
        ({"n_predict": 1, "max_tokens": 2}, "max_tokens"),
        ({"mirostat": 2}, "mirostat"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias[0]"),
        ({"logit_bias": [[97, 101]]}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias[0] has a text of 5000 characters; at most 256"),
        ({"logit_bias": [[97, 1], ["a" * 257, 1]]}, "logit_bias[1] has a text of 257 characters"),
        ({"response_fields": ["/a" * 200]}, "response_fields[0] takes at most 256 characters, got 400"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"top_p": 0}, "top_p"),
    ],
)
def test_what_is_wrong_is_named(app, change, said):
    error = refusal(app, **({"prompt": "a"} | change))
    assert said in error["message"]


def test_a_prompt_that_is_too_long_has_an_error_of_its_own(app):
    assert refusal(app, prompt="a" * 5000)["type"] == "exceed_context_size_error"


@pytest.mark.parametrize("prompt", [["a", 97, *["bc"] * 4_000], ["a", 97, "b" * (8 << 20), "c"]])
def test_what_follows_a_prompt_that_is_too_long_already_is_not_tokenized(app, monkeypatch, prompt):
    encoded = []
    encode = tokenising.encode

    async def counted(texts, *args, **options):
        encoded.extend(texts)
        return await encode(texts, *args, **options)

    monkeypatch.setattr(tokenising, "encode", counted)
    assert refusal(app, prompt=prompt)["type"] == "exceed_context_size_error"
    assert sum(map(len, encoded)) < 2 * CONTEXT_LEN


@pytest.fixture(scope="module")
def filling():
    with App(special=FIM, facts={"vocab_size": VOCAB_SIZE + len(FIM)}) as running:
        yield running


@pytest.fixture(scope="module")
def with_files():
    with App(special=SEVERAL_FILES, facts={"vocab_size": VOCAB_SIZE + len(SEVERAL_FILES)}) as running:
        yield running


def test_a_gap_is_filled_with_the_documented_prompt(filling):
    answer = complete(filling, "/infill", input_prefix="ab", input_suffix="cd", prompt="x", n_predict=1)
    assert answer["prompt"] == "<|fim_prefix|>abx<|fim_suffix|>cd<|fim_middle|>"


def test_other_files_come_first_each_after_its_name(filling, with_files):
    body = {
        "input_prefix": "ab",
        "input_suffix": "cd",
        "input_extra": [{"filename": "f.py", "text": "x = 1\n"}, {"filename": "g.py", "text": "y"}],
        "n_predict": 1,
    }
    gap = "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>"
    snippet = "\n\n--- snippet ---\n\n"
    assert complete(filling, "/infill", **body)["prompt"] == f"{snippet}x = 1\n{snippet}y{gap}"
    assert complete(with_files, "/infill", **body)["prompt"] == (
        "<|repo_name|>myproject\n<|file_sep|>f.py\nx = 1\n<|file_sep|>g.py\ny<|file_sep|>filename\n" + gap
    )


def test_files_that_together_are_too_long_are_not_tokenized(filling, monkeypatch):
    monkeypatch.setattr(tokenising, "encode", None)
    limit = CONTEXT_LEN * filling.state.context.tokenizer.max_token_chars
    for extra in ([{"filename": "f" * (limit + 1), "text": ""}], [{"text": "a" * (limit // 2 + 1)}] * 2):
        error = refusal(filling, path="/infill", input_prefix="a", input_suffix="b", input_extra=extra)
        assert error["type"] == "exceed_context_size_error"


EDITORS = {
    "llama.vim": {
        "input_prefix": "def f():\n", "input_suffix": "\n    return x\n", "prompt": "    ", "n_predict": 8,
        "n_indent": 4,
        "input_extra": [{"text": "x = 1\n", "time": [1, 2], "filename": "a.py"}],
        "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
        "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
    },
    "llama.vscode": {
        "input_prefix": "a", "input_suffix": "b", "input_extra": [], "prompt": "", "n_predict": 8, "top_k": 40,
        "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_indent": 2,
        "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    },
    "llama.vscode, to warm up": {
        "input_prefix": "", "input_suffix": "", "input_extra": [{"text": "a", "time": 1, "filename": "b"}],
        "prompt": "", "n_predict": 0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 500,
        "t_max_predict_ms": 1,
    },
}  # fmt: skip
"""The requests of editors, as their code makes them (ggml-org/llama.vim, ggml-org/llama.vscode)."""


@pytest.mark.parametrize("editor", EDITORS)
def test_editors_are_answered(filling, editor):
    answer = complete(filling, "/infill", **EDITORS[editor])
    wanted = EDITORS[editor].get("response_fields", ["content"])
    assert set(wanted) <= answer.keys()


def test_the_chat_of_an_editor_is_answered(app):
    """llama.vscode's request for an edit."""
    body = {
        "messages": [{"role": "user", "content": "say:a"}], "stream": False, "cache_prompt": True,
        "samplers": "edkypmxt", "temperature": 0.8, "dynatemp_range": 0, "dynatemp_exponent": 1, "top_k": 40,
        "top_p": 0.95, "min_p": 0.05, "typical_p": 1, "xtc_probability": 0, "xtc_threshold": 0.1, "repeat_last_n": 64,
        "repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0, "dry_multiplier": 0, "dry_base": 1.75,
        "dry_allowed_length": 2, "dry_penalty_last_n": -1, "max_tokens": -1, "timings_per_token": False,
    }  # fmt: skip
    assert complete(app, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]


def test_a_model_without_tokens_for_it_fills_no_gaps(app):
    assert "input_suffix" in refusal(app, path="/infill", input_prefix="a", input_suffix="b")["message"]


def test_texts_become_tokens_and_pieces(app):
    assert complete(app, "/tokenize", content="ab") == {"tokens": [97, 98]}
    pieces = complete(app, "/tokenize", content="aá", with_pieces=True)["tokens"]
    assert pieces == [{"id": 97, "piece": "a"}, {"id": 0xC3, "piece": [0xC3]}, {"id": 0xA1, "piece": [0xA1]}]
    assert complete(app, "/detokenize", tokens=[97, 98])["content"] == "ab"


@pytest.mark.parametrize("other", [{"prompt": "b"}, {"text": "b"}, {"messages": [{"role": "user", "content": "b"}]}])
def test_a_body_with_two_things_to_tokenize_is_refused(app, other):
    error = refusal(app, path="/tokenize", content="a", **other)
    assert error["message"] == f"content and {next(iter(other))} are both what to tokenize; send one"


def test_null_is_not_sent_on_a_path_that_dialects_share(app):
    assert complete(app, "/tokenize", content=None, prompt="ab")["count"] == 2


def test_the_template_is_applied_as_chats_apply_it(app):
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    text = complete(app, "/apply-template", **chat)["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert app.post("/apply-template", prompt="a").status_code == 400


def test_the_end_token_is_the_tokenizer_s_own(app, monkeypatch):
    monkeypatch.setattr(app.state.context.tokenizer, "named_tokens", {"eos_token": "<|im_end|>"})
    facts = [app.request("GET", path).json()["eos_token"] for path in ("/props", "/v1/tokenizer_info")]
    assert facts == ["<|im_end|>"] * 2


def test_the_server_s_properties_are_those_of_the_model(app):
    props = app.request("GET", "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == app.state.context.capacity
    assert props["total_slots"] == app.state.context.info.max_running_requests
    assert "<|im_start|>" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}
    with App(preferred_sampling_params='{"temperature": 0.3}') as other:
        params = other.request("GET", "/props").json()["default_generation_settings"]["params"]
        assert params["temperature"] == 0.3


def test_slots_say_how_many_requests_run(app):
    slots = app.request("GET", "/slots").json()
    assert [slot["id"] for slot in slots] == list(range(app.state.context.info.max_running_requests))
    assert not any(slot["is_processing"] for slot in slots)
    assert app.request("GET", "/slots?fail_on_no_slot=1").status_code == 200
