"""EBNF: every string up to a length against recognisers written for the test, every refusal, hostile texts."""

import re
from random import Random

import pytest
from matching import matches
from samples import some
from short_strings import assert_same, strings

from tureen.grammar.ebnf import ebnf
from tureen.grammar.expression import GrammarError
from tureen.grammar.rules import calls
from tureen.grammar.written_rules import MAX_PARTS, MAX_RULES


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('root ::= "a" | "bc" | "abc"', "a|bc|abc"),
        ('root ::= "a" "b"* "c"+', "ab*c+"),
        ('root ::= "a"?"b" {2}', "a?b{2}"),
        ('root ::= "a"{1,2} "b"{2,}', "a{1,2}b{2,}"),
        ('root ::= "a"{ 1 , 2 }', "a{1,2}"),
        ('root ::= "a"{0} "b"', "b"),
        ("root ::= [ab]* [^ab]", "[ab]*[^ab]"),
        ("root ::= [a-b]+ | [c-c]", "[ab]+|c"),
        ("root ::= . .", "[abc]{2}"),
        ('root ::= ("a" | "b" "c")* "a"', "(a|bc)*a"),
        ('root ::= ("a"* | "b"?)* "c"', "(a|b)*c"),
        ('root ::= ("a"? "b"? "c"?)+', "[abc]*"),
        ('root ::= ("a"? "b"?){2,3}', "(a?b?){3}"),
        ('root ::= ("" | "a" x){2} "c"\nx ::= "b" | ""', "(ab?){0,2}c"),
        ('root ::= "" | "a"', "a?"),
        ('root ::= "a" | ', "a?"),
        ('root ::= | "a"', "a?"),
        ("root ::=", ""),
        ("root ::= ()", ""),
        ('root ::= x* "c"\nx ::= y\ny ::= ""', "c"),
        ('root ::= x "c"\nx ::= (y | "a")*\ny ::= "" | x2\nx2 ::= ""', "a*c"),
        ('root ::= "a"\n  | "b"\n  # none\n\n  | "c" # last', "a|b|c"),
        ('root ::= "a" |\n "b"', "a|b"),
        ('root ::= ("a"\n "b"\n)', "ab"),
        ('root ::= "a"\n  "b"', "ab"),
        ('\n# first\nroot ::= A-1 b_2 3\nA-1 ::= "a"\n b_2 ::= "b"\n3 ::= "c"', "abc"),
        ('root ::= x\r\nx ::= "a"\r\n', "a"),
        ('root::="a"\nunused ::= "b"', "a"),
        ("root ::= /a+b?/ | /c/", "a+b?|c"),
    ],
)
def test_what_has_no_recursion_matches_what_the_regular_expression_does_and_calls_no_rule(grammar, pattern):
    compiled = re.compile(pattern)
    assert_same(grammar, compiled.fullmatch, "abc", 4)
    assert not list(calls(ebnf(grammar).start))


def written(random, depth):
    """A random grammar's alternatives, and the same as a regular expression."""
    kind = random.choice(["text", "chain", "choice", "repeat", "rule"]) if depth else "text"
    if kind == "text":
        text = random.choice(["", "a", "b", "ab"])
        return f'"{text}"', text, []
    if kind == "rule":
        inner, pattern, rules = written(random, depth - 1)
        name = f"r{len(rules)}-{random.randrange(10**9)}"
        return name, f"(?:{pattern})", [*rules, f"{name} ::= {inner}"]
    if kind == "repeat":
        inner, pattern, rules = written(random, depth - 1)
        times = random.choice(["*", "+", "?", "{2}", "{1,}", "{0,2}"])
        return f"({inner}){times}", f"(?:{pattern}){times}", rules
    first, second = written(random, depth - 1), written(random, depth - 1)
    sign = "|" if kind == "choice" else " "
    return (
        f"({first[0]}){sign}({second[0]})",
        f"(?:{first[1]}){sign.strip()}(?:{second[1]})",
        first[2] + second[2],
    )


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(40), 12))
def test_a_random_grammar_matches_what_its_regular_expression_does(seed):
    alternatives, pattern, rules = written(Random(seed), 6)
    assert_same("\n".join([f"root ::= {alternatives}", *rules]), re.compile(pattern).fullmatch, "ab", 5)
    recursive = "\n".join([f'root ::= ({alternatives}) | "(" root ")"', *rules])
    for text in strings("ab", 3):
        assert matches(ebnf(recursive), f"(({text}))") == bool(re.fullmatch(pattern, text)), text


