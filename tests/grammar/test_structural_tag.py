"""Structural tags: every string up to a length against a plain scanner, terminals, every refusal."""

import json
import re
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import samples
from matching import _ends, _worked_out, matches

from tureen.grammar.expression import GrammarError, Terminal
from tureen.grammar.regular import automaton
from tureen.grammar.rules import calls, parts
from tureen.grammar.structural_tag import structural_tag

ANY_TEXT = {"type": "any_text"}
INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


def const(value):
    return {"type": "const_string", "value": value}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def either(*elements):
    return {"type": "or", "elements": list(elements)}


def triggered(triggers, tags, **options):
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **options}


def separated(separator, tags, **options):
    return {"type": "tags_with_separator", "separator": separator, "tags": tags, **options}


def language_of(layout):
    return structural_tag(json.dumps({"type": "structural_tag", "format": layout}))


def strings(alphabet, most):
    return ("".join(letters) for length in range(most + 1) for letters in product(alphabet, repeat=length))


def assert_same(layout, oracle, alphabet, most):
    """Also when a lexer takes of every terminal as much as it can."""
    language = language_of(layout)
    texts = list(strings(alphabet, most))
    wrong = [text for text in texts if matches(language, text) != bool(oracle(text))]
    assert not wrong, f"{layout}: {wrong[:5]} of {len(wrong)}"
    viable = Viable(language)
    lost = [text for text in texts if oracle(text) and not greedy_matches(language, text, viable)]
    assert not lost, f"a lexer loses {lost[:5]} of {len(lost)}"
    assert any(map(oracle, texts))


class Viable:
    """Whether a text can be the beginning of what a terminal of a language matches."""

    def __init__(self, language):
        rest = [language.start, *language.rules.values()]
        self._automata = {}
        while rest:
            part = rest.pop()
            if isinstance(part, Terminal):
                self._automata[part] = automaton(part.item)
            rest.extend(parts(part))

    def __call__(self, terminal, text):
        machine = self._automata[terminal]
        state = 0
        for character in text:
            moves = machine.moves[state]
            targets = [target for first, last, target in moves if first <= ord(character) <= last]
            if not targets:
                return False
            state = targets[0]
        return bool(machine.moves[state]) or machine.accepting[state]


def greedy_matches(language, text, viable):
    """As `matches`, where a terminal does not end before a character that it could go on with."""

    def ends(node, start):
        if not isinstance(node, Terminal):
            return _worked_out(node, start, text, ends, language.rules)
        found = _ends(node, start, text, language.rules, {})
        return {end for end in found if end == len(text) or not viable(node, text[start : end + 1])}

    return len(text) in ends(language.start, 0)


@dataclass
class Scanner:
    """Reads free text until a trigger is complete; then a tag (begin, pattern of what follows) must go on from it.

    `end` ends the free text for good.
    """

    triggers: list[str]
    tags: list[tuple[str, str]]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] | list[str] = ()
    end: str | None = None

    def __call__(self, text):
        return self.tagged(text, 0, "") if self.at_least_one else self.free(text, 0)

    def free(self, text, start):
        """The rest of the text is free text with tags in it."""
        for stop in range(start, len(text) + 1):
            piece = text[start:stop]
            if self.end is not None and piece.endswith(self.end):
                return stop == len(text) and not self.has_excluded(piece[: -len(self.end)])
            if self.end is None and self.has_excluded(piece):
                return False
            for trigger in self.triggers:
                if piece.endswith(trigger):
                    return not self.has_excluded(piece) and self.tagged(text, stop - len(trigger), trigger)
        return self.end is None

    def tagged(self, text, start, trigger):
        """The rest of the text begins with a tag that begins with the trigger."""
        return any(
            text[stop:] == (self.end or "") if self.stop_after_first else self.free(text, stop)
            for begin, pattern in self.tags
            if begin.startswith(trigger) and text.startswith(begin, start)
            for stop in range(start + len(begin), len(text) + 1)
            if re.fullmatch(pattern, text[start + len(begin) : stop])
        )

    def has_excluded(self, text):
        return any(excluded in text for excluded in self.excludes)


