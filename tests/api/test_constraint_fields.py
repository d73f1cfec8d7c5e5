"""What the output must be, in the fields of vLLM, llama.cpp, TGI and SGLang: each acts, or is refused by its name."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from app_under_test import App
from served_app import ServedApp

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "structured-outputs.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## The fields of other servers")[2].partition("\n## ")[0]
SERVER = "http://127.0.0.1:30000"
LETTER = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
TAGGED = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": LETTER}}
OBJECT = {"type": "object"}
ROUTES = ("/v1/completions", "/v1/chat/completions", "/generate")


@pytest.fixture(scope="module")
def app():
    with App(chat_template="chatml") as running:
        yield running


def post(app: App, route: str, **fields: Any) -> Any:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in route else {"prompt": "a"}
    return app.request("POST", route, json={"max_tokens": 200, "seed": 5, **prompt, **fields})


def text_of(app: App, route: str, **fields: Any) -> str:
    response = post(app, route, **fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    if route == "/generate":
        return answer["text"][0].removeprefix("a ")
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["text"] if "text" in choice else choice["message"]["content"]


def is_valid(schema: Any):
    return lambda text: jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def matches(pattern: str):
    return lambda text: re.fullmatch(pattern, text) is not None


VLLM = [
    ({"guided_json": LETTER}, is_valid(LETTER)),
    ({"guided_json": json.dumps(LETTER)}, is_valid(LETTER)),
    ({"guided_regex": "[1-9][0-9]{2}"}, matches("[1-9][0-9]{2}")),
    ({"guided_choice": ["red", "green"]}, matches("red|green")),
    ({"guided_grammar": 'root ::= "<" [a-c] ">"'}, matches("<[a-c]>")),
    ({"guided_structural_tag": TAGGED}, is_valid(LETTER)),
    ({"guided_json": LETTER, "guided_decoding_backend": "auto"}, is_valid(LETTER)),
    ({"guided_json": LETTER, "guided_decoding_backend": "xgrammar:no-fallback"}, is_valid(LETTER)),
    ({"guided_json": LETTER, "guided_whitespace_pattern": r"[\n\t ]*"}, is_valid(LETTER)),
    ({"structured_outputs": {"json": LETTER}}, is_valid(LETTER)),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}, is_valid(OBJECT)),
    ({"structured_outputs": {"regex": "ab?", "disable_any_whitespace": False}}, matches("ab?")),
    ({"structured_outputs": {"choice": ["red", "green"]}}, matches("red|green")),
    ({"structured_outputs": {"grammar": 'root ::= "7" | "8"'}}, matches("[78]")),
    ({"structured_outputs": {"structural_tag": TAGGED}}, is_valid(LETTER)),
    ({"structured_outputs": {"json": LETTER, "whitespace_pattern": "[ ]?"}}, is_valid(LETTER)),
    ({"structured_outputs": {"json": LETTER, "disable_additional_properties": True}}, is_valid(LETTER)),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "fits"), VLLM)
def test_the_fields_of_vllm_constrain_the_output(app: App, route, fields, fits):
    text = text_of(app, route, **fields)
    assert fits(text), text


OTHERS = [
    ({"grammar": 'root ::= "<" [a-c] ">"'}, matches("<[a-c]>")),
    ({"json_schema": LETTER}, is_valid(LETTER)),
    ({"response_format": {"type": "json_object", "schema": LETTER}}, is_valid(LETTER)),
    ({"response_format": {"type": "json_schema", "schema": LETTER}}, is_valid(LETTER)),
    ({"response_format": {"type": "json", "value": LETTER}}, is_valid(LETTER)),
    ({"response_format": {"type": "json_object", "value": LETTER}}, is_valid(LETTER)),
    ({"response_format": {"type": "json", "value": json.dumps(LETTER)}}, is_valid(LETTER)),
    ({"response_format": {"type": "json_schema", "value": {"name": "x", "schema": LETTER}}}, is_valid(LETTER)),
    ({"response_format": {"type": "regex", "value": "ab{2,3}"}}, matches("ab{2,3}")),
]


@pytest.mark.parametrize("route", ROUTES[:2])
@pytest.mark.parametrize(("fields", "fits"), OTHERS)
def test_the_fields_of_llamacpp_and_tgi_constrain_openais_routes(app: App, route, fields, fits):
    text = text_of(app, route, **fields)
    assert fits(text), text


@pytest.mark.parametrize("value", [LETTER, {"name": "letter", "schema": LETTER}, {"schema": LETTER}])
@pytest.mark.parametrize("kind", ["json", "json_schema"])
def test_tgis_grammar_may_be_a_schema_or_a_schema_with_a_name(app: App, kind, value):
    parameters = {"grammar": {"type": kind, "value": value}, "max_new_tokens": 200, "seed": 1}
    answer = app.request("POST", "/generate", json={"inputs": "a", "parameters": parameters})
    assert is_valid(LETTER)(answer.json()["generated_text"])


REFUSED = [
    ({"guided_json": LETTER, "guided_regex": "a"}, "guided_regex"),
    ({"guided_json": LETTER, "structured_outputs": {"json": LETTER}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": LETTER, "json_object": True}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": LETTER, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_additional_properties": True}},
        "structured_outputs.disable_additional_properties",
    ),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {"type": "strin"}}, "guided_json"),
    ({"guided_json": LETTER, "guided_decoding_backend": "mine"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
    ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
]
NO_SPACE = ["", r"\n", "[ ]", " +", "[\n]*", " {2}", " {1,}", "(", "( ?", "[^ ]*", "[a ]*", "[ ]{0}"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("fields", "field"), REFUSED)
def test_what_says_two_things_or_cannot_be_kept_is_refused_by_name(app: App, route, fields, field):
    response = post(app, route, **fields)
    assert response.status_code in (400, 422)
    assert field in str(response.json()["error"])


def test_digits_of_a_pattern_are_ascii(app: App):
    samples = app.request(
        "POST", "/generate", json={"text": "a", "sampling_params": {"regex": r"(\d{3}-){2}\d{4}", "n": 32, "seed": 1}}
    ).json()
    assert [sample["text"] for sample in samples if not re.fullmatch("([0-9]{3}-){2}[0-9]{4}", sample["text"])] == []
    assert post(app, ROUTES[2], guided_regex=OTHER_DIGIT).status_code in (400, 422)


OTHER_DIGIT = r"(?![0-9])\d"  # nothing where digits are ASCII


def test_regex_unicode_lets_patterns_know_the_digits_of_all_scripts():
    tools = [{"type": "function", "function": {"name": "f"}}]
    with App(chat_template="chatml", regex_unicode=True) as running:
        for route, fields in ((ROUTES[0], {}), (ROUTES[1], {}), (ROUTES[1], {"tools": tools, "tool_choice": "auto"})):
            text = text_of(running, route, guided_regex=OTHER_DIGIT, **fields)
            assert (text.isdecimal(), text.isascii()) == (True, False), text


@pytest.mark.parametrize(
    "pattern", [r"\s*", " ?", "[ ]?", "[ \n]*", r"[\n\t ]{0,20}", r"[\s]{,3}", "[ \\r]{0,}", r"\s?"]
)
def test_white_space_that_may_be_none_or_a_space_is_taken_and_such_it_is(app: App, pattern):
    assert re.fullmatch(pattern, "")
    assert re.fullmatch(pattern, " ")
    text = text_of(app, ROUTES[0], structured_outputs={"json": LETTER, "whitespace_pattern": pattern})
    gap = f"(?:{pattern})"
    assert re.fullmatch(rf'{{{gap}"a"{gap}:{gap}"[xy]"{gap}}}', text)


@pytest.mark.parametrize("pattern", NO_SPACE)
@pytest.mark.parametrize("route", ROUTES)
def test_white_space_that_json_never_has_here_is_refused(app: App, route, pattern):
    for fields, field in (
        ({"guided_json": LETTER, "guided_whitespace_pattern": pattern}, "guided_whitespace_pattern"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": pattern}}, "structured_outputs.whitespace_pattern"),
    ):
        response = post(app, route, **fields)
        assert response.status_code in (400, 422)
        assert field in str(response.json()["error"])


@pytest.mark.parametrize("field", ["json_schema", "regex", "ebnf", "structural_tag"])
def test_an_empty_string_says_nothing(app: App, field):
    assert app.generate(text="say:x", sampling_params={field: ""})["text"] == "x"
    assert app.generate(text="a", sampling_params={field: "", "choice": ["b"]})["text"] == "b"
    assert text_of(app, ROUTES[0], prompt="say:x", **{field: ""}) == "x"
    assert text_of(app, ROUTES[1], **{field: ""}, guided_choice=["b"]) == "b"


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_grammar", "guided_structural_tag", "grammar"])
def test_an_empty_string_under_another_name_says_nothing_either(app: App, field):
    assert text_of(app, ROUTES[0], prompt="say:x", **{field: ""}) == "x"
    if field != "grammar":
        assert text_of(app, ROUTES[2], **{field: ""}, guided_choice=["b"]) == "b"


PART = {
    "type": "object",
    "properties": {"b": {"const": 1}},
    "patternProperties": {"^k[0-9]$": {"const": 2}},
    "minProperties": 1,
    "maxProperties": 2,
}
NESTED = {
    "$defs": {"part": PART},
    "type": "object",
    "properties": {
        "properties": {"$ref": "#/$defs/part"},
        "list": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["properties", "list"],
}


def test_no_additional_properties_closes_the_objects_that_name_keys_and_say_nothing_of_others(app: App):
    closed = {**NESTED, "$defs": {"part": PART | {"additionalProperties": False}}, "additionalProperties": False}
    for seed in range(5):
        options = {"json": NESTED, "disable_additional_properties": True}
        text = text_of(app, ROUTES[0], structured_outputs=options, seed=seed, max_tokens=2000)
        jsonschema.validate(json.loads(text), closed)


def test_the_program_of_the_page_prints_one_of_its_choices(capsys):
    [program] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    with ServedApp(chat_template="chatml") as server:
        space: dict[str, Any] = {}
        exec(program.replace(SERVER, server.url), space)
        space["client"].close()
    assert capsys.readouterr().out in ("blue\n", "green\n")


def test_each_command_of_the_page_says_yes_or_no(app: App):
    commands = re.findall(r"^curl .*?'$(?=\n(?:curl|```))", SECTION, re.MULTILINE | re.DOTALL)
    assert len(commands) == 3
    for command in commands:
        words = shlex.split(command)
        url = next(word for word in words if word.startswith(SERVER))
        answer = app.request("POST", url.removeprefix(SERVER), json=json.loads(words[-1])).json()
        text = answer["choices"][0]["text"] if "choices" in answer else answer["generated_text"]
        assert text in ("yes", "no")


def test_the_program_of_the_page_makes_a_pydantic_model(capsys):
    section = PAGE.partition("## Pydantic")[2].partition("\n## ")[0]
    [program] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    with ServedApp(chat_template="chatml") as server:
        space: dict[str, Any] = {}
        exec(compile(program.replace(SERVER, server.url), "page", "exec", dont_inherit=True), space)
        space["client"].close()
    printed = re.fullmatch(
        r"Weather\(city='(Rome|Oslo)', degrees=(-?\d+), tags=(set\(\)|\{.*\})\)\n", capsys.readouterr().out
    )
    assert printed
    assert -40 <= int(printed[2]) <= 50
