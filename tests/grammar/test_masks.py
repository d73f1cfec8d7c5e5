"""Masks by brute force: all strings of small languages, and every token at each of their prefixes."""

import numpy as np
import pytest
from backend_languages import END, EXTRA, OTHER_END, SAMPLES, SPECIAL, encode, vocabulary

from tureen.grammar import LanguageCompiler
from tureen.kernels.cpu import native

VOCABULARY = vocabulary()
COMPILER = LanguageCompiler(VOCABULARY, encode, native.require())
ENDS = {END, OTHER_END}
LONGEST = max(len(text.encode()) for text in EXTRA.split("|"))


def allowed(grammar):
    """The ids in the mask; words beyond the vocabulary count too."""
    mask = np.full(-(-VOCABULARY.size // 32), 0xFFFFFFFF, dtype=np.uint32)
    grammar.fill_mask(mask)
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def walks(sample):
    """The tokens of the alphabet, and each prefix that is walked with up to two ways to write it in tokens."""
    letters = {byte for char in sample.alphabet for byte in char.encode()}
    tokens = [
        (i, token) for i, token in enumerate(VOCABULARY.tokens) if token and i not in ENDS and letters >= set(token)
    ]
    ways = {b"": [()]}
    for prefix in sorted(sample.prefixes, key=len):
        for index, token in tokens if prefix in ways else ():
            longer = prefix + token
            if longer in sample.prefixes and sample.is_walked(longer):
                found = [*ways.get(longer, ()), *((*way, index) for way in ways[prefix])]
                ways[longer] = [min(found, key=len), max(found, key=len)]
    return tokens, {prefix: set(found) for prefix, found in ways.items()}


def compiled(name):
    return SAMPLES[name], COMPILER.load(COMPILER.translate(SAMPLES[name].language))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_token_is_allowed_exactly_where_a_string_of_the_language_goes_on_with_it(name):
    sample, ready = compiled(name)
    tokens, ways = walks(sample)
    accepted = set(sample.strings)
    for prefix, found in ways.items():
        for way in found:
            grammar = ready.start()
            assert all(map(grammar.accept, way)), (prefix, way)
            known = {index: prefix + token for index, token in tokens if sample.is_walked(prefix + token)}
            got = allowed(grammar)
            assert got & known.keys() == {i for i, longer in known.items() if longer in sample.prefixes}, (prefix, way)
            assert got <= set(range(len(VOCABULARY.tokens))) - {SPECIAL}
            assert grammar.is_accepting == (prefix in accepted), (prefix, way)
            assert (got & ENDS) == (ENDS if prefix in accepted else set())
            longer = any(string.startswith(prefix) for string in accepted - {prefix})
            assert grammar.is_done == (prefix in accepted and not longer), (prefix, way)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_forced_comes_next_in_every_string_and_a_long_forced_text_is_forced(name):
    sample, ready = compiled(name)
    for prefix, found in walks(sample)[1].items():
        rest = [string[len(prefix) :] for string in sample.strings if string.startswith(prefix)]
        for way in found:
            grammar = ready.start()
            assert all(map(grammar.accept, way))
            forced = grammar.forced()
            text = b"".join(VOCABULARY.tokens[index] for index in forced)
            assert all(string.startswith(text) for string in rest), (prefix, way, text)
            assert all(map(grammar.accept, forced))
            if len(rest) == 1 and LONGEST <= len(rest[0]) <= sample.known - len(prefix) - 3:
                assert forced


@pytest.mark.parametrize("name", SAMPLES)
def test_a_token_that_is_not_allowed_is_refused_and_changes_nothing(name):
    sample, ready = compiled(name)
    for prefix, found in list(walks(sample)[1].items())[:6]:
        grammar = ready.start()
        assert all(map(grammar.accept, min(found)))
        before = allowed(grammar)
        for index in (*range(40, 48), 97, 98, 255, SPECIAL, END, OTHER_END, *range(259, VOCABULARY.size, 7), -1, 10**6):
            if index not in before - ENDS:
                assert not grammar.accept(index), (prefix, index)
        assert allowed(grammar) == before


@pytest.mark.parametrize("name", SAMPLES)
def test_after_a_rollback_it_stands_where_it_stood(name):
    """Whatever it was asked meanwhile, and as often as one likes."""
    sample, ready = compiled(name)
    for way in max(walks(sample)[1].values(), key=lambda ways: max(map(len, ways))):
        grammar = ready.start()
        stands = [_stand(grammar)]
        for token_id in way:
            assert grammar.accept(token_id)
            stands.append(_stand(grammar))
        for num_tokens in range(len(way) + 1):
            grammar.rollback(num_tokens)
            assert _stand(grammar) == stands[len(way) - num_tokens]
            assert all(map(grammar.accept, way[len(way) - num_tokens :]))
            assert _stand(grammar) == stands[-1]


def _stand(grammar):
    return allowed(grammar), grammar.is_accepting, grammar.is_done, grammar.forced()
