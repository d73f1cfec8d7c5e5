"""Tool calls in the formats that models write: as their makers document them, cut anywhere, broken, and very long."""

import ast
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parts_of_calls import assert_linear, joined
from samples import either

from tureen.errors import StartupError
from tureen.text import tools
from tureen.text.messages import CallArguments, CallStart, Content, Tool
from tureen.text.tools import FORMATS, PARSERS, tool_format

TOOLS = (Tool(name="get_weather"), Tool(name="f"), Tool(name="calendar.add"))
NAMES = [tool.name for tool in TOOLS]
PARIS = {"city": "Paris", "days": [1, 2], "unit": None}
QUOTES = {"text": 'a "quoted" } ] ) \\ </tool_call> [TOOL_CALLS]', "inner": {"x": [{}, True]}}

WELL_FORMED = {
    "hermes: Nous Research": (
        'I look.\n<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        "I look.",
        [("get_weather", {"city": "Paris"})],
    ),
    "hermes: Qwen, two calls": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(QUOTES)}}}\n</tool_call>',
        "",
        [("get_weather", PARIS), ("f", QUOTES)],
    ),
    "hermes: no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", {})]),
    "hermes: arguments as a string": (
        f'<tool_call>{{"name": "f", "arguments": {json.dumps(json.dumps(PARIS))}}}</tool_call>',
        "",
        [("f", PARIS)],
    ),
    "hermes: more keys": (
        '<tool_call>{"id": 7, "name": "f", "arguments": {"a": 1}, "more": {"b": [2]}}</tool_call> Done.',
        " Done.",
        [("f", {"a": 1})],
    ),
    "hermes: text between calls": (
        'One\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\nTwo',
        "One\n\nTwo",
        [("f", {})],
    ),
    "hermes: a line break in a string": (
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        [("f", {"a": "x\ny"})],
    ),
    "llama3: Meta's JSON": (
        f'{{"name": "get_weather", "parameters": {json.dumps(PARIS)}}}',
        "",
        [("get_weather", PARIS)],
    ),
    "llama3: with the tag, two calls": (
        f'<|python_tag|>{{"name": "f", "parameters": {json.dumps(QUOTES)}}}; {{"name": "f", "parameters": {{}}}}',
        "",
        [("f", QUOTES), ("f", {})],
    ),
    "llama3: text and a type": (
        'Yes.\n\n<|python_tag|>{"type": "function", "name": "f", "parameters": {"a": "b"}}',
        "Yes.",
        [("f", {"a": "b"})],
    ),
    "mistral: a list": (
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {json.dumps(PARIS)}}}, '
        f'{{"arguments": {json.dumps(QUOTES)}, "name": "f", "id": "a1B2c3D4e"}}]',
        "",
        [("get_weather", PARIS), ("f", QUOTES)],
    ),
    "mistral: names and arguments": (
        'Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}',
        "Sure.",
        [("get_weather", {"city": "Paris"}), ("f", {})],
    ),
    "mistral: names and arguments, marks left out": (
        f"[TOOL_CALLS]f{json.dumps(QUOTES)}[TOOL_CALLS]calendar.add {{}}",
        "",
        [("f", QUOTES), ("calendar.add", {})],
    ),
    "pythonic: Meta's list": (
        "[get_weather(city='Paris', days=[1, 2], unit=None), f()]",
        "",
        [("get_weather", PARIS), ("f", {})],
    ),
    "pythonic: dotted name, nested values": (
        '[calendar.add(text="it\'s, (5) [o\'clock]", inner={"x": [{}, True]}, size=-1.5e3)]',
        "",
        [("calendar.add", {"text": "it's, (5) [o'clock]", "inner": {"x": [{}, True]}, "size": -1500.0})],
    ),
    "pythonic: Llama 4's marks": ("<|python_start|>[f(a=1)]<|python_end|>", "", [("f", {"a": 1})]),
    "pythonic: an object of JSON": (f"[f(**{json.dumps(PARIS)})]", "", [("f", PARIS)]),
}
"""As the makers' model cards and templates describe them: text, content, calls."""

