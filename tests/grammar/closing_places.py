"""Compare a grammar with the automaton that closes it."""

from __future__ import annotations

import numpy as np

from tureen.grammar import Vocabulary, language_of
from tureen.grammar.closing import ClosingCompiler
from tureen.kernels.cpu import native

FAR = 1 << 20


def vocabulary(tokens):
    return Vocabulary(tuple(tokens), (len(tokens),), len(tokens) + 1)


def letters(chars, *words):
    """Return a token for each character, and one for each word."""
    return [char.encode() for char in chars] + [word.encode() for word in words]


def closing_of(language, tokens):
    compiler = ClosingCompiler(vocabulary(tokens), native.load())
    return compiler.load(compiler.translate(language))


def place_behind(closing, token_ids):
    place = closing.start(FAR)
    for token_id in token_ids:
        place.accept(token_id)
    return place


MERGED = (b'"}', b'"a"', b', "', b'": ', b"ab", b"}}", b'"]', b"12", b"abc", b'"b": "', b"[[", b'{"', b"null", b"tr")
BYTES = [*(bytes([byte]) for byte in range(256)), *MERGED, "é".encode(), b"\xf0\x9f"]


def follow_both(spec, backend, compiler, dice, steps=40):
    """The backend and the closing automaton allow the same tokens all along a random output."""
    language = language_of(spec)
    grammar = backend.load(backend.translate(language)).start()
    place = compiler.load(compiler.translate(language)).start(FAR)
    mask = np.zeros(-(-(len(BYTES) + 1) // 32), dtype=np.uint32)
    for _ in range(steps):
        grammar.fill_mask(mask)
        allowed = [index for index in range(len(BYTES)) if mask[index // 32] >> index % 32 & 1]
        assert [index for index in range(len(BYTES)) if place.num_closing([index], FAR)] == allowed, spec
        assert (place.cost == 0) == grammar.is_accepting, spec
        if not allowed:
            return
        likely = [i for i in allowed if i >= 256 or chr(i) in 'ab"0123}],:x()+-'] or allowed
        token_id = dice.choice(likely if dice.random() < 0.9 else allowed)
        assert grammar.accept(token_id)
        place.accept(token_id)
