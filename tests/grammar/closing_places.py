"""Languages for small vocabularies, followed by the engine, and by llguidance beside it."""

from __future__ import annotations

import numpy as np
from llguidance_masks.llguidance import Llguidance

from tureen.grammar import LanguageCompiler, Vocabulary, language_of
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
    """As it is done for an output of at most so many tokens."""
    return place.restrict(mask, left, zones_of(most))


MERGED = (b'"}', b'"a"', b', "', b'": ', b"ab", b"}}", b'"]', b"12", b"abc", b'"b": "', b"[[", b'{"', b"null", b"tr")
BYTES = [*(bytes([byte]) for byte in range(256)), *MERGED, "é".encode(), b"\xf0\x9f"]
ENGINE = compiler_of(BYTES)
ORACLE = Llguidance(vocabulary(BYTES), lambda text: [])


def follow_both(spec, dice, steps=40):
    """The engine's masks are llguidance's, and it knows of all tokens in them that an end can follow."""
    language = language_of(spec)
    oracle = ORACLE.load(ORACLE.translate(language)).start()
    place = ENGINE.load(ENGINE.translate(language)).start()
    mask, expected = (np.zeros(-(-(len(BYTES) + 1) // 32), dtype=np.uint32) for _ in range(2))
    for _ in range(steps):
        oracle.fill_mask(expected)
        place.fill_mask(mask)
        assert (mask == expected).all(), spec
        assert (place.is_accepting, place.is_done) == (oracle.is_accepting, oracle.is_done), spec
        assert (place.cost == 0) == (place.is_accepting or place.is_free), spec
        allowed = [index for index in range(len(BYTES)) if mask[index // 32] >> index % 32 & 1]
        assert all(place.num_closing([index], FAR) for index in allowed), spec
        if not allowed:
            return
        likely = [i for i in allowed if i >= 256 or chr(i) in 'ab"0123}],:x()+-'] or allowed
        token_id = dice.choice(likely if dice.random() < 0.9 else allowed)
        assert oracle.accept(token_id)
        assert place.accept(token_id)
