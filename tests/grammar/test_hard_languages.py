"""Languages that are hard to compile, or are refused."""

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from backend_languages import chain, chars, choice, encode, optional, star, strings_of, vocabulary
from random_languages import random_language
from samples import either, some

from tureen.grammar import LanguageCompiler
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
    RuleCall,
    Terminal,
    Text,
)
from tureen.grammar_service import compile_worker
from tureen.grammar_service.messages import CompilerSetup
from tureen.kernels.cpu import native

VOCABULARY = vocabulary()

PAGE = Path(__file__).parents[2] / "docs" / "structured-outputs.md"


COMPILER = LanguageCompiler(VOCABULARY, encode, native.require())


def accepts(ready, text):
    grammar = ready.start()
    return all(map(grammar.accept, text.encode())) and grammar.is_accepting


def test_rules_inside_one_another_are_as_deep_as_they_like():
    def rule(number):
        inner = optional(chain("b", optional(chain("c", choice("x", chain(" ", RuleCall(f"r{number + 1}")))))))
        return chain("a", inner)

    rules = {f"r{number}": rule(number) for number in range(30)} | {
        "r30": choice("n", chain("(", RuleCall("r30"), ")"))
    }
    ready = COMPILER.load(COMPILER.translate(Language(RuleCall("r0"), rules)))
    assert accepts(ready, "abc " * 30 + "((n))")
    assert not accepts(ready, "abc " * 30 + "((n)")


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
def test_random_languages_are_accepted_exactly(seed):
    language = random_language(random.Random(seed), has_rules=bool(seed % 2))
    inside, outside = strings_and_verdicts(language)
    if not inside:
        with contextlib.suppress(GrammarError):  # without texts it may be refused
            assert not any(accepts(COMPILER.load(COMPILER.translate(language)), text) for text in outside)
        return
    ready = COMPILER.load(COMPILER.translate(language))
    for text in inside:
        assert accepts(ready, text), (language, text)
    for text in outside:
        assert not accepts(ready, text), (language, text)


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
def test_a_language_without_texts_is_refused(language):
    with pytest.raises(GrammarError, match="no text"):
        COMPILER.load(COMPILER.translate(language))


def nested(depth):
    made = Text("a")
    for _ in range(depth):
        made = chain("(", made, ")")
    return made


def test_what_is_nested_too_deep_is_refused():
    with pytest.raises(GrammarError, match="deep"):
        COMPILER.translate(Language(nested(5_000)))


def test_what_is_nested_within_the_limit_is_compiled():
    depth = 60
    assert accepts(COMPILER.load(COMPILER.translate(Language(nested(depth)))), "(" * depth + "a" + ")" * depth)


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
@pytest.mark.parametrize("name", HARD)
def test_a_hard_language_is_compiled_or_refused(name):
    steps_until_refused(HARD[name])


def steps_until_refused(language):
    """A few tokens, or a short reason."""
    refusal = ""
    try:
        grammar = COMPILER.load(COMPILER.translate(language)).start()
        mask = np.zeros(-(-VOCABULARY.size // 32), dtype=np.uint32)
        for _ in range(5):
            grammar.fill_mask(mask)
            assert mask.any()
            grammar.accept(ord("a"))
    except GrammarError as error:
        refusal = str(error)
    assert len(refusal) < 1_000


def test_what_could_not_be_followed_past_its_forced_beginning_is_refused_where_it_is_compiled():
    doubling = [f"r{index} ::= r{index + 1} r{index + 1}" for index in range(60)]
    text = "\n".join(["root ::= r0", *doubling, 'r60 ::= "a"'])
    tokens = tuple(bytes([byte]) for byte in range(256))
    compile_ = compile_worker.compile_with(CompilerSetup(Vocabulary(tokens, (256,), 257)))
    with pytest.raises(GrammarError, match="more than can be written"):
        compile_(GrammarSpec("ebnf", text))
    assert compile_(GrammarSpec("regex", "a{1000}"))
