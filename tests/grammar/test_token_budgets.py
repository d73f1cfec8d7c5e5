"""Free text in a structural tag has no more tokens than it may have: compared with all sequences of tokens."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
import regex

from tureen.grammar import GrammarError, GrammarSpec, LanguageCompiler, Vocabulary, compile_grammar
from tureen.grammar.frontends import language_of
from tureen.grammar.guard.facts import GuardFacts
from tureen.kernels.cpu import native

TOKENS = (
    b"<",
    b">",
    b"a",
    b"<a</e>",
    b"<</e>",
    b"</",
    b"</e>",
    b"e>",
    b"a<",
    b"<a",
    b"a</e",
    b"a</e>b",
    b"b",
    b"/",
    b"e",
    b"\xc3",
    b"\xa9",
)
BYTES = tuple(bytes([byte]) for byte in range(256))
VOCABULARY = Vocabulary(TOKENS, (len(TOKENS),), len(TOKENS) + 1)
END = "</e>"


def spec(layout: Any) -> GrammarSpec:
    return GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", "format": layout}))


def compiled(layout: Any, vocabulary: Vocabulary = VOCABULARY) -> Any:
    return compile_grammar(
        spec(layout), LanguageCompiler(vocabulary, lambda text: list(text.encode()), native.require())
    )


def allowed(grammar: Any) -> set[int]:
    mask = np.zeros(1, dtype=np.uint32)
    grammar.fill_mask(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def free_text(**keywords: Any) -> dict[str, Any]:
    return {"type": "any_text", **keywords}


def in_tag(most: int) -> dict[str, Any]:
    tag = {"type": "tag", "begin": "<", "content": free_text(max_tokens=most), "end": END}
    return {"type": "sequence", "elements": [tag, {"type": "const_string", "value": "b"}]}


def num_free(tokens: tuple[int, ...], first: int, last: int) -> int:
    """How many of the tokens hold some of the bytes from the first to before the last."""
    count = at = 0
    for token in tokens:
        size = len(TOKENS[token])
        count += max(at, first) < min(at + size, last)
        at += size
    return count


def free_end(data: bytes) -> int:
    """Where the free text behind "<" surely ends so far."""
    at = data.find(END.encode(), 1)
    if at >= 0:
        return at
    begun = (size for size in range(len(END) - 1, 0, -1) if size < len(data) and data.endswith(END.encode()[:size]))
    return len(data) - next(begun, 0)


@cache
def sequences(most: int) -> set[tuple[int, ...]]:
    """All that is right of `in_tag`."""
    right, waiting = set(), [()]
    while waiting:
        tokens = waiting.pop()
        data = b"".join(TOKENS[token] for token in tokens)
        if num_free(tokens, 1, free_end(data)) > most:
            continue
        text = data.decode("utf-8", "ignore")
        match = regex.fullmatch(r"<(?:(?!</e>).)*</e>b", text, partial=True)
        if match is None or (b"\xa9" in data and data.count(b"\xa9") > data.count(b"\xc3\xa9")):
            continue
        if data.count(b"\xc3") > data.count(b"\xc3\xa9") + data.endswith(b"\xc3"):
            continue
        if not match.partial and not data.endswith(b"\xc3"):
            right.add(tokens)
        else:
            waiting += [(*tokens, token) for token in range(len(TOKENS))]
    return right


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_token_is_allowed_exactly_where_a_right_sequence_goes_on_with_it(most):
    right = sequences(most)
    following: dict[tuple[int, ...], set[int]] = {}
    for tokens in right:
        for size in range(len(tokens)):
            following.setdefault(tokens[:size], set()).add(tokens[size])
        following.setdefault(tokens, set()).add(len(TOKENS))
    grammar = compiled(in_tag(most))
    assert len(following) > 10
    for tokens, expected in following.items():
        place = grammar.start()
        assert all(map(place.accept, tokens)), tokens
        assert allowed(place) == expected, b"".join(TOKENS[token] for token in tokens)
        refused = [token for token in range(len(TOKENS)) if token not in expected]
        assert not any(map(place.accept, refused)), tokens


def one_token_in_tag(excludes: list[str]) -> dict[str, Any]:
    content = {"type": "exclude_token", "exclude_tokens": excludes}
    tag = {"type": "tag", "begin": "<", "content": content, "end": END}
    return {"type": "sequence", "elements": [tag, {"type": "const_string", "value": "b"}]}


@pytest.mark.parametrize("excludes", [[], ["a"], ["a", "<", "a<"], ["b", "<a", "</"]])
def test_a_text_of_one_token_is_none_of_the_excluded_ones_and_nothing_leads_to_one(excludes):
    barred = {f"<{text}{END}b".encode() for text in ("", *excludes)}
    right = {tokens for tokens in sequences(1) if b"".join(TOKENS[token] for token in tokens) not in barred}
    assert 10 < len(right) < len(sequences(1))
    following: dict[tuple[int, ...], set[int]] = {}
    for tokens in right:
        for size in range(len(tokens)):
            following.setdefault(tokens[:size], set()).add(tokens[size])
        following.setdefault(tokens, set()).add(len(TOKENS))
    grammar = compiled(one_token_in_tag(excludes))
    for tokens, expected in following.items():
        place = grammar.start()
        assert all(map(place.accept, tokens)), tokens
        assert allowed(place) == expected, b"".join(TOKENS[token] for token in tokens)


def test_one_token_to_the_end_is_one_that_is_not_excluded():
    place = compiled({"type": "exclude_token", "exclude_tokens": ["a", "/"]}).start()
    end, letters = len(TOKENS), [TOKENS.index(token) for token in (b"a", b"/", b"b")]
    assert not {end, letters[0], letters[1], TOKENS.index(b"\xc3")} & allowed(place)
    assert {letters[2], TOKENS.index(b"a</e>b")} <= allowed(place)
    assert place.accept(letters[2])
    assert allowed(place) == {end}


def test_any_token_is_excluded_by_its_number_or_its_text():
    vocabulary = Vocabulary(BYTES, (256,), 257)
    numbered = language_of(spec({"type": "exclude_token", "exclude_tokens": [97, "b"]}), vocabulary)
    assert numbered == language_of(spec({"type": "exclude_token", "exclude_tokens": ["a", "b"]}), vocabulary)


@pytest.mark.parametrize("kind", ["any_text", "any_tokens"])
def test_free_text_to_the_end_has_no_more_tokens(kind):
    place = compiled({"type": kind, "max_tokens": 2}).start()
    end = len(TOKENS)
    assert end in allowed(place)
    assert place.accept(TOKENS.index(b"\xc3"))
    assert allowed(place) == {TOKENS.index(b"\xa9")}
    assert place.accept(TOKENS.index(b"\xa9"))
    assert allowed(place) == {end}
    place.rollback(2)
    assert place.accept(TOKENS.index(b"a"))
    assert TOKENS.index(b"\xc3") not in allowed(place)
    assert {end, TOKENS.index(b"a</e>b")} <= allowed(place)


def test_where_the_text_does_not_show_what_is_free_it_is_refused_by_name():
    some = {"type": "or", "elements": [free_text(max_tokens=3), {"type": "const_string", "value": "ab"}]}
    with pytest.raises(GrammarError, match=r"structural_tag.format.elements\[0\].max_tokens cannot be counted"):
        language_of(spec(some))
    with pytest.raises(GrammarError, match="max_tokens"):
        language_of(spec(free_text(max_tokens=-1)))


def test_a_budget_that_no_output_reaches_is_taken():
    language = language_of(spec(in_tag(10**40)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(language.guard), type=GuardFacts) == language.guard


NUMBERED: list[tuple[Any, Any]] = [
    ({"type": "token", "token": 97}, {"type": "token", "token": "a"}),
    ({"type": "any_tokens", "exclude_tokens": [97, "b"]}, {"type": "any_tokens", "exclude_tokens": ["a", "b"]}),
    ({"type": "token_dispatch", "rules": [[97, {"type": "token", "token": 300}]]},
     {"type": "token_dispatch", "rules": [["a", {"type": "token", "token": "<|x|>"}]]}),
    ({"type": "tag", "begin": {"token": 98}, "content": {"type": "any_text"}, "end": {"type": "token", "token": 99}},
     {"type": "tag", "begin": {"token": "b"}, "content": {"type": "any_text"}, "end": {"type": "token", "token": "c"}}),
    ({"type": "json_schema", "json_schema": {"properties": {"token": {"const": {"token": 5}}}}},
     {"type": "json_schema", "json_schema": {"properties": {"token": {"const": {"token": 5}}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("numbered", "named"), NUMBERED)
def test_the_number_of_a_token_means_its_text(numbered, named):
    vocabulary = Vocabulary((*BYTES, *[b""] * 50), (256,), 310, ((300, b"<|x|>"),))
    assert language_of(spec(numbered), vocabulary) == language_of(spec(named), vocabulary)


@pytest.mark.parametrize("number", [0xC3, 256, 9999, -1])
def test_a_number_without_a_text_is_refused_by_name(number):
    vocabulary = Vocabulary((*BYTES, *[b""] * 50), (256,), 310)
    with pytest.raises(GrammarError, match=r"structural_tag.format.token -?\d+ is not a token with text"):
        language_of(spec({"type": "token", "token": number}), vocabulary)
