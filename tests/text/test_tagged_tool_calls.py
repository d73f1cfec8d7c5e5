"""Tool calls as the chat templates of Qwen3-Coder, GLM, MiniMax, LFM2 and others write them: cuts, broken calls."""

import json

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_of_calls import assert_linear, joined

from tureen.text.messages import Reasoning, Tool
from tureen.text.tagged_parser import argument_text, types_of
from tureen.text.tools import PARSERS, tool_format

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F", None]},
        "near": {"type": "array", "items": {"type": "string"}},
        "more": {"$ref": "#/$defs/more"},
        "any": {},
    },
    "$defs": {"more": {"type": "object"}},
}
TOOLS = (Tool(name="get_weather", parameters=SCHEMA), Tool(name="f"), Tool(name="calendar.add", parameters=SCHEMA))
OSLO = {"city": "Oslo", "days": 2, "near": ["Moss", '"]}'], "more": {"x": {}}}

TEMPLATES = {
    "qwen3_coder": (
        "{% for c in calls %}<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n"
        "</tool_call>{% if not loop.last %}\n{% endif %}{% endfor %}"
    ),
    "glm45": (
        "{% for c in calls %}\n<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}"
        "</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
        "{% endfor %}"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n{% for c in calls %}<invoke name="{{ c.name }}">\n{% for k, v in c.arguments.items() %}'
        '<parameter name="{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n'
        "{% endfor %}</minimax:tool_call>"
    ),
    "step3": (
        '<｜tool_calls_begin｜>\n{% for c in calls %}<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
        '{{ c.name }}">{% for k, v in c.arguments.items() %}<steptml:parameter name="{{ k }}">'
        "{{ v if v is string else v | tojson }}</steptml:parameter>{% endfor %}</steptml:invoke><｜tool_call_end｜>\n"
        "{% endfor %}<｜tool_calls_end｜>"
    ),
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n{% for c in calls %}<｜DSML｜invoke name="{{ c.name }}">\n'
        '{% for k, v in c.arguments.items() %}<｜DSML｜parameter name="{{ k }}" string="{{ "true" if v is string else '
        '"false" }}">{{ v if v is string else v | tojson }}</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n'
        "{% endfor %}</｜DSML｜function_calls>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
        "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>{% if not loop.last %}\n{% endif %}{% endfor %}"
        "<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
        "{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "granite": (
        '<|tool_call|>[{% for c in calls %}{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]"
    ),
    "gpt-oss": (
        "{% for c in calls %}{% if not loop.first %}<|start|>assistant{% endif %}<|channel|>commentary "
        "to=functions.{{ c.name }} <|constrain|>json<|message|>{{ c.arguments | tojson }}<|call|>{% endfor %}"
    ),
    "seed_oss": (
        "{% for c in calls %}\n<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
        "<parameter={{ k }}>{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</function>\n"
        "</seed:tool_call>{% endfor %}"
    ),
    "lfm2": (
        "<|tool_call_start|>[{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}="
        "{{ v | python }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}"
        "{% endfor %}]<|tool_call_end|>"
    ),
    "olmo3": (
        "<function_calls>{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}="
        "{{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}\n{% endif %}"
        "{% endfor %}</function_calls>"
    ),
    "cohere_command3": (
        '<|START_ACTION|>[{% for c in calls %}{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", '
        '"parameters": {{ c.arguments | tojson }}}{% if not loop.last %},{% endif %}\n{% endfor %}]<|END_ACTION|>'
    ),
    "hunyuan": (
        '<tool_calls>[{% for c in calls %}{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]</tool_calls>"
    ),
    "gemma4": (
        '{% macro value(v) %}{% if v is string %}<|"|>{{ v }}<|"|>{% elif v is mapping %}'
        "{ {%- for k, w in v.items() -%}"
        "{{ k if k.isidentifier() else k | tojson }}:{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor -%} }"
        "{% elif v is iterable %}[{% for w in v %}{{ value(w) }}{{ '' if loop.last else ',' }}{% endfor %}]"
        "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
        "{% for c in calls %}<|tool_call>call:{{ c.name }}{{ value(c.arguments) }}<tool_call|>{% endfor %}"
    ),
    "apertus": (
        '<|tools_prefix|>[{% for c in calls %}{"{{ c.name }}": {{ c.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]<|tools_suffix|>"
    ),
}
"""How the chat templates of these models write the calls of an assistant's message, shortened."""

ENVIRONMENT = jinja2.Environment()
ENVIRONMENT.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
ENVIRONMENT.filters["python"] = repr