ONE = ([("ab", "cb")], ["a"], [tag("ab", const("c"), "b")])
LONG = ([("aab", "a")], ["aa"], [tag("aab", const(""), "a")])
TWO = ([("aab", "c"), ("bca", "b?c")], ["aa", "bc"], [tag("aab", const("c"), ""), tag("bca", regex("b?"), "c")])
SHARED = ([("abc", "a"), ("abb", "c+a")], ["ab"], [tag("abc", const(""), "a"), tag("abb", regex("c+"), "a")])
OPEN = ([("ab", "c*")], ["a"], [tag("ab", regex("c*"), "")])


@pytest.mark.sampled
@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
@pytest.mark.parametrize(("plain", "triggers", "tags"), [ONE, LONG, TWO, SHARED, OPEN])
def test_triggered_tags_are_what_a_scanner_reads(plain, triggers, tags, at_least_one, stop_after_first):
    options = {"at_least_one": at_least_one, "stop_after_first": stop_after_first}
    assert_same(triggered(triggers, tags, **options), Scanner(triggers, plain, **options), "abc", samples.either(6, 5))


@pytest.mark.sampled
@pytest.mark.parametrize("excludes", [["c"], ["ca"], ["bb", "cc"], ["ba"]])
def test_excluded_strings_do_not_occur_in_the_free_text_nor_in_it_and_the_trigger(excludes):
    oracle = Scanner(["ab"], [("ab", "ca")], excludes=excludes)
    assert_same(triggered(["ab"], [tag("ab", const("c"), "a")], excludes=excludes), oracle, "abc", samples.either(6, 5))


@pytest.mark.parametrize("stop_after_first", [False, True])
@pytest.mark.parametrize(
    ("triggers", "end", "excludes"), [(["a"], "b", []), (["ab"], "bc", []), (["ab"], "bc", ["cc"])]
)
def test_the_end_of_the_tag_around_ends_the_free_text(triggers, end, excludes, stop_after_first):
    layout = triggered(triggers, [tag("ab", const("c"), "a")], excludes=excludes, stop_after_first=stop_after_first)
    options = {"end": end, "excludes": excludes, "stop_after_first": stop_after_first}
    inner = Scanner(triggers, [("ab", "ca")], **options)
    assert_same(tag("c", layout, end), lambda text: text[:1] == "c" and inner(text[1:]), "abc", 6)


