"""The five documentation pages of `/generate`, row by row: every parameter, type, default, range and example.

`0` to `3` are SGLang's pages from the oldest to the newest, `M` is MindIE's. A row works as its page says, or an error
names its field. `say:hello` makes the fake model answer `hello`; other prompts have letters without end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from app_under_test import App
from byte_tokenizer import EOS
from real_app import RealApp, write_model


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    with App(chat_template="chatml") as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[App]:
    """A tiny model with numbers of its own, for what changes probabilities."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=5)
    with RealApp(folder) as running:
        yield running


class Row(NamedTuple):
    """A row that its answer alone can show."""

    pages: str
    name: str
    body: dict[str, Any]
    holds: Callable[[Any], bool]


class Pair(NamedTuple):
    """A row that two answers show: they have the same tokens, or not."""

    pages: str
    name: str
    body: dict[str, Any]
    other: dict[str, Any]
    are_same: bool


class Refused(NamedTuple):
    """A value outside a row's range: the error names the field."""

    pages: str
    name: str
    body: dict[str, Any]
    param: str


def text(prompt: Any = "say:hello", /, params: Any = None, **fields: Any) -> dict[str, Any]:
    """A body of SGLang's form."""
    return {"text": prompt, **({} if params is None else {"sampling_params": params}), **fields}


def mind(prompt: str = "say:hello", /, **fields: Any) -> dict[str, Any]:
    """A body of MindIE's form."""
    return {"prompt": prompt, **fields}


def says(expected: str) -> Callable[[Any], bool]:
    return lambda answer: answer["text"] == expected


def counts(number: int) -> Callable[[Any], bool]:
    return lambda answer: answer["meta_info"]["completion_tokens"] == number


def has(*names: str) -> Callable[[Any], bool]:
    return lambda answer: all(name in answer["meta_info"] for name in names)


def prints(expected: list[str]) -> Callable[[Any], bool]:
    return lambda answer: answer == {"text": expected}


PICTURE = "data:image/png;base64,AAAA"
SEEDED = {"sampling_seed": 3, "max_new_tokens": 12}