NO_CALLS = {
    "hermes": (
        "Just text.",
        "",
        " \n",
        "<tool_call>",
        "<tool_call>\n",
        "1 < 2, <tool_cal",
        "<tool_call>weather in Paris?</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call> So.',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>',
        '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "name": {"x": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"arguments": {"a": 1}, "na',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", x}</tool_call>',
        '<tool_call>{"name": "f" "arguments": {}}</tool_call>',
    ),
    "llama3": (
        '{"answer": 42, "name": "f", "parameters": {}}',
        "{}",
        '  {"a',
        'I would call {"name": "f", "parameters": {}}',
        '<|python_tag|>brave_search.call(query="weather")',
        '{"name": "unknown", "parameters": {}}; {"name": "f", "parameters": {}}',
    ),
    "mistral": (
        "[TOOL_CALLS] []",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [1, 2]",
        "[TOOL_CALLS]unknown[ARGS]{}",
        "[TOOL_CALLS]f of x",
        "[TOOL_CALLS]f",
        '[{"name": "f", "arguments": {}}]',
        "[TOOL_CALLS]" + "f" * 300 + "{}",
    ),
    "pythonic": (
        "[1, 2, 3]",
        "[f]",
        '["f(1)"]',
        "[unknown(a=1)]",
        "[f(1)]",
        "[f(a=g())]",
        "[f(a=__import__('os'))]",
        "[f(a=1 + 1)]",
        "[f(a=1, a=2)]",
        "[f(**1)]",
        "[f(a=1",
        "[f(a='x",
        "[f(a=9e999)]",
        f"[f(a={'9' * 5000})]",
        f"[f(a={'[' * 100}{']' * 100})]",
        "<|python_start|>f()",
        "It is [f()]",
    ),
}


def parts_of(name, pieces, **options):
    parser = PARSERS[name].parser(TOOLS, **options)
    return [part for piece in pieces for part in parser.feed(piece)] + parser.close()


def read(name, pieces, **options):
    return joined(parts_of(name, pieces, **options))


def all_samples():
    yield from ((title.split(":")[0], text) for title, (text, *_) in WELL_FORMED.items())
    yield from ((name, text) for name, texts in NO_CALLS.items() for text in texts)


@pytest.mark.parametrize("title", WELL_FORMED)
def test_calls_are_found_as_the_family_writes_them(title):
    text, content, calls = WELL_FORMED[title]
    got_content, got_calls = read(title.split(":")[0], [text])
    assert got_content == content
    assert [(name, json.loads(arguments)) for name, arguments in got_calls] == calls


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in NO_CALLS.items() for text in texts])
def test_what_is_no_call_is_content_to_the_last_character(name, text):
    assert read(name, [text]) == (text, [])


@pytest.mark.sampled
@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(("name", "text"), list(all_samples()))
def test_a_text_reads_the_same_wherever_it_is_cut(name, text, parallel):
    whole = read(name, [text], parallel=parallel)
    assert read(name, text, parallel=parallel) == whole
    step = 1 + len(text) // either(100, 30)
    for first in range(0, len(text) + 1, step):
        assert read(name, [text[:first], text[first:]], parallel=parallel) == whole
        for second in range(first, len(text) + 1, 4 * step):
            assert read(name, [text[:first], text[first:second], text[second:]], parallel=parallel) == whole


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True).filter(str.isidentifier), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def written(name, calls, ascii_only):
    """As the model family would write these calls."""
    texts = [(called, json.dumps(arguments, ensure_ascii=ascii_only)) for called, arguments in calls]
    match name:
        case "hermes":
            blocks = (f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>' for n, a in texts)
            return "\n".join(blocks)
        case "llama3":
            return "; ".join(f'{{"name": "{n}", "parameters": {a}}}' for n, a in texts)
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(f'{{"name": "{n}", "arguments": {a}}}' for n, a in texts) + "]"
        case "pythonic":
            listed = (f"{n}({', '.join(f'{key}={value!r}' for key, value in a.items())})" for n, a in calls)
            return "[" + ", ".join(listed) + "]"


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "pythonic"])
@pytest.mark.sampled
@settings(max_examples=either(100, 25), deadline=None)
@given(calls=CALLS, ascii_only=st.booleans(), data=st.data())
def test_any_calls_come_out_as_they_were_written_in_any_pieces(name, calls, ascii_only, data):
    text = written(name, calls, ascii_only)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, found = read(name, pieces)
    assert content == ""
    assert [(called, json.loads(arguments)) for called, arguments in found] == calls


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "{", "}", "[", "]", "(", ")"),
    *(",", ";", ":", '"', "'", "\\", "\n", " ", "f", "=", "1", "**", "f(a=1)"),
    *('"name": "f"', '"arguments": ', '"parameters": ', '{"name": "f", '),
)


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "pythonic"])
@pytest.mark.sampled
@settings(max_examples=either(300, 75), deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=25), cut=st.integers(0, 80))
def test_any_mixture_reads_the_same_in_any_pieces_and_its_content_is_what_stands_there(name, pieces, cut):
    text = "".join(pieces)
    content, calls = read(name, [text])
    assert read(name, pieces) == read(name, [text[:cut], text[cut:]]) == (content, calls)
    assert calls or content == text
    rest = iter(text)
    assert all(char in rest for char in content), "a subsequence"
    assert all(called in NAMES for called, _ in calls)


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>So.', "So.", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": <b>}}', "<b>}}", [("f", '{"a": ')]),
        ("pythonic", "[f(a=1))", ")", [("f", '{"a": 1}')]),
        ("pythonic", "[f(a=1), unknown()]", ", unknown()]", [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, 3]', ", 3]", [("f", "{}")]),
    ],
)
def test_of_a_call_that_is_cut_or_broken_what_was_read_is_kept(name, text, content, calls):
    assert read(name, [text]) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'Ok <tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "f"}</tool_call> more'),
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}"),
        ("pythonic", "[f(), f()]"),
    ],
)
def test_without_parallel_calls_the_answer_ends_with_its_first_call(name, text):
    content, calls = read(name, [text], parallel=False)
    assert calls == [("f", "{}")]
    assert content == ("Ok" if text.startswith("Ok") else "")
    assert len(read(name, [text])[1]) == 2


