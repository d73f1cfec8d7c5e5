"""Constrained outputs on the real server with the real model: they match, whatever else is going on.

tests/servers/test_structured_outputs.py is the smoke test; tests/api/test_constrained_answers.py asks in process.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import math
import re
import shlex
from pathlib import Path

import httpx
import jsonschema
import pytest
from server_process import ServerProcess, metric
from timeouts import wait_until

from tureen.weights.source import load_tokenizer

GUARDS = ("grammar", "grammar_service", "sampling", "engine", "docs/structured-outputs.md")

pytestmark = pytest.mark.model

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "structured-outputs.md").read_text(encoding="utf-8")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["administrator", "editor", "visitor"]},
        "is_active": {"type": "boolean"},
        "languages": {"type": "array", "items": {"enum": ["English", "French"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "role", "is_active", "languages"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
CITY = CITY | {"additionalProperties": False}
DATE = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
SUMS = """
root ::= number (" + " number){1,3} " = " number
number ::= [1-9] [0-9]{0,2}
"""
TOOL_PROMPT = """\
Which city is warm? <call>{"city": "Rome"}</call>
Which city is cold? <call>{"city": "Oslo"}</call>
Which city has the Colosseum? <call>"""
OLD_TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": '<call name="weather">', "schema": CITY, "end": "</call>"}],
    "triggers": ["<call"],
}
NEW_TAGS = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call"],
        "tags": [
            {
                "begin": '<call name="weather">',
                "content": {"type": "json_schema", "json_schema": CITY},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
TAG = re.compile(r'<call name="weather">(.*?)</call>', re.DOTALL)
THINKING = "2 + 2? Two and two make four. Answer: 4\n3 + 4? Three and four make seven. Answer: 7\n5 + 1?"
WEATHER = "".join(
    f'Weather in {city}: <call name="weather">{{"city": "{city}"}}</call>\n' for city in ("Rome", "Oslo", "Bern")
)
WEATHER += "Weather in Paris:"


def is_json(text: str, schema: object) -> bool:
    """Also that it is written in the one layout: the only space is one after each comma and colon."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    outside = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return re.fullmatch(r"(?:[^\s:,]|[:,] )*", outside) is not None


def is_tagged(text: str) -> bool:
    """Every trigger begins a whole tag."""
    assert len(TAG.findall(text)) == text.count("<call") > 0
    return all(is_json(content, CITY) for content in TAG.findall(text))


def is_sum_after_thinking(text: str) -> bool:
    thought, marker, answer = text.partition("Answer:")
    return bool(thought and marker and re.fullmatch(r" \d{1,3}", answer))


KINDS = {
    "schema-object": ("A user:\n", {"json_schema": PERSON}, lambda text: is_json(text, PERSON)),
    "schema-text": ("A person in JSON: ", {"json_schema": json.dumps(PERSON)}, lambda text: is_json(text, PERSON)),
    "any-json": ("A list of two numbers in JSON: ", {"json_schema": "$$ANY$$"}, lambda text: is_json(text, True)),
    "regex": ("The moon landing was on ", {"regex": DATE}, lambda text: re.fullmatch(DATE, text)),
    "ebnf": ("A sum: ", {"ebnf": SUMS}, lambda text: re.fullmatch(r"[1-9]\d{0,2}( \+ [1-9]\d{0,2}){1,3} = \d+", text)),
    "choice": ("The sky is", {"choice": [" blue", " green", " blueish grey"]}, lambda text: text.startswith(" ")),
    "old-tags": (WEATHER, {"structural_tag": OLD_TAGS, "stop": "\n"}, is_tagged),
    "new-tags": (WEATHER, {"structural_tag": json.dumps(NEW_TAGS)}, is_tagged),
    "int": ("The answer is ", {"dtype": "int"}, lambda text: isinstance(int(text), int)),
    "float": ("The value of pi is ", {"dtype": "float"}, lambda text: math.isfinite(float(text))),
    "bool": ("Is water wet? ", {"dtype": "bool"}, lambda text: text in ("True", "False")),
    "after-thinking": (
        THINKING,
        {"regex": r" \d{1,3}", "grammar_after": "Answer:"},
        is_sum_after_thinking,
    ),
}


def asked(kind: str, **fields) -> dict:
    """Sampled, seeded by the kind."""
    text, constraint, _ = KINDS[kind]
    params = {"max_new_tokens": 100, "sampling_seed": 1 + list(KINDS).index(kind), "top_p": 0.9}
    return {"text": text, "sampling_params": params | constraint} | fields


def plain(number: int = 0, **params) -> dict:
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True} | params
    return {"text": f"Chapter {number}: the keeper of the lighthouse", "sampling_params": sampling}


