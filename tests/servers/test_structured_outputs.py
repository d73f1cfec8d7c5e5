"""Constrained outputs on the real server with the real model, beside streams that go on as if alone."""

from __future__ import annotations

import concurrent.futures
import json
import re

import httpx
import jsonschema
import pytest
from server_process import ServerProcess, metric
from timeouts import wait_until

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["administrator", "editor", "visitor"]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
CALL = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": {"enum": ["Rome", "Oslo"]}},
    "end": "</call>",
}
CONSTRAINTS = {
    "json_schema": (PERSON, None),
    "regex": ("[0-9]{4}-(0[1-9]|1[0-2])", "[0-9]{4}-(0[1-9]|1[0-2])"),
    "ebnf": ('root ::= number (" + " number){1,3}\nnumber ::= [1-9] [0-9]?', r"[1-9]\d?( \+ [1-9]\d?){1,3}"),
    "structural_tag": ({"type": "structural_tag", "format": CALL}, r'<call>"(Rome|Oslo)"</call>'),
    "choice": ([" blue", " green", " blueish grey"], " blue| green| blueish grey"),
    "dtype": ("bool", "True|False"),
}


def asked(kind: str) -> dict:
    params = {"max_new_tokens": 100, "sampling_seed": 5, "top_p": 0.9, kind: CONSTRAINTS[kind][0]}
    return {"text": "It is known that", "sampling_params": params}


def plain() -> dict:
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    return {"text": "Chapter 1: the keeper of the lighthouse", "sampling_params": params}


def post(server: ServerProcess, body: dict) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body, timeout=120)


def post_until_judged(server: ServerProcess, body: dict) -> httpx.Response:
    """The answer once there was time for the constraint: a busy machine has none for each of several."""
    answers: list[httpx.Response] = []
    wait_until(lambda: answers.append(post(server, body)) or answers[-1].status_code != 503, "time for a constraint")
    return answers[-1]


def generate(server: ServerProcess, body: dict) -> dict:
    response = post_until_judged(server, body)
    assert response.status_code == 200, response.text
    return response.json()


def last_event(server: ServerProcess, body: dict) -> dict:
    with httpx.stream("POST", f"{server.url}/generate", json=body | {"stream": True}, timeout=120) as response:
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return json.loads(data[-2])


def result(answer: dict) -> tuple[list[int], str, dict]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def test_answers_match_their_constraints_alone_streamed_and_together(server):
    alone = {kind: generate(server, asked(kind)) for kind in CONSTRAINTS} | {"plain": generate(server, plain())}
    bodies = {kind: asked(kind) for kind in CONSTRAINTS} | {"plain": plain()}
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        together = dict(zip(bodies, pool.map(lambda body: generate(server, body), bodies.values()), strict=True))
    for kind, (_, pattern) in CONSTRAINTS.items():
        text = alone[kind]["text"]
        assert alone[kind]["meta_info"]["finish_reason"]["type"] == "stop", kind
        if pattern is None:
            jsonschema.validate(json.loads(text), PERSON)
        else:
            assert re.fullmatch(pattern, text), (kind, text)
        assert result(last_event(server, asked(kind))) == result(alone[kind]), kind
    assert {kind: result(answer) for kind, answer in together.items()} == {
        kind: result(answer) for kind, answer in alone.items()
    }
    assert alone["json_schema"]["meta_info"]["forced_tokens"] > 10
    assert metric(server.url, "sglang:num_grammar_mismatch_total") == 0
    sealed_helpers_know_the_official_meta_schemas(server)


def sealed_helpers_know_the_official_meta_schemas(server):
    unverified = metric(server.url, "sglang:num_grammar_unverified_total")
    for draft in ("http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"):
        schema = {"$schema": draft, "anyOf": [PERSON, {"allOf": [{"$ref": draft}, False]}]}
        params = {"json_schema": schema, "max_new_tokens": 100, "sampling_seed": 5, "top_p": 0.9}
        jsonschema.validate(json.loads(generate(server, {"text": "a", "sampling_params": params})["text"]), PERSON)
    assert metric(server.url, "sglang:num_grammar_unverified_total") == unverified


HOSTILE = {
    "nested counts": {"regex": "((((a{1,99}){1,99}){1,99}){1,99}b){1,99}"},
    "30,000 parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "30,000 parentheses in a grammar": {"ebnf": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000},
    "endless recursion": {"ebnf": 'root ::= root "a" | root "b" | other\nother ::= root | other'},
    "nested 30,000 deep": {"json_schema": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "a schema that is too large": {"json_schema": {"enum": [f"member number {number}" for number in range(100_000)]}},
    "rules that double": {
        "ebnf": "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"'])
    },
}


def test_hostile_and_abandoned_constraints_hold_nothing_up(server):
    hostile_constraints_are_refused_while_a_stream_goes_on_as_if_alone(server)
    an_abort_ends_a_request_whose_constraint_is_being_compiled(server)


def hostile_constraints_are_refused_while_a_stream_goes_on_as_if_alone(server):
    body = plain()
    expected = result(generate(server, body))
    with concurrent.futures.ThreadPoolExecutor(len(HOSTILE) + 2) as pool:
        stream = pool.submit(last_event, server, body)
        refused = {
            name: pool.submit(post_until_judged, server, {"text": "a", "sampling_params": params})
            for name, params in HOSTILE.items()
        }
        ambiguous = {"regex": "(?:a?){500}a{500}" * 20}
        answered = pool.submit(post_until_judged, server, {"text": "a", "sampling_params": ambiguous})
        assert result(stream.result()) == expected
        assert re.fullmatch("a+", answered.result().json()["text"])
        for name, future in refused.items():
            error = future.result().json().get("error", {})
            assert future.result().status_code == 400, (name, future.result().text[:500])
            assert len(error["message"]) < 1000, name


def an_abort_ends_a_request_whose_constraint_is_being_compiled(server):
    members = {f"member_{number}": {"type": "integer"} for number in range(5000)}
    params = {"json_schema": {"type": "object", "properties": members}, "max_new_tokens": 2000}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(generate, server, {"text": "a", "rid": "slow", "sampling_params": params})
        while not waiting.done():
            httpx.post(f"{server.url}/abort_request", json={"rid": "slow"}).raise_for_status()
        assert waiting.result()["meta_info"]["finish_reason"]["type"] == "abort"
    wait_until(lambda: metric(server.url, "sglang:num_grammar_queue_reqs") == 0, "an empty queue")