def test_names_and_arguments_come_as_soon_as_they_are_certain():
    parser = PARSERS["hermes"].parser(TOOLS)
    assert parser.feed("Look: <tool_") == [Content("Look:")]
    assert parser.feed('call>\n{"name": "f", "argu') == []
    assert parser.feed('ments": {') == [CallStart(0, "f"), CallArguments(0, "{")]
    assert parser.feed('"text": "On') == [CallArguments(0, '"text": "On')]
    assert parser.feed('ce"}') == [CallArguments(0, 'ce"}')]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.close() == []


def test_text_without_a_mark_is_not_held_back():
    for name in ("hermes", "mistral", "llama3", "pythonic"):
        parser = PARSERS[name].parser(TOOLS)
        assert parser.feed("Hello") == [Content("Hello")], name
    assert PARSERS["llama3"].parser(TOOLS).feed('{"answer": "a long text in JSON, ') != []


HOSTILE = {
    "hermes": (
        "<tool_call>",
        "<",
        " ",
        '<tool_call>{"arguments": {',
        '<tool_call>{"name": "f", "arguments": {"a":[',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    ),
    "llama3": ("<|python_tag|>{", '{"name":', " "),
    "mistral": ("[TOOL_CALLS]f", '[TOOL_CALLS][{"name": "f", "arguments": {}},', "[TOOL_CALLS]f{"),
    "pythonic": ("[", "[ ", "[f(a=", "[f(a=1),", "[f(\\"),
}


@pytest.mark.parametrize(("name", "unit"), [(name, unit) for name, units in HOSTILE.items() for unit in units])
def test_work_grows_with_the_text_and_not_with_its_square(name, unit):
    assert_linear(lambda pieces: parts_of(name, pieces), unit)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ('respond in the format {"name": function name, "parameters": dictionary of argument name', "llama3"),
        ("{{ '<|python_tag|>' }}", "llama3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", "hermes"),
    ],
)
def test_a_chat_template_tells_the_format(template, name):
    assert tool_format("auto", template) is PARSERS[name]


def test_the_search_for_formats_names_none_but_the_one_for_templates_that_teach_none():
    names = {name for form in FORMATS for name in form.NAMES}
    source = ast.parse(Path(tools.__file__).read_text(encoding="utf-8"))
    named = {node.value for node in ast.walk(source) if isinstance(node, ast.Constant)}
    assert named & names == {"hermes"}


def test_the_operator_chooses_the_format_by_name_and_hears_of_a_wrong_one():
    assert tool_format("none", "<tool_call>") is None
    assert tool_format("qwen25", "") is PARSERS["hermes"]
    assert {name for one in FORMATS for name in one.NAMES} == set(PARSERS)
    with pytest.raises(StartupError, match=r"--tool-call-parser 'herms'.*hermes"):
        tool_format("herms", "")