def post(server: ServerProcess, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def generate(server: ServerProcess, body: dict) -> dict:
    response = post(server, body)
    assert response.status_code == 200, response.text
    return response.json()


def events(server: ServerProcess, body: dict) -> list[dict]:
    with httpx.stream("POST", f"{server.url}/generate", json=body | {"stream": True}, timeout=120) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def result(answer: dict) -> tuple[list[int], str, dict]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


@pytest.fixture(scope="module")
def alone(server) -> dict[str, dict]:
    """What each kind of request gives by itself."""
    return {kind: generate(server, asked(kind)) for kind in KINDS}


def test_an_answer_of_each_kind_matches_its_constraint_and_ends_with_it(alone):
    wrong = {
        kind: answer
        for kind, answer in alone.items()
        if not KINDS[kind][2](answer["text"])
        or answer["meta_info"]["finish_reason"]["type"] != "stop"
        or answer["meta_info"]["completion_tokens"] != len(answer["output_ids"])
    }
    assert wrong == {}


@pytest.mark.parametrize("kind", ["schema-object", "new-tags", "after-thinking"])
def test_streamed_it_is_the_same_and_grows_only(server, alone, kind):
    seen = events(server, asked(kind))
    assert result(seen[-1]) == result(alone[kind])
    for before, after in itertools.pairwise(seen):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert seen[-1]["meta_info"]["forced_tokens"] == alone[kind]["meta_info"]["forced_tokens"]


def test_all_kinds_at_the_same_time_beside_plain_requests_give_what_each_gives_alone(server, alone):
    bodies = {kind: asked(kind) for kind in KINDS} | {
        f"plain-{number}": plain(number, temperature=1, sampling_seed=number, max_new_tokens=12) for number in range(3)
    }
    expected = {kind: result(answer) for kind, answer in alone.items()}
    expected |= {name: result(generate(server, bodies[name])) for name in bodies if name not in KINDS}
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        futures = {name: pool.submit(generate, server, body) for name, body in bodies.items()}
        assert {name: result(future.result()) for name, future in futures.items()} == expected


def test_eight_hot_samples_are_all_valid(server):
    params = {"json_schema": PERSON, "temperature": 1, "sampling_seed": 40, "n": 8, "max_new_tokens": 200}
    samples = generate(server, {"text": "A user:\n", "sampling_params": params})
    assert len({sample["text"] for sample in samples}) > 4
    for sample in samples:
        assert sample["meta_info"]["finish_reason"]["type"] == "stop"
        assert is_json(sample["text"], PERSON)


def test_sample_i_of_n_is_the_request_with_seed_plus_i(server):
    params = {"regex": DATE, "sampling_seed": 70, "temperature": 1.5}
    body = {"text": "The day was "}
    samples = generate(server, body | {"sampling_params": params | {"n": 3}})
    single = [generate(server, body | {"sampling_params": params | {"sampling_seed": 70 + i}}) for i in range(3)]
    assert [result(sample) for sample in samples] == [result(sample) for sample in single]
    assert all(re.fullmatch(DATE, sample["text"]) for sample in samples)


def test_a_batch_may_have_a_constraint_for_each_prompt(server, alone):
    kinds = ["schema-object", "regex", "choice"]
    body = {"text": [KINDS[kind][0] for kind in kinds]}
    body["sampling_params"] = [asked(kind)["sampling_params"] for kind in kinds]
    assert [result(answer) for answer in generate(server, body)] == [result(alone[kind]) for kind in kinds]


def test_keys_and_quotes_are_forced_and_have_finite_log_probabilities(server, alone):
    meta = generate(server, asked("schema-object", return_logprob=True))["meta_info"]
    assert meta["forced_tokens"] == alone["schema-object"]["meta_info"]["forced_tokens"]
    assert meta["completion_tokens"] >= 1.3 * (meta["completion_tokens"] - meta["forced_tokens"])
    logprobs = [value for value, _, _ in meta["output_token_logprobs"]]
    assert len(logprobs) == meta["completion_tokens"]
    assert all(math.isfinite(value) and value <= 0 for value in logprobs)
    ids = [token_id for _, token_id, _ in meta["output_token_logprobs"]]
    assert ids == alone["schema-object"]["output_ids"]


def test_the_whole_answer_is_forced_where_there_is_one_only(server):
    params = {"choice": ["a single possibility, and a long one at that"], "temperature": 0}
    answer = generate(server, {"text": "Say it: ", "sampling_params": params, "return_logprob": True})
    assert answer["text"] == "a single possibility, and a long one at that"
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "stop"
    assert meta["completion_tokens"] - meta["forced_tokens"] <= 2
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]