ROWS = [
    Row("0123", "text, a str", text(), says("hello")),
    Row("0123", "text, a list", text(["say:a", "say:b"]), lambda a: [one["text"] for one in a] == ["a", "b"]),
    Row("0123", "text, a list of one", text(["say:a"]), lambda a: [one["text"] for one in a] == ["a"]),
    Row("123", "input_ids", {"input_ids": list(b"say:hi")}, says("hi")),
    Row("123", "input_ids, lists", {"input_ids": [list(b"say:a")] * 2}, lambda a: [o["text"] for o in a] == ["a"] * 2),
    Row("3", "input_embeds", {"input_embeds": [[0.5] * 4] * 2, "sampling_params": {"max_new_tokens": 2}}, counts(2)),
    Row("3", "input_embeds, lists", {"input_embeds": [[[0.5] * 4]] * 2, "sampling_params": {"max_new_tokens": 2}},
        lambda a: [one["meta_info"]["completion_tokens"] for one in a] == [2, 2]),
    Row("0123", "sampling_params, an object", text(params={"max_new_tokens": 2}), says("he")),
    Row("0123", "sampling_params, a list", text(["say:abc"] * 2, [{"max_new_tokens": 1}, {"max_new_tokens": 2}]),
        lambda a: [one["text"] for one in a] == ["a", "ab"]),
    Row("0123", "sampling_params, left out", text("abc"), counts(128)),
    Row("023", "rid", text(rid="mine"), lambda a: a["meta_info"]["id"] == "mine"),
    Row("023", "rid, a list", text(["say:a"] * 2, rid=["x", "y"]),
        lambda a: [one["meta_info"]["id"] for one in a] == ["x", "y"]),
    Row("0123", "return_logprob", text(return_logprob=True), has("output_token_logprobs")),
    Row("0123", "return_logprob, false", text(), lambda a: "output_token_logprobs" not in a["meta_info"]),
    Row("0123", "return_logprob, a list", text(["say:a"] * 2, return_logprob=[True, False]),
        lambda a: ["output_token_logprobs" in one["meta_info"] for one in a] == [True, False]),
    Row("0123", "logprob_start_len", text(return_logprob=True, logprob_start_len=2),
        lambda a: len(a["meta_info"]["input_token_logprobs"]) == len("say:hello") - 2),
    Row("123", "logprob_start_len, default", text(return_logprob=True),
        lambda a: not a["meta_info"].get("input_token_logprobs")),
    Row("0123", "logprob_start_len, a list", text(["say:a"] * 2, return_logprob=True, logprob_start_len=[0, 4]),
        lambda a: [len(one["meta_info"]["input_token_logprobs"]) for one in a] == [5, 1]),
    Row("123", "top_logprobs_num", text(return_logprob=True, top_logprobs_num=2),
        lambda a: {len(place) for place in a["meta_info"]["output_top_logprobs"]} == {2}),
    Row("123", "top_logprobs_num, a list", text(["say:a"] * 2, return_logprob=True, top_logprobs_num=[1, 3]),
        lambda a: [len(one["meta_info"]["output_top_logprobs"][0]) for one in a] == [1, 3]),
    Row("23", "return_text_in_logprobs", text(return_logprob=True, return_text_in_logprobs=True),
        lambda a: [entry[2] for entry in a["meta_info"]["output_token_logprobs"]][:5] == list("hello")),
    Row("23", "return_text_in_logprobs, default", text(return_logprob=True),
        lambda a: {entry[2] for entry in a["meta_info"]["output_token_logprobs"]} == {None}),
    Row("0123", "stream, false", text(stream=False), says("hello")),
    Row("3", "log_metrics", text(log_metrics=False), says("hello")),
    Row("3", "modalities, without data", text(modalities=["image"]), says("hello")),
    Row("13", "lora_path, null", text(lora_path=None), says("hello")),
    Row("13", "lora_path, a list of nulls", text(["say:a"], lora_path=[None]), lambda a: a[0]["text"] == "a"),
    Row("13", "custom_logit_processor, a list of nulls", text(["say:a"], custom_logit_processor=[None]),
        lambda a: a[0]["text"] == "a"),
    Row("1", "return_hidden_states", text(return_hidden_states=True), has("hidden_states")),
    Row("1", "return_hidden_states, default", text(), lambda a: "hidden_states" not in a["meta_info"]),
    # ---- sampling parameters
    Row("0123", "max_new_tokens", text("abc", {"max_new_tokens": 32}), counts(32)),
    Row("0123", "stop, a str", text(params={"stop": "l"}), says("he")),
    Row("0123", "stop, a list", text(params={"stop": ["o", "l"]}), says("he")),
    Row("13", "stop_token_ids", text(params={"stop_token_ids": [ord("l")]}), says("he")),
    Row("0123", "ignore_eos", text(params={"ignore_eos": True, "max_new_tokens": 9}), counts(9)),
    Row("0123", "ignore_eos, default", text(), lambda a: a["meta_info"]["finish_reason"]["matched"] == EOS),
    Row("13", "min_new_tokens", text(params={"min_new_tokens": 9, "max_new_tokens": 20}),
        lambda a: a["meta_info"]["completion_tokens"] >= 9),
    Row("13", "no_stop_trim", text(params={"stop": "l", "no_stop_trim": True}), says("hel")),
    Row("13", "n", text(params={"n": 3}), lambda a: [one["text"] for one in a] == ["hello"] * 3),
    Row("0123", "skip_special_tokens", text(params={"skip_special_tokens": False, "no_stop_trim": True}),
        lambda a: a["text"].startswith("hello<")),
    Row("0123", "skip_special_tokens, default", text(params={"no_stop_trim": True}), says("hello")),
    Row("13", "spaces_between_special_tokens", text(params={"spaces_between_special_tokens": False}), says("hello")),
    Row("13", "custom_params, null", text(params={"custom_params": None}), says("hello")),
    Row("0123", "regex", text("abc", {"regex": "(France|England)"}), lambda a: a["text"] in ("France", "England")),
    Row("02", "dtype int", text("abc", {"dtype": "int"}), lambda a: a["text"].strip().lstrip("+-").isdigit()),
    Row("02", "dtype bool", text("abc", {"dtype": "bool"}), lambda a: a["text"] in ("True", "False")),
    Row("02", "dtype str", text("abc", {"dtype": "str", "max_new_tokens": 60}), lambda a: a["text"].startswith('"')),
    Row("02", "dtype float", text("abc", {"dtype": "float"}), lambda a: float(a["text"] + "0") is not None),
    Row("13", "json_schema, a str", text("abc", {"json_schema": json.dumps({"type": "boolean"})}),
        lambda a: a["text"] in ("true", "false")),
    Row("13", "ebnf", text("abc", {"ebnf": 'root ::= "Hello" | "Hi" | "Hey"'}),
        lambda a: a["text"] in ("Hello", "Hi", "Hey")),
    # ---- examples
    Row("0123", "example: normal", text("The capital of France is", {"temperature": 0, "max_new_tokens": 32}),
        counts(32)),
    Row("1", "example: JSON", text(
        "Here is the information of the capital of France in the JSON format.\n",
        {"temperature": 0, "max_new_tokens": 64, "json_schema": json.dumps({
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[\\w]+$"}, "population": {"type": "integer"}},
            "required": ["name", "population"],
        })},
    ), lambda a: json.loads(a["text"]).keys() == {"name", "population"}),
    Row("0123", "answer: text and meta_info", text(), lambda a: a.keys() == {"text", "output_ids", "meta_info"}),
    # ---- MindIE
    Row("M", "prompt", mind(), prints(["say:hello hello"])),
    Row("M", "prompt, Chinese", mind("say:你好"), prints(["say:你好 你好"])),
    Row("M", "max_tokens", mind(max_tokens=2), prints(["say:hello he"])),
    Row("M", "max_tokens, default", mind("abc"), lambda a: len(a["text"][0]) == len("abc ") + 16),
    Row("M", "top_k, beyond the vocabulary", mind(top_k=10**6), prints(["say:hello hello"])),
    Row("M", "stream, false", mind(stream=False), prints(["say:hello hello"])),
    Row("M", "example", mind("My name is Olivier and I", max_tokens=20, repetition_penalty=1.03, presence_penalty=1.2,
                             frequency_penalty=1.2, temperature=0.5, top_k=10, top_p=0.95, stream=False),
        lambda a: len(a["text"][0]) == len("My name is Olivier and I ") + 20),
]  # fmt: skip

