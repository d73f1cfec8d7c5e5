"""The detokenizer against brute force: decode all, look everywhere, cut at the earliest match of the earliest token."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from samples import either
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend
from toy_tokenizer import BOS, IM_END, PIECES, SPECIALS, make_toy_tokenizer
from work import count_lines

from tureen.contract.params import SamplingParams
from tureen.errors import RequestFailed
from tureen.text import stops as stops_module
from tureen.text.detokenizer import Detokenizer
from tureen.text.stops import LOOKBEHIND_CHARS, StopPatterns, StopStrings
from tureen.text.tokenizer import Tokenizer

TOY = make_toy_tokenizer()
ids_lists = st.lists(
    st.one_of(st.sampled_from([97, 98, 99, *range(256, len(PIECES)), IM_END, BOS]), st.integers(0, BOS)), max_size=40
)
stop_texts = st.one_of(
    st.text("ab", min_size=1, max_size=5),
    st.sampled_from(["stop", " the", "日", "😀", "\n\n", "é", *SPECIALS, "�", "<s"]),
)
PATTERNS = (
    "a+b",
    "ab*c",
    "[ab]{3}",
    "(?<=a)b",
    "b(?=c)",
    r"\n\n",
    "a|abc",
    "b.*?b",
    "(?s)c.*a",
    "^a",
    r"\ba",
    "c(?!a)",
    "(?<=a)c*",
    "(?=b)",
)


def _run(params, ids, *, allowed_from=0, tokenizer=TOY):
    """(pieces taken, stop or None, tokens consumed)"""
    detokenizer = Detokenizer(tokenizer, params)
    taken = []
    for count, token_id in enumerate(ids, 1):
        stop = detokenizer.append(token_id, stops_allowed=count > allowed_from)
        taken.append(detokenizer.take())
        if stop is not None:
            return [*taken, detokenizer.close()], stop, count
    return [*taken, detokenizer.close()], None, len(ids)


def _stored(ids, skip_special):
    pieces = [*PIECES, *(b"" if skip_special else text.encode() for text in SPECIALS)]
    return b"".join(pieces[token_id] for token_id in ids)


def _could_go_on(tail):
    """Whether these bytes are the beginning of a character: found by trying how it could end.

    Python also waits for the third byte of a surrogate, though it is not a character; the text in the end is the same.
    """
    if len(tail) == 2 and tail[0] == 0xED and 0xA0 <= tail[1] <= 0xBF:
        return True
    ends = [b"\x80", b"\x90", b"\xa0", b"\xbf", b"\x80\x80", b"\x90\x80", b"\xa0\x80", b"\xbf\xbf"]
    ends += [end + b"\x80" for end in ends[4:]] + [b"\x8f\xbf\xbf", b"\x9f\xbf"]
    for end in ends:
        try:
            if len((tail + end).decode()) == 1:
                return True
        except UnicodeDecodeError:
            pass
    return False


def _characters(ids, skip_special):
    """The text without a character that is still incomplete at its end."""
    stored = _stored(ids, skip_special)
    for length in (3, 2, 1):
        if length <= len(stored) and _could_go_on(stored[-length:]):
            return stored[:-length].decode("utf-8", "replace")
    return stored.decode("utf-8", "replace")


def _brute_force(params, ids, allowed_from):
    """(text, stop or None, tokens consumed)"""
    starts = dict.fromkeys(params.stop_regex, 0)
    before = ""
    for count in range(1, len(ids) + 1):
        text = _characters(ids[:count], params.skip_special_tokens)
        allowed = count > allowed_from
        matches = [
            (at, at + len(stop), stop)
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before) and allowed
        ]
        for pattern in params.stop_regex if text != before else ():
            match = regex.compile(pattern).search(text, starts[pattern])
            while match and not allowed and match.start() < len(text):
                starts[pattern] = match.start() + 1
                match = regex.compile(pattern).search(text, starts[pattern])
            if match and allowed:
                matches.append((*match.span(), match.group()))
        special = SPECIALS[ids[count - 1] - len(PIECES)] if ids[count - 1] >= len(PIECES) else None
        if not matches and allowed and params.skip_special_tokens and special in params.stop:
            matches = [(len(text), len(text), special)]
        if matches:
            start, end, stop = min(matches)
            return text[: end if params.no_stop_trim else start], stop, count
        before = text
    return _stored(ids, params.skip_special_tokens).decode("utf-8", "replace"), None, len(ids)


@pytest.mark.sampled
@settings(max_examples=either(600, 120), deadline=None)
@given(ids_lists, st.lists(stop_texts, max_size=4), st.booleans(), st.booleans(), st.integers(0, 10))
@example([97, 97, 98], ["aab", "ab"], True, False, 0)
@example([0xE6, 0x97, 0xA5], ["日"], True, False, 0)
@example([97, IM_END], ["<|im_end|>"], True, True, 0)
@example([0xE6, IM_END, 0x97, 0xA5], ["<|im_end|>"], False, False, 0)
def test_text_is_cut_where_brute_force_cuts_it(ids, stops, skip_special, no_stop_trim, allowed_from):
    params = SamplingParams(stop=tuple(stops), skip_special_tokens=skip_special, no_stop_trim=no_stop_trim)
    taken, stop, count = _run(params, ids, allowed_from=allowed_from)
    text, expected_stop, expected_count = _brute_force(params, ids, allowed_from)
    assert (count, stop, "".join(taken)) == (expected_count, expected_stop, text)


@pytest.mark.sampled
@settings(max_examples=either(600, 400), deadline=None)
@given(ids_lists, st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3), st.lists(stop_texts, max_size=1),
       st.booleans(), st.integers(0, 10))  # fmt: skip
@example([0xDE, 0xA6, 97], ["\\ba"], [], False, 0)  # a combining mark is a letter to regex, not to re
def test_text_is_cut_at_patterns_where_brute_force_cuts_it(ids, patterns, stops, no_stop_trim, allowed_from):
    params = SamplingParams(stop=tuple(stops), stop_regex=tuple(patterns), no_stop_trim=no_stop_trim)
    taken, stop, count = _run(params, ids, allowed_from=allowed_from)
    text, expected_stop, expected_count = _brute_force(params, ids, allowed_from)
    assert (count, stop, "".join(taken)) == (expected_count, expected_stop, text)


@pytest.mark.sampled
@settings(max_examples=either(400, 80), deadline=None)
@given(ids_lists, st.lists(stop_texts, max_size=4))
def test_exactly_what_may_become_a_stop_is_held_back(ids, stops):
    params = SamplingParams(stop=tuple(stops))
    detokenizer = Detokenizer(TOY, params)
    taken = ""
    for count, token_id in enumerate(ids, 1):
        detokenizer.append(token_id, stops_allowed=False)
        taken += detokenizer.take()
        text = _characters(ids[:count], True)
        prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
        assert text == taken + max((prefix for prefix in prefixes if text.endswith(prefix)), key=len, default="")


@pytest.mark.sampled
@settings(max_examples=either(300, 75), deadline=None)
@given(ids_lists, st.lists(stop_texts, max_size=2), st.lists(st.none() | st.integers(0, 60), min_size=41, max_size=41))
def test_text_is_taken_up_to_where_it_may_be_and_none_is_lost(ids, stops, ends):
    detokenizer = Detokenizer(TOY, SamplingParams(stop=tuple(stops)))
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    taken, reached = "", 0
    for count, (token_id, end) in enumerate(zip(ids, ends, strict=False), 1):
        detokenizer.append(token_id, stops_allowed=False)
        taken += detokenizer.take(end)
        text = _characters(ids[:count], True)
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        reached = max(reached, min(len(text) if end is None else end, len(text) - held))
        assert (taken, detokenizer.length) == (text[:reached], len(text))
    text = _stored(ids, True).decode("utf-8", "replace")
    taken += detokenizer.close(ends[-1])
    assert taken == text[: len(text) if ends[-1] is None else max(reached, ends[-1])]
    assert taken + detokenizer.close() == text


@pytest.mark.sampled
@settings(max_examples=either(300, 75), deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_text_of_any_bytes_is_that_of_the_tokenizers_package(ids):
    taken, _, _ = _run(SamplingParams(), ids)
    assert "".join(taken) == TOY._backend.decode(ids)
    assert "".join(taken) == TOY.decode(ids)


def test_text_is_the_same_for_every_tokenisation_of_it():
    text = "a stop日 the end"
    for ids in ([97, 32, 262, 0xE6, 0x97, 0xA5, 259], [97, 32, *b"sto", ord("p"), 263, 0xA5, *b" the"]):
        taken, stop, _ = _run(SamplingParams(stop=("日 t", "nothing")), [*ids, *b" end"])
        assert ("".join(taken), stop) == (text[:6], "日 t")


def test_an_incomplete_character_is_held_and_replaced_only_at_the_end():
    detokenizer = Detokenizer(TOY, SamplingParams())
    taken = []
    for token_id in (*"é😀".encode(), 0xF0, 0x9F):
        detokenizer.append(token_id, stops_allowed=True)
        taken.append(detokenizer.take())
    assert taken == ["", "é", "", "", "", "😀", "", ""]
    assert detokenizer.close() == "�"


def test_a_stop_never_matches_twice_and_text_after_it_is_dropped():
    taken, stop, count = _run(SamplingParams(stop=("b",)), [256 + 2, 97])
    assert ("".join(taken), stop, count) == ("", "b", 1)


def test_a_match_completed_before_stops_are_allowed_is_ignored_for_good():
    params = SamplingParams(stop=("ab",), stop_regex=("c+",))
    taken, stop, count = _run(params, [*b"abc", *b"xab"], allowed_from=3)
    assert ("".join(taken), stop, count) == ("abcx", "ab", 6)


def test_behind_an_ignored_match_the_very_next_character_may_begin_one_that_counts():
    taken, stop, count = _run(SamplingParams(stop_regex=("aa|abc",)), [*b"aabc"], allowed_from=3)
    assert ("".join(taken), stop, count) == ("a", "abc", 4)


def test_a_match_begun_before_stops_are_allowed_counts_when_it_is_completed_after():
    taken, stop, _ = _run(SamplingParams(stop=("xyz",)), b"axyz", allowed_from=3)
    assert ("".join(taken), stop) == ("a", "xyz")


def test_a_slow_stop_pattern_fails_its_request():
    detokenizer = Detokenizer(TOY, SamplingParams(stop_regex=("(a|aa)+$x",)))
    with pytest.raises(RequestFailed) as caught:
        _append_many(detokenizer, [256 + 5] * 100)
    assert caught.value.code == "stop_regex_timeout"
    assert caught.value.field == "sampling_params.stop_regex"


@pytest.mark.parametrize(("milliseconds", "expected"), [(1.0, 300), (1.35, 69), (26, 1)])
def test_searches_may_take_50_milliseconds_at_once_and_two_a_token_in_the_long_run(monkeypatch, milliseconds, expected):
    """Each token is searched twice: for a match, and for the beginning of one. 69, as 50 - 2.7 - 68 * 0.7 < 0."""
    readings = itertools.count(1)
    monkeypatch.setattr(stops_module.time, "thread_time", lambda: next(readings) // 2 * milliseconds / 1000)
    patterns = StopPatterns(["x"])
    num_fed = 0
    with contextlib.suppress(RequestFailed):
        while num_fed < 300:
            num_fed += 1
            patterns.feed("a", ignore=False)
    assert num_fed == expected


@pytest.mark.parametrize(("milliseconds", "is_refused"), [(50, False), (50.001, True)])
def test_all_that_searches_may_take_at_once_may_be_one(monkeypatch, milliseconds, is_refused):
    readings = itertools.count(1)
    monkeypatch.setattr(stops_module.time, "thread_time", lambda: next(readings) // 2 * milliseconds / 1000)
    with pytest.raises(RequestFailed) if is_refused else contextlib.nullcontext():
        assert StopPatterns(["a"]).feed("a", ignore=False) == [(0, 1, "a", "a")]


def _append_many(detokenizer, ids):
    for token_id in ids:
        detokenizer.append(token_id, stops_allowed=True)


def test_special_tokens_are_shown_when_asked_for():
    taken, _, _ = _run(SamplingParams(skip_special_tokens=False), [BOS, 97, IM_END])
    assert "".join(taken) == "<s>a<|im_end|>"


def _word_tokenizer(decoder):
    backend = Backend(models.WordLevel({"<a>": 0, "<b>": 1, "hi": 2, "##ho": 3}, unk_token="<a>"))
    backend.add_special_tokens([AddedToken("<a>", special=True), AddedToken("<b>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return Tokenizer(backend)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_spaces_between_special_tokens_are_removed_when_asked(decoder):
    tokenizer = _word_tokenizer(decoder)
    ids = [2, 0, 1, 2, 1]
    kept, _, _ = _run(SamplingParams(skip_special_tokens=False), ids, tokenizer=tokenizer)
    assert "".join(kept) == " hi <a> <b> hi <b>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi <a> <b> hi <b>"
    removed = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=False)
    assert "".join(_run(removed, ids, tokenizer=tokenizer)[0]) == " hi <a><b> hi <b>"
    assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == "hi <a><b> hi <b>"
    assert "".join(_run(removed, ids[1:], tokenizer=tokenizer)[0]) == " <a><b> hi <b>"


def test_many_long_stops_cost_work_proportional_to_the_text():
    params = SamplingParams(stop=tuple("a" * (960 + i) + "b" for i in range(64)))
    short, long = (count_lines(lambda length=length: _run(params, [97] * length)) for length in (1000, 4000))
    assert long < 5 * short


def test_ordinary_stops_cost_little_a_token():
    params = SamplingParams(stop=("\n\n", "###", "</end>", "User:"))
    tokens = [259, 97, 98, 99] * 500
    work, without = (count_lines(lambda one=one: _run(one, tokens)) for one in (params, SamplingParams()))
    assert work < without + 30 * len(tokens)


def test_patterns_search_only_text_that_can_still_match():
    patterns = StopPatterns(["foo[0-9]+bar"])
    for _ in range(5000):
        patterns.feed("some text ", ignore=False)
    assert len(patterns._text) < 4 * LOOKBEHIND_CHARS
    assert patterns.hold_from == 50_000
    assert patterns.feed("foo1bar", ignore=False) == [(50_000, 50_007, "foo1bar", "foo[0-9]+bar")]


def test_look_behind_and_line_starts_hold_across_forgotten_text():
    patterns = StopPatterns([r"(?<=x{9})y", r"^z", r"(?m)^w$"])
    for _ in range(900):
        patterns.feed("xxxxxxxxx ", ignore=False)
    assert patterns.feed("z", ignore=False) == []
    assert patterns.feed("xxxxxxxxx", ignore=False) == []
    assert [match.text for match in patterns.feed("y\n", ignore=False)] == ["y"]
    assert [match.text for match in StopPatterns([r"(?m)^w$"]).feed("a\nw", ignore=False)] == ["w"]


def test_patterns_that_overlap_strings_yield_the_earlier_match():
    taken, stop, _ = _run(SamplingParams(stop=("bc",), stop_regex=("a.c",)), [257])
    assert ("".join(taken), stop) == ("", "abc")


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), st.text("ab", max_size=60))
def test_every_occurrence_of_every_stop_is_found(stops, text):
    finder = StopStrings(stops)
    found = [match for char in text for match in finder.feed(char)]
    expected = {
        (at, at + len(stop), stop, "") for stop in stops for at in range(len(text)) if text.startswith(stop, at)
    }
    assert set(found) == expected
    assert len(found) == len(expected)


def test_the_regex_package_finds_partial_matches_leftmost():
    match = regex.compile("abcd|cde").search("xxabc", partial=True)
    assert match is not None
    assert match.start() == 2
