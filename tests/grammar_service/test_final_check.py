"""The last look at a finished output: what fits, what does not, and what nobody can tell."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading

import inline_workers
import msgspec
import pytest
from timeouts import wait_until

from tureen.grammar.base import GrammarSpec
from tureen.grammar_service import check as module
from tureen.grammar_service.check import Checker, Unverified, check
from tureen.sandbox.fork_server import Program

LOOP = "(a|a)*(?=b)b"  # every judge that backtracks is lost in it
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 2}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(value, after=""):
    return GrammarSpec("json_schema", json.dumps(value), after)


def judged(checker, spec, text):
    """Return the rows that do not fit, or None if all fit or no row can be checked."""
    verdict = checker.check(spec, text)
    return verdict.complaint if verdict.is_verified else None


HANGS = GrammarSpec("regex", "hangs")


def program(setup):
    """The judge's program, which changes nothing of this process; it hangs at one pattern."""
    decoder = msgspec.msgpack.Decoder(tuple[GrammarSpec, str])

    def handle(message):
        spec, text = decoder.decode(message)
        return None if spec == HANGS else msgspec.msgpack.encode(module._judge(spec, text))

    return Program(module.LIMITS, lambda _: handle)


@pytest.fixture(scope="module")
def inline():
    with pytest.MonkeyPatch.context() as patch:
        inline_workers.use(patch, "tureen.grammar_service.check", program)
        yield


@pytest.fixture(scope="module")
def checker(inline):
    running = Checker()
    yield running
    running.close()


@pytest.fixture
def patient(monkeypatch):
    """Whatever can be told is told, however slow the machine is."""
    monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 120.0)
    monkeypatch.setattr(module, "START_TIMEOUT_S", 120.0)
    monkeypatch.setattr(module, "MAX_WAIT_S", 120.0)


FITTING = [
    (schema(PERSON), '{"name": "Ada", "age": 36}'),
    (schema({"type": "number"}), "1e400"),
    (schema({"type": "integer"}), "9" * 500),
    (schema({"multipleOf": 0.1}), "1.1"),
    (schema({"type": "string", "format": "date"}), '"2024-02-29"'),
    (schema({"type": "string", "format": "no-such-format"}), '"x"'),
    (schema({"$ref": "#/$defs/a", "$defs": {"a": {"const": [1, {"b": None}]}}}), '[1, {"b": null}]'),
    (schema({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}]}), "[null, 1]"),
    (schema({"$schema": "http://json-schema.org/draft-04/schema", "minimum": 1, "exclusiveMinimum": True}), "2"),
    (schema({"$schema": "http://json-schema.org/draft-04/schema#", "const": 1, "if": False}), "2"),
    (
        schema(
            {
                "$schema": "http://json-schema.org/draft-06/schema#",
                "$ref": "#/definitions/a",
                "type": "null",
                "definitions": {"a": {"const": 1}},
            }
        ),
        "1",
    ),
    (schema({"$schema": "https://json-schema.org/draft/2019-09/schema", "items": [{"type": "null"}]}), "[null, 1]"),
    (schema({"$schema": "https://json-schema.org/draft/2020-12/schema", "additionalItems": False}), "[1]"),
    (schema({"$schema": "https://vendor.example/meta", "type": "string", "nullable": True}), "null"),
    (
        schema(
            {"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"type": "string", "nullable": True}}}}
        ),
        "null",
    ),
    (schema({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}), "[null, 1]"),
    (schema({"contentMediaType": "application/json", "$schema": "http://json-schema.org/draft-07/schema#"}), '"{"'),
    (schema({"properties": {"a": {"required": True}, "b": {"required": False}}}), '{"a": 1}'),
    (schema(True), "3"),
    (schema({"type": "object"}), '{"a": 1, "a": 2}'),
    (schema({"type": "integer"}, after="</think>"), "let me see: 2</think>3"),
    (GrammarSpec("json_schema", "$$ANY$$"), '{"a": [1.5, "x", null]}'),
    (GrammarSpec("regex", "[a-c]{2}|é"), "é"),
    (GrammarSpec("regex", "x+", after="=>"), "3 =>xx"),
    (GrammarSpec("regex", r"\W+"), "\u2764\ufe0f"),  # no word to Python's re, which patterns follow
    (GrammarSpec("choice", '["yes", "no", ""]'), "no"),
    (GrammarSpec("choice", '["yes", "no", ""]'), ""),
    (GrammarSpec("ebnf", 'root ::= "a"'), "anything: there is no second judge"),
    (GrammarSpec("structural_tag", "{}"), "anything"),
]

