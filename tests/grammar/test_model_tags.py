"""The tags that XGrammar's own builders make for models: compiled here, and judged by XGrammar's own matcher."""

import functools
import json
import random

import numpy as np
import pytest
from other_matchers import BYTES, compiled_tag, xgrammar_takes
from samples import either
from xgrammar.builtin_structural_tag import get_model_structural_tag

from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar, language_of
from tureen.kernels.cpu import native
from tureen.text.messages import Tool, ToolChoice
from tureen.text.tools import PARSERS, constraint

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "near": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
    },
    "required": ["city", "days"],
}
LIGHT = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "light", "parameters": LIGHT}},
]
MODELS = [
    "llama",
    "kimi",
    "kimi_k3",
    "deepseek_r1",
    "deepseek_v3_1",
    "qwen_3_coder",
    "qwen_3_5",
    "mimo",
    "qwen_3",
    "harmony",
    "deepseek_v3_2",
    "minimax",
    "minimax_m3",
    "glm_4_7",
    "deepseek_v4",
    "deepseek_v4_1",
    "cohere",
    "exaone",
]
CHOICES = ("auto", "required", {"type": "function", "function": {"name": "weather"}})
MAX_BYTES = 300


@functools.cache
def backend():
    vocabulary = Vocabulary(tokens=tuple(BYTES), eos_token_ids=(256,), size=257)
    return LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())


@functools.cache
def compiled(tag):
    return compile_grammar(GrammarSpec("structural_tag", tag), backend())


def takes(tag, text):
    grammar = compiled(tag).start()
    return all(map(grammar.accept, text.encode())) and grammar.is_accepting


def drawn(tag, seed, start=""):
    """An output of random printable bytes that the constraint allows; marks are preferred, so that it ends."""
    source = random.Random(seed)
    grammar = compiled(tag).start()
    text = list(start.encode())
    assert all(map(grammar.accept, text)), start
    mask = np.zeros(9, dtype=np.uint32)
    while not grammar.is_done:
        if forced := grammar.forced():
            assert all(map(grammar.accept, forced))
            text += forced
            continue
        grammar.fill_mask(mask)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        if 256 in allowed and (source.random() < 0.3 or len(text) > MAX_BYTES):
            break
        plain = [byte for byte in allowed if 32 <= byte < 127 or byte == 10] or allowed
        marks = [byte for byte in plain if byte in b'<]"}|/>'] if source.random() < 0.8 else []
        token_id = source.choice(marks or plain)
        assert grammar.accept(token_id)
        text.append(token_id)
        if len(text) > 4 * MAX_BYTES:
            return None
    return bytes(text).decode()


def built(model, choice, reasoning):
    return json.dumps(get_model_structural_tag(model, TOOLS, choice, reasoning).model_dump())


REASONING = ("enabled", "disabled", "auto")
COMBINATIONS = [(model, choice, reasoning) for model in MODELS for choice in range(3) for reasoning in REASONING]
PAIRS = [(model, at, REASONING[(place + at) % 3]) for place, model in enumerate(MODELS) for at in range(3)]
"""Each model with each choice, and with each kind of reasoning."""


@pytest.mark.sampled
@pytest.mark.parametrize(("model", "choice", "reasoning"), either(COMBINATIONS, PAIRS))
def test_what_is_drawn_under_a_builder_s_tag_is_what_xgrammar_takes(model, choice, reasoning):
    """XGrammar accepts each drawn text, and each broken one that our grammar accepts."""
    tag = built(model, CHOICES[choice], reasoning)
    texts = [text for seed in range(either(3, 2)) if (text := drawn(tag, seed)) is not None]
    for text in texts:
        assert xgrammar_takes(compiled_tag(tag), text), text
    source = random.Random(0)
    for text in texts:
        for _ in range(10):
            at = source.randrange(len(text) + 1)
            broken = text[:at] + source.choice(["", "<", '"', "x", "\n"]) + text[at + source.randrange(2) :]
            assert xgrammar_takes(compiled_tag(tag), broken) or not takes(tag, broken), broken