GREEDY = {"temperature": 0, "max_new_tokens": 12}
M_GREEDY = {"temperature": 0, "max_tokens": 12}

PAIRS = [
    Pair("0123", "temperature 0 is greedy", text("abcd", GREEDY), text("abcd", SEEDED | {"top_k": 1}), True),
    Pair("0123", "temperature, default 1.0", text("abcd", SEEDED | {"temperature": 1.0}), text("abcd", SEEDED), True),
    Pair("0123", "temperature", text("abcd", SEEDED | {"temperature": 3}), text("abcd", SEEDED), False),
    Pair("0123", "top_p", text("abcd", SEEDED | {"top_p": 1e-9}), text("abcd", GREEDY), True),
    Pair("0123", "top_p, default 1.0", text("abcd", SEEDED | {"top_p": 1.0}), text("abcd", SEEDED), True),
    Pair("0123", "top_k, default -1", text("abcd", SEEDED | {"top_k": -1}), text("abcd", SEEDED), True),
    Pair("13", "min_p", text("abcd", SEEDED | {"min_p": 1}), text("abcd", GREEDY), True),
    Pair("13", "min_p, default 0.0", text("abcd", SEEDED | {"min_p": 0.0}), text("abcd", SEEDED), True),
    Pair("0123", "frequency_penalty", text("abcd", SEEDED | {"frequency_penalty": 2}), text("abcd", SEEDED), False),
    Pair(
        "0123", "frequency_penalty 0.0", text("abcd", SEEDED | {"frequency_penalty": 0.0}), text("abcd", SEEDED), True
    ),
    Pair("0123", "presence_penalty", text("abcd", SEEDED | {"presence_penalty": 2}), text("abcd", SEEDED), False),
    Pair("0123", "presence_penalty 0.0", text("abcd", SEEDED | {"presence_penalty": 0.0}), text("abcd", SEEDED), True),
    Pair("13", "repetition_penalty", text("abcd", SEEDED | {"repetition_penalty": 2}), text("abcd", SEEDED), False),
    Pair("1", "repetition_penalty 0.0", text("abcd", SEEDED | {"repetition_penalty": 0.0}), text("abcd", SEEDED), True),
    Pair("M", "temperature 0", mind("abcd", **M_GREEDY), mind("abcd", seed=3, top_k=1, max_tokens=12), True),
    Pair("M", "temperature", mind("abcd", seed=3, temperature=3.0), mind("abcd", seed=3), False),
    Pair("M", "top_k", mind("abcd", seed=3, top_k=1), mind("abcd", temperature=0), True),
    Pair("M", "top_k -1", mind("abcd", seed=3, top_k=-1), mind("abcd", seed=3), True),
    Pair("M", "top_p", mind("abcd", seed=3, top_p=1e-9), mind("abcd", temperature=0), True),
    Pair("M", "repetition_penalty", mind("abcd", seed=3, repetition_penalty=2.0), mind("abcd", seed=3), False),
    Pair("M", "repetition_penalty 1.0", mind("abcd", seed=3, repetition_penalty=1.0), mind("abcd", seed=3), True),
    Pair("M", "presence_penalty", mind("abcd", seed=3, presence_penalty=2.0), mind("abcd", seed=3), False),
    Pair("M", "frequency_penalty", mind("abcd", seed=3, frequency_penalty=2.0), mind("abcd", seed=3), False),
]