WRONG = [
    (schema(PERSON), '{"name": "Ada", "age": 151}', "['age'] does not fit 'maximum'"),
    (schema(PERSON), '{"name": "Ada"}', "the value does not fit 'required'"),
    (schema(PERSON), '{"name": "Ada", "age": 36', "not JSON"),
    (schema({"type": "string", "format": "date"}), '"2023-02-29"', "'format'"),
    (schema({"type": "integer"}), "NaN", "NaN is not a JSON number"),
    (schema({}), "-Infinity", "-Infinity is not a JSON number"),
    (schema({"maximum": 0.1}), "0.1000000000000000000001", "'maximum'"),
    (schema({"type": "string"}), '"\\ud800"', "surrogate"),
    (schema({"properties": {"a": {"type": "null"}}}), '{"a": 1, "a": null}', "['a'] does not fit 'type'"),
    (schema({"properties": {"a": {"type": "null"}}}), '{"a": null, "a": 1}', "['a'] does not fit 'type'"),
    (schema({"minProperties": 2}), '{"a": 1, "a": 2}', "'minProperties'"),
    (schema({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}]}), "[1]", "'type'"),
    (
        schema({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}),
        "1",
        "'exclusiveMinimum'",
    ),
    (schema({"$schema": "https://json-schema.org/draft/2019-09/schema", "items": [{"type": "null"}]}), "[1]", "'type'"),
    (schema({"$schema": "https://vendor.example/meta", "type": "string"}), "null", "'type'"),
    (schema({"minimum": 1, "exclusiveMinimum": True}), "1", "'exclusiveMinimum'"),
    (schema({"items": [{"type": "null"}], "additionalItems": {"type": "integer"}}), "[null, null]", "'type'"),
    (schema({"dependencies": {"a": ["b"]}}), '{"a": 1}', "'required'"),
    (schema({"properties": {"a": {"required": True}}}), "{}", "'required'"),
    (
        schema({"contentEncoding": "base64", "$schema": "http://json-schema.org/draft-07/schema#", "pattern": "x"}),
        '"("',
        "'pattern'",
    ),
    (schema(False), "3", "does not fit"),
    (schema({"type": "integer"}, after="</think>"), "3", "never says '</think>'"),
    (schema({"type": "integer"}, after="</think>"), "1</think>2</think>3", "not JSON"),
    (GrammarSpec("json_schema", "$$ANY$$"), "{a: 1}", "not JSON"),
    (GrammarSpec("regex", "[a-c]{2}"), "abc", "does not match"),
    (GrammarSpec("regex", "a$"), "a\n", "does not match"),
    (GrammarSpec("choice", '["yes", "no"]'), "yes ", "not one of the choices"),
]


@pytest.mark.parametrize(("spec", "text"), FITTING)
@pytest.mark.usefixtures("patient")
def test_what_fits_passes(checker, spec, text):
    assert check(spec, text) is None
    unverified = checker.unverified
    assert judged(checker, spec, text) is None
    assert checker.unverified == unverified


@pytest.mark.parametrize(("spec", "text", "words"), WRONG)
@pytest.mark.usefixtures("patient")
def test_what_does_not_fit_is_named(checker, spec, text, words):
    assert words in check(spec, text)
    assert words in judged(checker, spec, text)


UNVERIFIABLE = [
    (GrammarSpec("regex", "(a"), "a"),
    (GrammarSpec("regex", "(?:a|a)*[bc]"), "a" * 60),
    (schema({"$ref": "#/nowhere"}), "1"),
    (schema({"type": "no-such-type"}), "1"),
    (schema({}), "[" * 200_000 + "]" * 200_000),
    (schema({}), "1e" + "9" * 30),
]


@pytest.mark.parametrize(("spec", "text"), UNVERIFIABLE)
def test_what_cannot_be_told_is_said_so(spec, text):
    with pytest.raises(Unverified):
        check(spec, text)


@pytest.mark.parametrize(("spec", "text"), UNVERIFIABLE)
@pytest.mark.usefixtures("patient")
def test_what_cannot_be_told_passes_and_is_counted(checker, spec, text):
    unverified = checker.unverified
    assert judged(checker, spec, text) is None
    assert checker.unverified == unverified + 1


def test_what_nobody_gets_done_with_takes_its_time_once(inline):
    """Its worker is ended, and the next check works."""
    checker = Checker()
    try:
        assert judged(checker, HANGS, "1") is None
        assert checker.unverified == 1
        assert judged(checker, schema({"type": "null"}), "1") is not None
        pid = checker._worker.pid
        assert [judged(checker, HANGS, str(value)) for value in range(50)] == [None] * 50
        assert checker._worker.pid == pid  # it was not asked, and so not ended
        assert checker.unverified == 51
    finally:
        checker.close()