def balanced(text):
    depth = 0
    for sign in text:
        depth += 1 if sign == "(" else -1
        if depth < 0:
            return False
    return depth == 0


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ("(" root ")")*',
        'root ::= "(" root ")" root | ""',
        'root ::= group*\ngroup ::= "(" group* ")"',
        'root ::= pair\npair ::= one* | ""\none ::= "(" pair ")" pair',
        'root ::= ("(" root ")" | none)*\nnone ::= root-end | ""\nroot-end ::= ""',
        'root ::= many\nmany ::= (some | "")* some?\nsome ::= "(" many ")" many',
    ],
)
def test_balanced_parentheses_are_those_that_a_counter_finds(grammar):
    assert_same(grammar, balanced, "()", 8)


def is_arithmetic(text):
    """A recursive descent over: expression = term {+ term}, term = factor {* factor}, factor = 1 | ( expression )."""

    def expression(at):
        at = term(at)
        while at is not None and text[at : at + 1] == "+":
            at = term(at + 1)
        return at

    def term(at):
        at = factor(at)
        while at is not None and text[at : at + 1] == "*":
            at = factor(at + 1)
        return at

    def factor(at):
        if text[at : at + 1] == "1":
            return at + 1
        if text[at : at + 1] != "(":
            return None
        at = expression(at + 1)
        return at + 1 if at is not None and text[at : at + 1] == ")" else None

    return expression(0) == len(text)


def test_arithmetic_is_what_a_recursive_descent_accepts():
    grammar = """
        root ::= expression
        expression ::= term ("+" term)*
        term ::= factor ("*" factor)*
        factor ::= "1" | "(" expression ")"
    """
    assert_same(grammar, is_arithmetic, "1+*()", 4)
    assert matches(ebnf(grammar), "(1+1)*1+1*(1)")


def is_list(text):
    """Rewrites what is a list to 1 until only one is left."""
    text = text.replace("11", "1").replace("11", "1").replace("11", "1")
    before = None
    while text != before:
        before = text
        text = re.sub(r"(?<=[\[,])\[(1(,1)*)?\](?=[\],])", "1", text)
    return re.fullmatch(r"\[(1(,1)*)?\]", text)


def test_lists_are_those_that_fold_into_one():
    grammar = 'root ::= "[" (item ("," item)*)? "]"\nitem ::= [1]+ | root'
    assert_same(grammar, is_list, "[1,]", 5)


def test_recursion_in_the_middle_and_at_the_end_is_counted():
    assert_same('root ::= "a" root "b" | "c"', re.compile("c|acb|aacbb").fullmatch, "abc", 5)
    assert_same('root ::= "a" root | "b"', re.compile("a*b").fullmatch, "ab", 7)


@pytest.mark.parametrize(
    ("literal", "text"),
    [
        (r'"\n\r\t"', "\n\r\t"),
        (r'"\\\""', '\\"'),
        (r'"\x41\u00e9\U0001F600"', "Aé😀"),
        (r'"\x414"', "A4"),
        ('"é日"', "é日"),
        ('"a#b|c)::="', "a#b|c)::="),
        (r'"\/\[\]\-\^\'\?"', "/[]-^'?"),
        (r'"\0\a\b\e\f\v"', "\0\a\b\x1b\f\v"),
    ],
)
def test_a_literal_stands_for_its_characters(literal, text):
    language = ebnf(f"root ::= {literal}")
    assert matches(language, text)
    assert not matches(language, text + "x")
    assert not matches(language, text[:-1])


