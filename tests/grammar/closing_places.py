"""Languages for small vocabularies, followed by the engine, and by llguidance beside it."""

from __future__ import annotations

import numpy as np
from llguidance_masks.llguidance import Llguidance

from tureen.grammar import GrammarError, LanguageCompiler, Vocabulary
from tureen.grammar.follower import zones_of
from tureen.kernels.cpu import native

FAR = 1 << 20


def vocabulary(tokens):
    return Vocabulary(tuple(tokens), (len(tokens),), len(tokens) + 1)


def letters(chars, *words):
    """Return a token for each character, and one for each word."""
    return [char.encode() for char in chars] + [word.encode() for word in words]


def compiler_of(tokens):
    return LanguageCompiler(vocabulary(tokens), lambda text: [], native.require())


def closing_of(language, tokens):
    compiler = compiler_of(tokens)
    return compiler.load(compiler.translate(language))


def place_behind(closing, token_ids):
    """The place after these tokens; None where the language does not go on with one of them."""
    place = closing.start()
    return place if all(map(place.accept, token_ids)) else None


def restrict(place, mask, left, most):
    """Restrict a mask with the zones of an output of at most `most` tokens."""
    return place.restrict(mask, left, zones_of(most))


MERGED = (b'"}', b'"a"', b', "', b'": ', b"ab", b"}}", b'"]', b"12", b"abc", b'"b": "', b"[[", b'{"', b"null", b"tr")
BYTES = [*(bytes([byte]) for byte in range(256)), *MERGED, "é".encode(), b"\xf0\x9f"]
ENGINE = compiler_of(BYTES)
ORACLE = Llguidance(vocabulary(BYTES), lambda text: [])
LIKELY = 'ab"0123}],:x()+-'


def follow_both(language, dice, steps=40, *, engine=ENGINE, oracle=ORACLE):
    """The engine's masks are llguidance's, and it knows of all tokens in them that an end can follow.

    Returns the number of masks: less than `steps` at the end of an output, or where llguidance gives up.
    """
    place = engine.load(engine.translate(language)).start()
    texts, num_words = engine.vocabulary.tokens, -(-engine.vocabulary.size // 32)
    mask, expected = np.zeros((2, num_words), dtype=np.uint32)
    try:
        judge = oracle.load(oracle.translate(language)).start()
    except GrammarError:  # it gives up
        return 0
    for step in range(steps):
        try:
            judge.fill_mask(expected)
        except GrammarError:
            return step
        place.fill_mask(mask)
        assert (mask == expected).all(), language
        assert (place.is_accepting, place.is_done) == (judge.is_accepting, judge.is_done), language
        assert (place.cost == 0) == (place.is_accepting or place.is_free), language
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = [index for index in allowed.tolist() if index < len(texts) and texts[index]]
        if not allowed:
            return step + 1
        some = dice.sample(allowed, min(len(allowed), 300))
        assert all(place.num_closing([index], FAR) for index in some), language
        likely = [index for index in some if len(texts[index]) > 1 or chr(texts[index][0]) in LIKELY] or some
        token_id = dice.choice(likely if dice.random() < 0.9 else some)
        assert judge.accept(token_id)
        assert place.accept(token_id)
    return steps