CALLS = {
    "llama": '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_r1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Oslo", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v3_1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo", "days": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "qwen_3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>",
    "mimo": "<tool_call><function=weather><parameter=city>Oslo</parameter><parameter=days>2</parameter></function>"
    "</tool_call>",
    "qwen_3": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>',
    "deepseek_v3_2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Oslo'
    "]<]minimax[>[</city>]<]minimax[>[<days>2]<]minimax[>[</days>]<]minimax[>[<near>]<]minimax[>[<item>Moss"
    "]<]minimax[>[</item>]<]minimax[>[</near>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "glm_4_7": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
    "<arg_value>2</arg_value></tool_call>",
    "cohere": '<cofl:tool_calls><cofl:tool_call id="0" name="weather"><cofl:value name="city" type="raw">Oslo'
    '</cofl:value><cofl:value name="days" type="json">2</cofl:value><cofl:value name="near" type="list">'
    '<cofl:value type="raw">Moss</cofl:value></cofl:value></cofl:tool_call></cofl:tool_calls>',
    "exaone": '<tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}</tool_call>',
}


@pytest.mark.parametrize("model", CALLS)
def test_a_call_as_the_model_writes_it_is_taken_and_a_wrong_one_is_not(model):
    tag = built(model, "auto", "disabled")
    elements = json.loads(tag)["format"].get("elements", [])
    before = "".join(element.get("value", "") for element in elements)  # what a prompt leaves to the model
    call = before + CALLS[model]
    assert takes(tag, call)
    assert xgrammar_takes(compiled_tag(tag), call)
    for old, new in (("weather", "wether"), ("days", "dais"), ("2", "12"), ("2", "two")):
        wrong = call.replace(old, new)
        assert wrong != call
        assert not takes(tag, wrong), wrong
        assert not xgrammar_takes(compiled_tag(tag), wrong), wrong


STYLES = {
    "qwen_xml": ("<parameter={}>", "</parameter>"),
    "minimax_xml": ('<parameter name="{}">', "</parameter>"),
    "glm_xml": ("<arg_key>{}</arg_key><arg_value>", "</arg_value>"),
}


def styled(style, schema, **options):
    content = {"type": "json_schema", "style": style, "json_schema": schema, **options}
    return json.dumps(
        {"type": "structural_tag", "format": {"type": "tag", "begin": "[", "content": content, "end": "]"}}
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "string", "pattern": "^[a-z]{2}$"}, ["ab"], ["abc", "AB", '"ab"']),
        ({"type": "string"}, ["a < b", '"x"', "", "{"], []),
        ({"enum": ["a b", 1, True]}, ["a b", "1", "true"], ["2", "false", '"a b"']),
        ({"type": ["integer", "null"]}, ["12", "null"], ["1.5", "x"]),
        ({"type": ["integer", "string"]}, ["12", "x", "12th"], ["{}", '"12"', "1.5"]),
        ({"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}, ['{"x": "y"}'], ["{}", "x"]),
        ({"type": "array", "items": {"type": "string"}}, ["[]", '["a"]'], ["[1]", "a", '["</parameter></arg_value>"]']),
    ],
)
def test_a_property_in_tags_is_raw_text_or_json_as_its_schema_says(style, schema, taken, refused):
    begin, end = STYLES[style]
    tag = styled(style, {"type": "object", "properties": {"a": schema}, "required": ["a"]})
    for text in taken:
        written = f"[{begin.format('a')}{text}{end}]"
        assert takes(tag, written), written
        assert xgrammar_takes(compiled_tag(tag), written), written
    for text in refused:
        assert not takes(tag, f"[{begin.format('a')}{text}{end}]"), text