@pytest.mark.parametrize(
    ("layout", "pattern", "alphabet"),
    [
        (const("ab"), "ab", "ab"),
        (const(""), "", "ab"),
        (ANY_TEXT, "[ab]*", "ab"),
        ({"type": "any_text", "max_chars": 2}, "[ab]{0,2}", "ab"),
        ({"type": "any_text", "max_chars": 0}, "", "ab"),
        ({"type": "any_text", "excludes": ["ab", "ba"]}, "a*|b*", "ab"),
        ({"type": "any_text", "excludes": ["aa"], "max_chars": 3}, "(?!.*aa).{0,3}", "ab"),
        (regex("a+"), "a+", "ab"),
        (regex("a*"), "a*", "ab"),
        ({"type": "grammar", "grammar": 'root ::= "a" root "b" | "c"'}, "c|acb|aacbb", "abc"),
        (sequence(const("a"), regex("b*"), const("b")), "ab*b", "ab"),
        (sequence(ANY_TEXT, const("b")), "[ab]*b", "ab"),
        (sequence(const("a"), ANY_TEXT), "a[ab]*", "ab"),
        (sequence(const(""), const("")), "", "ab"),
        (sequence({"type": "any_text", "max_chars": 1}, const("ab")), "[ab]?ab", "ab"),
        (either(const("a"), const("ab"), regex("b+")), "a|ab|b+", "ab"),
        (either(const("a"), ANY_TEXT), "[ab]*", "ab"),
        (either(const("a")), "a", "ab"),
        ({"type": "optional", "content": const("a")}, "a?", "ab"),
        ({"type": "plus", "content": const("ab")}, "(ab)+", "ab"),
        ({"type": "star", "content": regex("a*b")}, "(a*b)*", "ab"),
        ({"type": "star", "content": regex("a*")}, "a*", "ab"),
        ({"type": "repeat", "content": const("a"), "min": 1, "max": 2}, "a{1,2}", "ab"),
        ({"type": "repeat", "content": const("a"), "min": 1, "max": -1}, "a+", "ab"),
        ({"type": "repeat", "content": const("a"), "min": 0, "max": 0}, "", "ab"),
        (sequence({"type": "star", "content": ANY_TEXT}, const("a")), "[ab]*a", "ab"),
        (tag("a", ANY_TEXT, "b"), "a[^b]*b", "abc"),
        (tag("a", ANY_TEXT, "bb"), "a(?!.*bb.)[abc]*bb", "abc"),
        (tag("a", ANY_TEXT, ["b", "c"]), "aa*[bc]", "abc"),
        (tag("a", {"type": "any_text", "max_chars": 2}, "b"), "a[ac]{0,2}b", "abc"),
        (tag("a", {"type": "any_text", "excludes": ["cc"]}, "cb"), "a(?!.*cc.*cb)(?!.*cb.)[abc]*cb", "abc"),
        (tag("a", regex("[bc]*"), "b"), "a[bc]*b", "abc"),
        (tag("a", regex("a*"), "b"), "aa*b", "abc"),
        (tag("", const("a"), ""), "a", "ab"),
        (tag("a", ANY_TEXT, ""), "a[ab]*", "ab"),
        (tag("a", const("b"), ["b", "c"]), "ab[bc]", "abc"),
        (tag("a", sequence(const("c"), ANY_TEXT), "b"), "ac[^b]*b", "abc"),
        (tag("a", sequence(ANY_TEXT, const("c")), "b"), "a[^b]*cb", "abc"),
        (tag("a", either(const("c"), ANY_TEXT), "b"), "a[^b]*b", "abc"),
        (tag("a", {"type": "star", "content": const("c")}, "cb"), "ac*cb", "abc"),
        (tag("a", tag("b", ANY_TEXT, "c"), "a"), "ab[^c]*ca", "abc"),
        (sequence(tag("a", ANY_TEXT, "b"), ANY_TEXT), "a[^b]*b[abc]*", "abc"),
        (sequence(tag("a", ANY_TEXT, "b"), tag("a", ANY_TEXT, "c")), "a[^b]*ba[^c]*c", "abc"),
        (sequence(tag("a", ANY_TEXT, "b"), regex("c*")), "a[^b]*bc*", "abc"),
        (sequence({"type": "optional", "content": tag("a", ANY_TEXT, "b")}, regex("a*")), "(a[^b]*b)?a*", "abc"),
        (either(tag("a", ANY_TEXT, "b"), tag("ac", ANY_TEXT, "c")), "a[^b]*b|ac[^c]*c", "abc"),
        (separated("c", [tag("a", ANY_TEXT, "b")]), "(a[^b]*b(ca[^b]*b)*)?", "abc"),
        (separated("", [tag("a", const("c"), "b")], at_least_one=True), "(acb)+", "abc"),
        (separated("c", [tag("a", const(""), "b")], stop_after_first=True), "(ab)?", "abc"),
        (separated("c", [tag("a", const(""), "b")], stop_after_first=True, at_least_one=True), "ab", "abc"),
        (separated("c", [tag("a", const(""), "b"), tag("b", regex("a*"), "")]), "((ab|ba*)(c(ab|ba*))*)?", "abc"),
        (tag("b", separated("c", [tag("a", ANY_TEXT, "b")]), "c"), "b(a[^b]*b(ca[^b]*b)*)?c", "abc"),
        (sequence(separated("", [tag("a", ANY_TEXT, "b")]), tag("a", ANY_TEXT, "c")), "(a[^b]*b)*a[^c]*c", "abc"),
        (sequence(triggered(["a"], [tag("ab", const(""), "c")]), const("b")), "[bc]*(abc[bc]*)*b", "abc"),
        (sequence(const("c"), triggered(["a"], [tag("ab", const(""), "c")])), "c[bc]*(abc[bc]*)*", "abc"),
    ],
)
def test_a_format_is_what_its_regular_expression_matches(layout, pattern, alphabet):
    assert_same(layout, re.compile(pattern, re.DOTALL).fullmatch, alphabet, 6 if alphabet == "ab" else 5)


NUMBER = "(0|-?[1-9][0-9]*)"