def written(name, calls):
    named = [{"name": called, "arguments": arguments} for called, arguments in calls]
    return ENVIRONMENT.from_string(TEMPLATES[name]).render(calls=named)


def read(name, pieces, **options):
    """Content with the reasoning in braces, and the calls."""
    parser = PARSERS[name].parser(TOOLS, **options)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.close()
    thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content, calls = joined([part for part in parts if not isinstance(part, Reasoning)])
    return content, calls, thoughts


def objects(calls):
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_the_template_writes_comes_out_as_the_same_calls(name):
    calls = [("get_weather", OSLO), ("f", {}), ("calendar.add", {"any": [1, {"a": None}], "unit": None})]
    text = "Let me look." + written(name, calls)
    content, found, thoughts = read(name, [text])
    assert (content, thoughts) == ("Let me look.", "")
    assert objects(found) == calls
    assert read(name, text) == (content, found, thoughts)


def allowed(marks):
    """Texts without the marks of any format, and no digits alone."""
    return st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="<>\r"), max_size=8).filter(
        lambda text: not any(mark in text for mark in marks)
    )


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "city": allowed("\n").map(lambda text: text.strip("\n")),
        "days": st.integers(),
        "near": st.lists(allowed(""), max_size=3),
        "more": st.dictionaries(allowed(""), st.integers() | st.none() | allowed(""), max_size=2),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "calendar.add"]), VALUES), min_size=1, max_size=3)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, data=st.data())
def test_any_calls_come_out_as_they_were_written_in_any_pieces(name, calls, data):
    text = written(name, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, found, _ = read(name, pieces)
    assert content == ""
    assert objects(found) == calls
    assert read(name, text) == (content, found, "")


SAMPLES = {
    "qwen3_coder: no line breaks": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter><parameter=days>3</parameter></function>"
        "</tool_call> Done.",
        " Done.",
        [("get_weather", '{"city": "Oslo", "days": 3}')],
    ),
    "qwen3_coder: a string that looks like a number, several lines": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n\n x < y\n</parameter>\n</function>\n</tool_call>",
        "",
        [("get_weather", '{"city": "12\\n\\n x < y"}')],
    ),
    "qwen3_coder: Python's words": (
        "qwen3_coder",
        "<tool_call><function=calendar.add><parameter=near>['a', 'b']</parameter><parameter=any>True</parameter>"
        "</function></tool_call>",
        "",
        [("calendar.add", '{"near": ["a", "b"], "any": "True"}')],
    ),
    "qwen3_coder: cut in a value": (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        "",
        [("get_weather", '{"city": "Os')],
    ),
    "glm45: on one line": (
        "glm45",
        "Sure<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        "Sure",
        [("get_weather", '{"days": 3}')],
    ),
    "glm45: broken behind an argument": (
        "glm45",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>3</arg_value> and so on",
        "and so on",
        [("get_weather", '{"days": 3}')],
    ),
    "qwen3_coder: cut in the end of a value": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Oslo</para",
        "",
        [("get_weather", '{"city": "Oslo</para')],
    ),
    "qwen3_coder: without the end of the function": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=city>Oslo</parameter></tool_call> Done.",
        " Done.",
        [("get_weather", '{"city": "Oslo"}')],
    ),
    "minimax_m2: two blocks": (
        "minimax_m2",
        '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>\nand\n'
        '<minimax:tool_call><invoke name="f"><parameter name="x">null</parameter></invoke></minimax:tool_call>',
        "\nand",
        [("f", "{}"), ("f", '{"x": null}')],
    ),
    "deepseek_v32: a string that says so": (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="x" string="true">'
        '7</｜DSML｜parameter><｜DSML｜parameter name="y" string="false">7</｜DSML｜parameter></｜DSML｜invoke>'
        "</｜DSML｜function_calls>",
        "",
        [("f", '{"x": "7", "y": 7}')],
    ),
    "lfm2: text around the calls, and no space between them": (
        "lfm2",
        "Sure. <|tool_call_start|>[f(), f(a='<|tool_call_end|>',b=[1, None])]<|tool_call_end|> Done.",
        "Sure.  Done.",
        [("f", "{}"), ("f", '{"a": "<|tool_call_end|>", "b": [1, null]}')],
    ),
    "lfm2: an object of arguments, cut before the end of the list": (
        "lfm2",
        '<|tool_call_start|>[f(**{"a": 1})',
        "",
        [("f", '{"a": 1}')],
    ),
    "olmo3: lines": (
        "olmo3",
        '<function_calls>\nf(a="x")\nf(b=True)\n</function_calls>\nDone.',
        "\nDone.",
        [("f", '{"a": "x"}'), ("f", '{"b": true}')],
    ),
    "hunyuan: lines": (
        "hunyuan",
        'I look.\n<tool_calls>\n[\n  {"name": "f", "arguments": {"a": 1}}\n]\n</tool_calls>',
        "I look.",
        [("f", '{"a": 1}')],
    ),
    "cohere_command3: lines, and a name after its parameters": (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '    {"parameters": {"b": [2]}, "tool_name": "f"}\n]<|END_ACTION|>',
        "",
        [("f", '{"a": 1}'), ("f", '{"b": [2]}')],
    ),
    "gemma4: keys and texts as in JSON, and quotes in texts": (
        "gemma4",
        '<|tool_call>call:f{"a": "x\\"}", b:<|"|>say "hi" } \\<|"|>, c: [1.5,{d:None}]}<tool_call|>\n'
        "<|tool_call>call:f{}<tool_call|>Done.",
        "\nDone.",
        [("f", '{"a": "x\\"}", "b": "say \\"hi\\" } \\\\", "c": [1.5, {"d": null}]}'), ("f", "{}")],
    ),
    "gemma4: words without quotes, after a call that breaks": (
        "gemma4",
        "<|tool_call>call:f{a:{b:1}<tool_call|><|tool_call>call:f{a:celsius,b:NaN}<tool_call|>",
        "<|tool_call>call:f{a:{b:1}<tool_call|>",
        [("f", '{"a": "celsius", "b": "NaN"}')],
    ),
    "apertus: spaces": (
        "apertus",
        '<|tools_prefix|> [ { "f" : {"a": {"b": "}"}} } , {"f": {}} ] <|tools_suffix|>',
        "",
        [("f", '{"a": {"b": "}"}}'), ("f", "{}")],
    ),
    "granite: with a space": (
        "granite",
        '<|tool_call|> [{"name": "f", "arguments": {"a": 1}}]',
        "",
        [("f", '{"a": 1}')],
    ),
}