def test_named_properties_keep_their_order_and_free_ones_have_names():
    schema = {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}
    tag = styled("glm_xml", schema)
    one, other = (f"<arg_key>{key}</arg_key><arg_value>1</arg_value>" for key in "ab")
    assert [text for text in (other, one + other, one + "\n" + other, one, other + one) if takes(tag, f"[{text}]")] == [
        other,
        one + other,
        one + "\n" + other,
    ]
    free = styled("qwen_xml", {"type": "object", "additionalProperties": {"type": "integer"}})
    for text, is_taken in (("<parameter=x_1>7</parameter>", True), ("", True), ("<parameter=x y>7</parameter>", False)):
        assert takes(free, f"[{text}]") is is_taken
        assert xgrammar_takes(compiled_tag(free), f"[{text}]") is is_taken


def test_excluded_texts_stand_in_no_string():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    for style, form in (("json", '{{"a": "{}"}}'), ("qwen_xml", "<parameter=a>{}</parameter>")):
        tag = styled(style, schema, excludes=["<|sep|>", "xx"])
        for text, is_taken in (("x", True), ("<|sep", True), ("<|sep|>", False), ("axxb", False)):
            assert takes(tag, f"[{form.format(text)}]") is is_taken
            assert xgrammar_takes(compiled_tag(tag), f"[{form.format(text)}]") is is_taken


def whole(layout):
    return json.dumps({"type": "structural_tag", "format": layout})


def const(text):
    return {"type": "const_string", "value": text}


@pytest.mark.parametrize("loop", [True, False])
def test_dispatch_is_what_xgrammar_takes(loop):
    rules = [["<a>", const("1")], ["<b>", {"type": "regex", "pattern": "[0-9]+;"}]]
    tag = whole({"type": "dispatch", "rules": rules, "loop": loop, "excludes": ["no"]})
    pieces = ["", "x", "<a>1", "<a>2", "<b>12;", "<b>", "no", "n"]
    source = random.Random(5)
    texts = ["".join(source.choice(pieces) for _ in range(source.randrange(5))) for _ in range(200)]
    assert len(set(texts)) > 50
    for text in texts:
        assert takes(tag, text) == xgrammar_takes(compiled_tag(tag), text), text


@pytest.mark.parametrize(
    ("by_token", "by_text"),
    [
        ({"type": "token", "token": "<x>"}, const("<x>")),
        ({"type": "any_tokens", "exclude_tokens": ["<x>"]}, {"type": "any_text", "excludes": ["<x>"]}),
        (
            {"type": "token_triggered_tags", "trigger_tokens": ["<x>"], "exclude_tokens": ["<y>"], "tags": [
                {"type": "tag", "begin": {"type": "token", "token": "<x>"}, "content": const("1"),
                 "end": {"type": "token", "token": "</x>"}}]},
            {"type": "triggered_tags", "triggers": ["<x>"], "excludes": ["<y>"], "tags": [
                {"type": "tag", "begin": "<x>", "content": const("1"), "end": "</x>"}]},
        ),
        (
            {"type": "token_dispatch", "rules": [["<x>", const("1")]], "loop": False, "exclude_tokens": ["<y>"]},
            {"type": "dispatch", "rules": [["<x>", const("1")]], "loop": False, "excludes": ["<y>"]},
        ),
        (
            {"type": "qwen_xml_parameter", "json_schema": LIGHT},
            {"type": "json_schema", "json_schema": LIGHT, "style": "qwen_xml"},
        ),
    ],
)  # fmt: skip
def test_a_token_is_its_text(by_token, by_text):
    assert language_of(GrammarSpec("structural_tag", whole(by_token))) == language_of(
        GrammarSpec("structural_tag", whole(by_text))
    )


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"type": "token", "token": 7}, r"format\.token '?7'? is a number; write the token's text"),
        ({"type": "token", "token": ""}, "is empty"),
        (
            {"type": "or", "elements": [{"type": "exclude_token"}, {"type": "const_string", "value": "ab"}]},
            r"elements\[0\].exclude_token cannot be counted here",
        ),
        ({"type": "any_tokens", "max_tokens": "5"}, "max_tokens must be an integer"),
        ({"type": "dispatch", "rules": []}, "rules must be a list that is not empty"),
        ({"type": "dispatch", "rules": [["<a>"]]}, r"rules\[0\] must be a pair"),
        ({"type": "dispatch", "rules": [["<a>", const("1")], ["<a>", const("2")]]}, "is a duplicate"),
        ({"type": "token_dispatch", "rules": [[7, const("1")]]}, r"rules\[0\]\[0\] '?7'? is a number"),
        ({"type": "json_schema", "json_schema": {}, "style": "yaml"}, "style must be json or one of qwen_xml"),
        ({"type": "json_schema", "json_schema": {"type": "string"}, "style": "glm_xml"}, "it must allow an object"),
        (
            {"type": "json_schema", "json_schema": {"type": "object", "minProperties": 2}, "style": "glm_xml"},
            "cannot be enforced in tags",
        ),
        (
            {"type": "json_schema", "json_schema": {"properties": {"a>b": {}}}, "style": "qwen_xml"},
            "'a>b' cannot be written in a tag",
        ),
    ],
)
def test_what_tags_cannot_say_is_refused_by_name(layout, message):
    with pytest.raises(GrammarError, match=message):
        language_of(GrammarSpec("structural_tag", whole(layout)))