@pytest.mark.parametrize(
    ("layout", "pattern", "alphabet"),
    [
        (INTEGER, NUMBER, "01-"),
        (tag("a", INTEGER, "b"), f"a{NUMBER}b", "01ab"),
        (tag("a", INTEGER, "1"), f"a{NUMBER}1", "01a"),
        (tag("a", INTEGER, ["b", "11"]), f"a{NUMBER}(b|11)", "01ab"),
        (sequence(INTEGER, const("1"), INTEGER), f"{NUMBER}1{NUMBER}", "01a"),
        (sequence(INTEGER, const("a"), INTEGER), f"{NUMBER}a{NUMBER}", "01a"),
        (sequence(INTEGER, regex("1?a?"), INTEGER), f"{NUMBER}1?a?{NUMBER}", "01a"),
        (either(INTEGER, const("1a")), f"{NUMBER}|1a", "01a"),
        (either(INTEGER, tag("a", INTEGER, "a")), f"{NUMBER}|a{NUMBER}a", "01a"),
        (separated("1", [tag("a", INTEGER, "")]), f"(a{NUMBER}(1a{NUMBER})*)?", "01a"),
        (separated("1", [tag("a", INTEGER, "a")]), f"(a{NUMBER}a(1a{NUMBER}a)*)?", "01a"),
        (sequence({"type": "star", "content": INTEGER}, const("0")), f"{NUMBER}*0", "01a"),
        (sequence(tag("a", INTEGER, ""), INTEGER), f"a{NUMBER}{NUMBER}", "01a"),
    ],
)
def test_a_number_ends_before_what_looks_like_more_of_it(layout, pattern, alphabet):
    assert_same(layout, re.compile(pattern).fullmatch, alphabet, 5 if len(alphabet) == 3 else 4)


def weather(**options):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    content = {"type": "json_schema", "json_schema": schema, **options}
    return content, schema


