"""Backends: what is found by name, what is refused, and languages that are hard on them."""

import contextlib
import importlib.metadata
import importlib.util
import random
from pathlib import Path

import numpy as np
import pytest
from backend_languages import chain, chars, choice, encode, optional, star, strings_of, vocabulary
from samples import either, some

from tureen.constraining import compile_worker
from tureen.constraining.messages import CompilerSetup
from tureen.errors import StartupError
from tureen.grammar.backends import llguidance as llguidance_backend
from tureen.grammar.backends.registry import BACKENDS, XGRAMMAR, find_backend
from tureen.grammar.base import GrammarSpec, Vocabulary
from tureen.grammar.expression import (
    ANY_CHAR,
    ANYTHING,
    EMPTY,
    NOTHING,
    Both,
    GrammarError,
    Language,
    Not,
    Repeat,
    RuleCall,
    Terminal,
    Text,
)

VOCABULARY = vocabulary()

PAGE = Path(__file__).parents[2] / "docs" / "structured-outputs.md"


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    pytest.importorskip({"outlines": "outlines_core"}.get(request.param, request.param))
    return find_backend(request.param)(VOCABULARY, encode)


def accepts(ready, text):
    grammar = ready.start()
    return all(map(grammar.accept, text.encode())) and grammar.is_accepting


def test_rules_inside_one_another_are_as_deep_as_they_like(backend):
    # each stands in one place, and has parentheses of its own: llguidance takes 28 around one another
    def rule(number):
        inner = optional(chain("b", optional(chain("c", choice("x", chain(" ", RuleCall(f"r{number + 1}")))))))
        return chain("a", inner)

    rules = {f"r{number}": rule(number) for number in range(30)} | {
        "r30": choice("n", chain("(", RuleCall("r30"), ")"))
    }
    if type(backend).__module__.endswith("outlines"):
        pytest.skip("not regular")
    ready = backend.load(backend.translate(Language(RuleCall("r0"), rules)))
    assert accepts(ready, "abc " * 30 + "((n))")
    assert not accepts(ready, "abc " * 30 + "((n)")


def random_expression(source, depth, rules=()):
    kind = source.choice(["text", "text", "chars", "chain", "chain", "choice", "repeat", "both", "not", "call"])
    if kind == "call" and rules and depth < 3:
        return chain("(", RuleCall(source.choice(rules)), ")")
    if depth == 0 or kind in ("text", "chars"):
        size = source.randint(0, 2)
        return (
            chars(source.choice(["a", "b", "ab"])) if kind == "chars" else Text("".join(source.choices("ab(", k=size)))
        )
    if kind in ("both", "not", "call"):
        inside = random_expression(source, depth - 1)
        return Both(Not(inside) if kind == "not" else inside, star(chars("ab"), 0, source.choice([2, 4, None])))
    if kind == "repeat":
        least = source.randint(0, 2)
        return star(
            random_expression(source, depth - 1, rules), least, source.choice([None, least + source.randint(0, 2)])
        )
    items = [random_expression(source, depth - 1, rules) for _ in range(source.randint(1, 3))]
    return chain(*items) if kind == "chain" else choice(*items)


def strings_and_verdicts(language):
    alphabet = "ab()"
    inside = strings_of(language, alphabet, 5)
    source = random.Random(len(inside))
    others = {"".join(source.choices(alphabet, k=source.randint(0, 5))) for _ in range(150)}
    near = {
        text[:at] + source.choice(alphabet) + text[at + 1 :] for text in list(inside)[:50] for at in range(len(text))
    }
    return sorted(inside)[:200], sorted((others | near) - inside)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", some(range(60), 10))