@pytest.mark.parametrize("title", SAMPLES)
def test_other_ways_to_write_a_call_are_read_wherever_they_are_cut(title):
    name, text, content, calls = SAMPLES[title]
    assert read(name, [text]) == (content, calls, "")
    assert read(name, text) == (content, calls, "")
    for at in range(len(text)):
        assert read(name, [text[:at], text[at:]]) == (content, calls, "")


HARMONY = (
    "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant<|channel|>commentary<|message|>"
    'I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>'
)


def test_channels_of_harmony_are_reasoning_text_and_calls():
    assert read("gpt-oss", [HARMONY]) == ("I look.", [("f", '{"a": 1}')], "The user asks.")
    assert read("gpt-oss", HARMONY) == read("gpt-oss", [HARMONY])
    final = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
    assert read("gpt-oss", final) == ("It is 7.", [], "Hm.")
    before = "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>"
    assert read("gpt-oss", before) == ("", [("f", "{}")], "")


NO_CALLS = {
    "qwen3_coder": (
        "<tool_call>\n<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "<function=f></function>",
        "a < b <tool_call",
        "<tool_call>\n<function=f",
        "<tool_call><function=" + "f" * 700,
    ),
    "glm45": ("<tool_call>unknown<arg_key>a</arg_key>", "<tool_call>f of x</tool_call>", "<tool_call>f", "<arg_key>"),
    "minimax_m2": (
        "<minimax:tool_call>",
        '<minimax:tool_call><invoke name="g"></invoke>',
        '<invoke name="f"></invoke>',
    ),
    "step3": (
        "<｜tool_calls_begin｜>",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="g"></steptml:invoke>',
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">',
    ),
    "deepseek_v32": ('<｜DSML｜function_calls><invoke name="f">', "<｜DSML｜function_calls>\n", "｜DSML｜"),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.g:0<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}",
    ),
    "granite": ("<|tool_call|>", "<|tool_call|>[1]", '[{"name": "f", "arguments": {}}]'),
    "gpt-oss": ("Just text.", "<|channel|>", "<|channel|>" + "x" * 500),
    "seed_oss": (
        "<tool_call><function=f></function></tool_call>",
        "<seed:tool_call>",
        "<seed:tool_call>\n<function=g>",
    ),
    "lfm2": ("[f()]", "<|tool_call_start|>", "<|tool_call_start|>[g()]", "<|tool_call_start|>[f(x)]", "<|tool_call_"),
    "olmo3": ("f()", "<function_calls>", "<function_calls>g()</function_calls>", "<function_calls>\nf(open('x'))"),
    "cohere_command3": (
        "<|START_ACTION|>",
        '<|START_ACTION|>[{"tool_name": "g", "parameters": {}}]',
        '<|START_ACTION|>[{"name": "f", "parameters": {}}]<|END_ACTION|>',
    ),
    "hunyuan": ("<tool_calls>", '<tool_calls>[{"name": "g", "arguments": {}}]', "<tool_calls>[]</tool_calls>"),
    "gemma4": (
        "call:f{}",
        "<|tool_call>",
        "<|tool_call>call:g{}<tool_call|>",
        "<|tool_call>call:f{a:}<tool_call|>",
        '<|tool_call>call:f{a:<|"|>x',
        "<|tool_call>call:f{a:[1}]<tool_call|>",
        '<|tool_call>call:f{a:1]<tool_call|> and "more"',
        '<|tool_call>call:f{size:5" wide}<tool_call|> The answer',
    ),
    "apertus": ('<|tools_prefix|>[{"g": {}}]', '<|tools_prefix|>[{"f": 1}]', '<|tools_prefix|>{"f"', '[{"f": {}}]'),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content_to_the_last_character(name, text):
    assert read(name, [text]) == (text, [], "")
    assert read(name, text) == (text, [], "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_parallel_calls_the_answer_ends_with_its_first_call(name):
    text = written(name, [("get_weather", OSLO), ("f", {})])
    content, found, _ = read(name, text, parallel=False)
    assert content == ""
    assert objects(found) == [("get_weather", OSLO)]


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 2.5, True]}, {"string", "integer", "number", "boolean"}),
        ({"const": None}, {"null"}),
        ({"type": "number", "enum": [1, 2]}, {"number"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({"$ref": "#/$defs/a~1b"}, {"array"}),
        ({"$ref": "#/properties/x"}, {"array", "object", "string", "number", "integer", "boolean", "null"}),
        ({"type": {"no": 1}}, set()),
        (True, {"array", "object", "string", "number", "integer", "boolean", "null"}),
    ],
)
def test_the_types_of_an_argument_are_those_of_its_schema(schema, types):
    assert types_of({"properties": {"x": schema}, "$defs": {"a/b": {"type": "array"}}}, "x") == types