REFUSED = [
    Refused("123", "text and input_ids", text(input_ids=[97]), "input_ids"),
    Refused("0123", "no prompt", {"sampling_params": {}}, "text"),
    Refused("0123", "image_data, on a model of text", text(image_data="example_image.png"), "image_data"),
    Refused("0123", "image_data, a list", text(image_data=[PICTURE]), "image_data"),
    Refused("13", "lora_path, unknown", text(lora_path="none"), "lora_path"),
    Refused("13", "custom_logit_processor, without the flag", text(custom_logit_processor='{"callable": "00"}'),
            "custom_logit_processor"),
    Refused("13", "custom_params, without a processor", text(params={"custom_params": {"token_id": 5}}),
            "sampling_params.custom_params"),
    Refused("3", "session_params, unknown", text(session_params={"id": "none"}), "session_params.id"),
    *(Refused("1", name, text(params={name: value}), f"sampling_params.{name}") for name, value in (
        ("frequency_penalty", 2.1), ("frequency_penalty", -2.1), ("presence_penalty", 2.1), ("presence_penalty", -2.1),
        ("repetition_penalty", 2.1), ("repetition_penalty", -0.1),
    )),
    *(Refused("0123", name, text(params={name: value}), f"sampling_params.{name}") for name, value in (
        ("temperature", -1), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("max_new_tokens", -1), ("stop", 5),
        ("regex", "("),
    )),
    Refused("1", "one constraint only", text(params={"regex": "a", "ebnf": 'root ::= "a"'}), "sampling_params"),
    *(Refused("M", name, mind(**{name: value}), name) for name, value in (
        ("prompt", ""), ("prompt", "a" * (512 * 1024 + 1)), ("max_tokens", 0), ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.1), ("presence_penalty", 2.1), ("presence_penalty", -2.1), ("frequency_penalty", 2.1),
        ("frequency_penalty", -2.1), ("temperature", -0.1), ("top_k", 0), ("top_k", -2), ("top_k", 2**31),
        ("top_p", 0.0), ("top_p", 1.1), ("stream", "yes"),
    )),
]  # fmt: skip


def test_every_row_that_an_answer_shows_works_as_its_page_says(app: App):
    wrong = {}
    for row in ROWS:
        response = app.post(**row.body)
        if response.status_code != 200 or not row.holds(response.json()) or "x-tureen-ignored" in response.headers:
            wrong[row.name] = response.text[:300]
    assert wrong == {}


def tokens_of(app: App, body: dict[str, Any]) -> Any:
    response = app.post(**body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer.get("output_ids", answer["text"])


def test_every_row_that_changes_probabilities_works_as_its_page_says(model: App):
    wrong = [row.name for row in PAIRS if (tokens_of(model, row.body) == tokens_of(model, row.other)) != row.are_same]
    assert wrong == []


def test_every_value_outside_a_row_s_range_is_refused_with_the_row_s_name(app: App):
    wrong = {}
    for row in REFUSED:
        response = app.post(**row.body)
        if response.status_code not in (400, 403, 404, 422) or row.param not in response.text:
            wrong[f"{row.name}: {row.param}"] = (response.status_code, response.text[:200])
    assert wrong == {}


def test_the_client_loop_of_sglang_s_pages_prints_the_whole_text(app: App):
    body = text("say:The capital of France is Paris.", {"temperature": 0, "max_new_tokens": 256}, stream=True)
    printed, prev, has_ended = "", 0, False
    for line in app.post(**body).content.splitlines():
        chunk = line.decode("utf-8")
        if chunk and chunk.startswith("data:"):
            if chunk == "data: [DONE]":
                has_ended = True
                break
            output = json.loads(chunk[5:].strip("\n"))["text"].strip()
            printed += output[prev:]
            prev = len(output)
    assert (printed, has_ended) == ("The capital of France is Paris.", True)


def test_each_token_of_mindie_s_stream_ends_with_a_nul_byte(app: App):
    *pieces, rest = app.post(**mind(stream=True)).content.split(b"\0")
    assert rest == b""
    assert [json.loads(piece)["text"] for piece in pieces] == [[char] for char in "hello"]


ELSEWHERE = {
    "0123 image_data, on a model of pictures": "api/test_media_fields.py",
    "13 lora_path": "api/test_adapters.py",
    "3 session_params": "api/test_sessions.py",
    "1 custom_logit_processor, custom_params": "servers/test_client_code.py",
    "3 modalities, with data": "api/test_media_fields.py",
    "0123 commands": "test_peer_flags.py",
    "M certificates": "servers/test_tls.py",
}
"""Rows that need more than one request, and the file with their tests."""


def test_rows_that_are_tested_elsewhere_have_their_file():
    folder = Path(__file__).resolve().parents[1]
    assert [row for row, name in ELSEWHERE.items() if not (folder / name).is_file()] == []
