"""Grammars in Lark's notation: the readers of XGrammar and LLGuidance are the oracles, every refusal, hostile texts."""

import pytest
from matching import matches
from other_matchers import compiled_lark, llguidance_takes, xgrammar_takes
from short_strings import strings

from tureen.grammar import GrammarSpec, language_of
from tureen.grammar.expression import GrammarError
from tureen.grammar.lark import is_lark, lark
from tureen.grammar.lark_terminals import COMMON
from tureen.grammar.written_rules import MAX_RULES

SAMPLES = [
    ('start: "a" "b"*', "ab", 4),
    ('start: "a" | "b" "c" |', "abc", 3),
    ('start: ("a" | "b")~2..3', "ab", 4),
    ('start: "a"~2 "b"{1,2} "c"{2,}', "abc", 5),
    ('start: ["a"] "b"? ["c" "c"]', "abc", 4),
    ('start: "a".."c" "b".."b"', "abcd", 3),
    ('start: "aB"i', "abAB", 3),
    ("start: /a[bc]/ /[^a]/", "abc", 4),
    ("start: /AB/i /c/s", "abcABC", 3),
    ('start: /a+/\n  | B~1..2 -> many\nB: /b/ | B2\nB2: "c"', "abc", 3),
    ('?start: x\n!x: "a" y? -> foo\n  | "b"\n?y: "(" x ")"', "ab()", 4),
    ('start: start "," item | item\nitem: "1"', "1,", 5),
    ('start: e\ne: e "+" t | t\nt: t "*" f | f\nf: "1" | "(" e ")"', "1+*()", 4),
    ('start: "(" start ")" start |', "()", 6),
    ('start: A\n// comment\nA: "a" // another\n', "ab", 2),
    (r'start: "\n" "\u0042" "\"" "\\"', '\nB"\\', 4),
    ('start: _a\n_a: _B\n_B: "b"', "ab", 2),
    ('start: "a" %json {"enum": [1, ""]} "b"', 'ab1"', 4),
    ('%import common.INT\nstart: INT ("," INT)*', "12,", 4),
    ("%import common (INT, CNAME)\n%import common.WORD -> W\nstart: INT W | CNAME", "1a_", 4),
]


@pytest.mark.parametrize(("grammar", "alphabet", "most"), SAMPLES)
def test_a_grammar_takes_what_xgrammar_and_llguidance_take_of_every_string(grammar, alphabet, most):
    assert is_lark(grammar)
    language, compiled = lark(grammar), compiled_lark(grammar)
    texts = list(strings(alphabet, most))
    taken = [text for text in texts if matches(language, text)]
    assert taken == [text for text in texts if xgrammar_takes(compiled, text)]
    assert taken == [text for text in texts if llguidance_takes(grammar, text)]
    assert taken


@pytest.mark.parametrize(
    ("grammar", "alphabet"),
    [
        ('start: "a" "b" "c"\n%ignore " "', "abc "),
        ('start: x | y\nx: "a" | \ny: "b" x\n%ignore / +/', "ab "),
        ('start: "(" start ")" | NUMBER\n%import common.NUMBER\n%import common.WS\n%ignore WS', "() 1."),
        ('start: NAME NAME\nNAME: /[a-z]+/\n%ignore " "', "ab "),
        ('start: "a"*\n%ignore "-"\n%ignore "+"', "a-+"),
    ],
)
def test_what_is_ignored_may_follow_each_terminal_as_with_xgrammar(grammar, alphabet):
    language, compiled = lark(grammar), compiled_lark(grammar)
    texts = list(strings(alphabet, 5))
    assert [text for text in texts if matches(language, text)] == [t for t in texts if xgrammar_takes(compiled, t)]


LITERALS = [
    "",
    "0",
    "7",
    "-7",
    "+7",
    "7.",
    ".7",
    "7.5",
    "7e1",
    "7.5E-2",
    "-.5",
    "-7.5e+1",
    "e1",
    "f",
    "aF",
    "G",
    "_",
    "a_1",
]
LITERALS += ["1a", "a b", " ", "\t ", "\n", "\r\n", "\r\n\n", '""', '"a"', '"a\\"b"', '"a"b"', '"\\"', '"a\nb"', "ab"]
LITERALS += ["//x", "// x\n", "#x", "#", "/**/", "/* a * b */", "/* */ */", "/*/", "--x", "\f", "é", '"\\\\"']


@pytest.mark.parametrize("name", list(COMMON))
def test_a_terminal_of_the_library_is_what_xgrammar_takes_it_for(name):
    grammar = f"%import common.{name}\nstart: {name}"
    language, compiled = lark(grammar), compiled_lark(grammar)
    for text in LITERALS:
        if (name, text) == ("ESCAPED_STRING", '"a\nb"'):  # Lark's own, `"` and `.*?`, holds no line break
            assert not matches(language, text)
            continue
        assert matches(language, text) == xgrammar_takes(compiled, text), text