NESTED = {
    "$defs": {
        "part": {"type": "object", "properties": {"name": {"type": "string"}, "parts": {"$ref": "#/$defs/parts"}}}
    },
    "type": "object",
    "properties": {"title": {"type": "string"}, "parts": {"$ref": "#/$defs/parts"}},
    "required": ["title", "parts"],
}
NESTED["$defs"]["parts"] = {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1}
LONG = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "summary": {"type": "string", "minLength": 10},
        "tags": {"type": "array", "items": {"type": "string"}},
        "published": {"type": "string", "format": "date"},
        "score": {"type": "number"},
    },
    "required": ["title", "summary", "tags", "published", "score"],
}


@pytest.mark.parametrize("schema", [PERSON, CITY, NESTED, LONG, {"type": "object"}, {"type": "array"}])
def test_an_answer_is_whole_within_any_limit_or_refused_with_the_least_that_will_do(server, schema):
    def answer(limit):
        params = {"temperature": 0, "json_schema": schema, "max_new_tokens": limit}
        return post(
            server, {"text": "A long story about a machine and its parts, as JSON:\n", "sampling_params": params}
        )

    refused = answer(1).json()
    least = int(re.search(r"at least (\d+)", refused["error"]["message"])[1]) if "error" in refused else 1
    if least > 1:
        assert (refused["error"]["code"], answer(least - 1).status_code) == ("max_new_tokens_too_small", 400)
    for limit in (least, least + 1, least + 5, least + 16, 90, 150):
        made = answer(limit).json()
        assert made["meta_info"]["finish_reason"]["type"] == "stop", (limit, made)
        assert made["meta_info"]["completion_tokens"] <= limit
        assert is_json(made["text"], schema), (limit, made["text"])


@pytest.mark.parametrize("limit", [1, 4, 9])
def test_an_answer_cut_by_length_says_so_and_is_the_beginning_of_the_whole_one(server, alone, limit):
    body = asked("schema-object")
    body["sampling_params"] = body["sampling_params"] | {"max_new_tokens": limit, "close_early": False}
    answer = generate(server, body)
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": limit}
    assert answer["output_ids"] == alone["schema-object"]["output_ids"][:limit]


def test_penalties_bias_and_a_processor_cannot_break_the_constraint(server):
    params = {
        "json_schema": PERSON,
        "max_new_tokens": 200,
        "temperature": 1.3,
        "sampling_seed": 5,
        "frequency_penalty": 2,
        "presence_penalty": 2,
        "repetition_penalty": 2.0,
        "logit_bias": {str(token_id): 100 for token_id in range(200, 260)},
        "custom_params": {"token_ids": list(range(40, 60))},
        "min_new_tokens": 3,
    }
    body = {"text": "A user:\n", "sampling_params": params, "custom_logit_processor": "disallowed_tokens"}
    answer = generate(server, body)
    assert answer["meta_info"]["finish_reason"]["type"] == "stop"
    assert is_json(answer["text"], PERSON)


def test_where_the_grammar_allows_only_what_may_not_be_drawn_the_request_fails(server, default_model_source):
    tokenizer = load_tokenizer(default_model_source)
    params = {"choice": ["A", "B"], "custom_params": {"token_ids": [*tokenizer.encode("A"), *tokenizer.encode("B")]}}
    body = {"text": "A or B? ", "sampling_params": params, "custom_logit_processor": "disallowed_tokens"}
    response = post(server, body)
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "grammar_stuck"
    assert "simplify the schema, pattern or grammar, or remove fields that forbid tokens" in error["message"]


COMMANDS = [
    json.loads(shlex.split(command)[-1])
    for command in re.findall(r"^curl .*?'$(?=\n(?:curl|```))", PAGE, re.MULTILINE | re.DOTALL)
    if "sampling_params" in command
]
TAGS_OF_THE_PAGE = [json.loads(block) for block in re.findall(r"^```json\n(.*?)\n```", PAGE, re.MULTILINE | re.DOTALL)]
WEATHER_CALL = re.compile(r"<function=weather>(.*?)</function>", re.DOTALL)
LARK_SUM = re.compile("[0-9]+(?: [+] [0-9]+)*")
SUM = re.compile("[1-9][0-9]{0,2}(?: [+] [1-9][0-9]{0,2}){1,3}")


