"""Structured requests are asked alike of every server, and their answers are judged by their own schema."""

import argparse
import asyncio
import json

import jsonschema
import pytest

from tureen.bench.backends import BACKENDS
from tureen.bench.command import add_arguments, run
from tureen.bench.drive import FinishedRequest, run_load
from tureen.bench.http import Address, BenchError
from tureen.bench.report import ratios, summarise
from tureen.bench.structured import ASKED, OUTPUT_LEN, json_jobs, plain_jobs, share_valid, table
from tureen.bench.workloads import BenchRequest, Dice, OfferedLoad

VOCAB = 1000
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
JOB = BenchRequest("The answer:", 20, SCHEMA)


def _answer(text, tokens=10, forced=None, seconds=1.0):
    return FinishedRequest(
        started_s=0.0,
        token_times_s=[seconds / 2, seconds],
        ended_s=seconds,
        prompt_tokens=5,
        output_tokens=tokens,
        forced_tokens=forced,
        text=text,
    )


def _run(server, backend, job=JOB):
    load = OfferedLoad(name="structured", jobs=[job] * 3, concurrency=2)
    return asyncio.run(run_load(Address(server.url), BACKENDS[backend](), load))


def _parsed(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def _schema_in(body):
    """What a backend sent, wherever its kind of server looks for it."""
    if "response_format" in body:
        return body["response_format"]["json_schema"]["schema"]
    if "json_schema" in body:
        return body["json_schema"]
    return json.loads(body["sampling_params"]["json_schema"])


def test_the_schemas_are_objects_of_five_required_fields():
    for job in json_jobs(Dice(VOCAB, 1), len(ASKED)):
        schema = json.loads(job.schema)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert len(schema["properties"]) == len(schema["required"]) == 5
        assert schema["additionalProperties"] is False
        assert job.output_len == OUTPUT_LEN


def test_prompts_are_new_and_schemas_are_those_seen_before_unless_new_ones_are_wanted():
    seen, new = json_jobs(Dice(VOCAB, 1), 12), json_jobs(Dice(VOCAB, 1), 12, are_new=True)
    assert len({job.prompt for job in seen}) == 12
    assert len({job.schema for job in seen}) == len(ASKED)
    assert len({job.schema for job in new}) == 12
    assert not {job.schema for job in seen} & {job.schema for job in new}
    plain = plain_jobs(Dice(VOCAB, 1), 12, 33)
    assert [(job.prompt, job.output_len, job.schema) for job in plain] == [(job.prompt, 33, None) for job in seen]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_sends_the_schema_and_gives_back_the_whole_text(fake_server, backend):
    for answer in _run(fake_server, backend):
        assert answer.text == '{"a": 1}'
        assert answer.output_tokens == 5
    for body in fake_server.requests:
        assert _schema_in(body) == json.loads(SCHEMA)
        assert "ignore_eos" not in json.dumps(body)
        assert "The answer:" in (body.get("text"), body.get("prompt"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_answer_longer_than_asked_for_is_an_error_with_a_schema_too(fake_server, backend):
    fake_server.structured = ("{",) * 21
    with pytest.raises(BenchError, match="asked for 20 output tokens, the server counted 21"):
        _run(fake_server, backend)


def test_forced_tokens_are_those_that_the_server_counts(fake_server):
    assert [answer.forced_tokens for answer in _run(fake_server, "tureen")] == [None] * 3
    fake_server.forced = 2
    assert [answer.forced_tokens for answer in _run(fake_server, "tureen")] == [2] * 3


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [('{"a": 1}', True), ('{"a": "1"}', False), ("{}", False), ('{"a": 1', False), ("", False), ('{"a": 1} {', False)],
)
def test_an_answer_is_valid_when_it_is_json_that_matches(text, is_valid):
    assert share_valid([JOB, JOB], [_answer(text), _answer('{"a": 2}')]) == (1.0 if is_valid else 0.5)


def test_without_a_schema_nothing_is_asked_of_the_answers():
    assert share_valid([BenchRequest([1], 3)], [_answer("whatever")]) is None


def _result(name, answers, *, target="ours", valid=1.0):
    result = summarise(answers, workload=name, target=target, concurrency=1)
    result.valid = valid
    return result


def test_the_table_counts_decoded_tokens_and_compares_with_the_plain_run():
    answers = [_answer("", tokens=60, forced=20), _answer("", tokens=40, forced=30)]
    plain = _result("json-1-plain", [_answer("", tokens=50, seconds=2.0)] * 2, valid=None)
    lines = table([_result("json-1", answers, valid=0.5), plain]).splitlines()
    assert len(lines) == 2
    assert lines[1].split() == ["json-1", "ours", "2", "100", "50", "2.00", "1.00", "1000", "1000", "50.0%", "2.00"]


def test_servers_are_compared_by_requests_where_they_choose_the_length_of_their_answers():
    ours, theirs = [_answer("", tokens=10, seconds=1.0)], [_answer("", tokens=100, seconds=2.0)]
    results = [_result("json-1", ours), _result("json-1", theirs, target="theirs")]
    assert "2.00x" in ratios(results, ["ours", "theirs"])


def test_the_workload_asks_for_seen_plain_and_new_schemas_in_turn(fake_server, tmp_path, capsys):
    fake_server.forced = 2
    file = tmp_path / "out.json"
    arguments = ("--url", fake_server.url, "--workload", "json", "--quick", "--json", str(file))
    assert run(_parsed(*arguments)) == 0
    results = json.loads(file.read_text())["results"]
    names = ["json-1", "json-1-plain", "json-1-new", "json-16", "json-16-plain", "json-16-new"]
    assert [result["workload"] for result in results] == names
    assert [result["requests"] for result in results] == [3, 3, 3, 16, 16, 16]
    assert [result["concurrency"] for result in results] == [1, 1, 1, 16, 16, 16]
    assert [result["output_tokens"] for result in results] == [15, 15, 15, 80, 80, 80]
    assert [result["valid"] for result in results] == [0.0, None, 0.0, 0.0, None, 0.0]  # {"a": 1} is no person
    assert results[0]["forced_tokens"] == 6
    assert "1.67" in capsys.readouterr().out  # 15 tokens, 9 of them decoded
    schemas = [body["sampling_params"].get("json_schema") for body in fake_server.requests]
    assert schemas.count(None) == 4 + 3 + 16  # the warm-up and the plain passes
    assert len(set(schemas)) == 1 + len(ASKED) + 3 + 16


def test_concurrency_requests_and_rate_can_be_given(fake_server, tmp_path):
    file = tmp_path / "out.json"
    arguments = ("--url", fake_server.url, "--workload", "json", "--concurrency", "4", "--requests", "5")
    assert run(_parsed(*arguments, "--rate", "200", "--json", str(file))) == 0
    results = json.loads(file.read_text())["results"]
    assert [result["workload"] for result in results] == ["json-4", "json-4-plain", "json-4-new"]
    assert {(result["requests"], result["rate"]) for result in results} == {(5, 200.0)}