OPENAI_SAMPLE = """
start: expr
expr: term (SP ADD SP term)* -> add
| term
term: factor (SP MUL SP factor)* -> mul
| factor
factor: INT
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""


def test_the_sample_of_openai_s_custom_tools_is_read_wherever_a_grammar_may_stand():
    language = language_of(GrammarSpec("ebnf", OPENAI_SAMPLE))
    assert [text for text in ("4 + 5 * 6", "4+5", "4 + ", "44") if matches(language, text)] == ["4 + 5 * 6", "44"]
    assert [text for text in ("4 + 5 * 6", "4+5", "4 + ", "44") if llguidance_takes(OPENAI_SAMPLE, text)] == [
        "4 + 5 * 6",
        "44",
    ]


@pytest.mark.parametrize(
    ("grammar", "is_one"),
    [
        ('start: "a"', True),
        ('?start: "a"', True),
        ('root ::= "a"', False),
        ('root ::= "\nstart: "', False),
        ('# start: x\nroot ::= "a"', False),
        ("", False),
        ("root", False),
        ("%import common.INT\nstart:INT", True),
    ],
)
def test_a_notation_is_known_by_its_definitions(grammar, is_one):
    assert is_lark(grammar) is is_one


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('begin: "a"', r"there is no rule 'start'.*'begin'.*write start: …"),
        ('start: b\nbc: "a"', r"'start' calls 'b', which is not defined \(line 1\).*'bc'"),
        ("start: A", r"'start' calls 'A', which is not defined.*add A: …"),
        ('start: "a"\nstart: "b"', r"'start' is defined twice: in line 1 and again \(line 2\)"),
        ('start: A\nA.2: "a"', r"'A' has a priority \(line 2\)"),
        ('start.3: "a"', "'start' has a priority"),
        ('start: a\na: "x"\nA: a', r"terminal 'A' holds the rule 'a' \(line 3\)"),
        ('start: A\nA: "(" B ")"\nB: A | "x"', "holds itself.*make it a rule"),
        ('start: Ab\nAb: "x"', "'Ab' is no name.*small letters"),
        ('start: "a', "'\"' is not expected.*not closed on its line"),
        ("start: /a", "'/' is not expected.*not closed"),
        ("start: ('a')", "double quotes"),
        ('start: ("a"', r"'start': '\(' is not closed"),
        ('start: "a")', r"'\)' is not expected"),
        ('start: ["a")', r"'\[' is not closed"),
        ("start: *", r"'\*' is not expected"),
        ('start: "a"*?', r"'\?' follows another repetition"),
        ('start: "a"~3..1', "3 to 1 times is never possible"),
        ('start: "a"~2001', "2001 times is too often.*at most 2000"),
        ('start: "a"~', "no number follows ~"),
        ('start: "a"~1..', r"no number follows \.\."),
        ('start: "a"{,2}', "is not a number of times"),
        ('start: "a".."bc"', "a range goes from one character"),
        ('start: "b".."a"', "a range goes from one character"),
        ('start: "a".. x', "a range goes from one character"),
        (r'start: "\d"', r"the escape '\\d' is not known"),
        (r'start: "\ud800"', "half of a surrogate pair"),
        ("start: /a*?b/", "lazy repeats"),
        ("start: /a[*]?b+?/", "lazy repeats"),
        ("start: /a(?!b)/", "ask about the text around a terminal"),
        ("start: /^a/", "ask about the text around a terminal"),
        (r"start: /\bx/", "ask about the text around a terminal"),
        ("start: /a/l", "the flag l is not supported"),
        ("start: /(/", r"the regular expression is refused.*\(line 1\)"),
        ("start: /[^\\s\\S]/", "the regular expression matches nothing"),
        ("start: <think>", "special tokens"),
        ("start: @other", "grammars that are sent apart"),
        ('start: "a" & "b"', "intersection"),
        ("start: list{x}", "templates are not supported"),
        ('start[lazy]: "a"', "without attributes"),
        ('start: "a";', "no end sign"),
        ("%declare X\nstart: X", "%declare.*define them"),
        ("%override x\nstart: x", "%override"),
        ("%weird x\nstart: x", "'%weird' is not supported.*allowed are %ignore"),
        ("%import python.NAME\nstart: NAME", "only common is known"),
        ("%import common.FOO\nstart: FOO", "common has no 'FOO'.*known are DIGIT"),
        ("%import common\nstart: FOO", "name the terminals"),
        ("%import common (INT\nstart: INT", "common has no 'start'"),
        ("start: %json", "no JSON schema follows %json"),
        ('start: %json {"type": "wrong"}', "%json"),
        ('start: A\nA: %json {"type": "null"}', "%json is in a terminal"),
        ('start: "a" start', "'start'.*can never end"),
        ('"a"\nstart: "b"', "'\"a\"' is not expected.*write a rule at the start of a line as name"),
        ("start: " + "(" * 30_000, "nested more than 20 deep"),
        ("start: a0\n" + "\n".join(f"a{at}: a{at + 1}" for at in range(5_000)), f"at most {MAX_RULES}"),
        ("start: " + "|".join(f'"{at}"' for at in range(100_000)), "too large"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_place_and_what_to_do(grammar, message):
    with pytest.raises(GrammarError, match=message):
        lark(grammar)