@pytest.mark.parametrize(
    ("written", "inside", "outside"),
    [
        (r"[\]\\\-^]", "]\\-^", "a["),
        ("[-a]", "-a", "b"),
        ("[a-]", "a-", "b"),
        ("[a-c-e]", "abc-e", "d"),
        (r"[\^a]", "^a", "b"),
        (r"[\x41-\u0043\U00000061]", "ABCa", "Db"),
        (r"[^\x00-\x1F\x7F\"\\]", "a é\U0010ffff", '\x00\n\x1f\x7f"\\'),
        (r"[\u0000-\U0010FFFF]", "\0a\ud7ff\ue000\U0010ffff", "\ud800\udfff"),
        ("[^a]", "\n\0b", "a\ud800"),
        (".", "\n\0a\U0010ffff", "\udfff"),
        ("[#\"'/(]", "#\"'/(", "a"),
    ],
)
def test_a_character_class_holds_its_characters(written, inside, outside):
    language = ebnf(f"root ::= {written}")
    assert [character for character in inside if not matches(language, character)] == []
    assert [character for character in outside if matches(language, character)] == []


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "there is no rule 'root'.*rules: none"),
        ('start ::= "a"', "there is no rule 'root'.*'start'"),
        ('root ::= numbr\nnumber ::= "1"', r"'root' calls 'numbr', which is not defined \(line 1\).*'number'\?"),
        ('root ::= "a"\nx ::= "b"\n | zzz', r"'x' calls 'zzz', which is not defined \(line 3\); add zzz ::="),
        ('root ::= "a"\nx ::= "b"\nroot ::= "c"', r"'root' is defined twice: in line 1 and again \(line 3\)"),
        ('root ::= ("a"\nx ::= "b"', r"'root': a parenthesis is not closed \(line 1\)"),
        ('root ::= "a")', "'root': '\\)' closes nothing"),
        ("root ::= | * ", "nothing is before '\\*'"),
        ('root ::= "a"*?', "'\\?' follows another repetition"),
        ('root ::= "a"{3,2}', r"'\{3,2\}' is never possible"),
        ('root ::= "a"{,2}', r"'\{,2\}' is not a number of times.*write \{n\}"),
        ('root ::= "a"{2001}', r"'\{2001\}' is too large.*at most 2000"),
        ('root ::= "a"{9999999999999}', "is not a number of times"),
        ('root ::= "a"{2', "'{' is not expected.*not closed"),
        ("root ::= [a", r"'\[' is not expected.*not closed on its line"),
        ("root ::= []", "a character class is empty"),
        ("root ::= [^]", "a character class is empty.*any character is \\."),
        (r"root ::= [^\x00-\U0010FFFF]", "a character class matches nothing"),
        (r"root ::= [\d]", r"the escape '\\d' is not known.*\[0-9\]"),
        (r'root ::= "\w"', r"the escape '\\w' is not known.*\[A-Za-z0-9_\]"),
        (r'root ::= "\x4"', r"the escape '\\x' is not known.*hexadecimal"),
        (r'root ::= "\q"', r"the escape '\\q' is not known.*allowed are"),
        (r'root ::= "\ud800"', "is not a character"),
        (r'root ::= "\U00110000"', "is not a character"),
        ("root ::= [z-a]", "z-a is not a range"),
        ('root ::= "a', "'\"' is not expected.*not closed on its line"),
        ('root ::= "a\nb"', r"'\"' is not expected \(line 1\)"),
        ("root ::= 'a'", "double quotes"),
        ("root ::= a.b", "'\\.' touches a name.*put spaces"),
        ('a.b ::= "x"', "'a' is before the first rule"),
        ('root ::= "a" (="b")', r"'\(=' is not expected.*lookaheads are not supported"),
        ("root ::= <think>", "token references"),
        ("root ::= !<think>", "token references"),
        ('root ::= TagDispatch(("a", b))', "',' is not expected.*structural_tag"),
        ('root: "a"', "':' is not expected.*name ::="),
        ('root = "a"', "'=' is not expected.*name ::="),
        ('root ::= "a";', "';' is not expected.*no end sign"),
        ('root ::= "a"\n\n  é', r"'é' is not expected \(line 3\).*double quotes"),
        ('"a"', "is before the first rule"),
        ('root ::= "x" b ::= "y"', "rule 'b' starts within a line"),
        ("root ::= /a", "'/' is not expected.*not closed"),
        ("root ::= /(/", r"'root': the regular expression is refused.*\(line 1\)"),
        ('root ::= "a" /(?!)/', "the regular expression"),
    ],
)
def test_a_wrong_grammar_is_refused_with_the_place_and_what_to_do(grammar, message):
    with pytest.raises(GrammarError, match=message):
        ebnf(grammar)