def fits(text: str, params: dict) -> bool:
    """Whether a text is what the parameters of the page's examples ask for, by other means than the server's."""
    if "grammar_after" in params:
        _, marker, text = text.partition(params["grammar_after"])
        if not marker:
            return False
    if "json_schema" in params:
        return is_json(text, params["json_schema"]) is True
    if "regex" in params:
        return re.fullmatch(params["regex"], text) is not None
    if "ebnf" in params:
        return (LARK_SUM if params["ebnf"].startswith("start:") else SUM).fullmatch(text) is not None
    if "choice" in params:
        return text in params["choice"]
    return params["dtype"] == "int" and isinstance(int(text), int)


@pytest.mark.parametrize("body", COMMANDS)
def test_the_page_s_examples_give_what_they_ask_for(server, body):
    answer = generate(server, body)
    meta, params = answer["meta_info"], body["sampling_params"]
    assert meta["finish_reason"]["type"] == "stop"
    if "unenforced" in meta:
        assert f'"unenforced": {json.dumps(meta["unenforced"])}' in PAGE
        assert meta["valid"] == jsonschema.Draft202012Validator(params["json_schema"]).is_valid(
            json.loads(answer["text"])
        )
    else:
        assert fits(answer["text"], params), answer["text"]


def test_the_page_has_an_example_of_every_field_and_one_that_is_not_all_enforced():
    shown = {name for body in COMMANDS for name in body["sampling_params"]}
    assert shown >= {"json_schema", "regex", "ebnf", "choice", "dtype", "grammar_after"}
    assert sum("[A-Z]{2}" in json.dumps(body) for body in COMMANDS) == 1
    assert sum("uniqueItems" in json.dumps(body) for body in COMMANDS) == 1
    assert len(COMMANDS) == 10


@pytest.mark.parametrize(("tag", "arguments"), zip(TAGS_OF_THE_PAGE, (["city"], []), strict=True))
def test_the_page_s_tags_hold_what_they_say(server, tag, arguments):
    shown = "".join(
        f'Weather in {city}: <function=weather>{{"city": "{city}"}}</function>\n' for city in ("Rome", "Oslo", "Bern")
    )
    params = {"temperature": 0, "structural_tag": tag, "max_new_tokens": 100, "stop": ["\n"]}
    text = generate(server, {"text": f"{shown}Weather in Paris:", "sampling_params": params})["text"]
    calls = WEATHER_CALL.findall(text)
    assert len(calls) == text.count("<function=") > 0
    for call in calls:
        jsonschema.validate(json.loads(call), {"type": "object", "required": arguments})


def test_the_page_s_sentence_about_keys_is_true(server):
    def keys(schema: dict) -> set[str]:
        params = {"temperature": 0, "json_schema": schema, "max_new_tokens": 200}
        asked = {"text": 'JSON: {"a": 1, "b": 2}\nJSON: {"a": 1, "b": 2}\nJSON: ', "sampling_params": params}
        return set(json.loads(generate(server, asked)["text"]))

    named = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    count = {"maxProperties": 2}
    assert keys(named) == {"a"}
    assert keys(named | count | {"additionalProperties": {"enum": [1, 2]}}) == {"a", "b"}
    assert keys({"type": "object", "additionalProperties": {"enum": [1, 2]}} | count) == {"a", "b"}
    assert keys({"type": "object"} | count)


def test_the_page_s_mistakes_are_answered_as_it_says(server):
    mistakes = re.findall(r"^\| `(\{.*\})` \| `(.*)` \|$", PAGE, re.MULTILINE)
    assert len(mistakes) == 3
    for params, message in mistakes:
        response = post(server, {"text": "a", "sampling_params": json.loads(params)})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


def test_what_was_compiled_found_and_forced_is_counted(server, alone):
    names = ("num_grammar_total", "num_grammar_cache_hit_total", "forced_tokens_total", "num_grammar_mismatch_total")

    def counts() -> list[float]:
        return [metric(server.url, f"sglang:{name}") for name in names]

    before = counts()
    again = generate(server, asked("new-tags"))
    assert result(again) == result(alone["new-tags"])
    forced = again["meta_info"]["forced_tokens"]
    wanted = [before[0] + 1, before[1] + 1, before[2] + forced, 0]
    wait_until(lambda: counts() == wanted, f"the counts {wanted}")  # they are read off the engine now and then


def test_a_constraint_that_is_not_compiled_in_time_is_refused_and_nothing_else(default_model_source):
    with ServerProcess("--engine", "process", "--grammar-compile-timeout-s", "0.000001") as hasty:
        hasty.wait_ready()
        response = post(hasty, {"text": "a", "sampling_params": {"choice": ["a", "b"]}})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "grammar_compile_timeout")
        assert generate(hasty, plain(max_new_tokens=2))["meta_info"]["completion_tokens"] == 2