TEXT = {"properties": {"x": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/text", "$defs": {"text": TEXT}},
        {"allOf": [{"required": ["x"]}, TEXT]},
        {"oneOf": [TEXT, {**TEXT, "required": ["x"]}]},
        {"patternProperties": {"^x$": {"type": "string"}}, "additionalProperties": False},
    ],
)
def test_an_argument_has_the_types_that_the_parts_of_its_tool_s_schema_allow(schema):
    assert types_of(schema, "x") == {"string"}


def test_looking_for_types_ends_however_often_a_long_enumeration_is_named():
    class Members(list):
        num_looked_at = 0

        def __iter__(self):
            for item in super().__iter__():
                Members.num_looked_at += 1
                yield item

    many = Members(["a"] * 1_000)
    types_of({"properties": {"x": {"anyOf": [{"enum": many}] * 90}}}, "x")
    assert Members.num_looked_at <= 2_000


def test_a_broken_call_is_the_only_one_without_parallel_calls():
    broken = "<tool_call><function=f><parameter=x>1</parameter>so</tool_call>"
    whole = "<tool_call><function=f></function></tool_call>"
    _, calls, _ = read("qwen3_coder", [broken + whole], parallel=False)
    assert calls == [("f", '{"x": 1}')]


@pytest.mark.parametrize(
    ("text", "types", "read_as"),
    [
        ("12", {"string"}, '"12"'),
        ("12", {"integer", "string"}, "12"),
        ("1.5", {"integer", "string"}, '"1.5"'),
        ("5.0", {"integer"}, "5.0"),
        ("12", {"number"}, "12"),
        ("None", {"null"}, "null"),
        ("{'a': (1, 2)}", {"object"}, '{"a": [1, 2]}'),
        ("NaN", {"number"}, '"NaN"'),
        ("x", {"integer"}, '"x"'),
        ("[" * 100_000, {"array"}, json.dumps("[" * 100_000)),
        ("9" * 5_000, {"integer"}, json.dumps("9" * 5_000)),
    ],
)
def test_an_argument_is_json_where_it_may_be_no_string(text, types, read_as):
    assert argument_text(text, frozenset(types)) == read_as


