"""Pre-tokenizers of GGUF files against what llama.cpp made of the same texts (tests/golden/pre_tokenizers.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tureen.text.pre_tokenizers import BOS_BY_DEFAULT, IGNORE_MERGES, NAMES, PATTERNS, pre_tokenizer

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "pre_tokenizers.json").read_text(encoding="utf-8"))
LONGEST = 26
"""Bytes of the longest token of the recorded vocabulary: a longer word is several tokens."""
OTHER_NAMES = {"gpt2"}
"""Names of older files, which llama.cpp no longer knows."""
MARKS = {"e\u0301a\u0300 naïve Ö", "नमस्ते दुनिया"}
CASE = {"camelCaseWord HTTPServer iPhone ABCdef"}
WIDE_SPACE = {"\u00a0nbsp\u3000wide"}
DIFFERENT = {
    "deepseek-coder": WIDE_SPACE,  # the models' patterns make a word of an ideographic space
    "deepseek-llm": WIDE_SPACE,
    "gpt-4o": MARKS,  # the models' patterns keep marks with their letters
    "kimi-k2": MARKS | CASE,  # and begin words with capital letters
    "tekken": MARKS,
    "tiny_aya": CASE | {"1a2b 2024年12月 v1.2"},  # and a digit before a letter of any alphabet ends no word
    "youtu": CASE,
}
"""Texts that llama.cpp splits otherwise than the models' own tokenizer.json, whose patterns are used here."""


def test_every_name_was_recorded():
    assert RECORDED["names"].keys() == NAMES.keys() - OTHER_NAMES
    assert set(NAMES.values()) == set(PATTERNS)


@pytest.mark.parametrize("kind", PATTERNS)
def test_text_is_split_as_llama_cpp_splits_it(kind):
    names = [name for name in RECORDED["names"] if NAMES[name] == kind]
    different = {}
    for name in names:
        split = pre_tokenizer(name)
        rows = RECORDED["words"][RECORDED["names"][name]["words"]]
        different[name] = {
            text
            for text, row in zip(RECORDED["texts"], rows, strict=True)
            if not _are_words(split.pre_tokenize_str(text), [int(length) for length in row.split()])
        }
    own = {"granite-embed-multi-97m": set()}  # llama.cpp has a pattern of its own for it, with marks
    assert different == {name: own.get(name, DIFFERENT.get(kind, set())) for name in names}


def _are_words(words, lengths):
    """Returns whether the tokens of these lengths are the words, of which long ones are cut anywhere."""
    for word in (word for word, _ in words):
        left = len(word)
        while left > 0:
            left -= lengths.pop(0) if lengths else left + 1
            if left < 0 or (left > 0 and len(word) <= LONGEST):
                return False
    return not lengths


def test_bos_and_words_that_are_tokens_are_as_in_llama_cpp():
    recorded = RECORDED["names"]
    assert {name for name, facts in recorded.items() if facts["bos"]} == BOS_BY_DEFAULT
    assert {name for name, facts in recorded.items() if facts["whole"]} == IGNORE_MERGES
