"""Compare a grammar with a recogniser on every short string."""

from __future__ import annotations

from itertools import product

from matching import matches

from tureen.grammar.ebnf import ebnf


def strings(alphabet, most):
    return ("".join(letters) for length in range(most + 1) for letters in product(alphabet, repeat=length))


def assert_same(grammar, oracle, alphabet, most):
    language = ebnf(grammar)
    wrong = [text for text in strings(alphabet, most) if matches(language, text) != bool(oracle(text))]
    assert not wrong, f"{grammar}: {wrong[:5]} of {len(wrong)}"