def test_random_languages_are_accepted_exactly(backend, seed):
    source = random.Random(seed)
    names = ["x", "y"] if seed % 2 else []
    rules = {name: choice(random_expression(source, 2, names), source.choice(["a", "b", ""])) for name in names}
    language = Language(random_expression(source, 3, names), rules)
    inside, outside = strings_and_verdicts(language)
    recursive = names and type(backend).__module__.endswith("outlines")
    if not inside or recursive:
        with contextlib.suppress(GrammarError):  # without texts, or with recursion, it may be refused
            assert not any(accepts(backend.load(backend.translate(language)), text) for text in outside)
        return
    ready = backend.load(backend.translate(language))
    for text in inside:
        assert accepts(ready, text), (language, text)
    for text in outside:
        assert not accepts(ready, text), (language, text)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(StartupError, match=r"--grammar-backend.*lark.*llguidance, xgrammar, outlines, none"):
        find_backend("lark")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("llguidance", "pip install llguidance"),
        ("xgrammar", f"pip install --no-deps xgrammar=={XGRAMMAR} apache-tvm-ffi"),
        ("outlines", "pip install outlines_core"),
    ],
)
def test_a_missing_package_is_named_with_the_line_that_installs_it(name, line, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(StartupError) as caught:
        find_backend(name)
    assert line in str(caught.value)
    assert name == "llguidance" or line in PAGE.read_text(encoding="utf-8")


def test_another_version_of_xgrammar_is_refused_with_the_line_that_installs_the_right_one(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.2.8")
    with pytest.raises(StartupError, match=rf"xgrammar {XGRAMMAR}, but 0.2.8 is installed.*xgrammar=={XGRAMMAR} "):
        find_backend("xgrammar")


@pytest.mark.parametrize(
    "language",
    [
        Language(NOTHING),
        Language(chain("a", NOTHING)),
        Language(Both(Text("a"), Text("b"))),
        Language(Terminal(Both(Text("a"), Not(ANYTHING)))),
        Language(RuleCall("x"), {"x": chain("a", RuleCall("x"))}),
    ],
)
def test_a_language_without_texts_is_refused(backend, language):
    with pytest.raises(GrammarError, match="no text"):
        backend.load(backend.translate(language))


def nested(depth):
    made = Text("a")
    for _ in range(depth):
        made = chain("(", made, ")")
    return made


def test_what_is_nested_too_deep_is_refused(backend):
    with pytest.raises(GrammarError, match="deep"):
        backend.translate(Language(nested(5_000)))


def test_what_is_nested_within_the_limit_is_compiled(backend):
    depth = 60
    assert accepts(backend.load(backend.translate(Language(nested(depth)))), "(" * depth + "a" + ")" * depth)


def many_texts(count):
    return Language(choice(*[f"a{'b' * (index % 50)}{index}" for index in range(count)]))


def many_rules(count):
    rules = {f"x{index}": chain("a", optional(RuleCall(f"x{index + 1}"))) for index in range(count)}
    return Language(RuleCall("x0"), rules | {f"x{count}": EMPTY})


HARD = {
    "a long count": Language(star(ANY_CHAR, 0, 100_000)),
    "counts of counts": Language(star(star(star(chars("ab"), 50, 100), 50, 100), 50, 100)),
    "a character long before the end": Language(chain(ANYTHING, "a", star(chars("ab"), 25, 25))),
    "a long count without a text": Language(Both(Not(chain(ANYTHING, "ab", ANYTHING)), star(ANY_CHAR, 0, 10_000))),
    "many texts": many_texts(either(5_000, 1_000)),
    "ambiguous recursion": Language(
        RuleCall("x"), {"x": choice("a", chain(RuleCall("x"), optional(RuleCall("x")), Text("b")))}
    ),
    "many rules": many_rules(either(500, 200)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["a character long before the end", "many texts", "ambiguous recursion", "many rules"])
def test_a_hard_language_is_compiled_or_refused(backend, name):
    steps_until_refused(backend, HARD[name])


def steps_until_refused(backend, language):
    """A few tokens, or a short reason."""
    refusal = ""
    try:
        grammar = backend.load(backend.translate(language)).start()
        mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
        for _ in range(5):
            grammar.fill_mask(mask)
            assert mask.any()
            grammar.accept(ord("a"))
    except GrammarError as error:
        refusal = str(error)
    assert len(refusal) < 1_000


@pytest.mark.parametrize("name", ["a long count", "counts of counts", "a long count without a text"])
def test_llguidance_compiles_or_refuses_large_counts(name):
    steps_until_refused(find_backend("llguidance")(VOCABULARY, encode), HARD[name])


def test_a_limit_of_llguidance_that_is_reached_later_is_an_error_and_no_empty_mask(monkeypatch):
    import llguidance

    limits = llguidance.LLParserLimits(step_max_items=3, max_items_in_row=3, verbose_errors=False)
    monkeypatch.setattr(llguidance_backend, "LIMITS", limits)
    backend = find_backend("llguidance")(VOCABULARY, encode)
    rules = {"x": choice("a", chain(RuleCall("x"), RuleCall("x")))}
    with pytest.raises(GrammarError, match="llguidance"):
        step_until_the_limit(backend.load(backend.translate(Language(RuleCall("x"), rules))).start())


def step_until_the_limit(grammar):
    mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
    for _ in range(50):
        grammar.fill_mask(mask)
        grammar.accept(ord("a"))


def test_outlines_never_writes_nul():
    pytest.importorskip("outlines_core")
    backend = find_backend("outlines")(VOCABULARY, encode)
    ready = backend.load(backend.translate(Language(Repeat(ANY_CHAR))))
    assert accepts(ready, "\x01aé")
    assert not accepts(ready, "\0")


def test_what_could_not_be_followed_past_its_forced_beginning_is_refused_where_it_is_compiled():
    doubling = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(60)]
    text = "\n".join(["root ::= r0", *doubling, 'r60 ::= "a"'])
    tokens = tuple(bytes([byte]) for byte in range(256))
    compile_ = compile_worker.compile_with(CompilerSetup("llguidance", Vocabulary(tokens, (256,), 257)))
    with pytest.raises(GrammarError, match="gave up"):
        compile_(GrammarSpec("ebnf", text))
    assert compile_(GrammarSpec("regex", "a{1000}"))