@pytest.mark.parametrize(
    ("grammar", "name"),
    [
        ('root ::= "a" root', "root"),
        ('root ::= "a" | "b" x\nx ::= "(" y ")"\ny ::= "[" x "]"', "x"),
        ('root ::= "a"\nunused ::= "b" unused', "unused"),
        ('root ::= "a" root{2,}', "root"),
        ("root ::= root", "root"),
        ('root ::= "a"\nunused ::= other\nother ::= unused', "unused"),
    ],
)
def test_a_rule_that_can_never_end_is_refused(grammar, name):
    with pytest.raises(GrammarError, match=f"rule '{name}'.*can never end"):
        ebnf(grammar)


def test_parentheses_may_be_nested_but_not_without_bound():
    assert matches(ebnf("root ::= " + "(" * 20 + '"a"' + ")*" * 20), "aaa")
    for grammar in ("root ::= " + "(" * 30_000, "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000):
        with pytest.raises(GrammarError, match="parentheses are nested more than 20 deep"):
            ebnf(grammar)


def chain_of(number):
    rules = [f'r{at} ::= "x"? r{at + 1}' for at in range(number - 2)]
    return "\n".join(["root ::= r0", *reversed(rules), f'r{number - 2} ::= "y"'])


def test_a_chain_of_rules_is_read_up_to_the_limit_and_refused_above_it():
    language = ebnf(chain_of(MAX_RULES))
    assert len(language.rules) == MAX_RULES or not language.rules
    with pytest.raises(GrammarError, match=f"too large: it has more rules than this.*at most {MAX_RULES}"):
        ebnf(chain_of(5_000))


def test_an_alternation_of_a_hundred_thousand_literals_is_refused():
    with pytest.raises(GrammarError, match=f"too large.*at most {MAX_PARTS}"):
        ebnf("root ::= " + "|".join(f'"{at}"' for at in range(100_000)))


def test_a_large_alternation_within_the_limit_is_read():
    language = ebnf("root ::= " + "|".join(f'"{at}"' for at in range(10_000)))
    assert matches(language, "9999")
    assert not matches(language, "10000")


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= (("a"{2000}){2000}){2000}',
        'root ::= x{2000}\nx ::= ("a" "b" "c" "d" "e" "f" "g" "h" "i" "j"){2000}',
        "root ::= (" + '"a"? ' * 5_000 + ")*",
        "root ::= " + '("a"? ' * 20 + '"b"?' + ")*" * 20,
    ],
)
def test_what_would_become_too_large_when_written_out_is_refused(grammar):
    with pytest.raises(GrammarError, match="too large"):
        ebnf(grammar)


def test_optional_groups_that_are_repeated_in_each_other_stay_right():
    assert_same('root ::= ((("a"? "b"?)* "a"?)* "c"?)*', re.compile("[abc]*").fullmatch, "abc", 4)
    deep = "root ::= " + "(" * 10 + '"b"' + ' ("a"? "c"?)* ("a"? "c"?)*)*' * 10
    assert matches(ebnf(deep), "bacaab")
    assert not matches(ebnf(deep), "bad")


def test_rules_that_would_double_when_written_out_stay_rules():
    language = ebnf(
        "\n".join(["root ::= r0 r0", *(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(40)), 'r40 ::= "a"?'])
    )
    assert len(language.rules) == 42


def test_the_grammar_for_json_of_llama_cpp_is_read():
    language = ebnf(r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
""")
    assert matches(language, '{"a": [1, -2.5e3, "x\\n\\u00e9", {}], "b":true}')
    assert not matches(language, '{"a": [1,], "b":true}')
    assert not matches(language, "[1]")