STRICT = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"], "additionalProperties": False}
TOOL_SETS = {
    "a strict one beside one without a schema": (
        Tool(name="a", parameters=STRICT, strict=True),
        Tool(name="b", parameters={"type": "object"}),
    ),
    "arguments of any kind": (
        Tool(name="a", parameters={"type": "object", "properties": {"x": {}, "o": {"type": "object"}}}),
        Tool(name="b", parameters={"type": "object", "properties": {}, "title": "B"}, strict=True),
    ),
}
FREE_OBJECT = {"type": "json_schema", "json_schema": {"type": "object"}}
FREE_TAG = {"type": "tag", "begin": "<f>", "content": FREE_OBJECT, "end": "</f>"}
ENDLESS = {
    "triggered tags": {"type": "triggered_tags", "triggers": ["<f"], "tags": [FREE_TAG]},
    "tags with a separator": {"type": "tags_with_separator", "tags": [FREE_TAG], "separator": "\n"},
    "dispatch": {"type": "dispatch", "rules": [["<f>", FREE_OBJECT]]},
}


def goes_on(spec, seed, most=400):
    """Draws an output that avoids its end: prose, numbers and brackets where they are allowed."""
    source, grammar = random.Random(seed), compile_grammar(spec, backend()).start()
    mask = np.zeros(9, dtype=np.uint32)
    for _ in range(most):
        grammar.fill_mask(mask)
        tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        tokens = tokens[tokens < 256]
        if not len(tokens):
            assert grammar.is_done
            return
        liked = [token for token in tokens if chr(token) in 'ab 1{["']
        assert grammar.accept(int(source.choice(liked or tokens)))


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("tools", TOOL_SETS)
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_prose_and_free_arguments_beside_calls_go_on_as_long_as_they_like(name, tools, mode):
    # llguidance, whose masks these were, gave up after 10 to 200 tokens of such answers
    tag = constraint(PARSERS[name], TOOL_SETS[tools], ToolChoice(mode), parallel=True)
    for seed in range(2):
        goes_on(GrammarSpec("structural_tag", json.dumps(tag)), f"{name} {seed}")


@pytest.mark.parametrize("name", ENDLESS)
def test_free_objects_in_tags_go_on_as_long_as_they_like(name):
    tag = {"type": "structural_tag", "format": ENDLESS[name]}
    for seed in range(4):
        goes_on(GrammarSpec("structural_tag", json.dumps(tag)), f"{name} {seed}")


def test_text_that_can_be_cut_up_in_many_ways_goes_on_as_long_as_it_likes():
    rules = 'root ::= (text | obj)+\ntext ::= [^{}]+\nobj ::= "{" (obj | text)* "}"'
    for seed in range(4):
        goes_on(GrammarSpec("ebnf", rules), seed)