HOSTILE = {
    "qwen3_coder": (
        "<tool_call>",
        "<tool_call><function=f><parameter=a>x",
        "<tool_call><function=f><parameter=a></parameter>",
        "<tool_call><function=f></function></tool_call>",
        "<",
    ),
    "glm45": ("<tool_call>f<arg_key>", "<tool_call>f</tool_call>", "<tool_call>f "),
    "minimax_m2": ('<minimax:tool_call><invoke name="f"></invoke>', "<minimax:"),
    "kimi_k2": ("<|tool_calls_section_begin|>f{", "<|tool_calls_section_begin|>f:0{}<|tool_call_end|>", "<|tool_call"),
    "step3": (
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f"></steptml:invoke>',
        "<｜tool_calls",
    ),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>f{", "<｜tool▁calls▁begin｜>f{}<｜tool▁call▁end｜>", "<｜tool▁call"),
    "gpt-oss": (
        "<|channel|>",
        "<|channel|>analysis<|message|>",
        "<|channel|>to=functions.f<|message|>{}",
        "<|",
        "<|end|>",
    ),
    "granite": ("<|tool_call|>[", '<|tool_call|>[{"name": "f", "arguments": {}},'),
    "lfm2": ("<|tool_call_start|>[", "<|tool_call_start|>[f()]<|tool_call_end|>", "<|tool_call_start|>[f(a='"),
    "olmo3": ("<function_calls>", "<function_calls>f()\n", "<function_calls>f(a=["),
    "gemma4": ("<|tool_call>call:f{", "<|tool_call>call:f{}<tool_call|>", '<|tool_call>call:f{a:<|"|>', '<|"', "[{"),
    "apertus": ('<|tools_prefix|>[{"f": {}}', '<|tools_prefix|>[{"f"', "<|tools_prefix|>"),
}


@pytest.mark.parametrize(("name", "unit"), [(name, unit) for name, units in HOSTILE.items() for unit in units])
def test_work_grows_with_the_text_and_not_with_its_square(name, unit):
    assert_linear(lambda pieces: read(name, pieces), unit)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (r"{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}", "qwen3_coder"),
        (r"{{ '<arg_key>' + k + '</arg_key>' }} <tool_call>", "glm45"),
        (r"{{ '<minimax:tool_call>' }}", "minimax_m2"),
        ("{{ '<｜tool_calls_begin｜>' }}{{ '<steptml:invoke name=' }}", "step3"),
        ("{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] }}", "deepseek_v3"),
        ("{{ '<|tool_calls_section_begin|>' }}{{ '<|tool_call_begin|>' }}", "kimi_k2"),
        ("{{ '<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' }}", "deepseek_v31"),
        ("{{ '<｜DSML｜function_calls>' }}", "deepseek_v32"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ('{{- "<|start|>assistant<|channel|>commentary" }}', "gpt-oss"),
        (r"{{ '\n<seed:tool_call>\n<function=' + tool_call.name + '>' }}", "seed_oss"),
        ('{{- "<|tool_call_start|>[" + calls + "]<|tool_call_end|>" -}}', "lfm2"),
        ("{{ '<function_calls>' }}", "olmo3"),
        ("{{ '<tool_calls>[' }}", "hunyuan"),
        ("{{ '<|START_ACTION|>[' }}", "cohere_command3"),
        ("{{ '<|tools_prefix|>[' }}", "apertus"),
        ("{{- '<|tool_call>call:' + function['name'] + '{' -}}", "gemma4"),
    ],
)
def test_a_chat_template_tells_the_format(template, name):
    assert tool_format("auto", template) is PARSERS[name]


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (("qwen3_coder", "qwen3_xml", "mimo", "step3p5"), "qwen3_coder"),
        (("glm45", "glm47"), "glm45"),
        (("llama4", "llama4_pythonic"), "pythonic"),
        (("deepseek_v3", "deepseekv3"), "deepseek_v3"),
        (("deepseek_v31", "deepseekv31"), "deepseek_v31"),
        (("deepseek_v32", "deepseekv32"), "deepseek_v32"),
        (("minimax_m2", "minimax-m2"), "minimax_m2"),
        (("gpt-oss", "openai"), "gpt-oss"),
        (("granite4",), "hermes"),
    ],
)
def test_formats_have_the_names_of_sglang_and_vllm(names, form):
    assert {PARSERS[name] for name in names} == {PARSERS[form]}
