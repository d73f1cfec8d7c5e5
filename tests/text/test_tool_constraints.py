"""The constraints that make tool choices hold: what they allow, and how what was written under them is read."""

import functools
import itertools
import json
import random

import jsonschema
import msgspec
import numpy as np
import pytest
from byte_tokenizer import EOS
from inline_compiler import VOCABULARY, InlineCompiler
from samples import either

from tureen.grammar.base import GrammarSpec
from tureen.text.messages import CallArguments, CallStart, Content, Tool, ToolChoice
from tureen.text.tools import PARSERS, calls_or, constraint, schema_fields

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Zürich", 'say "}]"']},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
        "note": {"type": "string", "maxLength": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FREE = {"properties": {"on": {"type": "boolean"}}, "required": ["on"]}  # its type is left out
TOOLS = (Tool(name="weather", parameters=WEATHER), Tool(name="light.set", parameters=FREE), Tool(name="ping"))
STRICT = (Tool(name="weather", parameters=WEATHER, strict=True), *TOOLS[1:])
SCHEMAS = {tool.name: tool.parameters for tool in TOOLS}
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32")
WITH_AUTO = ("hermes", "llama3", "pythonic", *TAGGED)
PYTHON = ("lfm2", "olmo3")
HELD_BY_STRICT = (
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "kimi_k2",
    "step3",
    "granite",
    "gpt-oss",
    "hunyuan",
    "cohere_command3",
    "apertus",
    "gemma4",
    *PYTHON,
)
NAMES = (*WITH_AUTO, *HELD_BY_STRICT)
ONE_CALL = ("gpt-oss",)  # it ends the answer
MAX_CHARS = 400
MARKS = ("｜".encode()[0], "▁".encode()[0])  # which stand in those of DeepSeek

ANY, REQUIRED = ToolChoice("auto"), ToolChoice("required")


@functools.cache
def compiled(tag):
    compiler = InlineCompiler()
    waiting = compiler.submit(GrammarSpec("structural_tag", tag))
    compiler.poll()
    assert waiting.error is None, waiting.error
    return waiting.compiled


CLOSERS = {
    "qwen3_coder": ("</parameter>", "\n</parameter>"),
    "seed_oss": ("</parameter>", "\n</parameter>"),
    "glm45": ("</arg_value>",),
    "minimax_m2": ("</parameter>",),
    "step3": ("</steptml:parameter>",),
    "deepseek_v32": ("</｜DSML｜parameter>",),
}
"""What ends a value in tags, which random bytes would never write."""
LEAST_SEEDS = either(1000, 4)
"""Outputs of each kind that are drawn at least; those that take a sample draw all in the ledgers."""


def closed(grammar, closers):
    """The first of these texts that may follow, which then has; empty if none may."""
    for text in (*closers, '"', "}", "]"):
        accepted = list(itertools.takewhile(grammar.accept, text.encode()))
        if bytes(accepted) == text.encode():
            return accepted
        grammar.rollback(len(accepted))
    return []


def drawn(tag, seed, starts=("",), closers=()):
    """An output of random bytes that the constraint allows; it ends early where it may."""
    source = random.Random(seed)
    grammar = compiled(json.dumps(tag)).start()
    made = list(source.choice(starts).encode())
    assert all(map(grammar.accept, made))
    mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
    while not grammar.is_done:
        grammar.fill_mask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        if EOS in allowed and (source.random() < 0.3 or len(made) > MAX_CHARS):
            break
        plain = [
            byte
            for byte in allowed
            if byte != EOS and (byte in b'"\\}]{[(),;=<>:\n' or 32 <= byte < 127 or byte in MARKS)
        ]
        closing = [byte for byte in plain if byte in b'"}'] if len(made) > MAX_CHARS // 2 else []
        if closers and len(made) > MAX_CHARS // 2 and (text := closed(grammar, closers)):
            made += text
            continue
        token_id = source.choice(closing or plain or [byte for byte in allowed if byte != EOS])
        assert grammar.accept(token_id)
        made.append(token_id)
    return bytes(made).decode()


def allows(tag, text):
    grammar = compiled(json.dumps(tag)).start()
    return all(map(grammar.accept, text.encode())) and grammar.is_accepting


def read(name, text, tools):
    parser = PARSERS[name].parser(tools)
    parts = parser.feed(text) + parser.close()
    calls = [
        (part.name, "".join(one.text for one in parts if isinstance(one, CallArguments) and one.index == part.index))
        for part in parts
        if isinstance(part, CallStart)
    ]
    return "".join(part.text for part in parts if isinstance(part, Content)), calls


def check(calls, tools):
    for called, arguments in calls:
        jsonschema.validate(json.loads(arguments), SCHEMAS[called] | {"type": "object"})
        assert called in {tool.name for tool in tools}


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_required_call_comes_alone_and_its_arguments_are_valid(name, parallel):
    tag = constraint(PARSERS[name], TOOLS, REQUIRED, parallel=parallel)
    counts, seen = set(), set()
    for seed in range(40):
        content, calls = read(name, drawn(tag, seed), TOOLS)
        assert content == ""
        check(calls, TOOLS)
        counts.add(len(calls))
        seen |= {called for called, _ in calls}
        if seed >= LEAST_SEEDS and seen == set(SCHEMAS) and (not parallel or name in ONE_CALL or counts > {1}):
            break
    assert seen == set(SCHEMAS)
    assert counts == {1} if not parallel or name in ONE_CALL else min(counts) == 1 < max(counts)


@pytest.mark.parametrize("name", NAMES)
def test_a_named_tool_is_called_once_and_no_other(name):
    tag = constraint(PARSERS[name], TOOLS, ToolChoice("required", "light.set"), parallel=True)
    for seed in range(10):
        content, calls = read(name, drawn(tag, seed), TOOLS)
        assert content == ""
        assert [called for called, _ in calls] == ["light.set"]
        check(calls, TOOLS)


BEGINNINGS = {
    "hermes": ("", "<", "Let me see <b>. <tool_call>", "{", "[", "<tool_call>", "<tool_ca"),
    "llama3": ("a", "<b>", "{", '{"name": "weather", ', "No {", "<<"),
    "pythonic": ("a", "<b>", "[", "[weather(", "No [", "<<"),
    "qwen3_coder": ("", "<", "So <b>. <tool_call>", "<tool_call>\n<function=weather>\n", "{"),
    "glm45": ("", "<", "So <b>. <tool_call>", "<tool_call>weather", "{"),
    "minimax_m2": ("", "<", "So <b>. <minimax:tool_call>", '<minimax:tool_call>\n<invoke name="weather">', "{"),
    "deepseek_v32": ("", "<", "So <b>. <｜DSML｜function_calls>", "<｜DSML｜function_calls>", "{"),
    "mistral": ("", "[", "So [it]. [TOOL_CALLS]", '[TOOL_CALLS] [{"name": "weather", ', "{"),
    "deepseek_v3": ("", "<", "So <b>. <｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", "{"),
    "deepseek_v31": ("", "<", "So <b>. <｜tool▁calls▁begin｜>", "<｜tool▁calls▁begin｜>", "{"),
    "kimi_k2": ("", "<", "So <b>. <|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", "{"),
    "step3": ("", "<", "So <b>. <｜tool_calls_begin｜>", "<｜tool_calls_begin｜>", "{"),
    "granite": ("", "<", "So <b>. <|tool_call|>", '<|tool_call|>[{"name": "weather", ', "{"),
    "gpt-oss": (
        "",
        "<|channel|>final<|message|>So it is.",
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.weather",
        "<|channel|>commentary to=functions.",
        "<|start|>assistant to=functions.weather<|channel|>",
    ),
    "seed_oss": ("", "<", "So <b>. <seed:tool_call>", "<seed:tool_call>\n<function=weather>\n", "{"),
    "lfm2": ("", "<", "So <b>. <|tool_call_start|>", "<|tool_call_start|>[weather(", "["),
    "olmo3": ("", "<", "So <b>. <function_calls>", "<function_calls>\nweather(", "["),
    "hunyuan": ("", "<", "So <b>. <tool_calls>", '<tool_calls>[{"name": "weather", ', "{"),
    "cohere_command3": (
        "",
        "<",
        "So <b>. <|START_ACTION|>",
        '<|START_ACTION|>[\n    {"tool_name": "weather", ',
        "{",
    ),
    "gemma4": ("", "<", "So <b>. <|tool_call>", "<|tool_call>call:weather", "{"),
    "apertus": ("", "<", "So <b>. <|tools_prefix|>", '<|tools_prefix|>[{"weather": ', "{"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_a_strict_tool_gets_valid_arguments_wherever_the_model_calls_it(name, parallel):
    tag = constraint(PARSERS[name], STRICT, ANY, parallel=parallel)
    counts = []
    for seed in range(60):
        _, calls = read(name, drawn(tag, seed, BEGINNINGS[name], CLOSERS.get(name, ())), STRICT)
        check([call for call in calls if call[0] == "weather"], STRICT)
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
        counts.append(len(calls))
        if seed >= LEAST_SEEDS and min(counts) == 0 < max(counts):
            break
    assert min(counts) == 0 < max(counts)
    assert parallel or max(counts) == 1


ANSWER = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_an_output_is_valid_calls_or_else_the_object(name, parallel):
    answer = {"type": "json_schema", "json_schema": ANSWER | {"additionalProperties": False}}
    tools = tuple(msgspec.structs.replace(tool, strict=True) for tool in TOOLS)
    tag = calls_or(PARSERS[name], tools, answer, parallel=parallel)
    called, counts, answers = set(), [], 0
    for seed in range(40):
        content, calls = read(name, drawn(tag, seed), tools)
        check(calls, tools)
        assert bool(content) is not bool(calls)
        if content:
            jsonschema.validate(json.loads(content), ANSWER)
            answers += 1
        called |= {tool for tool, _ in calls}
        counts.append(len(calls))
        if seed >= LEAST_SEEDS and called == set(SCHEMAS) and answers:
            break
    assert called == set(SCHEMAS)
    assert answers
    assert allows(tag, '{"warm": true}')
    assert not allows(tag, "It is warm.")
    assert parallel or max(counts) == 1


TEXTS = {
    "mistral": (
        "It is <b>warm</b>, {not} [cold].",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
        '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
        'So: [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]',
    ),
    "deepseek_v3": (
        "It is <b>warm</b>, {not} [cold].",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        '<｜tool▁calls▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁calls▁end｜>',
    ),
    "deepseek_v31": (
        "It is <b>warm</b>, {not} [cold].",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜>weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁calls▁end｜>',
    ),
    "kimi_k2": (
        "It is <b>warm</b>, {not} [cold].",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>weather:1<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    ),
    "step3": (
        "It is <b>warm</b>, {not} [cold].",
        '<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">\n'
        '<steptml:parameter name="city">Rome</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n'
        "<｜tool_calls_end｜>",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">'
        '<steptml:parameter name="city">Rome</steptml:parameter></steptml:invoke><｜tool_call_end｜>',
    ),
    "granite": (
        "It is <b>warm</b>, {not} [cold].",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]',
        '<|tool_call|> [{"name": "weather", "arguments": {"city": "Rome"}}]',
    ),
    "gpt-oss": (
        "<|channel|>final<|message|>It is <b>warm</b>, {not} [cold].",
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        '<|channel|>commentary to=functions.weather<|message|>{"city": "Rome"}',
        "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary to=functions.weather"
        ' <|constrain|>json<|message|>{"city": "Rome"}',
        '<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Rome"}',
    ),
    "hermes": (
        "It is <b>warm</b>, {not} [cold].",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>',
    ),
    "llama3": (
        "It is <b>warm</b>, {not} [cold].",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        ' {"name": "weather", "parameters": {"city": "Rome"}}',
        'So: <|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
        '<<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}',
    ),
    "pythonic": (
        "It is <b>warm</b>, {not} [cold].",
        '[weather(**{"city": "Rome"})]',
        "[weather(city='Rome')]",
        "\n[weather(city='Rome')]",
        "<|python_start|>[weather(city='Rome')]",
    ),
    "qwen3_coder": (
        "It is <b>warm</b>, {not} [cold].",
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=weather><parameter=city>Rome</parameter></function></tool_call>",
        "<tool_call>\n\n<function=weather><parameter=city>Rome</parameter></function></tool_call>",
    ),
    "glm45": (
        "It is <b>warm</b>, {not} [cold].",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
        "<tool_call>\nweather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>",
    ),
    "minimax_m2": (
        "It is <b>warm</b>, {not} [cold].",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rome</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        '<minimax:tool_call><invoke name="weather"><parameter name="city">Rome</parameter></invoke>',
    ),
    "deepseek_v32": (
        "It is <b>warm</b>, {not} [cold].",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Rome'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="false">"Rome"'
        "</｜DSML｜parameter></｜DSML｜invoke>",
    ),
    "seed_oss": (
        "It is <b>warm</b>, {not} [cold].",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Rome</parameter>\n</function>\n</seed:tool_call>",
        "<seed:tool_call><function=weather><parameter=city>Rome</parameter></function></seed:tool_call>",
    ),
    "lfm2": (
        "It is <b>warm</b>, {not} [cold].",
        '<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>',
        '<|tool_call_start|>[weather(**{"city": "Rome"})]<|tool_call_end|>',
    ),
    "olmo3": (
        "It is <b>warm</b>, {not} [cold].",
        '<function_calls>weather(city="Rome")</function_calls>',
        '<function_calls>\nweather(**{"city": "Rome"})\n</function_calls>',
    ),
    "hunyuan": (
        "It is <b>warm</b>, {not} [cold].",
        '<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>',
        '<tool_calls>\n[\n{"name": "weather", "arguments": {"city": "Rome"}}\n]\n</tool_calls>',
    ),
    "cohere_command3": (
        "It is <b>warm</b>, {not} [cold].",
        '<|START_ACTION|>[\n    {"tool_name": "weather", "parameters": {"city": "Rome"}}\n]<|END_ACTION|>',
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}}]<|END_ACTION|>',
    ),
    "gemma4": (
        "It is <b>warm</b>, {not} [cold].",
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>',
        '<|tool_call>call:weather{"city": "Rome"}<tool_call|>',
    ),
    "apertus": (
        "It is <b>warm</b>, {not} [cold].",
        '<|tools_prefix|>[{"weather": {"city": "Rome"}}]<|tools_suffix|>',
        '<|tools_prefix|> [ { "weather" : {"city": "Rome"}}]<|tools_suffix|>',
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_no_way_to_write_a_call_that_the_parser_knows_escapes_strict(name):
    tag = constraint(PARSERS[name], STRICT, ANY, parallel=True)
    free, *calls = TEXTS[name]
    assert allows(tag, free)
    for text in calls:
        assert read(name, text, STRICT)[1], text
        assert not allows(tag, text), text
        fits = text.replace("Rome", "Paris")
        if allows(tag, fits):
            check(read(name, fits, STRICT)[1], STRICT)


@pytest.mark.parametrize("name", WITH_AUTO)
def test_one_call_at_most_without_parallel_calls_and_text_before_it_where_the_format_has_it(name):
    tag = constraint(PARSERS[name], TOOLS, ANY, parallel=False)
    assert allows(tag, "Just text.")
    one = {
        "hermes": 'So:\n<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "ping", "parameters": {}}',
        "pythonic": "[ping(**{})]",
        "qwen3_coder": "So:\n<tool_call>\n<function=ping>\n</function>\n</tool_call>",
        "seed_oss": "So:\n<seed:tool_call>\n<function=ping>\n</function>\n</seed:tool_call>",
        "glm45": "So:\n<tool_call>ping</tool_call>",
        "minimax_m2": 'So:\n<minimax:tool_call>\n<invoke name="ping">\n</invoke>\n</minimax:tool_call>',
        "deepseek_v32": "So:\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="ping">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    }[name]
    assert allows(tag, one)
    more = {"llama3": f"{one}; {one}", "pythonic": "[ping(**{}), ping(**{})]"}.get(name, one + "\n" + one)
    assert len(read(name, more, TOOLS)[1]) == 2
    assert not allows(tag, more)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_constrained_where_any_output_will_do(name):
    assert constraint(PARSERS[name], TOOLS, ANY, parallel=True) is None
    assert constraint(PARSERS[name], TOOLS, ToolChoice("none"), parallel=False) is None
    assert constraint(PARSERS[name], (), ANY, parallel=False) is None


@pytest.mark.parametrize("name", HELD_BY_STRICT)
def test_formats_whose_calls_are_written_in_many_ways_are_held_to_one_only_by_strict(name):
    assert constraint(PARSERS[name], TOOLS, ANY, parallel=False) is None  # the parser ends after the first call
    for tools, choice in ((STRICT, ANY), (TOOLS, REQUIRED)):
        assert constraint(PARSERS[name], tools, choice, parallel=True)["special_tokens"] is True


@pytest.mark.parametrize("choice", [REQUIRED, ToolChoice("required", "bad"), ANY])
@pytest.mark.parametrize("name", NAMES)
def test_a_schema_that_cannot_be_enforced_is_found_under_the_clients_own_name(name, choice):
    bad = Tool(name="bad", parameters={"type": "object", "properties": {"a": {"minLenght": 3}}}, strict=True)
    tools = (*STRICT, bad)
    tag = constraint(PARSERS[name], tools, choice, parallel=True)
    compiler = InlineCompiler()
    waiting = compiler.submit(GrammarSpec("structural_tag", json.dumps(tag)))
    compiler.poll()
    places = schema_fields(tag, tools, choice, "tools[{}].function.parameters")
    found = [field for path, field in places.items() if f"{path}: " in waiting.error.message]
    assert found == ["tools[3].function.parameters"]
    assert "minLenght" in waiting.error.message