def end_from_outside(_):
    raise inline_workers.ended_from_outside()


def test_what_is_lost_from_outside_is_judged_by_another_worker(inline):
    checker = Checker()
    try:
        assert judged(checker, schema({"type": "null"}), "1") is not None
        checker._worker.lose(inline_workers.ended_from_outside)
        assert judged(checker, schema({"type": "null"}), "1") is not None
        checker._worker.answer_with(end_from_outside)  # while it judges
        assert judged(checker, schema({"type": "null"}), "1") is not None
        checker.supervisor.end_fork_server()
        assert judged(checker, schema({"type": "null"}), "1") is not None
        assert checker.unverified == 0
    finally:
        checker.close()


def test_many_slow_checks_hold_up_another_one_only_so_long(monkeypatch, inline):
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(module, "CHECK_TIMEOUT_S", 0.1)
    checker = Checker()

    def hang(spec, text):
        wait_until(lambda: checker.unverified == 39, "that all others have given up")

    async def ask():
        asked = [checker.check_in_turn(schema({"const": value}), "1") for value in range(40)]
        return await asyncio.gather(*asked)

    try:
        monkeypatch.setattr(checker, "check", hang)
        assert [verdict for verdict in asyncio.run(ask()) if verdict is not None and verdict.is_verified] == []
        assert checker.unverified == 39
    finally:
        checker.close()


@pytest.mark.usefixtures("patient")
def test_many_threads_may_ask(checker):
    wrong = []

    def ask(number):
        for value in range(20):
            complaint = judged(checker, schema({"const": number}), str(value))
            if (complaint is None) != (value == number):
                wrong.append((number, value))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("pattern", "text", "fits_ascii", "fits_all"),
    [
        (r"\d+", "12", True, True),
        (r"\d+", "1\u0662", False, True),
        (r"\w\W\s", "a\xe9 ", True, False),
        (r"(?u)\d+", "1\u0662", True, True),
        (r"(?u:\w)\W", "éé", True, False),
        (r"(?i)é\d", "É1", True, True),
        (r"(?i)[^\W]+", "ski", True, True),
    ],
)
def test_a_pattern_is_judged_by_the_same_letters_that_its_mask_knows(pattern, text, fits_ascii, fits_all):
    for wide, fits in ((False, fits_ascii), (True, fits_all)):
        assert (check(GrammarSpec("regex", pattern, unicode_classes=wide), text) is None) == fits


PATTERNS = (r"\bé", r"é\b", r"a\b", r"\B.", r"^a\Bé$", r"^\W?\b\w+\b\W?$", r"\\b", "[a.]é$", "^a.b$", r"^(?=a)\w+$",
            r"(?<!\w)[^\W]", r"(?!a)[\w-]$", r"(?=\D)[é[&]$", r"[\w.-]+\b[\W\s]")  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_schemas_know_the_letters_and_lines_of_ecma_262(pattern):
    # Python's `re` with ASCII has that `\b`; its dot matches three characters more, which none of these patterns meets
    plain = {"patternProperties": {pattern: {"const": 1}}, "additionalProperties": {"const": 2}}
    for letters in itertools.product("aé b.[&-", repeat=3):
        text = "".join(letters).strip()
        fits = re.search(pattern, text, re.ASCII) is not None
        assert (check(GrammarSpec("json_schema", json.dumps({"pattern": pattern})), json.dumps(text)) is None) == fits
        value = json.dumps({text: 1 if fits else 2})
        assert check(GrammarSpec("json_schema", json.dumps(plain)), value) is None
    for end in "\n\r\u2028\u2029":
        assert check(GrammarSpec("json_schema", json.dumps({"pattern": "^a.b$"})), json.dumps(f"a{end}b")) is not None


def test_what_looks_like_a_pattern_in_a_value_is_a_value():
    schema = {"const": {"pattern": r"\b.", "enum": [r"\b"]}, "properties": {"pattern": {"minLength": 1}}}
    assert check(GrammarSpec("json_schema", json.dumps(schema)), json.dumps(schema["const"])) is None


@pytest.mark.parametrize("head", [{}, {"$schema": "https://json-schema.org/draft/2019-09/schema"}])
@pytest.mark.parametrize(
    "uri", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_a_reference_to_a_meta_schema_is_judged_without_the_network(head, uri):
    spec = GrammarSpec("json_schema", json.dumps(head | {"items": {"$ref": uri}}))
    assert check(spec, '[{"type": "string"}, true]') is None
    assert "does not fit" in check(spec, '[{"type": "text"}]')