def test_both_forms_of_function_calls_allow_the_same():
    content, schema = weather()
    old = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<function=get>", "schema": schema, "end": "</function>"},
            {"begin": "<function=put>", "schema": {"type": "integer"}, "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
    tags = [tag("<function=get>", content, "</function>"), tag("<function=put>", INTEGER, "</function>")]
    text = {"Sure. ": True, "<function": True, "<function=": False}
    text["Sure. <function=get>" + '{"n": 12}' + "</function> Done."] = True
    text["<function=get>" + '{"n": 12}' + "</function><function=put>7</function>"] = True
    text["<function=put>" + '{"n": 12}' + "</function>"] = False
    text["<function=get>" + '{"n": 12}' + "</function"] = False
    text["<function=get>" + '{"n": "x"}' + "</function>"] = False
    text["<function=set>7</function>"] = False
    languages = [structural_tag(json.dumps(old)), language_of(triggered(["<function="], tags))]
    for language in languages:
        assert {sample: matches(language, sample) for sample in text} == text


def test_the_old_form_takes_a_schema_as_text():
    value = {"structures": [{"begin": "<a>", "schema": '{"type": "integer"}', "end": "</a>"}], "triggers": ["<a"]}
    language = structural_tag(json.dumps(value))
    assert matches(language, "x<a>10</a>y")
    assert not matches(language, "x<a>x</a>y")


def test_reasoning_then_json_keeps_the_lexemes_of_both():
    content, _ = weather(style="json", any_order=False, excludes=[], max_whitespace_cnt=1)
    language = language_of(sequence(tag("<think>", ANY_TEXT, "</think>"), content))
    assert matches(language, '<think>1 < 2</thin</think>{"n": 12}')
    assert not matches(language, '<think>a</think>{"n": 12}</think>{"n": 12}')
    assert len(terminals(language)) > 3


def terminals(language):
    rest, found = [language.start, *language.rules.values()], []
    while rest:
        part = rest.pop()
        found += [part] * isinstance(part, Terminal)
        rest.extend(parts(part))
    return found


def test_rules_of_several_contents_do_not_mix():
    tree = {"type": "object", "properties": {"t": {"$ref": "#"}}, "additionalProperties": False}
    recursive = {"type": "json_schema", "json_schema": tree}
    grammar = partial(dict, type="grammar")
    language = language_of(
        sequence(
            recursive,
            grammar(grammar='root ::= "(" root ")" | "x"'),
            const(" "),
            grammar(grammar='root ::= "[" root "]" | "y"'),
            recursive,
        )
    )
    assert matches(language, '{"t": {}}((x)) [[y]]{"t": {"t": {}}}')
    assert not matches(language, '{"t": {}}((x)) [[x]]{}')
    assert set(calls(language.start)) <= set(language.rules)


def test_what_is_not_needed_is_not_there():
    assert language_of(triggered(["a"], [tag("ab", const("c"), "b")])).rules == {}


def whole(layout):
    return {"type": "structural_tag", "format": layout}


TAG = tag("<f>", const("x"), "</f>")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"structural_tag must be an object, got a list"),
        ({"type": "structural_tag"}, "structural_tag lacks 'format'"),
        ({"format": ANY_TEXT}, "structural_tag lacks 'type'"),
        ({"type": "json", "format": ANY_TEXT}, "structural_tag.type must be 'structural_tag', got 'json'"),
        ({**whole(ANY_TEXT), "more": 1}, "structural_tag has an unknown key 'more'; known are type, format"),
        (whole("x"), "structural_tag.format must be an object with a type, got 'x'"),
        (whole({}), "structural_tag.format.type must be one of const_string, .*got null"),
        (whole({"type": "text"}), "structural_tag.format.type must be one of .*got 'text'"),
        (whole({"type": []}), "structural_tag.format.type must be one of .*got a list"),
        (whole({"type": "token", "token": 3}), "format.token 3 is a number; write the token's text"),
        (
            whole({"type": "star", "content": {"type": "exclude_token"}}),
            r"format.content.exclude_token cannot be counted here.*use regex",
        ),
        (whole({"type": "exclude_token", "exclude_tokens": [3]}), r"exclude_tokens\[0\] 3 is a number"),
        (whole({"type": "const_string"}), "structural_tag.format lacks 'value'"),
        (whole(const(3)), "structural_tag.format.value must be a string, got 3"),
        (whole(const("\ud800")), "structural_tag.format.value holds half of a surrogate pair"),
        (whole({**ANY_TEXT, "max_tokens": -1}), "format.max_tokens must be an integer, .* got -1"),
        (whole({**ANY_TEXT, "max_chars": -1}), "format.max_chars must be an integer, 0 to 2000, got -1"),
        (whole({**ANY_TEXT, "max_chars": True}), "format.max_chars must be an integer, 0 to 2000, got true"),
        (whole({**ANY_TEXT, "excludes": [""]}), r"format.excludes\[0\] is empty"),
        (whole({**ANY_TEXT, "excludes": "x"}), "format.excludes must be a list that is not empty, got 'x'"),
        (whole(regex("(")), "structural_tag.format.pattern: "),
        (whole({"type": "grammar", "grammar": "x"}), "structural_tag.format.grammar: 'x' is before"),
        (whole({"type": "json_schema", "json_schema": 3}), "format.json_schema must be a schema, got 3"),
        (whole({"type": "json_schema", "json_schema": {"type": 3}}), "structural_tag.format.json_schema: "),
        (whole({**INTEGER, "style": "yaml"}), "format.style must be json or one of qwen_xml"),
        (whole({**INTEGER, "style": ["json"]}), "format.style must be json or one of qwen_xml"),
        (whole({**INTEGER, "max_whitespace_cnt": 0}), "format.max_whitespace_cnt must be at least 1"),
        (whole({**INTEGER, "strict": 1}), "structural_tag.format.strict must be true or false, got 1"),
        (whole(sequence()), "format.elements must be a list that is not empty"),
        (whole(either(ANY_TEXT, const(1))), r"format.elements\[1\].value must be a string"),
        (whole({"type": "repeat", "content": TAG, "min": 2, "max": 1}), r"format.max must be at least min \(2\) or -1"),
        (whole({"type": "repeat", "content": TAG, "min": 0, "max": 9999}), "format.max must be an integer, 0 to 2000"),
        (
            whole({"type": "star", "content": {"type": "grammar", "grammar": 'root ::= "(" root ")" | ""'}}),
            "format.content can be empty",
        ),
        (whole(tag(3, ANY_TEXT, "x")), "format.begin must be a string, got 3"),
        (whole(tag({"type": "token", "token": 3}, ANY_TEXT, "x")), "format.begin.token 3 is a number"),
        (whole(tag("x", ANY_TEXT, [])), "format.end must be a list that is not empty"),
        (whole(tag("x", ANY_TEXT, ["a", "a"])), r"format.end\[1\] is a duplicate: 'a'"),
        (whole(triggered([], [TAG])), "format.triggers must be a list that is not empty"),
        (whole(triggered(["<f"], [])), "format.tags must be a list that is not empty"),
        (whole(triggered(["<f"], [const("x")])), r"format.tags\[0\] has an unknown key 'value'"),
        (
            whole(triggered(["<f"], [{"type": "or", "begin": "", "content": TAG, "end": ""}])),
            r"tags\[0\].type must be 'tag'",
        ),
        (whole(triggered([""], [TAG])), r"format.triggers\[0\] is empty"),
        (whole(triggered(["<g"], [TAG])), r"format.triggers\[0\] '<g' is not the beginning of a tag"),
        (whole(triggered(["<f>x"], [TAG])), r"format.triggers\[0\] '<f>x' is not the beginning of a tag"),
        (
            whole(triggered(["<f"], [TAG, tag("<g", ANY_TEXT, ">")])),
            r"format.tags\[1\].begin '<g' starts with none of structural_tag.format.triggers",
        ),
        (whole(triggered(["<f", "<f>"], [TAG])), r"format.triggers\[1\] '<f>' holds the trigger '<f'"),
        (whole(triggered(["<f", "f"], [TAG])), r"format.triggers\[0\] '<f' holds the trigger 'f'"),
        (whole(triggered(["<f"], [TAG], excludes=["<"])), r"format.triggers\[0\] '<f' holds '<', which is excluded"),
        (whole(triggered(["<f"], [TAG], at_least_one=1)), "format.at_least_one must be true or false, got 1"),
        (whole(triggered([f"<{at}>" for at in range(201)], [TAG])), "format.triggers has too many: 201; at most 200"),
        (
            whole(tag("<o>", triggered(["<f"], [TAG]), "<f/>")),
            r"format.content.triggers\[0\] '<f' and the end '<f/>' of the tag around it hold each other",
        ),
        (whole(separated(3, [TAG])), "format.separator must be a string, got 3"),
        ({"structures": [], "triggers": ["<"]}, "structural_tag.structures must be a list that is not empty"),
        ({"structures": [{"begin": "<f"}], "triggers": ["<"]}, r"structural_tag.structures\[0\] lacks 'schema'"),
        (
            {"structures": [{"begin": "f", "schema": {}, "end": ""}], "triggers": ["<"]},
            r"structural_tag.triggers\[0\] '<' is not the beginning of a tag",
        ),
        (
            {"structures": [{"begin": "f", "schema": {"type": 3}, "end": ""}], "triggers": ["f"]},
            r"structural_tag.structures\[0\].schema: ",
        ),
        (
            {"structures": [{"begin": "f", "schema": "{", "end": ""}], "triggers": ["f"]},
            r"structural_tag.structures\[0\].schema: ",
        ),
        ({"structures": 1, "triggers": ["f"], "tools": 1}, "structural_tag has an unknown key 'tools'"),
    ],
)
def test_a_wrong_structural_tag_is_refused_with_the_place(value, message):
    with pytest.raises(GrammarError, match=message):
        structural_tag(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "structural_tag is not valid JSON"),
        ("{", "structural_tag is not valid JSON"),
        ('{"type": "structural_tag", "type": "structural_tag"}', "has the key 'type' twice"),
        ('{"format": NaN}', "NaN is not a number of JSON"),
        ('{"format": 1e999}', "a number with too many digits: '1e999'"),
        ('{"format": 0.12345678901234567890123}', "a number with too many digits"),
        ("[" * 30_000, "structural_tag is nested too deep"),
    ],
)
def test_what_is_no_json_is_refused(text, message):
    with pytest.raises(GrammarError, match=message):
        structural_tag(text)


def test_formats_may_be_nested_but_not_without_bound():
    layout = const("x")
    for _ in range(32):
        layout = sequence(layout)
    assert matches(language_of(layout), "x")
    with pytest.raises(GrammarError, match="nested too deep: at most 32 formats in each other"):
        language_of(sequence(layout))
    with pytest.raises(GrammarError, match="at most 2000 formats in one structural tag"):
        language_of(either(*[const(str(at)) for at in range(2_000)]))
