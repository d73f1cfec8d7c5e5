"""Every list and map of every body has a declared limit. tests/ledgers/api checks what refusing costs."""

import msgspec
import pytest
from body_limits import BODIES, places

from tureen.errors import InvalidRequest, PayloadTooLarge
from tureen.fields import body
from tureen.http.dialect import Entry


@pytest.mark.parametrize(("entry", "body"), BODIES)
def test_every_list_and_map_says_how_many_entries_it_takes(entry: Entry, body: type[msgspec.Struct]):
    assert [place.path for place in places(entry, body) if place.most is None] == []


@pytest.mark.parametrize(
    "parts", ['"a": [[], [], [], []]', '"a": {"b": {}, "c": {}}', '"a": {"b":1,"c":2,"d":3,"e":4}']
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_decoded(monkeypatch, parts):
    """Decoding six million empty lists holds the event loop up for seconds."""
    monkeypatch.setattr(body, "MAX_PARTS", 6)
    text = "[{:" * 99 + '\\":\\\\'
    sent = f'{{"text": "{text}", "n": [1, 2]}}'
    assert body.read_json("application/json", sent.encode())["n"] == [1, 2], "characters of a text are no parts"
    with pytest.raises(PayloadTooLarge, match="at most 6 are allowed"):
        body.read_json("application/json", sent.replace('"n": [1, 2]', parts).encode())


@pytest.mark.parametrize("end", ["", "\\"])
def test_a_text_that_the_body_s_end_cuts_is_passed_over_once(monkeypatch, end):
    """Otherwise the search begins again at each escaped quote: a body of a megabyte of them takes hours."""
    monkeypatch.setattr(body, "MAX_PARTS", 6)
    with pytest.raises(InvalidRequest) as raised:
        body.read_json("application/json", ('{"a": "' + '\\"[' * 9 + end).encode())
    assert raised.value.code == "invalid_json"
